"""The toy, as something that can be judged: what the protocol asks of a pool, and what the toy answers."""

from dataclasses import replace

from toy import Toy

from spec.engine import Admission, InvalidField, Profile, UnknownId
from spec.vocabulary import Allocate, Append, Config, Event, Release, Seq, Start, State, Write


class ToyPool:
    """It declares nothing: no forks, no prefix cache, no window."""

    profile = Profile("toy", frozenset())

    def __init__(self, config: Config) -> None:
        self.config = config
        self.toy = Toy(config.num_blocks, config.block_size)
        self.seqs: dict[int, Seq] = {}

    def allocate(self, seq: int, tokens: tuple[int, ...]) -> tuple[Event, ...] | Admission:
        if seq in self.seqs:
            raise InvalidField("seq", seq, "an id that no live sequence has")
        return self._grow(Seq(seq, (), num_prompt_tokens=len(tokens)), Start(seq, tokens), tokens)

    def append(self, seq: int, tokens: tuple[int, ...]) -> tuple[Event, ...] | Admission:
        if seq not in self.seqs:
            raise UnknownId("sequence", seq)
        return self._grow(self.seqs[seq], Append(seq, tokens), tokens)

    def release(self, seq: int) -> tuple[Event, ...]:
        if seq not in self.seqs:
            raise UnknownId("sequence", seq)
        self.toy.drop(str(seq))
        del self.seqs[seq]
        return (Release(seq),)

    def _grow(self, old: Seq, first: Event, tokens: tuple[int, ...]) -> tuple[Event, ...] | Admission:
        """What happened, in order: the tokens came, they got room, they were written."""
        if not tokens:
            raise InvalidField("tokens", tokens, "at least one token")
        seq, name, num_tokens = old.request_id, str(old.request_id), old.num_tokens + len(tokens)
        lacking = self.toy.blocks_lacking(name, len(tokens))
        if len(self.toy.tables.get(name, [])) + lacking > self.config.num_blocks:
            return Admission.NEVER
        if lacking > len(self.toy.free):
            return Admission.LATER
        blocks = tuple(self.toy.grow(name, len(tokens)))
        slots = tuple(self.toy.slots(name, old.num_tokens, num_tokens))
        self.seqs[seq] = replace(old, tokens=old.tokens + tokens, num_computed_tokens=num_tokens)
        return first, Allocate(seq, len(tokens), blocks), Write(seq, old.num_tokens, slots)

    def snapshot(self) -> State:
        """The toy's own counts, not ones that are worked out here: a count of ours would always be right."""
        return State(
            config=self.config,
            free=tuple(self.toy.free),
            ref_count=tuple(self.toy.users),
            block_tables={seq: tuple(self.toy.tables[str(seq)]) for seq in self.seqs},
            seqs=dict(self.seqs),
        )
