"""What the engine shows of itself: a ``State`` made from the scheduler, whose contents later calls do not change."""

from __future__ import annotations

from dataclasses import dataclass

from optimized.pool import SubmittedStep
from optimized.scheduler import Scheduler
from optimized.sequences import LiveSeq
from optimized.step import StepInFlight
from optimized.waste import Slots, slots_of
from spec.vocabulary import CacheKey, Flight, Seq, State

NO_KEY = CacheKey((), "")


@dataclass(frozen=True)
class Look:
    """An engine at one moment, for whoever watches it: its state, in which cached blocks have no key, and its slots."""

    state: State
    slots: Slots
    num_preemptions: int


def look_at(scheduler: Scheduler) -> Look:
    """O(pool) and O(tokens of requests)."""
    return Look(snapshot_of(scheduler, with_keys=False), slots_of(scheduler), scheduler.counters.num_preemptions)


def snapshot_of(scheduler: Scheduler, with_keys: bool = True) -> State:
    """O(pool) and O(requests): only for whoever asks. The contents of the cache are not shown. The keys of cached blocks
    take O(tokens before each)."""
    pool, requests, cache = scheduler.pool, scheduler.requests, scheduler.cache
    return State(
        config=scheduler.config,
        free=tuple(pool.free_list()),
        ref_count=tuple(pool.ref_count),
        block_tables={
            seq_id: seq.table for seq_id, seq in scheduler.seqs.items() if seq.request.running and not seq.host_table
        },
        seqs={seq_id: _seq(seq) for seq_id, seq in scheduler.seqs.items()},
        requests={request_id: live.request for request_id, live in requests.items()},
        waiting=tuple(live.request.request_id for live in scheduler.waiting.in_order()),
        running=tuple(live.request.request_id for live in scheduler.running),
        num_preemptions={i: live.num_preemptions for i, live in requests.items() if live.num_preemptions},
        flights={i: _flight(step, pool.submitted[i]) for i, step in scheduler.flights.items()},
        cached={}
        if cache is None
        else {block: cache.key_of(block) if with_keys else NO_KEY for block in cache.cached_blocks()},
        host_free=tuple(scheduler.host_free),
        host_tables={seq_id: seq.host_table for seq_id, seq in scheduler.seqs.items() if seq.host_table},
    )


def _seq(seq: LiveSeq) -> Seq:
    return Seq(
        seq.request.request.request_id,
        tuple(seq.tokens),
        num_prompt_tokens=len(seq.request.request.prompt),
        num_computed_tokens=seq.num_computed,
        num_scheduled_tokens=seq.num_scheduled,
        num_dropped_blocks=seq.num_dropped_blocks,
    )


def _flight(step: StepInFlight, submitted: SubmittedStep) -> Flight:
    scheduled = dict(zip(step.plan.seq_ids, step.counts, strict=True))
    blocks = frozenset(block for table in step.plan.block_tables for block in table)
    return Flight(
        scheduled,
        blocks | set(step.holds),
        tuple(submitted.holds),
        submitted=True,
        preempting=bool(step.preempted),
        num_copies=len(step.holds),
    )
