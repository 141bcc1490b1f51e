"""Preemption and both recoveries: nothing is lost, nothing is in two places."""

from dataclasses import replace

from spec.broken import (
    ALICE,
    ALONE,
    BOB,
    BOB_IN_FLIGHT,
    EMPTY,
    EQUALS,
    FULL,
    STEP_2,
    SWAPPED,
    SWAPPING,
    WAITING,
    computed,
    follow,
    stored,
)
from spec.choices import Choices
from spec.preemption import blocks_for_step
from spec.prefix_cache import held_hits, sure_hits
from spec.vocabulary import (
    Abort,
    Add,
    Admit,
    Allocate,
    Append,
    Begin,
    Complete,
    Fork,
    Observe,
    Policy,
    Preempt,
    Publish,
    Release,
    Slide,
    Start,
    Submit,
    SwapIn,
    SwapOut,
    Write,
    initial_state,
)
from tests.spec.states import allows, bites, fails, forbids, holds

PAIR = initial_state(replace(EMPTY.config, block_size=2))


def test_a_preempted_request_starts_again_with_all_its_tokens() -> None:
    state = follow(FULL, Preempt(1))
    assert state.seqs[1].tokens == (6, 7)
    assert state.seqs[1].num_computed_tokens == 0
    assert (state.waiting, state.running, state.num_preemptions) == ((1,), (0,), {1: 1})
    assert state.free == (1,)


def test_a_swapped_request_keeps_what_it_has_computed() -> None:
    state = follow(FULL, SwapOut(1, (0,)), Preempt(1))
    assert state.seqs[1].num_computed_tokens == 1
    assert state.host_tables == {1: (0,)} and state.host_cells == {0: (6,)}


def test_a_preempted_request_waits_before_everybody_who_came_later() -> None:
    carol = replace(BOB, request_id=2, seq_ids=(2,))
    assert follow(FULL, Add(carol), Preempt(1)).waiting == (1, 2)


def test_a_plan_forgets_its_victim() -> None:
    state = follow(WAITING, Begin(1), Admit(0), Allocate(0, 1, (0,)), Preempt(0))
    assert state.flights[1].scheduled == {} and state.seqs[0].num_scheduled_tokens == 0
    assert state.flights[1].preempting


def test_a_plan_forgets_who_gives_up() -> None:
    assert follow(WAITING, Begin(1), Admit(0), Allocate(0, 1, (0,)), Abort(0)).flights[1].scheduled == {}


def test_swapping_out_and_in_changes_blocks_only() -> None:
    state = follow(SWAPPED, SwapIn(0, (2,)))
    assert state.block_tables == {0: (2,)} and state.cells == {2: (5,)}
    assert state.host_tables == {1: (1,)} and state.host_free == (0,) and state.host_cells == {1: (5,)}


def test_an_aborted_request_leaves_nothing() -> None:
    assert follow(EMPTY, Add(ALICE), Abort(0)) == EMPTY
    state = follow(STEP_2, Abort(0))
    assert not (state.seqs or state.requests or state.running or state.block_tables or state.cells)
    assert sorted(state.free) == [0, 1, 2]


def test_an_aborted_swapped_sequence_gives_its_host_blocks_back() -> None:
    state = follow(SWAPPED, Release(0))
    assert state.host_free == (0,) and state.host_cells == {1: (5,)}


def test_preempt_1_the_newest_goes_first() -> None:
    allows("PREEMPT-1", FULL, Preempt(1))
    bites("PREEMPT-1")


def test_preempt_1_the_least_urgent_goes_first_wherever_it_stands() -> None:
    """An engine may keep those who run in the order in which they were admitted; the victim is the same."""
    own = Choices(runs_in_admission_order=True)
    empty = initial_state(replace(EMPTY.config, policy=Policy.PRIORITY), own)
    state = follow(empty, Add(ALICE), Admit(0), Add(replace(BOB, priority=-1)), Admit(1))
    assert state.running == (0, 1)
    allows("PREEMPT-1", state, Preempt(0))
    forbids("PREEMPT-1", state, Preempt(1))


