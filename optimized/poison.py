"""Poison: numbers that spoil whatever reads them, in cells that nobody has written, for whoever debugs kernels and engines.

A block that was given back, or is handed out anew, has what its last holder wrote, and a kernel that reads a cell too many finds plausible
numbers there. With ``KVPROOF_POISON=1`` it finds NaN, and the request that it reads for fails instead of going wrong. Rows and
columns of a batch that belong to nobody name a block of their own, which is NaN from the first cell to the last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spec.vocabulary import BlockId, InvalidConfig

if TYPE_CHECKING:
    from torch import Tensor

    from optimized.plan import Plan
    from optimized.pool import BlockPool

VARIABLE = "KVPROOF_POISON"
FP8_NAN = 0x7F
NOBODY = -1
"""The token, position, slot and length of a row that belongs to nobody."""


def is_asked_for(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether cells are poisoned. Raises ``InvalidConfig`` for what is neither 0 nor 1."""
    said = environment.get(VARIABLE, "0")
    if said not in ("0", "1"):
        raise InvalidConfig(VARIABLE, said, "0 or 1")
    return said == "1"


def spoil(caches: Sequence[Tensor], blocks: Sequence[BlockId]) -> None:
    """Every cell of these blocks is NaN. The caches of fp8 are given as their bytes."""
    import torch

    for cache in caches:
        places = torch.tensor(blocks, dtype=torch.int64, device=cache.device)
        cache.index_fill_(0, places, FP8_NAN if cache.dtype == torch.uint8 else float("nan"))


def unwritten_blocks(plan: Plan, block_size: int) -> list[BlockId]:
    """The blocks of a plan's tables in which nothing of their sequence is written before the plan's own tokens."""
    found: list[BlockId] = []
    for row, table in enumerate(plan.block_tables):
        num_written = -(-plan.positions[plan.query_start[row]] // block_size)
        if plan.num_dropped_blocks:
            num_written -= plan.num_dropped_blocks[row]
        found += table[num_written:]
    return found


def lost_blocks(pool: BlockPool) -> set[BlockId]:
    """The blocks that nobody holds and nobody can find: what is in them is lost. O(blocks)."""
    cached = None if pool.cache is None else pool.cache.of_block
    return {
        block for block, count in enumerate(pool.ref_count) if not count and (cached is None or cached[block] is None)
    }
