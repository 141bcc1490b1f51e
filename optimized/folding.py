"""Folding: steps in which every running sequence gets its next token and nothing else happens, without making their plans.

What is left of such a step is what it changes: a block for whoever stands at the end of one, taken in the order in which
the scheduler takes it, and those that are full, for the prefix cache; the counters; and the time, which is summed up step
by step since every pass reads more keys than the one before. Only an engine without an observer is folded: there are no
events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from optimized.plan import Plan
from optimized.scheduler import Scheduler
from optimized.sequences import LiveSeq
from optimized.simulated_device import SimulatedDevice
from optimized.step import Outcome
from optimized.waste import slots_of


class Folded(NamedTuple):
    """What a step leaves: the tokens in the cache, how many the blocks in use may come to hold, and the tokens that all
    sequences see, which are more where some share blocks."""

    num_tokens: int
    num_fillable: int
    num_keys: int


def may_fold(scheduler: Scheduler, plan: Plan, outcome: Outcome) -> bool:
    """Whether steps like this follow the step that has just ended, until a sequence ends or somebody comes.

    Everybody who runs has just got a token, so nobody is left in the middle of a prompt, and wrote the one before, so nobody
    has a last block to copy (COW-2). Who waits was refused in a step like the next ones, and only an end makes room for him,
    or a block that is filled and that he hits in a prefix cache. O(running requests).
    """
    num_planned, num_finished = len(plan.seq_ids), len(outcome.finished)
    if scheduler.config.window is not None or plan.preempted or len(plan.sample_rows) != num_planned:
        return False
    if num_planned != sum([len(request.seqs) for request in scheduler.running]) + num_finished:
        return False
    was_refused = scheduler.cache is None and plan.num_tokens == num_planned and not num_finished
    return was_refused or not scheduler.waiting


def folded_steps(scheduler: Scheduler, device: SimulatedDevice, until_s: float) -> Iterator[Folded]:
    """The next steps, up to the one in which a sequence ends or blocks run out, which is left to the scheduler; none begins
    at ``until_s`` or later. O(1) each, and O(running sequences) for all. To be called where ``may_fold`` says so, and to
    be read to the end."""
    size, pool, counters = scheduler.config.block_size, scheduler.pool, scheduler.counters
    seqs = [seq for request in scheduler.running for seq in request.seqs]
    num_seqs, num_done = len(seqs), 0
    num_steps = min([seq.max_tokens - len(seq.tokens) for seq in seqs], default=0) - 1
    if num_steps < 1:
        return
    computed, slots = [seq.num_computed for seq in seqs], slots_of(scheduler)
    num_tokens, num_fillable, num_keys = slots.tokens, slots.tokens + slots.reserved, sum(computed)
    # Who needs a block in which step, by its remainder. Who reserves has blocks of thousands of tokens: most have nobody.
    due: dict[int, list[LiveSeq]] = {}
    for seq in seqs:
        due.setdefault(-seq.num_computed % size, []).append(seq)
    while num_done < num_steps and device.now < until_s:
        takers = due.get(num_done % size, [])
        if len(takers) > pool.num_free:
            break
        for seq in takers:
            # What it may come to hold; the last token of a sequence is never stored.
            num_fillable += min(size, seq.max_tokens - 1 - len(seq.table) * size)
            seq.table += pool.take_many(1)
        num_tokens += num_seqs
        num_keys += num_seqs
        seconds = device.pass_seconds(num_seqs, num_seqs, num_keys, num_keys)
        device.now += seconds
        device.busy_s += seconds
        counters.num_block_steps += pool.num_blocks - pool.num_free
        num_done += 1
        if scheduler.cache is not None:
            for seq in due.get(num_done % size, []):
                _compute(seq, len(seq.table) * size)
                scheduler.publish(seq, len(seq.table) - 1)
        yield Folded(num_tokens, num_fillable, num_keys)
    for seq, before in zip(seqs, computed, strict=True):
        _compute(seq, before + num_done)
    counters.num_steps += num_done
    counters.num_spared_block_steps += num_done * pool.num_spared
    counters.num_tokens_computed += num_done * num_seqs
    counters.num_tokens_sampled += num_done * num_seqs


def _compute(seq: LiveSeq, num_tokens: int) -> None:
    """So many of its tokens are computed, and one more is drawn."""
    seq.tokens += [0] * (num_tokens - seq.num_computed)
    seq.num_computed = num_tokens
