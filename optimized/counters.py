"""Counters: what an engine has done so far, as operators see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_blocks_copied: int = 0
    num_blocks_swapped_out: int = 0
    num_tokens_computed: int = 0
    num_tokens_sampled: int = 0
    num_block_steps: int = 0
    """Blocks in use, summed over the steps."""
    num_spared_block_steps: int = 0
    """Blocks that would have been in use besides if nobody shared one."""
    num_cache_queries: int = 0
    """Sequences that began with an empty table and asked the prefix cache: once for each time they were admitted."""
    num_cache_hits: int = 0
    """Those of them that found at least one block."""
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
