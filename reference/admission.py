"""Admission: whether the head of the queue may run, given what those who run already are owed."""

from collections import Counter

from reference.pool import BlockPool, blocks_needed, num_tokens_with_room
from reference.roster import Roster
from spec.vocabulary import AdmissionRule, BlockId, Config, Policy, Request, RequestId, SeqId


def most_tokens_stored(request: Request) -> int:
    """The most tokens of one sequence that are ever in the cache: the last sampled one needs no slot."""
    return len(request.prompt) + request.max_tokens - 1


def copies_owed(roster: Roster, pool: BlockPool, seq_ids: list[SeqId]) -> int:
    """How many copies these sequences need before each can write its next token.

    Of several sequences that share a tail, the last one writes in place; into a cached tail nobody does.
    """
    writers: Counter[BlockId] = Counter()
    for seq_id in seq_ids:
        index = pool.tail(roster.seqs[seq_id])
        if index is not None and pool.tables.get(seq_id):
            writers[pool.tables[seq_id][index]] += 1
    copies = 0
    for block, num_writers in writers.items():
        in_place = 0 if block in pool.cached else 1
        copies += min(num_writers, pool.num_entries(block) - in_place)
    return copies


def blocks_lacking(roster: Roster, pool: BlockPool, seq_ids: list[SeqId]) -> int:
    """How many blocks these sequences still need for all the tokens they have, copies included."""
    behind = [i for i in seq_ids if num_tokens_with_room(roster.seqs[i]) < roster.seqs[i].num_tokens]
    growth = sum(pool.growth(i, roster.seqs[i], roster.seqs[i].num_tokens) for i in behind)
    return growth + copies_owed(roster, pool, behind)


def blocks_owed(roster: Roster, pool: BlockPool, request_id: RequestId) -> int:
    """The blocks that a running request may still ask for, as far as the admission rule looks ahead."""
    rule, seq_ids = pool.config.admission_rule, roster.seqs_of(request_id)
    if rule is AdmissionRule.OPTIMISTIC:
        return 0
    if rule is AdmissionRule.PROMPT:
        return blocks_lacking(roster, pool, seq_ids)
    most = most_tokens_stored(roster.requests[request_id])
    owed = len(roster.unborn(request_id)) * blocks_needed(most, pool.config.block_size)
    growing = [i for i in seq_ids if num_tokens_with_room(roster.seqs[i]) < most]
    owed += sum(pool.growth(i, roster.seqs[i], most) for i in growing)
    return owed + copies_owed(roster, pool, growing)


def longest_hit(roster: Roster, pool: BlockPool, seq_id: SeqId) -> tuple[BlockId, ...]:
    """The cached blocks with which a waiting sequence would begin; a swapped one comes back as it was."""
    if not pool.config.prefix_cache or seq_id in pool.host_tables:
        return ()
    return pool.longest_hit(roster.seqs[seq_id].tokens, roster.request_of(seq_id).cache_salt)


def num_tokens_at_start(roster: Roster, pool: BlockPool, seq_id: SeqId) -> int:
    """How many tokens a waiting sequence need not compute: those in host memory, or those it would hit."""
    num_hit_tokens = len(longest_hit(roster, pool, seq_id)) * pool.config.block_size
    return max(roster.seqs[seq_id].num_computed_tokens, num_hit_tokens)


def num_hits_in_use(roster: Roster, pool: BlockPool, seq_id: SeqId) -> int:
    """How many blocks of the sequence's longest cached prefix are held already, and so cost no free block.

    A promise that holds to the end (NO_EVICT) does not count on them: they may be gone when their turn comes.
    """
    if pool.config.admission_rule is AdmissionRule.NO_EVICT:
        return 0
    return sum(1 for block in longest_hit(roster, pool, seq_id) if pool.ref_count[block] > 0)


def share(config: Config) -> int:
    """The most tokens of one sequence in one step: the budget, divided among those that may be computed in parts."""
    return -(-config.max_num_batched_tokens // config.max_num_partial_prefills)


def batch_is_closed(roster: Roster, config: Config) -> bool:
    """Whether batches are static, and one of those who run has got a token."""
    running = [seq_id for request_id in roster.running for seq_id in roster.seqs_of(request_id)]
    return config.policy is Policy.STATIC and any(roster.seqs[seq_id].num_output_tokens > 0 for seq_id in running)


def blocks_wanted(roster: Roster, pool: BlockPool, request_id: RequestId, budget: int) -> int:
    """The free blocks that must be there before a waiting request is admitted."""
    rule, request, size = pool.config.admission_rule, roster.requests[request_id], pool.config.block_size
    wanted = 0
    for seq_id in roster.seqs_of(request_id):
        seq = roster.seqs[seq_id]
        if rule is AdmissionRule.OPTIMISTIC:
            num_tokens = min(seq.num_tokens, num_tokens_at_start(roster, pool, seq_id) + budget)
        elif rule is AdmissionRule.PROMPT:
            num_tokens = seq.num_tokens
        else:
            num_tokens = most_tokens_stored(request)
        wanted += blocks_needed(num_tokens, size) - num_hits_in_use(roster, pool, seq_id)
    if rule is AdmissionRule.NO_EVICT:
        wanted += len(roster.unborn(request_id)) * blocks_needed(most_tokens_stored(request), size)
    return wanted


def may_admit(roster: Roster, pool: BlockPool, request_id: RequestId, budget: int) -> bool:
    """Whether seats and blocks suffice, and a static batch is open. The watermark is left free unless nobody runs."""
    if budget == 0 or roster.seats(request_id) > pool.config.max_num_seqs - roster.seats_taken():
        return False
    if batch_is_closed(roster, pool.config):
        return False
    owed = sum(blocks_owed(roster, pool, running) for running in roster.running)
    watermark = pool.config.watermark_blocks if roster.running else 0
    wanted = blocks_wanted(roster, pool, request_id, min(budget, share(pool.config)))
    return wanted <= pool.num_free - owed - watermark


def may_fork(roster: Roster, pool: BlockPool, parent: SeqId) -> bool:
    """Whether one more sequence like this one leaves free what NO_EVICT has promised (SCHED-22)."""
    if pool.config.admission_rule is not AdmissionRule.NO_EVICT:
        return True
    seq, most = roster.seqs[parent], most_tokens_stored(roster.request_of(parent))
    owed = sum(blocks_owed(roster, pool, running) for running in roster.running)
    # Whoever of the two writes first into a half-filled tail copies it.
    copies = 1 if num_tokens_with_room(seq) < most and pool.tail(seq) is not None and pool.tables[parent] else 0
    return owed + pool.growth(parent, seq, most) + copies <= pool.num_free