def test_preempt_1_a_waiting_request_is_no_victim() -> None:
    forbids("PREEMPT-1", WAITING, Preempt(0))


def test_preempt_2_a_waiting_request_holds_nothing() -> None:
    holds("PREEMPT-2", follow(FULL, Preempt(1)))
    bites("PREEMPT-2")


def test_preempt_2_no_block_and_no_plan() -> None:
    waiting = follow(FULL, Preempt(1))
    fails("PREEMPT-2", replace(waiting, block_tables={**waiting.block_tables, 1: (1,)}))
    planned = replace(waiting.seqs[1], num_scheduled_tokens=1)
    fails("PREEMPT-2", replace(waiting, seqs={**waiting.seqs, 1: planned}))


def test_preempt_3_what_is_not_stored_is_not_computed() -> None:
    holds("PREEMPT-3", SWAPPED)
    bites("PREEMPT-3")


def test_preempt_3_a_window_may_leave_nothing_to_store() -> None:
    tight = initial_state(replace(EMPTY.config, window=1))
    holds("PREEMPT-3", follow(tight, *stored(0, (5,), (0,)), Slide(0, 1)))


def test_preempt_3_what_a_window_has_passed_is_counted_in_tokens() -> None:
    window = initial_state(replace(PAIR.config, window=1))
    holds("PREEMPT-3", follow(window, *stored(0, (5, 6), (1,), block_size=2), Slide(0, 1)))


def test_preempt_4_no_token_is_lost() -> None:
    allows("PREEMPT-4", STEP_2, Observe(), leads_to=follow(STEP_2, Preempt(0)))
    bites("PREEMPT-4")


def test_preempt_4_an_output_token_does_not_become_a_prompt_token() -> None:
    renamed = replace(STEP_2.seqs[0], num_prompt_tokens=2)
    forbids("PREEMPT-4", STEP_2, Observe(), leads_to=replace(STEP_2, seqs={0: renamed}))


def test_preempt_5_somebody_lacks_a_block() -> None:
    allows("PREEMPT-5", FULL, Preempt(1))
    bites("PREEMPT-5")


def test_preempt_5_one_victim_at_a_time() -> None:
    forbids("PREEMPT-5", FULL, Preempt(1), Preempt(0))


def test_preempt_5_only_for_what_the_step_can_still_compute() -> None:
    long = follow(EMPTY, Add(replace(ALICE, prompt=(5, 6, 7, 8))), Begin(1), Admit(0))
    assert blocks_for_step(long) == long.config.max_num_batched_tokens == 2 < len(long.free)
    forbids("PREEMPT-5", long, Preempt(0))
    allows("PREEMPT-5", follow(long, Start(9, (5, 5)), Allocate(9, 0, (1, 2))), Preempt(0))
    assert blocks_for_step(follow(long, Allocate(0, 2, (0, 1)))) == 0, "the budget is used up"


def test_preempt_5_the_budget_goes_to_those_who_are_served_first() -> None:
    both = follow(WAITING, Begin(1), Admit(0), Admit(1))
    assert blocks_for_step(both) == 2
    assert blocks_for_step(replace(both, config=replace(both.config, max_num_batched_tokens=1))) == 1


def test_preempt_5_what_is_hit_takes_a_block_only_if_nobody_holds_it() -> None:
    tight = initial_state(replace(EMPTY.config, max_num_batched_tokens=1))
    known = follow(tight, *stored(9, (5, 6), (0, 1)), Publish(9, 0), Publish(9, 1))
    alice = (Add(replace(ALICE, prompt=(5, 6, 7, 8))), Begin(1), Admit(0))
    assert blocks_for_step(follow(known, *alice)) == 1
    assert blocks_for_step(follow(known, Release(9), *alice)) == 3


