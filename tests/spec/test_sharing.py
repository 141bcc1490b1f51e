"""Forks and copy-on-write: nobody sees what another one writes."""

from dataclasses import replace

from spec.broken import (
    ALICE,
    ALONE,
    BOB,
    COMPUTED,
    EMPTY,
    EMPTY_PAIRS,
    EQUALS,
    FORKED,
    PUBLISHED,
    TAKEN_BACK,
    THREE_SEATS,
    TWINS,
    follow,
    stored,
)
from spec.choices import Choices, Publication
from spec.sharing import blocks_lacking, blocks_written, copies_owed, growth, is_promised, must_copy, num_entries
from spec.vocabulary import (
    Add,
    Admit,
    Allocate,
    Append,
    Begin,
    CacheKey,
    Complete,
    Copy,
    Fork,
    Publish,
    Release,
    Rollback,
    Slide,
    Start,
    Submit,
    Write,
    initial_state,
)
from tests.spec.states import allows, bites, forbids

GROWN = follow(FORKED, Append(0, (6,)), Append(1, (7,)))
"""Parent and child share a block that is half full, and each has a token of its own to write."""


def test_entries_are_counted_over_all_tables() -> None:
    assert num_entries(FORKED, 0) == 2
    assert num_entries(FORKED, 1) == 0


def test_a_block_that_is_shared_or_cached_is_not_written() -> None:
    assert must_copy(FORKED, 0)
    assert must_copy(PUBLISHED, 0)
    assert not must_copy(ALONE, 0)


def test_a_write_goes_into_the_blocks_of_its_slots() -> None:
    assert blocks_written(EMPTY_PAIRS, Write(0, 1, (1, 4, 5))) == {0, 2}


def test_the_last_holder_writes_in_place() -> None:
    assert copies_owed(GROWN, (0, 1)) == 1
    assert copies_owed(follow(GROWN, Fork(1, 2)), (0, 1, 2)) == 2
    assert copies_owed(follow(GROWN, Release(0)), (1,)) == 0


def test_a_holder_that_does_not_write_leaves_nobody_a_last_one() -> None:
    assert copies_owed(follow(GROWN, Fork(1, 2)), (0, 1)) == 2


def test_a_cached_tail_is_copied_by_every_writer() -> None:
    cached = replace(GROWN, cached={0: CacheKey((5, 6))})
    assert copies_owed(cached, (0, 1)) == 2


def test_a_full_tail_owes_no_copy() -> None:
    state = follow(EMPTY_PAIRS, *stored(0, (5, 6), (0,), block_size=2), Fork(0, 1), Append(0, (7,)), Append(1, (7,)))
    assert copies_owed(state, (0, 1)) == 0
    assert blocks_lacking(state, (0, 1)) == 2


def test_growth_is_what_the_table_lacks() -> None:
    assert [growth(ALONE, 0, num_tokens) for num_tokens in (0, 1, 2, 3)] == [0, 0, 1, 2]


def test_only_sequences_that_are_behind_lack_blocks() -> None:
    assert blocks_lacking(FORKED, (0, 1)) == 0
    assert blocks_lacking(GROWN, (0, 1)) == 1
    assert blocks_lacking(GROWN, (0,)) == 1


def test_a_copy_outside_a_step_gives_its_source_back_at_once() -> None:
    state = follow(FORKED, Copy(1, 0, 0, 2))
    assert state.ref_count == (1, 0, 1)
    assert state.block_tables == {0: (0,), 1: (2,)}
    assert state.cells == {0: (5,), 4: (5,)}


def test_a_copy_in_a_step_holds_its_source_until_the_step_is_over() -> None:
    state = follow(FORKED, Begin(1), Copy(1, 0, 0, 2))
    assert state.ref_count == (2, 0, 1)
    assert state.flights[1].holds == (0,)
    assert state.flights[1].num_copies == 1


