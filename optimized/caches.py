"""The caches of a process that serves: what each keeps from one request for another, and how much at most.

Whatever grows with what callers ask is a way to fill a server's memory, so nothing may be kept without a bound, and a test
walks this list: it looks for caches that are not here, and whether those that are stay within what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimized.llm import LLM


@dataclass(frozen=True)
class Cache:
    """Something that grows with what is asked. Sizes are of the unit that ``bound`` names."""

    name: str
    bound: str
    size: Callable[[LLM], int]
    most: Callable[[LLM], int]


CACHES = (
    Cache(
        "prefix cache",
        "a record for each block (num_gpu_blocks), some 300 bytes each",
        lambda llm: llm.stats().num_cached_blocks,
        lambda llm: llm.config.num_blocks,
    ),
    Cache(
        "grammars",
        "bytes (grammar_cache_bytes); who has not been asked for the longest goes first",
        lambda llm: llm.grammars.num_kept_bytes,
        lambda llm: llm.grammars.limits.cache_bytes,
    ),
)

ONCE: Mapping[str, str] = {
    "kernels.cpu.team.why_not": "one answer for a process",
    "kernels.cpu.team._openmp_library": "one file's name for a process",
    "kernels.cpu.team._work": "one compiled function for a process",
    "optimized.sampling.SamplingParams.is_plain": "true or false, as long as the parameters of a request",
    "optimized.sampling.SamplingParams.is_memoryless": "the same",
    "optimized.sampling.SamplingParams.is_open": "the same",
    "optimized.torch_device.SeqSampling.is_plain": "the same, of a sequence",
    "optimized.cli.specification.read_ledger": "one ledger for a command; no server reads it",
}
"""What is worked out once and kept, by where it is: no caller can make it more."""
