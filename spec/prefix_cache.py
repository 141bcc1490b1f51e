"""The prefix cache: full blocks that can be found by the tokens they stand for."""

from collections.abc import Mapping

from spec.allocator import blocks_taken, take
from spec.block_table import room, stands_for
from spec.choices import EvictionOrder, Publication
from spec.rules import state_rule, step_rule
from spec.vocabulary import (
    Allocate,
    Append,
    BlockId,
    CacheKey,
    Complete,
    Copy,
    Evict,
    Hit,
    Observe,
    Publish,
    Refuse,
    Reset,
    Seq,
    SeqId,
    State,
    Submit,
    SwapIn,
    all_blocks,
    replace,
)


def salt_of(s: State, seq: Seq) -> str:
    """Whom the sequence shares with: equal salts share, different ones never do."""
    return s.requests[seq.request_id].cache_salt if seq.request_id in s.requests else ""


def key_of(s: State, seq_id: SeqId, index: int) -> CacheKey:
    """The key of entry ``index`` of a sequence's table: everything up to the end of that block."""
    seq = s.seqs[seq_id]
    return CacheKey(seq.tokens[: (index + 1) * s.config.block_size], salt_of(s, seq))


def find(s: State, key: CacheKey) -> BlockId | None:
    """A block that the cache names for this key."""
    return next((block for block, cached in s.cached.items() if cached == key), None)


def longest_hit(s: State, seq_id: SeqId) -> int:
    """How many leading blocks of the sequence are cached; the last token is always left to compute."""
    full = (s.seqs[seq_id].num_tokens - 1) // s.config.block_size
    keys = (key_of(s, seq_id, index) for index in range(full))
    return next((i for i, key in enumerate(keys) if key not in s.cached.values()), full)


def held_hits(s: State, seq_id: SeqId) -> int:
    """How many of these blocks somebody holds already."""
    return sum(_are_held(s, seq_id))


def sure_hits(s: State, seq_id: SeqId) -> int:
    """How many of them no other sequence can take away in this step: those before the first one that is free."""
    return [*_are_held(s, seq_id), False].index(False)


def _are_held(s: State, seq_id: SeqId) -> list[bool]:
    """Whether somebody holds each of the leading blocks of the sequence that are cached."""
    found = (find(s, key_of(s, seq_id, index)) for index in range(longest_hit(s, seq_id)))
    return [block is not None and s.ref_count[block] > 0 for block in found]


def hit(s: State, event: Hit) -> State:
    """The blocks get one more holder; their tokens count as computed. Of equal blocks a look-up finds the same as before."""
    cached, cells = s.cached, s.cells
    s = take(s, event.blocks)
    size = s.config.block_size
    kept = {b: key for b, key in cached.items() if b in s.cached or b in event.blocks}
    found = {at: cells[at] for b in event.blocks for at in range(b * size, (b + 1) * size) if at in cells}
    seq = replace(s.seqs[event.seq], num_computed_tokens=len(event.blocks) * size)
    return replace(
        s,
        cached=kept,
        cells={**s.cells, **found},
        seqs={**s.seqs, event.seq: seq},
        block_tables={**s.block_tables, event.seq: event.blocks},
    )


def publish(s: State, event: Publish) -> State:
    """The block can be found by the prefix that it ends."""
    block = s.block_tables[event.seq][event.index - s.seqs[event.seq].num_dropped_blocks]
    return replace(s, cached={**s.cached, block: key_of(s, event.seq, event.index)})


def forget(s: State, names: Mapping[BlockId, CacheKey]) -> State:
    """These blocks can no longer be found; a free one has no contents any more."""
    size = s.config.block_size
    gone = {at for b in names if b in s.free for at in range(b * size, (b + 1) * size)}
    return replace(
        s,
        cached={b: key for b, key in s.cached.items() if b not in names},
        cells={at: prefix for at, prefix in s.cells.items() if at not in gone},
    )


def evict(s: State, event: Evict) -> State:
    return forget(s, {b: key for b, key in s.cached.items() if b == event.block})


def reset(s: State, event: Reset) -> State:
    return forget(s, s.cached)


