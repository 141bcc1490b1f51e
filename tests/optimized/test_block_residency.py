"""How long blocks keep what is in them, by a clock that a test turns."""

from dataclasses import replace
from itertools import cycle

import pytest

from optimized.block_residency import RESIDENCY_BUCKETS, BlockResidency
from optimized.cli.watch import SelfCheck, Watch
from optimized.engine import SymbolicEngine
from spec.vocabulary import Config, InvalidConfig, Request

CONFIG = Config(
    num_blocks=4, block_size=2, max_model_len=16, max_num_seqs=2, max_num_batched_tokens=16, prefix_cache=True
)


class Turned:
    """A clock, and an engine that is watched."""

    def __init__(self, config: Config = CONFIG, draws: tuple[float, ...] = (0.0,), sample: float = 1.0) -> None:
        self.now = 0.0
        self.residency = BlockResidency(sample, lambda: self.now, cycle(draws).__next__)
        self.engine = SymbolicEngine(config, self.residency.observer(config))
        self.num_requests = 0

    def serve(self, now: float, prompt: range) -> None:
        """A request that comes and ends at this time: one token is sampled, and none of it is stored."""
        self.now, number = now, self.num_requests
        self.num_requests += 1
        self.engine.add(Request(number, tuple(prompt), 1, (number,)))
        while self.engine.core.has_work:
            self.engine.step(lambda seq_id, prefix: 0)


def test_a_block_lives_until_it_is_taken_again() -> None:
    turned = Turned()
    turned.serve(0.0, range(1, 6))  # takes 0, 1, 2 and leaves 0 and 1 to be found
    turned.serve(10.0, range(1, 6))  # hits 0 and 1, takes 3
    turned.serve(25.0, range(1, 6))  # hits 0 and 1, takes 2, which had lived for 25 s and never been hit
    found = turned.residency
    assert (found.lifetimes.total, found.idle_times.total, found.gaps.total) == (25.0, 25.0, 0.0)
    turned.serve(100.0, range(50, 57))  # takes all: 3 since 10, 2 since 25, 0 and 1 since 0, hit at 10 and at 25
    assert found.lifetimes.total == 25.0 + 90.0 + 75.0 + 100.0 + 100.0
    assert found.idle_times.total == 25.0 + 90.0 + 75.0 + 75.0 + 75.0
    assert found.gaps.total == 15.0 + 15.0
    counts = dict(zip((*RESIDENCY_BUCKETS, "+Inf"), found.lifetimes.cumulative(), strict=True))
    assert (counts[20.0], counts[30.0], counts[60.0], counts[120.0], counts["+Inf"]) == (0, 1, 1, 5, 5)
    assert found.gaps.cumulative()[-1] == 2


def test_of_many_hits_the_last_four_count() -> None:
    turned = Turned()
    turned.serve(0.0, range(1, 4))
    for now in (1.0, 3.0, 7.0, 15.0, 31.0, 63.0):
        turned.serve(now, range(1, 4))
    turned.serve(100.0, range(50, 57))
    found = turned.residency
    assert found.gaps.total == 8.0 + 16.0 + 32.0
    assert found.gaps.cumulative()[-1] == 3


def test_a_sample_is_drawn_each_time_that_a_block_is_taken() -> None:
    turned = Turned(draws=(0.1, 0.7, 0.7), sample=0.5)
    turned.serve(0.0, range(1, 8))  # takes 0, 1, 2, 3; of these 0 and 3 are in the sample
    turned.serve(10.0, range(50, 57))
    assert turned.residency.lifetimes.cumulative()[-1] == 2
    assert turned.residency.lifetimes.total == 20.0


def test_without_a_prefix_cache_and_after_a_reset_nothing_is_counted() -> None:
    turned = Turned(replace(CONFIG, prefix_cache=False))
    for now in (0.0, 1.0, 2.0):
        turned.serve(now, range(1, 8))
    assert turned.residency.lifetimes.cumulative()[-1] == 0
    turned = Turned()
    turned.serve(0.0, range(1, 8))
    assert turned.engine.reset_cache()
    turned.serve(1.0, range(1, 8))
    assert turned.residency.lifetimes.cumulative()[-1] == 0


def test_copies_and_tables_that_come_back_are_blocks_that_are_taken() -> None:
    from spec.vocabulary import Copy, SwapIn

    turned = Turned()
    observer = turned.residency.observer(CONFIG)
    observer.event(SwapIn(0, (1, 2)))
    turned.now = 3.0
    observer.event(Copy(0, 1, 1, 2))
    assert turned.residency.lifetimes.total == 3.0


@pytest.mark.parametrize("sample", [0.0, -0.1, 1.5, float("nan"), True, "1"])
def test_a_sample_is_a_part(sample: float) -> None:
    with pytest.raises(InvalidConfig, match="kv_cache_metrics_sample"):
        BlockResidency(sample)


def test_nobody_is_watched_unless_somebody_asks() -> None:
    assert not Watch("optimized", SelfCheck.OFF, None).is_wanted
    residency = BlockResidency(1.0)
    watch = Watch("optimized", SelfCheck.SAMPLED, None, residency=residency)
    engine = SymbolicEngine(CONFIG, watch.make_observer(CONFIG))  # beside somebody else who watches
    for number in range(2):
        engine.add(Request(number, tuple(range(10 * number + 1, 10 * number + 8)), 1, (number,)))
        while engine.core.has_work:
            engine.step(lambda seq_id, prefix: 0)
    assert residency.lifetimes.cumulative()[-1] == 4