def test_when_a_step_is_over_what_was_let_go_is_free_before_the_sources_of_copies() -> None:
    copied = follow(FORKED, Append(1, (7,)), Begin(1), Copy(1, 0, 0, 2), Allocate(1, 1, ()), Submit(1))
    assert follow(copied, Release(1), Release(0), Complete(1)).free == (1, 2, 0)


def test_only_what_is_cached_is_promised() -> None:
    shared = replace(FORKED, choices=Choices(publication=Publication.AT_SCHEDULE))
    assert not is_promised(shared, Write(1, 1, (1,)), 0)


def test_a_rollback_gives_back_the_blocks_that_nothing_else_is_in() -> None:
    state = follow(EMPTY, *stored(0, (5, 6, 7), (0, 1, 2)), Rollback(0, 1))
    assert state.block_tables == {0: (0,)}
    assert sorted(state.free) == [1, 2]
    assert state.seqs[0].num_computed_tokens == 1


def test_cow_2_shared_blocks_are_never_written() -> None:
    allows("COW-2", FORKED, Append(1, (7,)), Copy(1, 0, 0, 1), Allocate(1, 1, ()), Write(1, 1, (3,)))
    bites("COW-2")


def test_cow_2_the_last_holder_may_write() -> None:
    allows("COW-2", FORKED, Append(1, (7,)), Release(0), Allocate(1, 1, ()), Write(1, 1, (1,)))


def test_cow_2_cached_blocks_are_never_written() -> None:
    forbids("COW-2", TAKEN_BACK, Allocate(0, 2, ()), Write(0, 1, (1, 2)), Publish(0, 0), Write(0, 3, (2,)))


def test_cow_3_a_shared_block_is_copied() -> None:
    allows("COW-3", FORKED, Copy(1, 0, 0, 1))
    bites("COW-3")


def test_cow_3_a_cached_block_is_copied() -> None:
    allows("COW-3", PUBLISHED, Copy(0, 0, 0, 1))


def test_cow_4_a_step_copies_before_it_writes() -> None:
    allows("COW-4", FORKED, Begin(1), Copy(1, 0, 0, 1))
    bites("COW-4")


def test_cow_4_the_target_is_not_written_before_either() -> None:
    start = follow(FORKED, Start(2, (8,)), Begin(1), Allocate(2, 1, (1,)), Submit(1), Write(2, 0, (2,)))
    allows("COW-4", start, Copy(1, 0, 0, 2))
    forbids("COW-4", start, Copy(1, 0, 0, 1))


def test_cow_4_any_slot_of_a_block_is_a_write_to_it() -> None:
    start = follow(FORKED, *stored(2, (8,), (1,), block_size=2), Append(2, (9,)), Begin(1), Allocate(2, 1, ()))
    forbids("COW-4", start, Submit(1), Write(2, 1, (3,)), Copy(1, 0, 0, 1))


def test_cow_5_a_copy_replaces_its_source() -> None:
    allows("COW-5", FORKED, Copy(1, 0, 0, 1))
    bites("COW-5")


def test_cow_5_the_source_is_what_the_table_had() -> None:
    forbids("COW-5", FORKED, Copy(1, 0, 2, 1))


def test_cow_6_a_child_is_new() -> None:
    allows("COW-6", EQUALS, Fork(0, 2))
    bites("COW-6")


def test_cow_7_a_rollback_leaves_the_beginning() -> None:
    allows("COW-7", EMPTY, *stored(0, (5, 6), (0, 1)), Rollback(0, 1))
    bites("COW-7")


def test_cow_7_a_rollback_takes_something_back_and_changes_nothing_else() -> None:
    two = follow(EMPTY, *stored(0, (5, 6), (0, 1)))
    forbids("COW-7", two, Rollback(0, 2))
    forbids("COW-7", two, Rollback(0, 1), leads_to=follow(EMPTY, *stored(0, (6,), (0,))))


def test_cow_8_a_rollback_keeps_what_is_still_seen() -> None:
    window = initial_state(replace(EMPTY.config, num_blocks=4, window=2))
    slid = follow(window, *stored(0, (5, 6, 7, 8), (0, 1, 2, 3)), Slide(0, 1))
    allows("COW-8", slid, Rollback(0, 2))
    forbids("COW-8", slid, Rollback(0, 1))
    bites("COW-8")