def test_preempt_5_what_is_cached_behind_a_free_block_may_be_lost() -> None:
    """Somebody who is served before may take the free block, and then nothing behind it is hit."""
    tight = initial_state(replace(EMPTY.config, num_blocks=4, max_num_batched_tokens=1))
    known = follow(tight, *stored(9, (5, 6, 7), (0, 1, 2)), *(Publish(9, i) for i in range(3)))
    known = follow(known, Add(replace(ALICE, prompt=(5, 6, 7, 8))), Begin(1), Admit(0))
    for first_free, num_sure in ((0, 0), (1, 1), (2, 2)):
        gap = replace(known, free=(first_free, 3), ref_count=tuple(int(b not in {first_free, 3}) for b in range(4)))
        assert (held_hits(gap, 0), sure_hits(gap, 0)) == (2, num_sure)
        assert blocks_for_step(gap) == 2 == len(gap.free)
        (allows if num_sure < 2 else forbids)("PREEMPT-5", gap, Preempt(0))
    assert sure_hits(known, 0) == 3


def test_preempt_5_only_a_step_that_is_being_scheduled_takes_blocks() -> None:
    assert blocks_for_step(FULL) == 2
    assert blocks_for_step(replace(FULL, flights={})) == 0


def test_preempt_5_what_is_hit_is_counted_in_tokens() -> None:
    tight = initial_state(replace(PAIR.config, max_num_batched_tokens=1))
    known = follow(tight, *stored(9, (5, 6), (0,), block_size=2), Publish(9, 0))
    assert blocks_for_step(follow(known, Add(replace(ALICE, prompt=(5, 6, 7, 8))), Begin(1), Admit(0))) == 1


def test_preempt_5_nobody_hits_anything_once_the_budget_is_used_up() -> None:
    tight = initial_state(replace(EMPTY.config, max_num_batched_tokens=1))
    known = follow(tight, *stored(9, (5, 6), (0, 1)), Publish(9, 0), Publish(9, 1), Release(9))
    alice = follow(known, Add(replace(ALICE, prompt=(5, 6, 7, 8))), Begin(1), Admit(0))
    assert blocks_for_step(follow(alice, Start(8, (9,)), Allocate(8, 1, (2,)))) == 0


def test_preempt_5_a_share_is_all_that_somebody_takes() -> None:
    shares = initial_state(replace(EMPTY.config, max_num_batched_tokens=4, max_num_partial_prefills=2))
    alice = follow(shares, Add(replace(ALICE, prompt=(5, 6, 7, 8))), Begin(1), Admit(0))
    assert blocks_for_step(alice) == 2
    assert blocks_for_step(follow(alice, Allocate(0, 2, (0, 1)))) == 0


def test_preempt_5_what_the_victim_swapped_out_was_not_free_before() -> None:
    """The budget is Alice's, who lacks a block; Bob's was the last one, and is free since he swapped out."""
    tight = replace(FULL, config=replace(FULL.config, max_num_batched_tokens=1))
    allows("PREEMPT-5", tight, SwapOut(1, (0,)), Preempt(1))
    forbids("PREEMPT-5", follow(tight, SwapOut(1, (0,))), Preempt(0))


def test_preempt_5_a_copy_takes_a_block() -> None:
    twins = follow(PAIR, Add(ALICE), Begin(1), Admit(0), Allocate(0, 1, (0,)), Submit(1), Write(0, 0, (0,)))
    twins = follow(twins, Append(0, (7,)), Complete(1), Fork(0, 7), Begin(2))
    assert blocks_for_step(twins) == 1


def test_preempt_6_preemptions_are_counted() -> None:
    preempted = follow(FULL, Preempt(1))
    allows("PREEMPT-6", preempted, Observe(), leads_to=replace(preempted, num_preemptions={0: 0, 1: 1}))
    bites("PREEMPT-6")


