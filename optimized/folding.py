"""Folding: steps in which every running sequence gets its next token and nothing else happens, without making their plans.

What is left of such a step is what it changes: a block for whoever stands at the end of one, taken in the order in which
the scheduler takes it; the counters; and the time, which is summed up step by step since every pass reads more keys than
the one before. Only an engine without an observer is folded: there are no events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from optimized.plan import Plan
from optimized.scheduler import Scheduler
from optimized.sequences import LiveSeq
from optimized.simulated_device import SimulatedDevice
from optimized.step import Outcome
from spec.vocabulary import BlockId


class Folded(NamedTuple):
    """What a step leaves: the tokens in the cache, and how many the blocks in use may come to hold."""

    num_tokens: int
    num_fillable: int


def may_fold(scheduler: Scheduler, plan: Plan, outcome: Outcome) -> bool:
    """Whether steps like this follow the step that has just ended, until a sequence ends or somebody comes. O(1).

    Everybody who runs has just got a token, so nobody is left in the middle of a prompt. Who waits was refused in a step
    like the next ones, and only an end makes room for him.
    """
    if scheduler.cache is not None or scheduler.config.window is not None or scheduler.pool.num_shared:
        return False
    num_running = len(scheduler.running) + len(outcome.finished)
    everybody = len(plan.sample_rows) == len(plan.seq_ids) == num_running
    refused = plan.num_tokens == num_running and not outcome.finished
    return everybody and not plan.preempted and (refused or not scheduler.waiting)


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
    num_tokens = sum([seq.num_computed for seq in seqs])
    num_fillable = sum([_fillable(seq, len(seq.table) * size) for seq in seqs])
    due: dict[int, list[tuple[LiveSeq, list[BlockId]]]] = {}  # who needs a block in which step, by its remainder
    for seq in seqs:
        due.setdefault(-seq.num_computed % size, []).append((seq, []))
    while num_done < num_steps and device.now < until_s:
        takers = due.get(num_done % size, ())
        if len(takers) > pool.num_free:
            break
        for seq, blocks in takers:
            end = (len(seq.table) + len(blocks)) * size
            num_fillable += _fillable(seq, end + size) - _fillable(seq, end)
            blocks.append(pool.take())
        num_tokens += num_seqs
        seconds = device.pass_seconds(num_seqs, num_seqs, num_tokens, num_tokens)
        device.now += seconds
        device.busy_s += seconds
        counters.num_block_steps += pool.num_blocks - pool.num_free
        num_done += 1
        yield Folded(num_tokens, num_fillable)
    for takers in due.values():
        for seq, blocks in takers:
            seq.table += tuple(blocks)
            seq.num_computed += num_done
            seq.tokens += [0] * num_done
    counters.num_steps += num_done
    counters.num_tokens_computed += num_done * num_seqs
    counters.num_tokens_sampled += num_done * num_seqs


def _fillable(seq: LiveSeq, end: int) -> int:
    """How many tokens its blocks, which end there, may come to hold; the last token of a sequence is never stored."""
    return min(end, seq.max_tokens - 1)