def test_cow_8_without_a_window_everything_is_kept() -> None:
    allows("COW-8", EMPTY, *stored(0, (5, 6), (0, 1)), Rollback(0, 1))


TWO_BLOCKS = follow(EMPTY_PAIRS, *stored(0, (5, 6, 7), (1, 2), block_size=2), Fork(0, 1))
"""A full block and a half full one, both shared."""


def test_a_copy_moves_every_slot_of_a_block_and_leaves_the_rest_of_the_table() -> None:
    first = follow(TWO_BLOCKS, Copy(1, 0, 1, 0))
    assert first.block_tables == {0: (1, 2), 1: (0, 2)}
    assert first.cells == {0: (5,), 1: (5, 6), 2: (5,), 3: (5, 6), 4: (5, 6, 7)}
    last = follow(TWO_BLOCKS, Copy(1, 1, 2, 0))
    assert last.block_tables == {0: (1, 2), 1: (1, 0)}
    assert last.cells == {0: (5, 6, 7), 2: (5,), 3: (5, 6), 4: (5, 6, 7)}


def test_dropped_blocks_count_for_growth_and_for_copies() -> None:
    window = initial_state(replace(EMPTY_PAIRS.config, num_blocks=4, window=1))
    slid = follow(window, *stored(0, (5, 6, 7), (0, 1), block_size=2), Slide(0, 1))
    assert [growth(slid, 0, num_tokens) for num_tokens in (3, 4, 5)] == [0, 0, 1]
    both = follow(slid, Fork(0, 1), Append(0, (8,)), Append(1, (9,)))
    assert copies_owed(both, (0, 1)) == 1


def test_a_sequence_without_a_table_owes_no_copy() -> None:
    assert copies_owed(follow(EMPTY_PAIRS, Start(0, (5,))), (0,)) == 0
    assert copies_owed(replace(EMPTY_PAIRS, seqs={0: COMPUTED}), (0,)) == 0


def test_cow_2_every_block_of_a_write_counts() -> None:
    start = follow(FORKED, Append(1, (7, 8)), Allocate(1, 2, (1,)))
    forbids("COW-2", start, Write(1, 1, (1, 2)))


def test_cow_6_a_twin_is_born_once() -> None:
    twins = follow(THREE_SEATS, Add(TWINS), Add(BOB), Admit(0), Admit(1))
    allows("COW-6", twins, Fork(0, 2))
    forbids("COW-6", twins, Fork(0, 2), Fork(0, 2))


def test_cow_6_what_is_promised_to_a_twin_is_nobody_elses() -> None:
    twins = follow(THREE_SEATS, Add(TWINS), Add(BOB), Admit(0), Admit(1))
    forbids("COW-6", twins, Fork(1, 2))
    allows("COW-6", twins, Fork(1, 7))
    forbids("COW-6", twins, Fork(1, 0))


def test_cow_8_positions_are_counted_in_tokens_and_not_in_blocks() -> None:
    window = initial_state(replace(EMPTY_PAIRS.config, window=2))
    slid = follow(window, *stored(0, (5, 6, 7, 8), (0, 1), block_size=2), Slide(0, 1))
    allows("COW-8", slid, Rollback(0, 3))
    forbids("COW-8", slid, Rollback(0, 2))


def test_sched_23_a_fork_fits_into_what_is_not_reserved() -> None:
    """Each of the two needs two blocks, and of four one is reserved."""
    reserved = initial_state(replace(EMPTY.config, num_blocks=4), Choices(num_reserved_blocks=1))
    alice = follow(reserved, Add(ALICE), Admit(0), Allocate(0, 1, (1,)), Write(0, 0, (1,)))
    forbids("SCHED-23", alice, Fork(0, 7))
    allows("SCHED-23", replace(alice, choices=Choices()), Fork(0, 7))
