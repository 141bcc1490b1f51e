"""Block tables: positions, slots, and what lies in them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.block_table import first_kept, holds_its_tokens, owes, slot, slot_mapping, slots_of
from spec.broken import ALONE, COMPUTED, EMPTY, EMPTY_PAIRS, EQUALS, FORKED, NEW, SCHEDULED, STEP_1, follow, stored
from spec.vocabulary import (
    Allocate,
    Append,
    Begin,
    Complete,
    Observe,
    Rollback,
    Seq,
    Slide,
    Start,
    Submit,
    Write,
    initial_state,
)
from tests.spec.states import allows, bites, fails, forbids, holds

WINDOW_2 = initial_state(replace(EMPTY.config, window=2))
IN_WINDOW = follow(WINDOW_2, *stored(0, (5, 6), (0, 1)))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=9, unique=True), st.integers(1, 17), st.data())
def test_a_slot_is_a_block_and_an_offset(table: list[int], block_size: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(table) * block_size - 1))
    block, offset = divmod(slot(tuple(table), position, block_size), block_size)
    assert (block, offset) == (table[position // block_size], position % block_size)


@given(st.lists(st.integers(0, 99), max_size=9, unique=True), st.integers(1, 17))
def test_a_table_without_repeats_gives_every_position_a_slot_of_its_own(table: list[int], block_size: int) -> None:
    slots = slot_mapping(tuple(table), 0, len(table) * block_size, block_size)
    assert len(set(slots)) == len(slots) == len(table) * block_size


def test_a_windows_dropped_blocks_are_not_in_the_table() -> None:
    state = follow(IN_WINDOW, Slide(0, 1))
    assert slots_of(state, 0, 1, 2) == (1,)
    assert first_kept(state.seqs[0], block_size=1) == 1


def test_only_the_kept_positions_must_be_stored() -> None:
    assert holds_its_tokens(replace(follow(IN_WINDOW, Slide(0, 1)), cells={1: (5, 6)}), 0)
    assert not holds_its_tokens(replace(IN_WINDOW, cells={1: (5, 6)}), 0)


def test_a_slot_is_owed_what_is_scheduled_for_it_and_not_the_next_token() -> None:
    scheduled = follow(EMPTY_PAIRS, Start(0, (5, 6)), Allocate(0, 1, (0,)))
    assert owes(scheduled, 0, 0, (5,))
    assert not owes(scheduled, 0, 1, (5, 6))


def test_tokens_written_outside_a_step_are_in_no_step() -> None:
    state = follow(ALONE, Append(0, (6,)), Begin(1), Submit(1), Allocate(0, 1, (1,)), Write(0, 1, (1,)))
    assert state.flights[1].scheduled == {} and state.flights[1].written == frozenset()


def test_tokens_scheduled_twice_in_a_step_add_up() -> None:
    state = follow(EMPTY, Start(0, (5, 6)), Begin(1), Allocate(0, 1, (0,)), Allocate(0, 1, (1,)))
    assert state.flights[1].scheduled == {0: 2}
    assert state.block_tables[0] == (0, 1)


def test_table_1_a_table_has_the_blocks_its_tokens_need() -> None:
    holds("TABLE-1", follow(EMPTY_PAIRS, *stored(0, (5, 6, 7), (2, 0), block_size=2)))
    bites("TABLE-1")


def test_table_1_scheduled_tokens_need_blocks_too() -> None:
    holds("TABLE-1", follow(EMPTY, Start(0, (5,)), Allocate(0, 1, (0,))))
    fails("TABLE-1", replace(EMPTY, seqs={0: SCHEDULED}, block_tables={0: ()}))


def test_table_1_dropped_blocks_count() -> None:
    holds("TABLE-1", follow(IN_WINDOW, Slide(0, 1)))


def test_table_2_tokens_go_to_their_slots() -> None:
    allows("TABLE-2", EMPTY, Start(0, (5, 6)), Allocate(0, 2, (2, 0)), Write(0, 0, (2, 0)))
    bites("TABLE-2")


def test_table_3_a_step_writes_a_slot_once() -> None:
    start = follow(EMPTY_PAIRS, Start(0, (5, 6)), Begin(1), Allocate(0, 2, (0,)), Submit(1))
    allows("TABLE-3", start, Write(0, 0, (0,)), Write(0, 1, (1,)))
    bites("TABLE-3")


def test_table_3_also_within_one_write() -> None:
    forbids("TABLE-3", EMPTY_PAIRS, Start(0, (5, 6)), Allocate(0, 2, (0,)), Write(0, 0, (0, 0)))


def test_table_3_a_later_write_outside_a_step_is_free_to_write_again() -> None:
    taken_back = follow(EMPTY, *stored(0, (5, 6), (0, 1)), Rollback(0, 1), Append(0, (7,)))
    allows("TABLE-3", taken_back, Allocate(0, 1, (1,)), Write(0, 1, (1,)))


def test_table_4_a_dead_sequence_has_no_table() -> None:
    holds("TABLE-4", ALONE)
    bites("TABLE-4")


def test_table_4_nor_a_host_table() -> None:
    fails("TABLE-4", replace(EMPTY, host_tables={0: (0,)}, host_free=(1,)))


def test_table_5_a_slot_holds_the_whole_prefix_of_its_token() -> None:
    holds("TABLE-5", follow(EMPTY, *stored(0, (5, 6), (2, 0))))
    bites("TABLE-5")


def test_table_5_the_same_token_after_another_prefix_is_another_value() -> None:
    state = follow(EMPTY, *stored(0, (5, 6), (0, 1)))
    fails("TABLE-5", replace(state, cells={0: (5,), 1: (4, 6)}))


def test_table_5_an_empty_slot_holds_nothing() -> None:
    fails("TABLE-5", replace(ALONE, cells={}))


def test_table_6_a_block_stands_once_in_a_table() -> None:
    holds("TABLE-6", FORKED)
    bites("TABLE-6")


def test_table_7_tables_name_blocks_of_the_pool() -> None:
    holds("TABLE-7", follow(EMPTY, *stored(0, (5, 6, 7), (0, 1, 2))))
    bites("TABLE-7")


@pytest.mark.parametrize("block", [-1, 3])
def test_table_7_the_pool_has_bounds(block: int) -> None:
    fails("TABLE-7", replace(EMPTY, seqs={0: NEW}, block_tables={0: (block,)}))


def test_table_8_a_table_changes_by_events_only() -> None:
    allows("TABLE-8", EQUALS, Observe(), leads_to=replace(EQUALS, block_tables={1: (1,), 0: (0,)}))
    bites("TABLE-8")


def test_table_9_a_write_continues_where_the_last_one_ended() -> None:
    start = follow(EMPTY, Start(0, (5, 6)), Allocate(0, 2, (0, 1)))
    allows("TABLE-9", start, Write(0, 0, (0,)), Write(0, 1, (1,)))
    bites("TABLE-9")


def test_table_9_no_gap_no_repetition_and_no_empty_write() -> None:
    start = follow(EMPTY, Start(0, (5, 6, 7)), Allocate(0, 3, (0, 1, 2)), Write(0, 0, (0,)))
    forbids("TABLE-9", start, Write(0, 2, (2,)))
    forbids("TABLE-9", start, Write(0, 0, (0,)))
    forbids("TABLE-9", start, Write(0, 1, ()))


def test_table_10_what_the_next_token_does_not_see_may_go() -> None:
    allows("TABLE-10", IN_WINDOW, Slide(0, 1))
    bites("TABLE-10")


def test_table_10_what_it_sees_may_not() -> None:
    forbids("TABLE-10", IN_WINDOW, Slide(0, 2))
    forbids("TABLE-10", IN_WINDOW, Slide(0, 0))


def test_table_10_without_a_window_everything_is_seen() -> None:
    forbids("TABLE-10", ALONE, Slide(0, 1))


def test_a_new_sequence_has_computed_nothing() -> None:
    assert follow(EMPTY, Start(0, (5,))).seqs[0] == NEW
    assert ALONE.seqs[0] == COMPUTED == Seq(0, (5,), 1, num_computed_tokens=1)


def test_dropped_blocks_are_counted_in_tokens() -> None:
    window = initial_state(replace(EMPTY_PAIRS.config, window=1))
    slid = follow(window, *stored(0, (5, 6, 7), (0, 2), block_size=2), Slide(0, 1))
    assert first_kept(slid.seqs[0], block_size=2) == 2
    assert slots_of(slid, 0, 2, 3) == (4,)
    assert holds_its_tokens(slid, 0)


def test_table_11_passed_blocks_are_given_back() -> None:
    allows("TABLE-11", STEP_1, Append(0, (7,)), Complete(1))
    bites("TABLE-11")


def test_table_11_a_block_is_passed_with_its_last_position() -> None:
    """Of two computed tokens and one to come, a window of two sees the second one, and a window of one neither."""
    for window, judge in ((2, allows), (1, forbids)):
        judge("TABLE-11", replace(STEP_1, config=replace(STEP_1.config, window=window)), Append(0, (7,)), Complete(1))


def test_a_sequence_begins_with_an_empty_table() -> None:
    assert follow(EMPTY, Start(0, (5,))).block_tables == {0: ()}
