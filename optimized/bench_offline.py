"""A whole engine on a workload: how long it takes, and how many tokens that is a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimized.llm import LLM
from optimized.sampling import SamplingParams
from optimized.workload import arrival_s_of, read_lines
from spec.vocabulary import InvalidConfig, Token


@dataclass(frozen=True)
class Task:
    """A request of a workload: greedy, and never ended by an end token."""

    prompt_token_ids: list[Token]
    max_tokens: int
    n: int = 1
    arrival_s: float = 0.0


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


def bench_offline(llm: LLM, tasks: list[Task], progress: Callable[[str], None] = lambda _: None) -> dict[str, object]:
    """Serve the workload, each request from its arrival on, and say how long it took.

    Times to the first token count from the arrival, in seconds; rates are over the time until the last token.
    """
    coming, first_s, num_out, num_steps = list(reversed(tasks)), dict[str, float](), 0, 0
    arrivals = {str(index): task.arrival_s for index, task in enumerate(tasks)}
    names = iter(arrivals)
    started = time.perf_counter()
    while coming or llm.has_unfinished_requests():
        now = time.perf_counter() - started
        while coming and coming[-1].arrival_s <= now:
            task = coming.pop()
            params = SamplingParams(n=task.n, temperature=0.0, max_tokens=task.max_tokens, ignore_eos=True)
            llm.add_request(next(names), task.prompt_token_ids, params)
        if not llm.has_unfinished_requests():
            time.sleep(max(0.0, coming[-1].arrival_s - now))
            continue
        num_steps += 1
        for output in llm.step():
            first_s.setdefault(output.request_id, time.perf_counter() - started - arrivals[output.request_id])
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
        "preemptions": stats.num_preemptions,
        "hit_tokens": stats.hit_tokens,
        "blocks_saved": stats.blocks_saved,
    }
