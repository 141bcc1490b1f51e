"""The planner held against this machine: a workload served by the engine on a real device, and what a simulated one foresaw.

The simulated device knows a few numbers of the real one, fitted on a handful of steps that are measured before: what a
step costs at all, for each token (the first few, some more, and the others: a product of few rows is bound by memory or
takes another way), for each sample, for each pair of a query and a key, and for each key that is read. The last two differ:
a prompt multiplies a key that it has read with many queries, the next token with one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimized.bench_compare import MOST_BUSY, busy_s
from optimized.bench_offline import Task
from optimized.checkpoint import Checkpoint
from optimized.device import Sampled
from optimized.grammar import Barred
from optimized.model_core import EngineArgs, TorchCore
from optimized.plan import Plan
from optimized.planner import Facts, percentile
from optimized.simulated_device import ModelCost, Rates, SimulatedDevice, num_pairs_of
from optimized.simulation import Replica, simulate
from optimized.workload import Arrival
from spec.vocabulary import Config, InvalidConfig, Request

GROUPS = ((1, 32), (1, 256), (4, 64), (8, 128), (16, 32), (32, 64), (64, 16), (16, 192), (64, 96))
"""What is measured before: so many requests at once, with prompts of so many tokens. Each step of theirs is one measurement."""
GROUP_STEPS, GROUP_ROUNDS = 8, 3
"""All requests of a group still run for so many steps together after the last one has got its first token."""
KNOTS = (8, 32)
"""Where a token in a step begins to cost something else."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """A step on the real device: what it had to do, and how long it took from its schedule to its commit."""

    num_tokens: int
    num_samples: int
    num_pairs: int
    num_keys: int
    seconds: float

    @property
    def work(self) -> tuple[int, ...]:
        """What each cost is multiplied with, in the order of ``Fit.costs``."""
        return work_of(self.num_tokens, self.num_samples, self.num_pairs, self.num_keys)


def work_of(num_tokens: int, num_samples: int, num_pairs: int, num_keys: int) -> tuple[int, ...]:
    """A step, its tokens in the parts that the knots make, samples, pairs and keys.

    >>> work_of(num_tokens=40, num_samples=2, num_pairs=90, num_keys=50)
    (1, 8, 24, 8, 2, 90, 50)
    """
    parts, begin = list[int](), 0
    for knot in KNOTS:
        parts.append(min(max(0, num_tokens - begin), knot - begin))
        begin = knot
    return (1, *parts, max(0, num_tokens - begin), num_samples, num_pairs, num_keys)


class TimedCore(TorchCore):
    """An engine core that can say what its last step had to do."""

    last_plan = Plan(-1)

    def run(self, plan: Plan) -> Sequence[Sampled]:
        self.last_plan = plan
        return super().run(plan)

    def timed_step(self) -> tuple[Measured, list[int]]:
        """A step, and who got a token."""
        before = time.perf_counter()
        outcome = self.step()
        seconds = time.perf_counter() - before
        plan = self.last_plan
        measured = Measured(plan.num_tokens, len(plan.sample_rows), num_pairs_of(plan), sum(plan.seq_lens), seconds)
        return measured, list(outcome.seq_ids)


@dataclass(frozen=True)
class Fit:
    """Seconds for each part of the work of a step; ``median_error`` is that of the steps it was fitted on."""

    costs: tuple[float, ...]
    num_steps: int
    median_error: float

    @staticmethod
    def of(steps: Sequence[Measured]) -> Fit:
        """Least squares of the relative errors; no cost is below 0, since waiting is all that a device can do for nothing."""
        work = np.array([each.work for each in steps], dtype=float)
        seconds = np.array([each.seconds for each in steps])
        scaled, costs, kept = work / seconds[:, None], np.zeros(work.shape[1]), list(range(work.shape[1]))
        while kept:
            found = np.linalg.lstsq(scaled[:, kept], np.ones(len(steps)), rcond=None)[0]
            if (found >= 0.0).all():
                costs[kept] = found
                break
            kept.pop(int(found.argmin()))
        errors = np.abs(work @ costs / seconds - 1.0)
        return Fit(tuple(costs.tolist()), len(steps), float(np.median(errors)))

    @property
    def facts(self) -> Facts:
        """The costs by name, in milliseconds."""
        milliseconds = [1e3 * cost for cost in self.costs]
        step, *tokens, sample, pair, key = milliseconds
        bounds = (0, *KNOTS)
        return {
            "steps": self.num_steps,
            "ms_per_step": step,
            **{f"ms_per_token_after_{bound}": each for bound, each in zip(bounds, tokens, strict=True)},
            "ms_per_sample": sample,
            "ms_per_thousand_pairs": 1e3 * pair,
            "ms_per_thousand_keys": 1e3 * key,
            "median_error": self.median_error,
        }


class FittedDevice(SimulatedDevice):
    """A device whose passes take what a fit says."""

    def __init__(self, fit: Fit, block_size: int) -> None:
        nothing = ModelCost("fitted", 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
        super().__init__(nothing, Rates(1.0, math.inf, 0.0, math.inf), block_size)
        self.fit = fit

    def pass_seconds(
        self,
        num_tokens: int,
        num_samples: int,
        num_pairs: int,
        num_keys: int,
        num_copied: int = 0,
        num_swapped: int = 0,
    ) -> float:
        """What is predicted has neither copies nor swaps."""
        work = work_of(num_tokens, num_samples, num_pairs, num_keys)
        return sum([cost * count for cost, count in zip(self.fit.costs, work, strict=True)])


def calibrate(core: TimedCore, vocab_size: int, say: Say = lambda _: None) -> Fit:
    """Measure the steps of the groups, three times each after one round that does not count, and fit what they take in the median."""
    random, steps, first_id = np.random.default_rng(0), list[Measured](), 0
    for number, (count, length) in enumerate(GROUPS):
        say(f"group {number + 1} of {len(GROUPS)}")
        rounds = []
        for _ in range(1 + GROUP_ROUNDS):
            for task in group(core.config, vocab_size, random, count, length):
                _add(core, task, first_id)
                first_id += 1
            rounds.append(list(_steps(core)))
        for same in zip(*rounds[1:], strict=True):
            steps.append(replace(same[0], seconds=statistics.median([each.seconds for each in same])))
    return Fit.of(steps)


def group(config: Config, vocab_size: int, random: np.random.Generator, count: int, length: int) -> list[Task]:
    """Prompts of one length, as far as the engine takes them; who is served first gets the longest answer, so that in the
    end all of them run at once."""
    count, budget = min(count, config.max_num_seqs), config.max_num_batched_tokens
    tasks = []
    for number in range(count):
        steps = GROUP_STEPS + (count - 1 - number) * length // budget
        prompt = random.integers(vocab_size, size=max(1, min(length, config.max_model_len - steps)))
        tasks.append(Task(prompt.tolist(), min(steps, config.max_model_len - len(prompt))))
    return tasks


def _steps(core: TimedCore) -> Iterator[Measured]:
    while core.core.has_work:
        yield core.timed_step()[0]


def serve(core: TimedCore, tasks: Sequence[Task], first_id: int) -> tuple[float, list[float]]:
    """Seconds until all are served, and from each arrival to the first token."""
    coming, firsts = list(reversed(list(enumerate(tasks, start=first_id)))), dict[int, float]()
    started = time.perf_counter()
    while coming or core.core.has_work:
        now = time.perf_counter() - started
        while coming and coming[-1][1].arrival_s <= now:
            number, task = coming.pop()
            _add(core, task, number)
        if not core.core.has_work:
            time.sleep(max(0.0, coming[-1][1].arrival_s - now))
            continue
        _, seq_ids = core.timed_step()
        for seq_id in seq_ids:
            firsts.setdefault(seq_id, time.perf_counter() - started - tasks[seq_id - first_id].arrival_s)
    return time.perf_counter() - started, list(firsts.values())


def foresee(config: Config, tasks: Sequence[Task], fit: Fit) -> tuple[float, list[float]]:
    """The same from the simulated device, under the same limits."""
    replica = Replica(config, FittedDevice(fit, config.block_size))
    arrivals = [Arrival(task.arrival_s, len(task.prompt_token_ids), task.max_tokens) for task in tasks]
    run = simulate(arrivals, replica)
    return run.end_s, [each.first_token_s for each in run.served]


def bench_predicted(
    checkpoint: Checkpoint, dtype: str, tasks: Sequence[Task], load: float, rounds: int, say: Say = lambda _: None
) -> Facts:
    """Fit, foresee and serve: all requests at once, and as they come at random at ``load`` times the rate that was foreseen for
    all at once. Of several rounds the median counts."""
    if any(task.n != 1 for task in tasks):
        raise InvalidConfig("n", max(task.n for task in tasks), "1: what is predicted is one answer to each prompt")
    core = TimedCore(checkpoint, EngineArgs(enable_prefix_caching=False, dtype=dtype, device="cpu"))
    fit = calibrate(core, checkpoint.config.vocab_size, say)
    at_once = [Task(task.prompt_token_ids, task.max_tokens) for task in tasks]
    rate = load * len(tasks) / foresee(core.config, at_once, fit)[0]
    times = np.random.default_rng(0).exponential(1.0 / rate, len(tasks)).cumsum().tolist()
    as_they_come = [
        Task(task.prompt_token_ids, task.max_tokens, 1, at_s) for task, at_s in zip(tasks, times, strict=True)
    ]
    begin_s, begin_busy_s = time.perf_counter(), busy_s()
    runs = {}
    for name, these in (("all at once", at_once), (f"{rate:.2f} requests a second", as_they_come)):
        served = []
        for number in range(rounds):
            say(f"{name}, round {number + 1} of {rounds}")
            served.append(serve(core, these, first_id=1_000_000))
        runs[name] = _beside(these, served, foresee(core.config, these, fit))
    end_busy_s = busy_s()
    neighbours = None
    if begin_busy_s is not None and end_busy_s is not None:
        neighbours = round(max(0.0, (end_busy_s - begin_busy_s) / (time.perf_counter() - begin_s)), 3)
    return {
        "model": checkpoint.name,
        "requests": len(tasks),
        "tokens_out": sum(task.max_tokens for task in tasks),
        "rounds": rounds,
        "fit": fit.facts,
        "runs": runs,
        "neighbours": neighbours,
        "quiet": None if neighbours is None else neighbours <= MOST_BUSY,
    }


def _beside(
    tasks: Sequence[Task], served: Sequence[tuple[float, list[float]]], foreseen: tuple[float, list[float]]
) -> Facts:
    num_out = sum(task.max_tokens for task in tasks)

    def both(measured: float, predicted: float) -> dict[str, float]:
        return {"measured": measured, "predicted": predicted, "error": predicted / measured - 1.0}

    seconds = statistics.median([each for each, _ in served])
    facts = {"tokens_out_per_s": both(num_out / seconds, num_out / foreseen[0])}
    for percent in (50, 90):
        measured = statistics.median([percentile(firsts, percent) for _, firsts in served])
        facts[f"ttft_p{percent}_s"] = both(measured, percentile(foreseen[1], percent))
    return facts


def _add(core: TimedCore, task: Task, number: int) -> None:
    request = Request(number, tuple(task.prompt_token_ids), task.max_tokens, (number,))
    core.add(request, task.params, seed=0, barred=Barred())
