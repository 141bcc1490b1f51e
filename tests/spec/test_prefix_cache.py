"""The prefix cache: what is named, what is found, what is kept."""

from dataclasses import replace

import pytest

from spec.broken import (
    ALICE,
    ALONE,
    AT_SCHEDULE,
    EMPTY,
    EMPTY_PAIRS,
    EQUALS,
    IN_ORDER,
    PUBLISHED,
    STEP_1,
    TAKEN_BACK,
    UNUSED,
    computed,
    follow,
    served,
    stored,
)
from spec.choices import Choices
from spec.prefix_cache import find, is_written, key_of, longest_hit, salt_of
from spec.vocabulary import (
    Abort,
    Add,
    Admit,
    Allocate,
    Append,
    Begin,
    CacheKey,
    Complete,
    Event,
    Evict,
    Hit,
    Observe,
    Preempt,
    Publish,
    Read,
    Refuse,
    Release,
    Reset,
    Seq,
    Slide,
    Start,
    Submit,
    Write,
    initial_state,
)
from tests.spec.states import allows, bites, fails, forbids, holds

CHAIN = follow(EMPTY, *stored(0, (5, 6), (0, 1)), Publish(0, 0), Publish(0, 1), Release(0))
"""Two cached blocks, one the continuation of the other, held by nobody."""


def test_a_key_is_the_whole_prefix() -> None:
    state = follow(EMPTY_PAIRS, Start(0, (5, 6, 7, 8)))
    assert key_of(state, 0, 0) == CacheKey((5, 6))
    assert key_of(state, 0, 1) == CacheKey((5, 6, 7, 8))


def test_the_salt_is_the_requests() -> None:
    state = follow(EMPTY, Add(replace(ALICE, cache_salt="mine")))
    assert salt_of(state, state.seqs[0]) == "mine"
    assert salt_of(ALONE, ALONE.seqs[0]) == ""
    assert key_of(state, 0, 0) == CacheKey((5,), "mine")


def test_a_cached_block_is_found_by_its_key() -> None:
    assert find(CHAIN, CacheKey((5, 6))) == 1
    assert find(CHAIN, CacheKey((6,))) is None


@pytest.mark.parametrize(
    ("tokens", "hit"), [((5,), 0), ((5, 6), 1), ((5, 6, 7), 2), ((5, 9, 7), 1), ((6, 5, 7), 0)], ids=str
)
def test_the_longest_hit_leaves_the_last_token(tokens: tuple[int, ...], hit: int) -> None:
    assert longest_hit(follow(CHAIN, Start(1, tokens)), 1) == hit


def test_a_hit_keeps_contents_and_names() -> None:
    state = follow(CHAIN, Start(1, (5, 6, 7)), Hit(1, (0, 1)))
    assert state.cells == CHAIN.cells and state.cached == CHAIN.cached
    assert state.seqs[1].num_computed_tokens == 2
    assert state.ref_count == (1, 1, 0)


def test_a_taken_block_is_forgotten() -> None:
    state = follow(UNUSED, Start(1, (8,)), Allocate(1, 1, (0,)))
    assert state.cached == {} and state.cells == {}


def test_a_freed_block_keeps_its_contents_while_it_is_cached() -> None:
    assert UNUSED.cells == {0: (5,)}
    assert follow(ALONE, Release(0)).cells == {}


def test_an_evicted_block_loses_its_contents() -> None:
    assert follow(CHAIN, Evict(1)).cells == {0: (5,)}
    assert follow(CHAIN, Evict(1)).cached == {0: CacheKey((5,))}


def test_a_reset_forgets_everything() -> None:
    assert follow(CHAIN, Reset()).cached == {} == follow(CHAIN, Reset()).cells


def test_cache_1_a_cached_block_holds_its_key() -> None:
    holds("CACHE-1", CHAIN)
    bites("CACHE-1")


def test_cache_1_every_slot_of_the_block_counts() -> None:
    pair = replace(EMPTY_PAIRS, cached={0: CacheKey((5, 6))}, cells={0: (5,), 1: (5, 6)})
    holds("CACHE-1", pair)
    fails("CACHE-1", replace(pair, cells={0: (5,)}))
    fails("CACHE-1", replace(pair, cells={1: (5, 6)}))


def test_cache_1_the_chain_counts() -> None:
    fails("CACHE-1", replace(CHAIN, cells={0: (5,), 1: (6,)}))


def test_cache_2_only_full_blocks_are_cached() -> None:
    holds("CACHE-2", PUBLISHED)
    bites("CACHE-2")


def test_cache_2_the_empty_prefix_is_no_block() -> None:
    fails("CACHE-2", replace(EMPTY, cached={0: CacheKey(())}))


