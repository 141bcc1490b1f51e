"""Admission: whether the head of the queue may run, given what those who run already are owed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from optimized.placement import longest_hit
from optimized.pool import BlockPool, blocks_needed
from optimized.sequences import LiveRequest, LiveSeq
from spec.vocabulary import AdmissionRule, BlockId, Config, Policy


def may_admit(
    config: Config, pool: BlockPool, running: Sequence[LiveRequest], head: LiveRequest, num_seats: int, budget: int
) -> bool:
    """Whether there is room for the head of the queue (SCHED-11). The first to run need not leave the watermark.

    ``num_seats`` are those that nobody has taken, ``budget`` the tokens that the step has left.
    """
    if head.num_seats > num_seats or (config.policy is Policy.STATIC and has_begun(running)):
        return False
    spare = pool.num_free - blocks_owed(config, pool, running) - (config.watermark_blocks if running else 0)
    wanted = blocks_wanted(config, pool, head, min(budget, share(config)))
    if wanted <= spare or pool.cache is None or config.admission_rule is AdmissionRule.NO_EVICT:
        return wanted <= spare  # a promise to the end can not count on what others hold
    # What it hits in blocks that somebody holds already need not be free. To look comes last, since it costs most.
    return wanted - sum([pool.num_in_use(longest_hit(pool, seq)) for seq in head.seqs]) <= spare


def share(config: Config) -> int:
    """The most tokens of one sequence in one step (SCHED-27): the budget, divided among those that may be computed in
    parts. With one of them that is the whole budget."""
    return -(-config.max_num_batched_tokens // config.max_num_partial_prefills)


def has_begun(running: Sequence[LiveRequest]) -> bool:
    """Whether one of those who run has got a token, which closes a static batch. O(running sequences)."""
    return any(len(seq.tokens) > len(request.request.prompt) for request in running for seq in request.seqs)


def blocks_owed(config: Config, pool: BlockPool, running: Sequence[LiveRequest]) -> int:
    """The blocks that the running requests may still ask for, as far as the admission rule looks ahead.

    Under PROMPT that is none: while there is budget left, every running sequence has room for all of its tokens
    (SCHED-13), and without budget nobody is admitted. Where it may have had its share only, and under NO_EVICT, it is
    O(running sequences).
    """
    if config.admission_rule is AdmissionRule.NO_EVICT:
        return sum([blocks_promised(config, pool, request) for request in running])
    if config.admission_rule is AdmissionRule.PROMPT and config.max_num_partial_prefills > 1:
        return sum([blocks_lacking(config, seq) for request in running for seq in request.seqs])
    return 0


def blocks_lacking(config: Config, seq: LiveSeq) -> int:
    """The blocks that a sequence of which the step has computed its share needs for the rest of its tokens."""
    if len(seq.tokens) == seq.num_computed + seq.num_scheduled:
        return 0
    return blocks_needed(len(seq.tokens), config.block_size) - len(seq.table) - seq.num_dropped_blocks


def blocks_promised(config: Config, pool: BlockPool, request: LiveRequest) -> int:
    """The blocks that a running request may ask for until all of its sequences are at their ends, copies included."""
    most, block_size = request.most_tokens_stored, config.block_size
    blocks = blocks_needed(most, block_size)
    promised = request.num_unborn * blocks
    writers: Counter[BlockId] = Counter()
    for seq in request.seqs:
        room = seq.num_computed + seq.num_scheduled
        if room < most:
            promised += max(0, blocks - len(seq.table) - seq.num_dropped_blocks)
            if room % block_size and seq.table:
                writers[seq.table[-1]] += 1
    # Of several sequences that share a tail, the last one writes in place.
    return promised + sum([min(count, pool.num_entries(block) - 1) for block, count in writers.items()])


def may_fork(config: Config, pool: BlockPool, running: Sequence[LiveRequest], parent: LiveSeq) -> bool:
    """Whether one more sequence like this one leaves free what NO_EVICT has promised (SCHED-22)."""
    if config.admission_rule is not AdmissionRule.NO_EVICT:
        return True
    held = len(parent.table) + parent.num_dropped_blocks
    growth = blocks_needed(parent.request.most_tokens_stored, config.block_size) - held
    # Whoever of the two writes first into a half-filled tail copies it. The parent is in no step.
    copies = 1 if parent.num_computed % config.block_size else 0
    return blocks_owed(config, pool, running) + growth + copies <= pool.num_free


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
