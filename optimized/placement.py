"""Placement: what a sequence needs before it can compute its next tokens."""

from __future__ import annotations

from optimized.pool import BlockPool, blocks_needed
from optimized.sequences import LiveSeq
from spec.vocabulary import BlockId


def num_blocks_to_place(pool: BlockPool, seq: LiveSeq, budget: int, block_size: int) -> int:
    """How many free blocks the sequence will take: those that it hits, new ones, and one for a copy."""
    room, held = seq.num_computed + seq.num_scheduled, len(seq.table) + seq.num_dropped_blocks
    if pool.cache is not None and not room:
        hits = longest_hit(pool, seq)
        room = len(hits) * block_size
        held = pool.num_in_use(hits)
    count = min(len(seq.tokens) - room, budget)
    return blocks_needed(room + count, block_size) - held + must_copy(pool, seq, block_size)


def longest_hit(pool: BlockPool, seq: LiveSeq) -> list[BlockId]:
    """The cached blocks that a sequence without a table can begin with; its last token is left (CACHE-4)."""
    if pool.cache is None or seq.host_table:
        return []
    return pool.cache.find(seq.chain, seq.tokens, limit=(len(seq.tokens) - 1) // pool.cache.block_size)


def num_passed_blocks(num_computed: int, window: int, block_size: int) -> int:
    """How many leading blocks no token sees any more that is still to be computed (TABLE-10, TABLE-11).

    >>> [num_passed_blocks(computed, window=3, block_size=2) for computed in (0, 3, 4, 5, 6)]
    [0, 0, 1, 1, 2]
    """
    return max(0, num_computed - window + 1) // block_size


def must_copy(pool: BlockPool, seq: LiveSeq, block_size: int) -> bool:
    """Whether the next token goes into a block that others name too (COW-2).

    The block can not be in the prefix cache: only full blocks are, and this one is not.
    """
    if (seq.num_computed + seq.num_scheduled) % block_size == 0 or not seq.table:
        return False
    return pool.num_entries(seq.table[-1]) > 1