def test_cache_3_a_hit_takes_the_sequences_own_prefix() -> None:
    allows("CACHE-3", CHAIN, Start(1, (5, 6, 7)), Hit(1, (0, 1)))
    bites("CACHE-3")


@pytest.mark.parametrize("blocks", [(1,), (1, 0), (0, 2), (0, 0)], ids=str)
def test_cache_3_other_blocks_are_no_hit(blocks: tuple[int, ...]) -> None:
    forbids("CACHE-3", CHAIN, Start(1, (5, 6, 7)), Hit(1, blocks))


def test_cache_3_only_an_empty_table_is_hit() -> None:
    forbids("CACHE-3", CHAIN, Start(1, (5, 6, 7)), Allocate(1, 1, (2,)), Hit(1, (0,)))


def test_cache_4_the_last_token_is_computed() -> None:
    allows("CACHE-4", UNUSED, Start(1, (5, 6)), Hit(1, (0,)))
    bites("CACHE-4")


def test_cache_5_the_longest_prefix_is_hit() -> None:
    allows("CACHE-5", CHAIN, Start(1, (5, 6, 7)), Hit(1, (0, 1)))
    bites("CACHE-5")


def test_cache_6_a_block_is_published_when_it_is_computed() -> None:
    allows("CACHE-6", ALONE, Publish(0, 0))
    bites("CACHE-6")


def test_cache_6_a_block_that_left_the_window_is_not_published() -> None:
    start = follow(initial_state(replace(EMPTY.config, window=2)), *stored(0, (5, 6), (0, 1)), Slide(0, 1))
    allows("CACHE-6", start, Publish(0, 1))
    forbids("CACHE-6", start, Publish(0, 0))


def test_cache_7_the_cache_changes_by_events_only() -> None:
    allows("CACHE-7", UNUSED, Observe(), leads_to=UNUSED)
    bites("CACHE-7")


def test_cache_8_a_key_names_one_block() -> None:
    allows("CACHE-8", EQUALS, Publish(1, 0))
    bites("CACHE-8")


def test_cache_9_an_unused_block_is_evicted() -> None:
    allows("CACHE-9", UNUSED, Evict(0))
    bites("CACHE-9")


def test_cache_9_only_a_cached_block_is_evicted() -> None:
    forbids("CACHE-9", UNUSED, Evict(1))


def test_cache_10_a_reset_waits_until_nothing_is_in_use() -> None:
    allows("CACHE-10", UNUSED, Reset())
    bites("CACHE-10")


def test_cache_10_a_reset_leaves_nothing() -> None:
    forbids("CACHE-10", UNUSED, Reset(), leads_to=UNUSED)


def test_cache_11_tokens_are_only_appended() -> None:
    allows("CACHE-11", ALONE, Append(0, (6,)))
    bites("CACHE-11")


def test_cache_11_appending_nothing_is_no_event() -> None:
    forbids("CACHE-11", ALONE, Append(0, ()))


def test_cache_13_a_reset_is_refused_only_in_use() -> None:
    allows("CACHE-13", PUBLISHED, Refuse(Reset()))
    bites("CACHE-13")


def test_cache_12_what_is_cached_is_hit() -> None:
    allows("CACHE-12", EMPTY, Start(0, (5, 6)), Allocate(0, 2, (0,)))
    bites("CACHE-12")


def test_a_publication_names_the_block_that_ends_the_prefix() -> None:
    state = follow(TAKEN_BACK, Allocate(0, 2, ()), Write(0, 1, (1, 2)), Publish(0, 0))
    assert state.cached == {0: CacheKey((5, 6, 7))}
    assert state.seqs[0] == Seq(0, (5, 6, 7), 3, num_computed_tokens=3)


PAIR_CHAIN = follow(
    EMPTY_PAIRS, *stored(0, (5, 6, 7, 8), (1, 2), block_size=2), Publish(0, 0), Publish(0, 1), Release(0)
)
"""Two cached blocks of two tokens each, held by nobody; block 0 is empty."""
PAIR_CELLS = {2: (5,), 3: (5, 6), 4: (5, 6, 7), 5: (5, 6, 7, 8)}


