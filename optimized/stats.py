"""What the cache of an engine has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """What the cache has done since the engine was made.

    ``blocks_prompt_shared`` is the most blocks that several sequences held at one time: with one request of several
    samples, the blocks of its prompt. ``blocks_copied`` counts copies on write, ``blocks_swapped_out`` the blocks of
    preempted requests that went to host memory, ``hit_tokens`` the tokens that were found in the prefix cache, of
    ``queried_tokens`` looked up. ``blocks_saved`` is the part of the blocks that sharing spared, over all steps. What waits,
    runs and is free or cached now is that of the last step.
    """

    blocks_prompt_shared: int
    blocks_copied: int
    num_preemptions: int
    blocks_swapped_out: int
    hit_tokens: int
    steps: int
    num_blocks: int
    queried_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    blocks_saved: float = 0.0
    tokens_computed: int = 0
    tokens_sampled: int = 0
