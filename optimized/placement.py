"""Placement: what a sequence needs before it can compute its next tokens."""

from __future__ import annotations

from optimized.pool import BlockPool, blocks_needed
from optimized.sequences import LiveSeq
from spec.vocabulary import BlockId


def num_blocks_to_place(pool: BlockPool, seq: LiveSeq, budget: int, block_size: int) -> int:
    """How many free blocks the sequence will take: those that it hits, new ones, and one for a copy."""
    computed, held = seq.num_computed, len(seq.table)
    if pool.cache is not None and not seq.table:
        hits = longest_hit(pool, seq)
        computed = len(hits) * block_size
        held = pool.num_in_use(hits)
    count = min(len(seq.tokens) - computed, budget)
    return blocks_needed(computed + count, block_size) - held + must_copy(pool, seq, block_size)


def longest_hit(pool: BlockPool, seq: LiveSeq) -> list[BlockId]:
    """The cached blocks that a sequence without a table can begin with; its last token is left (CACHE-4)."""
    if pool.cache is None or seq.host_table:
        return []
    return pool.cache.find(seq.chain, seq.tokens, limit=(len(seq.tokens) - 1) // pool.cache.block_size)


def must_copy(pool: BlockPool, seq: LiveSeq, block_size: int) -> bool:
    """Whether the next token goes into a block that others name too (COW-2).

    The block can not be in the prefix cache: only full blocks are, and this one is not.
    """
    if seq.num_computed % block_size == 0 or not seq.table:
        return False
    return pool.num_entries(seq.table[-1]) > 1