@pytest.mark.parametrize(("num_tokens", "hit"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_the_longest_hit_is_counted_in_blocks(num_tokens: int, hit: int) -> None:
    assert longest_hit(follow(PAIR_CHAIN, Start(1, (5, 6, 7, 8, 9)[:num_tokens])), 1) == hit


def test_a_hit_is_computed_in_tokens_and_keeps_every_slot() -> None:
    state = follow(PAIR_CHAIN, Start(1, (5, 6, 7, 8, 9)), Hit(1, (1, 2)))
    assert state.seqs[1].num_computed_tokens == 4
    assert state.cells == PAIR_CELLS
    assert follow(PAIR_CHAIN, Start(1, (5, 6, 9)), Hit(1, (1,))).cells == PAIR_CELLS


def test_an_evicted_block_loses_every_slot_and_no_other() -> None:
    assert follow(PAIR_CHAIN, Evict(1)).cells == {4: (5, 6, 7), 5: (5, 6, 7, 8)}
    assert follow(PAIR_CHAIN, Evict(2)).cells == {2: (5,), 3: (5, 6)}


def test_a_block_in_use_that_leaves_the_cache_keeps_its_contents() -> None:
    held = follow(PAIR_CHAIN, Start(1, (5, 6, 9)), Hit(1, (1,)), Evict(1))
    assert held.cells == PAIR_CELLS


def test_cache_4_tokens_are_counted_and_not_blocks() -> None:
    forbids("CACHE-4", PAIR_CHAIN, Start(1, (5, 6)), Hit(1, (1,)))
    allows("CACHE-4", PAIR_CHAIN, Start(1, (5, 6, 7)), Hit(1, (1,)))


def test_cache_10_every_cached_block_counts() -> None:
    forbids("CACHE-10", CHAIN, Start(1, (5, 9)), Hit(1, (0,)), Reset())


def test_cache_12_only_who_starts_must_look() -> None:
    running = follow(CHAIN, Start(1, (5, 6, 7)), Hit(1, (0, 1)))
    allows("CACHE-12", running, Allocate(1, 1, (2,)))
    without = replace(CHAIN, config=replace(CHAIN.config, prefix_cache=False))
    allows("CACHE-12", without, Start(1, (5, 6)), Allocate(1, 1, (2,)))


def test_cache_12_who_has_a_table_has_begun() -> None:
    begun = follow(CHAIN, Start(1, (5, 6, 7)))
    allows("CACHE-12", replace(begun, block_tables={1: (2,)}), Allocate(1, 1, ()))
    forbids("CACHE-12", begun, Allocate(1, 1, (2,)))


def test_cache_12_a_window_may_leave_an_old_sequence_without_a_table() -> None:
    tight = initial_state(replace(EMPTY.config, window=1))
    slid = follow(tight, *stored(0, (5,), (0,)), Publish(0, 0), Slide(0, 1), Append(0, (6,)))
    allows("CACHE-12", slid, Allocate(0, 1, (1,)))


def test_cache_14_what_is_filled_is_published() -> None:
    allows("CACHE-14", STEP_1, Append(0, (7,)), Publish(0, 0), Complete(1))
    bites("CACHE-14")


# Publication at the schedule

PLANNED = follow(AT_SCHEDULE, *served(ALICE, 0), Publish(0, 0))
"""Alice's block can be found, and is not written yet."""
FOLLOWED = follow(PLANNED, Start(5, (5, 6)), Hit(5, (0,)))
"""Somebody has hit it in the same step."""


def test_cache_6_a_scheduled_block_is_published_only_at_the_schedule() -> None:
    allows("CACHE-6", AT_SCHEDULE, *served(ALICE, 0), Publish(0, 0))
    forbids("CACHE-6", replace(AT_SCHEDULE, choices=Choices()), *served(ALICE, 0), Publish(0, 0))
    forbids("CACHE-6", AT_SCHEDULE, Admit(0), Publish(0, 0))


def test_cache_1_a_block_that_is_published_at_the_schedule_is_owed_its_prefix() -> None:
    holds("CACHE-1", PLANNED)
    fails("CACHE-1", replace(PLANNED, choices=Choices()))
    fails("CACHE-1", replace(PLANNED, cached={0: CacheKey((6,))}))


@pytest.mark.parametrize("event", [Preempt(0), Abort(0), Release(0)], ids=repr)
def test_cache_1_who_does_not_write_takes_back_what_was_published(event: Event) -> None:
    fails("CACHE-1", follow(PLANNED, event))
    holds("CACHE-1", follow(PLANNED, Evict(0), event))


def test_cache_9_a_block_in_use_is_taken_back_while_it_is_not_written() -> None:
    allows("CACHE-9", PLANNED, Evict(0))
    forbids("CACHE-9", PLANNED, Write(0, 0, (0,)), Evict(0))


def test_table_5_whoever_hits_such_a_block_waits_for_it() -> None:
    holds("TABLE-5", FOLLOWED)
    fails("TABLE-5", follow(FOLLOWED, Evict(0), Preempt(0)))


def test_attn_1_what_is_hit_is_written_before_it_is_read() -> None:
    allows("ATTN-1", FOLLOWED, Write(0, 0, (0,)), Read(5, (0,)))
    forbids("ATTN-1", FOLLOWED, Read(5, (0,)))


def test_cow_2_what_was_published_at_the_schedule_is_written_once() -> None:
    allows("COW-2", FOLLOWED, Write(0, 0, (0,)))
    forbids("COW-2", replace(FOLLOWED, choices=Choices()), Write(0, 0, (0,)))
    forbids("COW-2", FOLLOWED, Write(0, 0, (0,)), Write(0, 0, (0,)))
    forbids("COW-2", replace(FOLLOWED, cached={0: CacheKey((6,))}), Write(0, 0, (0,)))


def test_cache_15_what_a_step_will_fill_is_published_when_it_is_submitted() -> None:
    bites("CACHE-15")
    allows("CACHE-15", PLANNED, Submit(1))
    allows("CACHE-15", replace(AT_SCHEDULE, choices=Choices()), *served(ALICE, 0), Submit(1))


def test_cache_15_what_an_earlier_step_filled_may_be_forgotten() -> None:
    later = follow(PLANNED, Submit(1), *computed(ALICE, 0), Append(0, (7,)), Complete(1), Begin(2), Evict(0))
    allows("CACHE-15", later, Allocate(0, 1, (1,)), Publish(0, 1), Submit(2))
    forbids("CACHE-15", later, Allocate(0, 1, (1,)), Submit(2))


def test_a_block_is_written_whatever_is_in_the_others() -> None:
    second = replace(EMPTY, cells={1: (5,)})
    assert is_written(second, 1)
    assert not is_written(second, 0)


# Which free block is taken


def test_cache_16_under_lru_the_cached_block_free_longest_is_evicted() -> None:
    bites("CACHE-16")
    freed = replace(CHAIN, choices=IN_ORDER.choices)
    allows("CACHE-16", freed, Start(0, (6,)), Allocate(0, 1, (2,)))
    allows("CACHE-16", freed, Start(0, (6,)), Allocate(0, 1, (1,)))
    forbids("CACHE-16", freed, Start(0, (6,)), Allocate(0, 1, (0,)))
    allows("CACHE-16", CHAIN, Start(0, (6,)), Allocate(0, 1, (0,)))


def test_cache_17_under_lru_the_end_of_a_table_is_evicted_first() -> None:
    bites("CACHE-17")
    freed = replace(CHAIN, choices=IN_ORDER.choices)
    assert freed.free == (2, 1, 0)
    allows("CACHE-17", freed, Observe(), leads_to=replace(freed, free=(1, 2, 0)))
    allows("CACHE-17", CHAIN, Observe(), leads_to=replace(CHAIN, free=(0, 1, 2)))


# Choices: equal blocks, and a cache that is emptied only when nothing is in use

KEEPS_EQUALS = Choices(publishes_equal_blocks=True)


def test_cache_8_equal_blocks_are_published_if_the_engine_says_so() -> None:
    forbids("CACHE-8", EQUALS, Publish(1, 0), Publish(0, 0))
    allows("CACHE-8", replace(EQUALS, choices=KEEPS_EQUALS), Publish(1, 0), Publish(0, 0))


def test_of_equal_blocks_the_first_is_found() -> None:
    both = follow(replace(EQUALS, choices=KEEPS_EQUALS), Publish(1, 0), Publish(0, 0))
    first, second = both.cached
    assert both.cached[first] == both.cached[second]
    assert find(both, both.cached[first]) == first
    assert find(follow(both, Evict(first)), both.cached[second]) == second


def test_cache_13_a_reset_waits_for_every_block_if_the_engine_says_so() -> None:
    """Nothing cached is in use, but a block is."""
    in_use = follow(CHAIN, Start(1, (9,)), Allocate(1, 1, (0,)))
    forbids("CACHE-13", in_use, Refuse(Reset()))
    allows("CACHE-13", replace(in_use, choices=Choices(resets_idle_only=True)), Refuse(Reset()))
    forbids("CACHE-13", replace(CHAIN, choices=Choices(resets_idle_only=True)), Refuse(Reset()))


def test_of_equal_blocks_a_hit_leaves_the_first_one_first() -> None:
    """Somebody published an equal block while nobody held the first one; look-ups go on to find the first one."""
    equals = follow(initial_state(EMPTY.config, KEEPS_EQUALS), *stored(0, (5, 6), (0, 1)), Publish(0, 0))
    equals = follow(equals, *stored(1, (5, 6), (2, 3)), Publish(1, 0), Release(0))
    state = follow(equals, Start(2, (5, 9)), Hit(2, (0,)))
    assert find(equals, CacheKey((5,))) == find(state, CacheKey((5,))) == 0
    assert state.cached.keys() == {0, 2}