def evicts_in_order(s: State) -> bool:
    """Whether the engine has declared which cached block it evicts first."""
    return s.choices.eviction_order is EvictionOrder.LRU


def eviction_queue(s: State) -> list[BlockId]:
    """The cached blocks that nobody holds, in the order of the free list."""
    return [block for block in s.free if block in s.cached]


def may_reset(s: State) -> bool:
    """Whether the cache may be emptied now: no block of it is in use, or none at all."""
    blocks = all_blocks(s) if s.choices.resets_idle_only else s.cached
    return all(s.ref_count[b] == 0 for b in blocks)


def is_written(s: State, block: BlockId) -> bool:
    """Whether every slot of the block holds something."""
    size = s.config.block_size
    return all(at in s.cells for at in range(block * size, (block + 1) * size))


@state_rule("CACHE-1", corpus="P1 P2")
def cached_blocks_hold_their_key(s: State) -> bool:
    """A cached block holds exactly the prefix that its key names, chain and all.

    Where blocks are published at the schedule, a block may be cached while it is owed that prefix: a live sequence has it
    scheduled. When that sequence is preempted, aborted or fails before the block is written, the cache must forget it;
    not what a submitted step writes, if the engine schedules ahead: such a step comes to its end.
    """
    size = s.config.block_size
    return all(
        stands_for(s, b * size + offset, key.tokens[: len(key.tokens) - size + offset + 1])
        for b, key in s.cached.items()
        for offset in range(size)
    )


@state_rule("CACHE-2", corpus="P5")
def only_full_blocks_are_cached(s: State) -> bool:
    """The length of a key is a positive multiple of the block size."""
    return all(key.tokens and len(key.tokens) % s.config.block_size == 0 for key in s.cached.values())


@step_rule("CACHE-3", corpus="P1 P2 P8 P10 P14")
def hits_are_the_sequences_own_prefix(before: State, event: Hit, after: State) -> bool:
    """A hit takes blocks whose keys are the sequence's own leading blocks, under its own salt."""
    keys = tuple(key_of(before, event.seq, index) for index in range(len(event.blocks)))
    return keys == tuple(before.cached.get(b) for b in event.blocks) and not before.block_tables.get(event.seq)


@step_rule("CACHE-4", corpus="P6")
def the_last_token_is_computed(before: State, event: Hit, after: State) -> bool:
    """At least one token of a sequence is always computed, whatever is cached."""
    return len(event.blocks) * before.config.block_size < before.seqs[event.seq].num_tokens


@step_rule("CACHE-5", corpus="P9")
def the_longest_prefix_is_hit(before: State, event: Hit, after: State) -> bool:
    """A hit takes the longest cached prefix there is."""
    return len(event.blocks) >= longest_hit(before, event.seq)


@step_rule("CACHE-6", corpus="P4 P5")
def only_computed_blocks_are_published(before: State, event: Publish, after: State) -> bool:
    """A block is published only when all of its tokens are there and computed, or, at the schedule, scheduled."""
    seq, at_schedule = before.seqs[event.seq], before.choices.publication is Publication.AT_SCHEDULE
    num_tokens = min(room(seq), seq.num_tokens) if at_schedule else seq.num_computed_tokens
    return seq.num_dropped_blocks <= event.index and (event.index + 1) * before.config.block_size <= num_tokens


@step_rule("CACHE-7", corpus="P3 P13")
def the_cache_changes_by_events_only(before: State, event: Observe, after: State) -> bool:
    """What the prefix cache names is what was published and neither taken, evicted nor reset since."""
    return dict(before.cached) == dict(after.cached)


@step_rule("CACHE-8", corpus="P3")
def a_key_names_one_block(before: State, event: Publish, after: State) -> bool:
    """A block is published under a key that no other block has, unless the engine declares that it keeps equal ones."""
    is_new = key_of(before, event.seq, event.index) not in before.cached.values()
    return is_new or before.choices.publishes_equal_blocks