def test_preempt_7_what_a_submitted_step_computes_is_not_preempted() -> None:
    allows("PREEMPT-7", follow(BOB_IN_FLIGHT, *computed(BOB, 1), Append(1, (7,)), Complete(2)), Preempt(1))
    bites("PREEMPT-7")


def test_swap_1_a_host_block_has_one_place() -> None:
    holds("SWAP-1", SWAPPED)
    bites("SWAP-1")


def test_swap_1_never_two_places() -> None:
    fails("SWAP-1", replace(SWAPPED, host_free=(1,)))
    fails("SWAP-1", replace(SWAPPED, host_tables={0: (0,), 1: (0,)}, host_free=(1,)))


def test_swap_2_only_a_free_host_block_is_taken() -> None:
    allows("SWAP-2", EQUALS, SwapOut(0, (0,)), SwapOut(1, (1,)))
    bites("SWAP-2")


def test_swap_2_no_host_block_is_taken_twice_at_once() -> None:
    forbids("SWAP-2", EMPTY, *stored(0, (5, 6), (0, 1)), SwapOut(0, (0, 0)))


def test_swap_3_a_host_slot_holds_its_prefix() -> None:
    holds("SWAP-3", SWAPPED)
    bites("SWAP-3")


def test_swap_3_the_dropped_blocks_of_a_window_are_not_stored() -> None:
    windowed = initial_state(replace(EMPTY.config, window=2))
    holds("SWAP-3", follow(windowed, *stored(0, (5, 6), (0, 1)), Slide(0, 1), SwapOut(0, (1,))))


def test_swap_4_a_sequence_is_in_one_memory() -> None:
    holds("SWAP-4", follow(SWAPPED, SwapIn(0, (0,))))
    bites("SWAP-4")


def test_swap_5_a_swap_moves_the_whole_table() -> None:
    allows("SWAP-5", EMPTY, *stored(0, (5, 6), (0, 1)), SwapOut(0, (1, 0)))
    bites("SWAP-5")


def test_swap_5_each_block_has_a_place_of_its_own() -> None:
    two = follow(EMPTY, *stored(0, (5, 6), (0, 1)))
    forbids("SWAP-5", two, SwapOut(0, (0, 0)))
    allows("SWAP-5", two, SwapOut(0, (0, 1)), SwapIn(0, (2, 0)))
    forbids("SWAP-5", two, SwapOut(0, (0, 1)), SwapIn(0, (2, 2)))


def test_swap_6_host_tables_change_by_events_only() -> None:
    allows("SWAP-6", SWAPPED, Observe(), leads_to=SWAPPED)
    bites("SWAP-6")


def test_swap_7_what_is_scheduled_is_not_swapped_out() -> None:
    allows("SWAP-7", ALONE, SwapOut(0, (0,)))
    bites("SWAP-7")


def test_swap_8_what_can_be_swapped_out_is() -> None:
    allows("SWAP-8", SWAPPING, SwapOut(1, (0,)), Preempt(1))
    allows("SWAP-8", FULL, Preempt(1))
    forbids("SWAP-8", replace(SWAPPING, host_free=(1,)), Preempt(1))
    bites("SWAP-8")


def test_swap_8_host_memory_may_have_no_room() -> None:
    allows("SWAP-8", replace(SWAPPING, host_free=()), Preempt(1))


def test_swap_8_what_is_scheduled_already_is_computed_again() -> None:
    allows("SWAP-8", follow(SWAPPING, Allocate(1, 1, ())), Preempt(1))


def test_swap_8_there_may_be_nothing_to_swap() -> None:
    allows("SWAP-8", replace(SWAPPING, block_tables={0: (0,), 1: ()}), Preempt(1))


def test_swap_8_several_sequences_may_be_computed_again() -> None:
    allows("SWAP-8", follow(SWAPPING, Fork(1, 7)), Preempt(1))


