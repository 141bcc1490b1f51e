"""The waste accountant: of each slot it is known what it is for, and the specification's account says the same."""

from collections import Counter

from optimized.engine import SymbolicEngine, make_engine
from optimized.waste import slots_of
from spec.timeline import account_of
from spec.vocabulary import Config, Request
from tests.optimized.driver import Caller, config_for


class Accountant(Caller):
    """A caller who keeps two books after every call."""

    seen: Counter[str]

    def compare(self) -> None:
        (engine,) = self.engines
        assert isinstance(engine, SymbolicEngine)
        slots, state = slots_of(engine.core.scheduler), engine.snapshot()
        assert (slots.tokens, slots.reserved, slots.internal, slots.external) == account_of(state)
        assert slots.total == state.config.num_slots
        assert min(slots.tokens, slots.reserved, slots.internal, slots.external) >= 0
        self.seen.update(name for name in ("tokens", "reserved", "internal", "external") if getattr(slots, name))


def test_two_books_agree_after_every_call_and_add_up() -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        config = config_for(seed, SymbolicEngine.profile.capabilities)
        accountant = Accountant(config, [make_engine(config)], seed)
        accountant.seen = seen
        accountant.run(num_calls=60)
    assert seen.keys() == {"tokens", "reserved", "internal", "external"}


def test_what_a_request_has_taken_it_fills_may_fill_or_never_will() -> None:
    """Three tokens of a prompt and two of three to come have places in two blocks of four; the last one needs none."""
    engine = make_engine(Config(num_blocks=8, block_size=4, max_num_batched_tokens=5))
    engine.add(Request(0, (1, 2, 3, 4, 5), max_tokens=3, seq_ids=(0,)))
    engine.step(lambda seq, prefix: 0)
    assert account_of(engine.snapshot()) == (5, 2, 1, 24)
