"""The toy with one bug: whoever ends gives back all blocks but the last."""

from toy import Toy
from toy_adapter import ToyPool

from spec.vocabulary import Config


class Forgetful(Toy):
    def drop(self, name: str) -> None:
        self.tables[name].pop()
        super().drop(name)


class ForgetfulPool(ToyPool):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.toy = Forgetful(config.num_blocks, config.block_size)
