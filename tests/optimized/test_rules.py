"""The optimized engine under every rule, and beside the reference engine, after every call."""

from collections import Counter

import pytest

import reference
from optimized.engine import SymbolicEngine, make_engine
from spec.conformance.judge import Follower
from tests.optimized.driver import Caller, config_for

SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_event_keeps_every_rule(seed: int) -> None:
    config = config_for(seed, SymbolicEngine.profile.capabilities)
    engine = make_engine(config, Follower(config, "optimized"))
    Caller(config, [engine], seed).run(num_calls=60)


@pytest.mark.parametrize("seed", SEEDS)
def test_both_engines_decide_the_same(seed: int) -> None:
    """Blocks by name, the order of eviction, swaps and hits included, after every call."""
    config = config_for(seed, SymbolicEngine.profile.capabilities)
    Caller(config, [make_engine(config), reference.make_engine(config)], seed).run(num_calls=60)


def test_the_driver_reaches_every_situation() -> None:
    """What the two tests above see, added up: rules that nothing ever tries would hold too."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        config = config_for(seed, SymbolicEngine.profile.capabilities)
        engine = make_engine(config)
        caller = Caller(config, [engine], seed)
        caller.run(num_calls=60)
        seen.update(engine.core.stats())
        seen["two in flight"] += caller.most_in_flight == 2
    for situation in (
        "num_preemptions",
        "num_blocks_copied",
        "num_blocks_swapped_out",
        "num_cache_hits",
        "two in flight",
    ):
        assert seen[situation] > 0, situation
