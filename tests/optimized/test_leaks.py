"""Whatever comes, is aborted and is preempted: when everybody is gone, nothing is left of them.

300 traces as a rule, 10,000 with ``KVPROOF_TIER=soak``.
"""

import os
import random
from collections import Counter

import pytest

from optimized.engine import EngineCore
from optimized.plan import Plan
from optimized.symbolic_device import SymbolicDevice
from spec.engine import InvalidRequest
from spec.vocabulary import AdmissionRule, Config, Policy, Recovery, Request
from tests.optimized.driver import next_token

NUM_TRACES = 10_000 if os.environ.get("KVPROOF_TIER") == "soak" else 300
CHUNK = 100


def crowded(rng: random.Random) -> Config:
    """An engine with too few blocks for those who come."""
    return Config(
        num_blocks=rng.randint(3, 8),
        block_size=rng.randint(1, 3),
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=rng.randint(2, 12),
        max_model_len=32,
        watermark_blocks=rng.choice((0, 0, 1)),
        num_host_blocks=rng.choice((0, 4, 12)),
        prefix_cache=rng.random() < 0.7,
        window=rng.choice((None, None, None, 3)),
        recovery=rng.choice(list(Recovery)),
        policy=rng.choice(list(Policy)),
        admission_rule=rng.choice((AdmissionRule.OPTIMISTIC, *AdmissionRule)),
    )


class Trace:
    """Somebody who adds, forks, aborts and lets go of sequences between any two thirds of steps, out of a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.config = crowded(self.rng)
        self.core = EngineCore(self.config, SymbolicDevice(self.config.block_size, next_token))
        self.plans: list[Plan] = []
        self.most_in_flight = self.rng.choice((1, 1, 2))  # nobody is preempted while another step is in flight
        self.num_ids = 0
        self.seen: Counter[str] = Counter()

    def run(self, num_calls: int) -> None:
        """So many calls; then everybody is aborted, or all run to their ends."""
        calls = (
            self.add,
            self.add,
            self.begin,
            self.begin,
            self.begin,
            self.end,
            self.end,
            self.abort,
            self.fork,
            self.let_go,
        )
        for _ in range(num_calls):
            self.rng.choice(calls)()
        if self.rng.random() < 0.5:
            for request_id in self.rng.sample(sorted(self.core.scheduler.requests), len(self.core.scheduler.requests)):
                self.core.abort(request_id)
        while self.plans or self.core.has_work:
            self.end() if self.plans else self.begin()
        self.seen.update(self.core.stats())

    def add(self) -> None:
        longest = min(self.config.num_slots, self.config.max_model_len)
        count, length = self.rng.choice((1, 1, 1, 2)), self.rng.randint(1, max(1, longest // 2))
        self.num_ids += count
        request = Request(
            self.num_ids,
            tuple(self.rng.randint(0, 1) for _ in range(length)),
            max_tokens=self.rng.randint(1, longest - length + 1),
            seq_ids=tuple(range(self.num_ids - count, self.num_ids)),
            stop_token_ids=(2,) if self.rng.random() < 0.2 else (),
            priority=self.rng.randint(0, 2),
            cache_salt=self.rng.choice(("", "", "a", "b")),
        )
        try:
            self.core.add(request)
        except InvalidRequest:
            self.seen["refused"] += 1

    def begin(self) -> None:
        if len(self.plans) < self.most_in_flight:
            plan = self.core.begin_step()
            if plan is not None:
                self.plans.append(plan)

    def end(self) -> None:
        if self.plans:
            plan = self.plans.pop(0)
            self.core.commit(plan, [self.rng.randint(0, 2) for _ in plan.sample_rows])

    def abort(self) -> None:
        if self.core.scheduler.requests and self.rng.random() < 0.5:
            self.core.abort(self.rng.choice(sorted(self.core.scheduler.requests)))
            self.seen["aborted in flight"] += bool(self.plans)

    def fork(self) -> None:
        parents = [
            seq
            for seq in self.core.scheduler.seqs.values()
            if seq.request.running and not seq.num_scheduled and not seq.request.num_unborn and seq.table
        ]
        if parents:
            parent = self.rng.choice(parents)
            self.num_ids += 1
            try:
                self.core.fork(parent.seq_id, self.num_ids - 1)
            except InvalidRequest:
                self.seen["refused"] += 1

    def let_go(self) -> None:
        seqs = [seq for seq in self.core.scheduler.seqs.values() if not seq.request.num_unborn]
        if seqs and self.rng.random() < 0.2:
            self.core.release(self.rng.choice(seqs).seq_id)


def left_over(core: EngineCore) -> dict[str, object]:
    """What is there of requests that are gone, by where it is."""
    scheduler, pool, config = core.scheduler, core.scheduler.pool, core.config
    kept = {
        "requests": scheduler.requests,
        "sequences": scheduler.seqs,
        "running": scheduler.running,
        "waiting": scheduler.waiting.in_order(),
        "promised": scheduler._promised,
        "seats": scheduler._seats_taken,
        "flights": scheduler.flights,
        "submitted": pool.submitted,
        "holds": pool.holds,
        "shared": (pool.num_shared or pool.num_spared),
        "held": sum(pool.ref_count),
        "not free": set(range(config.num_blocks)) ^ set(pool.free_list()),
        "twice free": config.num_blocks - pool.num_free or len(list(pool.free_list())) - config.num_blocks,
        "host blocks": set(range(config.num_host_blocks)) ^ set(scheduler.host_free),
    }
    cache = scheduler.cache
    if cache is not None:
        kept["cache that stays"] = not core.reset_cache() or cache.num_cached
        kept["records"] = [record for record in cache.of_block if record is not None] or cache._by_digest
        kept["salts"] = list(cache._roots)
    return {name: each for name, each in kept.items() if each}


@pytest.mark.parametrize("first", range(0, NUM_TRACES, CHUNK))
def test_when_everybody_is_gone_nothing_is_left(first: int) -> None:
    for seed in range(first, first + CHUNK):
        trace = Trace(seed)
        trace.run(num_calls=60)
        assert left_over(trace.core) == {}, f"seed {seed}"


def test_the_traces_abort_and_preempt() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        trace = Trace(seed)
        trace.run(num_calls=60)
        seen += trace.seen
    for situation in (
        "aborted in flight",
        "num_preemptions",
        "num_blocks_swapped_out",
        "num_cache_hits",
        "num_blocks_copied",
    ):
        assert seen[situation] > 5, situation


def test_a_left_over_is_seen() -> None:
    core = EngineCore(Config(num_blocks=4, prefix_cache=True), SymbolicDevice(16, next_token))
    core.add(Request(0, (1,), 1, (0,)))
    core.scheduler.pool.take()
    assert {"requests", "waiting", "held", "not free"} <= left_over(core).keys()
