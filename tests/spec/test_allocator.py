"""Blocks: arithmetic, counts, and who may have which."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.allocator import blocks_in, blocks_needed, blocks_taken, give_back, holders, kv_bytes_per_token, wasted_slots
from spec.broken import ALONE, EMPTY, EMPTY_PAIRS, FORKED, RESERVING, SWAPPED, follow, stored
from spec.choices import Choices
from spec.vocabulary import (
    Allocate,
    Begin,
    CacheKey,
    Complete,
    Config,
    Copy,
    Evict,
    Flight,
    Fork,
    InvalidConfig,
    Observe,
    Publish,
    Release,
    Start,
    Submit,
    SwapIn,
    initial_state,
)
from tests.spec.states import allows, bites, fails, forbids, holds

sizes = st.integers(1, 512)
counts = st.integers(0, 10**7)


def test_llama_2_13b_takes_800_kib_a_token() -> None:
    assert kv_bytes_per_token(num_layers=40, num_kv_heads=40, head_size=128, dtype_bytes=2) == 819_200 == 800 * 1024


@given(counts, sizes)
def test_blocks_needed_is_the_least_number_that_has_room(num_tokens: int, block_size: int) -> None:
    blocks = blocks_needed(num_tokens, block_size)
    assert blocks * block_size >= num_tokens
    assert (blocks - 1) * block_size < num_tokens or blocks == 0


@given(counts, sizes)
def test_lemma_a_sequence_wastes_less_than_one_block(num_tokens: int, block_size: int) -> None:
    """Follows from TABLE-1: a table has as many blocks as its tokens need."""
    assert 0 <= wasted_slots(num_tokens, block_size) < block_size


@given(st.integers(0, 2**45), sizes, st.integers(1, 10**7))
def test_blocks_in_is_the_greatest_number_that_fits(num_bytes: int, block_size: int, bytes_per_token: int) -> None:
    blocks = blocks_in(num_bytes, block_size, bytes_per_token)
    assert blocks * block_size * bytes_per_token <= num_bytes < (blocks + 1) * block_size * bytes_per_token


def test_holders_are_table_entries_and_holds_in_flight() -> None:
    assert holders(replace(FORKED, flights={1: Flight(holds=(0, 2))})) == {0: 3, 2: 1}


def test_a_block_that_does_not_exist_hides_no_other() -> None:
    assert give_back(ALONE, (0, 9)) == give_back(ALONE, (0,))
    assert give_back(ALONE, (0,)).free == (1, 2, 0)


def test_only_allocation_copy_and_swap_in_take_free_blocks() -> None:
    assert blocks_taken(Allocate(0, 3, (1, 2))) == (1, 2)
    assert blocks_taken(SwapIn(0, (2,))) == (2,)
    assert blocks_taken(Copy(0, 0, 1, 2)) == (2,)
    assert blocks_taken(Evict(1)) == ()


def test_lemma_free_and_referenced_blocks_are_the_pool() -> None:
    """Follows from ALLOC-1 and ALLOC-3: together they are all blocks, and no block is both."""
    for state in (EMPTY, ALONE, FORKED, SWAPPED):
        holds("ALLOC-1", state)
        holds("ALLOC-3", state)
        referenced = [block for block, count in enumerate(state.ref_count) if count]
        assert sorted([*state.free, *referenced]) == list(range(state.config.num_blocks))


def test_lemma_an_idle_engine_holds_nothing() -> None:
    """Follows from TABLE-4, ALLOC-2 and ALLOC-3: without sequences and steps every block is free."""
    idle = follow(FORKED, Release(0), Release(1))
    assert not idle.seqs and not idle.flights
    assert sorted(idle.free) == list(range(idle.config.num_blocks))


def test_alloc_1_a_block_is_free_once() -> None:
    holds("ALLOC-1", EMPTY)
    bites("ALLOC-1")


@pytest.mark.parametrize("block", [-1, 3])
def test_alloc_1_free_blocks_are_blocks_of_the_pool(block: int) -> None:
    fails("ALLOC-1", replace(EMPTY, free=(0, 1, block)))


def test_alloc_2_every_holder_is_counted() -> None:
    holds("ALLOC-2", FORKED)
    bites("ALLOC-2")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_alloc_2_a_fork_is_a_second_holder(count: int) -> None:
    fails("ALLOC-2", replace(FORKED, ref_count=(count, 0, 0)))


def test_alloc_2_a_hold_in_flight_counts() -> None:
    held = replace(ALONE, flights={1: Flight(holds=(0,))})
    fails("ALLOC-2", held)
    holds("ALLOC-2", replace(held, ref_count=(2, 0, 0)))


def test_alloc_3_free_and_unreferenced_are_the_same() -> None:
    holds("ALLOC-3", ALONE)
    bites("ALLOC-3")


def test_alloc_3_a_referenced_block_is_not_free() -> None:
    fails("ALLOC-3", replace(ALONE, free=(0, 1, 2)))


def test_alloc_4_only_a_free_block_is_handed_out() -> None:
    allows("ALLOC-4", ALONE, Start(1, (6,)), Allocate(1, 1, (2,)))
    bites("ALLOC-4")


def test_alloc_4_holds_for_copies_and_swaps_too() -> None:
    allows("ALLOC-4", FORKED, Copy(1, 0, 0, 2))
    forbids("ALLOC-4", FORKED, Copy(1, 0, 0, 0))
    allows("ALLOC-4", SWAPPED, SwapIn(0, (0,)))
    forbids("ALLOC-4", follow(SWAPPED, SwapIn(0, (0,))), SwapIn(1, (0,)))


def test_alloc_4_no_block_is_handed_out_twice_at_once() -> None:
    forbids("ALLOC-4", EMPTY, Start(0, (5, 6)), Allocate(0, 2, (0, 0)))


def test_alloc_4_no_block_outside_the_pool_is_handed_out() -> None:
    forbids("ALLOC-4", EMPTY, Start(0, (5,)), Allocate(0, 1, (3,)))


def test_alloc_5_a_block_in_flight_is_not_free() -> None:
    holds("ALLOC-5", follow(ALONE, Begin(1), Submit(1, (0,))))
    bites("ALLOC-5")


def test_alloc_5_a_released_block_stays_until_the_step_is_over() -> None:
    released = follow(ALONE, Begin(1), Submit(1, (0,)), Release(0))
    holds("ALLOC-5", released)
    assert 0 not in released.free


def test_alloc_5_a_plan_that_is_not_submitted_keeps_nothing() -> None:
    holds("ALLOC-5", replace(EMPTY, flights={1: Flight(blocks=frozenset({0}))}))


def test_a_freed_block_is_taken_last_and_the_tail_of_a_table_first() -> None:
    state = follow(EMPTY_PAIRS, Start(0, (5, 6, 7)), Allocate(0, 3, (0, 1)), Fork(0, 1), Release(0), Release(1))
    assert state.free == (2, 1, 0)


def test_alloc_4_the_last_free_block_may_be_taken() -> None:
    allows("ALLOC-4", EMPTY, Start(0, (5, 6, 7)), Allocate(0, 3, (2, 1, 0)))


def test_alloc_5_the_newest_step_that_may_touch_a_block_keeps_it() -> None:
    released = follow(ALONE, Begin(1), Submit(1, (0,)), Begin(2), Submit(2, (0,)), Release(0))
    assert (released.flights[1].holds, released.flights[2].holds) == ((), (0,))
    older = follow(released, Complete(2))
    assert older.flights[1].holds == (0,)
    assert 0 in follow(older, Complete(1)).free


def test_alloc_5_a_block_with_other_holders_needs_no_step_to_keep_it() -> None:
    released = follow(FORKED, Begin(1), Submit(1, (0,)), Release(0))
    assert released.flights[1].holds == ()
    assert released.ref_count[0] == 1


def test_alloc_5_only_a_submitted_step_keeps_what_it_touches() -> None:
    planned = replace(ALONE, flights={1: Flight(blocks=frozenset({0}))})
    assert 0 in follow(planned, Release(0)).free
    elsewhere = replace(ALONE, flights={1: Flight(blocks=frozenset({2}), submitted=True)})
    assert 0 in follow(elsewhere, Release(0)).free


def test_a_block_that_becomes_free_loses_its_contents_and_no_others() -> None:
    both = follow(EMPTY_PAIRS, *stored(0, (5, 6), (1,), block_size=2), *stored(1, (7, 8), (2,), block_size=2))
    assert follow(both, Release(0)).cells == {4: (7,), 5: (7, 8)}
    assert follow(both, Release(1)).cells == {2: (5,), 3: (5, 6)}


def test_a_cached_block_that_is_taken_loses_its_contents_and_no_others() -> None:
    both = follow(EMPTY_PAIRS, *stored(0, (5, 6), (1,), block_size=2), *stored(1, (7, 8), (2,), block_size=2))
    unused = follow(both, Publish(0, 0), Publish(1, 0), Release(0), Release(1), Start(2, (9,)))
    assert follow(unused, Allocate(2, 1, (1,))).cells == {4: (7,), 5: (7, 8)}
    assert follow(unused, Allocate(2, 1, (2,))).cells == {2: (5,), 3: (5, 6)}


def test_blocks_outside_the_pool_are_nobodys() -> None:
    nowhere = follow(EMPTY, Start(0, (5,)), Allocate(0, 1, (3,)))
    assert nowhere.ref_count == (0, 0, 0)
    assert follow(nowhere, Release(0)).ref_count == (0, 0, 0)


def test_alloc_6_a_reserved_block_is_in_no_table_and_not_cached() -> None:
    bites("ALLOC-6")
    holds("ALLOC-6", RESERVING)
    fails("ALLOC-6", replace(RESERVING, cached={0: CacheKey((5,))}))
    holds("ALLOC-6", follow(RESERVING, *stored(0, (5,), (1,)), Publish(0, 0)))


def test_alloc_1_a_reserved_block_is_never_free() -> None:
    assert RESERVING.free == (1, 2)
    fails("ALLOC-1", replace(RESERVING, free=(0, 1, 2)))


def test_alloc_4_nobody_is_given_a_reserved_block() -> None:
    forbids("ALLOC-4", RESERVING, Start(0, (5,)), Allocate(0, 1, (0,)))
    shared = follow(RESERVING, *stored(0, (5,), (1,)), Fork(0, 1))
    forbids("ALLOC-4", shared, Copy(1, 0, 1, 0))


def test_alloc_2_what_an_engine_counts_of_a_reserved_block_is_its_own_affair() -> None:
    counted = replace(RESERVING, ref_count=(7, 0, 0))
    for rule_id in ("ALLOC-2", "ALLOC-3"):
        holds(rule_id, counted)
    allows("API-3", RESERVING, Observe(), leads_to=counted)


def test_all_blocks_but_one_can_not_be_reserved_too() -> None:
    for count in (-1, 2):
        with pytest.raises(InvalidConfig, match=f"num_reserved_blocks is {count}, it must be 0 to 1"):
            initial_state(Config(num_blocks=2), Choices(num_reserved_blocks=count))