STORED = follow(PAIR, *stored(0, (5, 6, 7), (1, 2), block_size=2))


def test_a_swap_moves_every_slot() -> None:
    out = follow(STORED, SwapOut(0, (1, 0)))
    assert out.host_cells == {2: (5,), 3: (5, 6), 0: (5, 6, 7)} and out.cells == {}
    holds("SWAP-3", out)
    back = follow(out, SwapIn(0, (2, 0)))
    assert back.cells == {4: (5,), 5: (5, 6), 0: (5, 6, 7)} and back.host_cells == {}
    holds("TABLE-5", back)


def test_swap_3_every_slot_counts() -> None:
    out = follow(STORED, SwapOut(0, (1, 0)))
    for at in out.host_cells:
        fails("SWAP-3", replace(out, host_cells={**out.host_cells, at: (9,)}))


def test_swap_3_dropped_blocks_are_counted_in_tokens() -> None:
    window = initial_state(replace(PAIR.config, window=1))
    slid = follow(window, *stored(0, (5, 6, 7), (1, 2), block_size=2), Slide(0, 1), SwapOut(0, (1,)))
    assert slid.host_cells == {2: (5, 6, 7)}
    holds("SWAP-3", slid)
    fails("SWAP-3", replace(slid, host_cells={2: (7,)}))


def test_a_released_swapped_sequence_loses_its_own_host_slots() -> None:
    both = follow(PAIR, *stored(0, (5, 6), (0,), block_size=2), *stored(1, (7, 8), (1,), block_size=2))
    out = follow(both, SwapOut(0, (0,)), SwapOut(1, (1,)))
    assert follow(out, Release(0)).host_cells == {2: (7,), 3: (7, 8)}
    assert follow(out, Release(1)).host_cells == {0: (5,), 1: (5, 6)}


def test_a_preempted_window_sequence_starts_again_with_a_whole_table() -> None:
    window = replace(FULL, config=replace(FULL.config, window=1))
    slid = follow(window, Slide(1, 1))
    assert follow(slid, Preempt(1)).seqs[1].num_dropped_blocks == 0


def test_an_aborted_request_leaves_the_preemptions_of_others() -> None:
    preempted = follow(FULL, Preempt(1))
    assert follow(preempted, Abort(0)).num_preemptions == {1: 1}
    assert follow(preempted, Abort(1)).num_preemptions == {}


def test_a_step_that_preempted_once_stays_one_that_preempts() -> None:
    once = follow(FULL, Preempt(1), Submit(2))
    assert once.flights[2].preempting
    assert follow(once, Begin(3), Preempt(0)).flights[2].preempting


def test_a_swapped_request_keeps_the_count_of_what_its_window_has_passed() -> None:
    out = follow(FULL, SwapOut(1, (0,)))
    slid = replace(out.seqs[1], num_computed_tokens=2, num_dropped_blocks=1)
    kept = follow(replace(out, seqs={**out.seqs, 1: slid}), Preempt(1)).seqs[1]
    assert (kept.num_computed_tokens, kept.num_dropped_blocks) == (2, 1)


def test_every_preemption_of_a_request_counts() -> None:
    assert follow(replace(FULL, num_preemptions={0: 4, 1: 2}), Preempt(1)).num_preemptions == {0: 4, 1: 3}


def test_a_preempted_request_waits_behind_whoever_is_more_urgent() -> None:
    carol = replace(BOB, request_id=2, seq_ids=(2,), priority=-1)
    assert follow(FULL, Add(carol), Preempt(1)).waiting == (2, 1)


def test_sched_28_a_step_that_has_preempted_somebody_admits_nobody() -> None:
    allows("SCHED-28", FULL, Preempt(1), Abort(0), Submit(2), Complete(2), Begin(3), Admit(1))
    allows("SCHED-28", WAITING, Admit(0))
    bites("SCHED-28")
