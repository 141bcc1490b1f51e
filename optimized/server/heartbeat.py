"""A line every ten seconds in which something happened, and what can be done where the cache is too small or too empty."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from optimized.async_llm import AsyncLLM
from optimized.fault_points import FaultPoint, reach
from optimized.stats import Stats
from spec.vocabulary import Config

logger = logging.getLogger("kvproof.server")

HEARTBEAT_S = 10.0
LOW_USAGE = 0.2
LOW_BEATS = 6
"""The usage is chronically low if it was below this for so many lines in a row, in which requests waited."""


@dataclass(frozen=True)
class Line:
    """Something to be logged: its level, its text, and its numbers by name."""

    level: int
    text: str
    numbers: dict[str, float]


class Heartbeat:
    """Remembers the numbers of the last line."""

    def __init__(self, config: Config, stats: Stats) -> None:
        self._config = config
        self._before = stats
        self._num_low = 0

    def beat(self, now: Stats, seconds: float) -> list[Line]:
        """What is to be said of so many seconds; nothing if there was no step."""
        before, self._before = self._before, now
        if now.steps == before.steps:
            return []
        preempted = now.num_preemptions - before.num_preemptions
        numbers = _numbers(before, now, seconds)
        lines = [Line(logging.INFO, _text(numbers, preempted), numbers)]
        if preempted:
            text = (
                f"{preempted} requests had to wait again, for want of blocks: fewer at once (max_num_seqs is "
                f"{self._config.max_num_seqs}) or more memory (num_gpu_blocks is {self._config.num_blocks}) would help"
            )
            lines.append(Line(logging.WARNING, text, numbers))
        is_low = numbers["kv_cache_usage"] < LOW_USAGE and now.num_waiting > 0
        self._num_low = self._num_low + 1 if is_low else 0
        if self._num_low == LOW_BEATS:
            self._num_low = 0
            text = (
                f"requests wait while less than {LOW_USAGE:.0%} of the blocks are in use: more at once would help "
                f"(max_num_seqs is {self._config.max_num_seqs})"
            )
            lines.append(Line(logging.WARNING, text, numbers))
        return lines


def _numbers(before: Stats, now: Stats, seconds: float) -> dict[str, float]:
    queried = now.queried_tokens - before.queried_tokens
    sampled = now.tokens_sampled - before.tokens_sampled
    computed = now.tokens_computed - before.tokens_computed
    return {
        "prompt_tokens_per_s": max(0, computed - sampled) / seconds,
        "generation_tokens_per_s": sampled / seconds,
        "num_running": now.num_running,
        "num_waiting": now.num_waiting,
        "kv_cache_usage": (now.num_blocks - now.num_free_blocks) / now.num_blocks,
        "prefix_cache_hit_rate": (now.hit_tokens - before.hit_tokens) / queried if queried else 0.0,
        "num_preemptions": now.num_preemptions - before.num_preemptions,
    }


def _text(numbers: dict[str, float], preempted: int) -> str:
    """In vLLM's words and order, so that whoever reads its lines reads ours."""
    return (
        f"Avg prompt throughput: {numbers['prompt_tokens_per_s']:.1f} tokens/s, "
        f"Avg generation throughput: {numbers['generation_tokens_per_s']:.1f} tokens/s, "
        f"Running: {numbers['num_running']:.0f} reqs, Waiting: {numbers['num_waiting']:.0f} reqs, "
        f"GPU KV cache usage: {numbers['kv_cache_usage']:.1%}, "
        f"Prefix cache hit rate: {numbers['prefix_cache_hit_rate']:.1%}, Preemptions: {preempted}"
    )


async def beat_for_ever(engine: AsyncLLM) -> None:
    """Log every line when it is time."""
    heart, then = Heartbeat(engine.llm.config, engine.stats()), time.monotonic()
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        now = time.monotonic()
        try:
            reach(FaultPoint.BEAT)
            for line in heart.beat(engine.stats(), now - then):
                logger.log(line.level, "%s", line.text, extra={"numbers": line.numbers})
        except Exception:
            logger.exception("there is no line this time")
        then = now
