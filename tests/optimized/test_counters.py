"""What operators see of an engine: every number, counted a second time from the events."""

from collections import Counter
from dataclasses import replace

import pytest

from optimized.engine import SymbolicEngine, make_engine
from spec.conformance.judge import Follower
from spec.vocabulary import (
    AdmissionRule,
    Allocate,
    Append,
    Begin,
    Config,
    Copy,
    Event,
    Hit,
    Preempt,
    Recovery,
    Submit,
    SwapOut,
)
from tests.optimized.driver import Caller, config_for


class Bookkeeper(Follower):
    """Counts what the events say."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, "optimized")
        self.counts: Counter[str] = Counter()
        self.peak_shared = 0

    def event(self, event: Event) -> None:
        before, counts = self.state, self.counts
        super().event(event)
        counts["num_steps"] += isinstance(event, Begin)
        counts["num_preemptions"] += isinstance(event, Preempt)
        counts["num_tokens_sampled"] += isinstance(event, Append)
        if isinstance(event, SwapOut):
            counts["num_blocks_swapped_out"] += len(event.blocks)
        if isinstance(event, Submit):
            counts["num_block_steps"] += self.config.num_blocks - len(self.state.free)
            counts["num_spared_block_steps"] += sum(max(0, count - 1) for count in self.state.ref_count)
            counts["num_tokens_computed"] += sum(self.state.flights[event.step_id].scheduled.values())
            counts["num_blocks_copied"] += self.num_copies(event)
        if isinstance(event, Hit | Allocate) and self.config.prefix_cache:
            seq = before.seqs[event.seq]
            if not before.block_tables[event.seq] and seq.num_computed_tokens == 0:
                counts["num_cache_queries"] += 1
                counts["num_queried_tokens"] += seq.num_tokens
            if isinstance(event, Hit):
                counts["num_cache_hits"] += 1
                counts["num_hit_tokens"] += len(event.blocks) * self.config.block_size
        self.peak_shared = max(self.peak_shared, self.num_shared)

    def num_copies(self, submit: Submit) -> int:
        """The copies of the step for whoever was not preempted after all."""
        start = max(i for i, event in enumerate(self.trace) if isinstance(event, Begin))
        return sum(
            isinstance(event, Copy) and event.seq in self.state.flights[submit.step_id].scheduled
            for event in self.trace[start:]
        )

    @property
    def config(self) -> Config:
        return self.state.config

    @property
    def num_shared(self) -> int:
        return sum(count > 1 for count in self.state.ref_count)


@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_every_number_is_what_the_events_say(num_host_blocks: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(7):
        config = replace(
            config_for(seed, SymbolicEngine.profile.capabilities),
            num_blocks=8,
            max_num_seqs=6,
            num_host_blocks=num_host_blocks,
            recovery=Recovery.SWAP if num_host_blocks else Recovery.RECOMPUTE,
            admission_rule=AdmissionRule.OPTIMISTIC,
            prefix_cache=seed % 2 == 0,
        )
        bookkeeper = Bookkeeper(config)
        engine = make_engine(config, bookkeeper)
        Caller(config, [engine], seed).run(num_calls=40)
        state, stats = bookkeeper.state, engine.core.stats()
        assert stats == dict.fromkeys(stats, 0) | bookkeeper.counts | {
            "num_waiting": len(state.waiting),
            "num_running": len(state.running),
            "num_free_blocks": len(state.free),
            "num_shared_blocks": bookkeeper.num_shared,
            "peak_shared_blocks": bookkeeper.peak_shared,
            "num_cached_blocks": len(state.cached),
        }
        seen += Counter(stats)
    often = {"num_preemptions", "num_blocks_copied", "num_cache_hits", "peak_shared_blocks"}
    assert all(seen[name] > 1 for name in often | ({"num_blocks_swapped_out"} if num_host_blocks else set())), seen
