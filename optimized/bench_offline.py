"""A whole engine on a workload: how long it takes, and how many tokens that is a second."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from optimized.checkpoint import Checkpoint
from optimized.device import Sampled
from optimized.llm import LLM
from optimized.model_core import EngineArgs, MakeObserver, TorchCore
from optimized.plan import Plan
from optimized.sampling import SamplingParams
from optimized.workload import arrival_s_of, read_lines
from spec.vocabulary import InvalidConfig, Token


@dataclass(frozen=True)
class Task:
    """A request of a workload, never ended by an end token: greedy, or ``n`` samples at temperature 1."""

    prompt_token_ids: list[Token]
    max_tokens: int
    n: int = 1
    arrival_s: float = 0.0

    @property
    def params(self) -> SamplingParams:
        """How it is sampled."""
        temperature = 0.0 if self.n == 1 else 1.0
        return SamplingParams(n=self.n, temperature=temperature, max_tokens=self.max_tokens, ignore_eos=True)


def read_tasks(path: Path) -> list[Task]:
    """A workload file: a line of JSON for each request, with ``prompt_token_ids``, ``max_tokens``, ``n`` and ``arrival_s``.

    Raises ``InvalidConfig`` that names the line.
    """
    tasks = [_task(where, values) for where, values in read_lines(path)]
    return sorted(tasks, key=lambda task: task.arrival_s)


def _task(where: str, values: Mapping[str, Any]) -> Task:
    ids, most, n = values.get("prompt_token_ids"), values.get("max_tokens"), values.get("n", 1)
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise InvalidConfig(f"prompt_token_ids in {where}", ids, "a list of token ids")
    return Task(ids, _count(f"max_tokens in {where}", most), _count(f"n in {where}", n), arrival_s_of(where, values))


def _count(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise InvalidConfig(name, value, "a whole number, at least 1")
    return value


class Work(NamedTuple):
    """What one step asks of the arithmetic: tokens computed, tokens sampled, and cached tokens that attention reads."""

    num_tokens: int
    num_samples: int
    num_keys: int


class CountedCore(TorchCore):
    """An engine core that keeps count of what its steps computed."""

    def __init__(self, checkpoint: Checkpoint, args: EngineArgs, make_observer: MakeObserver | None = None) -> None:
        super().__init__(checkpoint, args, make_observer)
        self.work: Counter[Work] = Counter()

    def run(self, plan: Plan) -> Sequence[Sampled]:
        if plan.seq_ids:
            self.work[Work(plan.num_tokens, len(plan.sample_rows), sum(plan.seq_lens))] += 1
        return super().run(plan)


def bench_offline(
    llm: LLM, tasks: list[Task], progress: Callable[[str], None] = lambda _: None, serial: bool = False
) -> dict[str, object]:
    """Serve the workload, each request from its arrival on, and say how long it took. ``serial``: one after the other.

    Times to the first token count from the arrival, in seconds; served one after the other, from the turn. Rates are over
    the time until the last token.
    """
    coming, first_s, num_out, num_steps = list(reversed(tasks)), dict[str, float](), 0, 0
    begun_s, before = dict[str, float](), llm.stats()
    started = time.perf_counter()
    while coming or llm.has_unfinished_requests():
        now = time.perf_counter() - started
        while coming and coming[-1].arrival_s <= now and not (serial and llm.has_unfinished_requests()):
            task, name = coming.pop(), str(len(begun_s))
            begun_s[name] = now if serial else task.arrival_s
            llm.add_request(name, task.prompt_token_ids, task.params)
        if not llm.has_unfinished_requests():
            time.sleep(max(0.0, coming[-1].arrival_s - now))
            continue
        num_steps += 1
        for output in llm.step():
            first_s.setdefault(output.request_id, time.perf_counter() - started - begun_s[output.request_id])
            if output.finished:
                num_out += sum(len(each.token_ids) for each in output.outputs)
                progress(f"{len(first_s)} of {len(tasks)} requests begun")
    seconds = time.perf_counter() - started
    num_in = sum(len(task.prompt_token_ids) for task in tasks)
    ordered = sorted(first_s.values())
    stats = llm.stats()
    return {
        "engine": "kvproof",
        "model": llm.checkpoint.name,
        "requests": len(tasks),
        "seconds": round(seconds, 3),
        "tokens_in": num_in,
        "tokens_out": num_out,
        "tokens_out_per_s": round(num_out / seconds, 1),
        "tokens_per_s": round((num_in + num_out) / seconds, 1),
        "ttft_median_s": round(ordered[len(ordered) // 2], 4),
        "steps": num_steps,
        "preemptions": stats.num_preemptions - before.num_preemptions,
        "hit_tokens": stats.hit_tokens - before.hit_tokens,
        "blocks_saved": stats.blocks_saved,
    }