@step_rule("CACHE-9", corpus="P7")
def a_block_in_use_is_not_evicted(before: State, event: Evict, after: State) -> bool:
    """Only a cached block that nobody holds is evicted, or one that is not written yet."""
    return event.block in before.cached and (before.ref_count[event.block] == 0 or not is_written(before, event.block))


@step_rule("CACHE-10", corpus="P3")
def reset_leaves_nothing_in_use(before: State, event: Reset, after: State) -> bool:
    """The cache is emptied only while no cached block is in use, and then names nothing."""
    return not after.cached and all(before.ref_count[b] == 0 for b in before.cached)


@step_rule("CACHE-11", corpus="P1 R2 R3")
def tokens_are_only_appended(before: State, event: Append, after: State) -> bool:
    """Appending leaves every earlier token as it was, so that a published prefix stays true."""
    old = before.seqs[event.seq].tokens
    return after.seqs[event.seq].tokens == old + event.tokens and bool(event.tokens)


@step_rule("CACHE-12", corpus="P4 P9")
def what_is_cached_is_hit(before: State, event: Allocate, after: State) -> bool:
    """A sequence that has nothing yet is given blocks only when there is no cached prefix that it could hit."""
    starts = not before.block_tables.get(event.seq) and before.seqs[event.seq].num_computed_tokens == 0
    return not (starts and before.config.prefix_cache and longest_hit(before, event.seq))


@step_rule("CACHE-13", corpus="A11")
def a_reset_is_refused_only_in_use(before: State, event: Refuse, after: State) -> bool:
    """Emptying the cache is turned down only while a cached block is in use, or any block, if the engine says so."""
    return not isinstance(event.call, Reset) or not may_reset(before)


@step_rule("CACHE-14", corpus="P4")
def what_is_filled_is_published(before: State, event: Complete, after: State) -> bool:
    """When a step ends, the prefix cache names the key of every block that the step has filled."""
    scheduled, size = before.flights[event.step_id].scheduled, before.config.block_size
    alive = {i: before.seqs[i].num_computed_tokens for i in scheduled if i in before.seqs}
    filled = [(i, n) for i, end in alive.items() for n in range((end - scheduled[i]) // size, end // size)]
    return not before.config.prefix_cache or all(key_of(before, i, n) in before.cached.values() for i, n in filled)


@step_rule("CACHE-15", corpus="P4")
def what_will_be_filled_is_published(before: State, event: Submit, after: State) -> bool:
    """An engine that publishes at the schedule has, when a step is submitted, published every block that the step fills
    with tokens that are there."""
    scheduled, size = before.flights[event.step_id].scheduled, before.config.block_size
    ends = {i: min(room(before.seqs[i]), before.seqs[i].num_tokens) for i in scheduled}
    starts = {i: room(before.seqs[i]) - scheduled[i] for i in scheduled}
    filled = [(i, n) for i, end in ends.items() for n in range(starts[i] // size, end // size)]
    at_schedule = before.config.prefix_cache and before.choices.publication is Publication.AT_SCHEDULE
    return not at_schedule or all(key_of(before, i, n) in before.cached.values() for i, n in filled)


@step_rule("CACHE-16", corpus="A10")
def what_is_free_longest_is_evicted(before: State, event: Allocate | Copy | SwapIn, after: State) -> bool:
    """An engine that declares LRU takes, of the cached blocks, those that have been free longest.

    Where a free block stands that nobody can find makes no difference.
    """
    evicted = {b for b in blocks_taken(event) if b in before.cached}
    return not evicts_in_order(before) or evicted == set(eviction_queue(before)[: len(evicted)])


@step_rule("CACHE-17", corpus="A10")
def cached_blocks_queue_up(before: State, event: Observe, after: State) -> bool:
    """An engine that declares LRU has its free cached blocks in the order in which they became free, the end of a table
    before its beginning.

    So the later blocks of a chain are evicted first: without the earlier ones nobody would find them. When a step ends,
    what was given up while it was in flight comes first; then what the windows leave, in the order of the step; then what
    has ended, as reported; then the sources of its copies.
    """
    return not evicts_in_order(before) or eviction_queue(before) == eviction_queue(after)
