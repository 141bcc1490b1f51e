"""Admission: whether the head of the queue may run, given what those who run already are owed."""

from __future__ import annotations

from collections.abc import Sequence

from optimized.pool import BlockPool, blocks_needed
from optimized.sequences import LiveRequest, LiveSeq
from spec.vocabulary import AdmissionRule, BlockId, Config


def may_admit(
    config: Config, pool: BlockPool, running: Sequence[LiveRequest], head: LiveRequest, num_seats: int, budget: int
) -> bool:
    """Whether there is room for the head of the queue (SCHED-11). The first to run need not leave the watermark.

    ``num_seats`` are those that nobody has taken, ``budget`` the tokens that the step has left.
    """
    if head.num_seats > num_seats:
        return False
    spare = pool.num_free - blocks_owed(config, running) - (config.watermark_blocks if running else 0)
    wanted = blocks_wanted(config, pool, head, budget)
    if wanted <= spare or pool.cache is None:
        return wanted <= spare
    # What it hits in blocks that somebody holds already need not be free. To look comes last, since it costs most.
    return wanted - sum([pool.num_in_use(longest_hit(pool, seq)) for seq in head.seqs]) <= spare


def blocks_owed(config: Config, running: Sequence[LiveRequest]) -> int:
    """The blocks that the running requests may still ask for, as far as the admission rule looks ahead.

    Under PROMPT that is none: while there is budget left, every running sequence has room for all of its tokens
    (SCHED-13), and without budget nobody is admitted. Under NO_EVICT it is O(running sequences).
    """
    if config.admission_rule is not AdmissionRule.NO_EVICT:
        return 0
    owed, block_size = 0, config.block_size
    for request in running:
        most = request.most_tokens_stored
        blocks = blocks_needed(most, block_size)
        owed += request.num_unborn * blocks
        for seq in request.seqs:
            owed += max(0, blocks - len(seq.table)) + (seq.num_computed + seq.num_scheduled < most)
    return owed


def blocks_wanted(config: Config, pool: BlockPool, head: LiveRequest, budget: int) -> int:
    """The free blocks that must be there for the head of the queue, if it hits nothing."""
    rule, block_size = config.admission_rule, config.block_size
    most = head.most_tokens_stored
    wanted = 0
    for seq in head.seqs:
        if rule is AdmissionRule.OPTIMISTIC:
            at_start = max(seq.num_computed, len(longest_hit(pool, seq)) * block_size)
            num_tokens = min(len(seq.tokens), at_start + budget)
        else:
            num_tokens = len(seq.tokens) if rule is AdmissionRule.PROMPT else most
        wanted += blocks_needed(num_tokens, block_size)
    if rule is AdmissionRule.NO_EVICT:
        wanted += head.num_unborn * blocks_needed(most, block_size)
    return wanted


def longest_hit(pool: BlockPool, seq: LiveSeq) -> list[BlockId]:
    """The cached blocks that a sequence without a table can begin with; its last token is left (CACHE-4)."""
    if pool.cache is None or seq.host_table:
        return []
    return pool.cache.find(seq.chain, seq.tokens, limit=(len(seq.tokens) - 1) // pool.cache.block_size)
