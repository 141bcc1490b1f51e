"""The scheduler: the door, the queue, the budget, the end."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.block_table import budget_left
from spec.broken import (
    ALICE,
    ALONE,
    BOB,
    EMPTY,
    EMPTY_PAIRS,
    EQUALS,
    FULL,
    RESERVING,
    STEP_1,
    STEP_2,
    THREE_SEATS,
    TWINS,
    TWO_BLOCKS_BY_PRIORITY,
    WAITING,
    computed,
    follow,
    served,
    stored,
)
from spec.choices import Choices
from spec.engine import Admission
from spec.scheduler import (
    admission,
    blocks_owed,
    blocks_wanted,
    fits_alone,
    is_servable,
    most_tokens_stored,
    num_hits_in_use,
    num_seats,
    num_tokens_at_start,
    num_unborn,
    seats_taken,
)
from spec.vocabulary import (
    Add,
    AdmissionRule,
    Admit,
    Allocate,
    Append,
    Begin,
    Complete,
    Config,
    Finish,
    FinishReason,
    Flight,
    Fork,
    Observe,
    Policy,
    Preempt,
    Publish,
    Read,
    Refuse,
    Release,
    Request,
    Rollback,
    Start,
    State,
    Submit,
    SwapOut,
    Write,
    initial_state,
)
from tests.spec.states import allows, bites, fails, forbids, holds

CAROL = replace(BOB, request_id=2, seq_ids=(9,), priority=-1)
TWINS_COMPUTED = follow(THREE_SEATS, Add(TWINS), Begin(1), *served(TWINS, 0), Submit(1), *computed(TWINS, 0))


def under(rule: AdmissionRule, start: State = EMPTY) -> State:
    return replace(start, config=replace(start.config, admission_rule=rule))


def test_the_last_sampled_token_is_never_stored() -> None:
    assert most_tokens_stored(Request(0, (1, 2, 3), max_tokens=4, seq_ids=(0,))) == 6


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))
def test_a_request_fits_alone_if_its_sequences_need_no_more_than_there_is(
    num_blocks: int, block_size: int, num_prompt_tokens: int, max_tokens: int, num_seqs: int
) -> None:
    config = Config(num_blocks=num_blocks, block_size=block_size, max_num_seqs=2)
    request = Request(0, (5,) * num_prompt_tokens, max_tokens, tuple(range(num_seqs)))
    slots = [num_prompt_tokens + max_tokens - 1] * num_seqs
    needed = sum((count + block_size - 1) // block_size for count in slots)
    assert fits_alone(config, request, num_seqs) == (needed <= num_blocks and num_seqs <= 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": ()},
        {"max_tokens": 0},
        {"seq_ids": ()},
        {"seq_ids": (0, 0)},
        {"seq_ids": (0, 1, 2)},
        {"max_tokens": 4},
        {"prompt": (5,) * 8},
    ],
    ids=str,
)
def test_the_door_turns_down_what_can_never_be_served(wrong: dict) -> None:
    assert is_servable(EMPTY.config, ALICE)
    assert is_servable(EMPTY.config, replace(ALICE, prompt=(5, 5))), "it needs all blocks"
    assert not is_servable(EMPTY.config, replace(ALICE, **wrong))


def test_the_door_knows_the_longest_sequence() -> None:
    long = replace(EMPTY.config, block_size=4, max_model_len=8)
    assert is_servable(long, replace(ALICE, prompt=(5,) * 4, max_tokens=4))
    assert not is_servable(long, replace(ALICE, prompt=(5,) * 5, max_tokens=4))


def test_twins_take_two_seats_from_the_start() -> None:
    state = follow(THREE_SEATS, Add(TWINS), Admit(0))
    assert (num_unborn(state, 0), num_seats(state, 0), seats_taken(state)) == (1, 2, 2)


def test_a_born_twin_takes_no_second_seat() -> None:
    born = follow(TWINS_COMPUTED, Fork(0, 2))
    assert (num_unborn(born, 0), num_seats(born, 0)) == (0, 2)
    sampled = follow(born, Append(0, (7,)), Append(2, (8,)), Release(2))
    assert (num_unborn(sampled, 0), num_seats(sampled, 0)) == (0, 1)
    assert num_unborn(follow(born, Release(0)), 0) == 0


def test_the_optimistic_rule_owes_nothing() -> None:
    assert blocks_owed(under(AdmissionRule.OPTIMISTIC, FULL), 0) == 0


def test_the_prompt_rule_owes_the_tokens_that_are_there() -> None:
    assert [blocks_owed(FULL, request_id) for request_id in (0, 1)] == [1, 1]


def test_the_no_evict_rule_owes_the_tokens_that_may_come() -> None:
    state = follow(under(AdmissionRule.NO_EVICT, THREE_SEATS), Add(TWINS), Admit(0))
    assert blocks_owed(state, 0) == 2 + 2  # two blocks each; a copy of the tail is one of the second sequence's


def test_what_a_waiting_request_wants_depends_on_the_rule() -> None:
    request = replace(ALICE, prompt=(5, 6), max_tokens=2)
    wants = {rule: blocks_wanted(follow(under(rule), Add(request)), 0, budget=1) for rule in AdmissionRule}
    assert wants == {AdmissionRule.OPTIMISTIC: 1, AdmissionRule.PROMPT: 2, AdmissionRule.NO_EVICT: 3}


def test_a_cached_block_in_use_need_not_be_free() -> None:
    request = replace(BOB, prompt=(5, 6), max_tokens=1)
    used = follow(ALONE, Publish(0, 0), Add(replace(request, seq_ids=(7,))))
    assert blocks_wanted(used, 1, budget=2) == 1
    assert blocks_wanted(follow(used, Release(0)), 1, budget=2) == 2


def test_the_head_is_admitted_when_seats_blocks_and_budget_suffice() -> None:
    assert admission(WAITING, 0, budget=1) is Admission.NOW
    assert admission(WAITING, 0, budget=0) is Admission.LATER
    full_house = follow(WAITING, Add(CAROL), Admit(0), Admit(1))
    assert admission(full_house, 2, budget=1) is Admission.LATER
    assert admission(follow(FULL, Preempt(1)), 1, budget=1) is Admission.LATER


def test_the_watermark_is_left_free_unless_nobody_runs() -> None:
    start = initial_state(replace(EMPTY.config, watermark_blocks=2))
    both = follow(start, Add(ALICE), Add(BOB))
    assert admission(both, 0, budget=2) is Admission.NOW
    assert admission(follow(both, Begin(1), *served(ALICE, 0)), 1, budget=1) is Admission.LATER


def test_priority_decides_before_arrival() -> None:
    by_priority = replace(WAITING, config=replace(WAITING.config, policy=Policy.PRIORITY))
    assert follow(by_priority, Add(CAROL)).waiting == (2, 0, 1)
    assert follow(WAITING, Add(CAROL)).waiting == (0, 1, 2)
    assert follow(by_priority, Add(CAROL), Admit(2), Admit(0)).running == (2, 0)


def test_a_swapped_sequence_keeps_its_host_table_when_it_is_admitted() -> None:
    state = follow(FULL, SwapOut(1, (0,)), Preempt(1), Admit(1))
    assert 1 not in state.block_tables


def test_sched_1_a_step_keeps_its_budget() -> None:
    holds("SCHED-1", replace(EMPTY, flights={1: Flight(scheduled={0: 1, 1: 1}), 2: Flight(scheduled={0: 2})}))
    bites("SCHED-1")


def test_sched_1_the_budget_is_for_all_sequences_together() -> None:
    fails("SCHED-1", replace(EMPTY, flights={1: Flight(scheduled={0: 1, 1: 2})}))
    assert budget_left(EMPTY, Flight(scheduled={0: 1})) == 1


def test_sched_2_at_most_max_num_seqs_run() -> None:
    holds("SCHED-2", follow(WAITING, Admit(0), Admit(1)))
    bites("SCHED-2")


def test_sched_2_who_waits_takes_no_seat() -> None:
    holds("SCHED-2", follow(WAITING, Add(CAROL), Admit(0), Admit(1)))


def test_sched_3_every_request_has_one_place() -> None:
    holds("SCHED-3", follow(WAITING, Admit(0)))
    bites("SCHED-3")


def test_sched_3_not_two_places_and_never_without_a_sequence() -> None:
    fails("SCHED-3", replace(WAITING, running=(0,)))
    fails("SCHED-3", replace(WAITING, waiting=(0, 0)))
    fails("SCHED-3", replace(WAITING, seqs={}))
    fails("SCHED-3", replace(EMPTY, waiting=(0,)))


def test_sched_4_nobody_overtakes() -> None:
    holds("SCHED-4", WAITING)
    bites("SCHED-4")


def test_sched_4_who_came_first_runs_first() -> None:
    fails("SCHED-4", replace(WAITING, waiting=(0,), running=(1,)))
    fails("SCHED-4", replace(WAITING, waiting=(), running=(1, 0)))


def test_sched_4_by_priority_each_line_is_in_order() -> None:
    both = follow(TWO_BLOCKS_BY_PRIORITY, Add(ALICE), Add(CAROL))
    holds("SCHED-4", replace(both, waiting=(2,), running=(0,)))
    fails("SCHED-4", replace(both, waiting=(0, 2)))
    fails("SCHED-4", replace(both, waiting=(), running=(0, 2)))


def test_sched_4_who_runs_may_stand_in_the_order_of_admission_if_the_engine_says_so() -> None:
    own = replace(TWO_BLOCKS_BY_PRIORITY, choices=Choices(runs_in_admission_order=True))
    both = follow(own, Add(ALICE), Admit(0), Add(CAROL), Admit(2))
    assert both.running == (0, 2)
    holds("SCHED-4", both)
    fails("SCHED-4", replace(both, choices=Choices()))
    fails("SCHED-4", replace(both, waiting=(0, 2), running=()))


def test_sched_5_a_running_sequence_computes_tokens_it_has() -> None:
    allows("SCHED-5", WAITING, Admit(0), Allocate(0, 1, (0,)))
    bites("SCHED-5")


def test_sched_5_a_waiting_one_computes_nothing() -> None:
    forbids("SCHED-5", WAITING, Allocate(0, 1, (0,)))
    forbids("SCHED-5", WAITING, Admit(0), Allocate(0, 0, ()))


def test_sched_5_scheduled_tokens_are_not_scheduled_again() -> None:
    forbids("SCHED-5", WAITING, Admit(0), Allocate(0, 1, (0,)), Allocate(0, 1, (1,)))


def test_sched_6_a_token_comes_when_all_before_it_are_computed() -> None:
    allows("SCHED-6", STEP_1, Append(0, (7,)))
    bites("SCHED-6")


def test_sched_6_a_caller_may_append_what_it_likes() -> None:
    allows("SCHED-6", EMPTY, Start(0, (5,)), Append(0, (6,)))


def test_sched_7_every_complete_sequence_is_sampled() -> None:
    allows("SCHED-7", STEP_1, Append(0, (7,)), Complete(1))
    bites("SCHED-7")


def test_sched_7_a_sequence_that_ended_needs_no_token() -> None:
    allows("SCHED-7", STEP_1, Release(0), Complete(1))


def test_sched_8_the_door_lets_in_what_fits() -> None:
    allows("SCHED-8", EMPTY, Add(replace(ALICE, max_tokens=3)))
    bites("SCHED-8")


@pytest.mark.parametrize("taken", [replace(CAROL, request_id=0), replace(CAROL, seq_ids=(1,))], ids=str)
def test_sched_8_ids_are_new(taken: Request) -> None:
    forbids("SCHED-8", WAITING, Add(taken))


def test_sched_9_a_step_with_work_computes() -> None:
    allows("SCHED-9", WAITING, Begin(1), *served(ALICE, 0), Submit(1))
    bites("SCHED-9")


def test_sched_9_an_idle_engine_or_one_that_has_a_step_out_may_rest() -> None:
    allows("SCHED-9", EMPTY, Begin(1), Submit(1))
    allows("SCHED-9", STEP_1, Begin(2), Submit(2))


def test_sched_9_a_step_in_flight_that_computes_nothing_is_no_reason_to_rest() -> None:
    """Behind one that computes it may be in flight; when that one is over, the next one computes."""
    waits = follow(STEP_1, Begin(2), Submit(2), Append(0, (7,)), Publish(0, 0), Complete(1), Begin(3))
    assert not waits.flights[2].scheduled and waits.requests
    forbids("SCHED-9", waits, Submit(3))


def test_sched_10_the_head_of_the_queue_is_admitted() -> None:
    allows("SCHED-10", WAITING, Admit(0))
    bites("SCHED-10")


def test_sched_11_admission_leaves_room() -> None:
    allows("SCHED-11", WAITING, Begin(1), *served(ALICE, 0), Admit(1))
    bites("SCHED-11")


def test_sched_11_the_budget_must_not_be_spent() -> None:
    wide = follow(EMPTY_PAIRS, Add(replace(ALICE, prompt=(5, 6))), Add(BOB))
    forbids("SCHED-11", wide, Begin(1), Admit(0), Allocate(0, 2, (0,)), Admit(1))


def test_sched_12_room_is_not_left_unused() -> None:
    allows("SCHED-12", WAITING, Begin(1), *served(ALICE, 0), *served(BOB, 1), Submit(1))
    bites("SCHED-12")


def test_sched_12_a_step_that_preempts_admits_nobody() -> None:
    allows("SCHED-12", FULL, Preempt(1), Preempt(0), Submit(2))


def test_sched_13_nobody_who_runs_is_passed_over() -> None:
    allows("SCHED-13", WAITING, Begin(1), *served(ALICE, 0), Submit(1))
    bites("SCHED-13")


def test_sched_13_unless_the_budget_is_spent() -> None:
    wide = follow(EMPTY_PAIRS, Add(replace(ALICE, prompt=(5, 6))), Add(BOB))
    allows("SCHED-13", wide, Begin(1), Admit(0), Admit(1), Allocate(0, 2, (0,)), Submit(1))


def test_sched_14_queues_change_by_events_only() -> None:
    allows("SCHED-14", WAITING, Observe(), leads_to=WAITING)
    bites("SCHED-14")


def test_sched_15_counters_change_by_events_only() -> None:
    allows("SCHED-15", ALONE, Observe(), leads_to=ALONE)
    bites("SCHED-15")


def test_sched_15_scheduled_tokens_are_shown() -> None:
    planned = replace(ALONE.seqs[0], num_scheduled_tokens=1)
    forbids("SCHED-15", ALONE, Observe(), leads_to=replace(ALONE, seqs={0: planned}))


LAST_STEP = follow(STEP_2, Allocate(0, 1, (1,)), Submit(2), Write(0, 1, (1,)), Read(0, (0, 1)), Append(0, (8,)))


def test_sched_16_a_sequence_ends_when_it_must() -> None:
    allows("SCHED-16", LAST_STEP, Finish(0, FinishReason.LENGTH))
    bites("SCHED-16")


def test_sched_16_the_reason_is_the_true_one() -> None:
    stopping = replace(STEP_1, requests={0: replace(ALICE, stop_token_ids=(7,))})
    allows("SCHED-16", stopping, Append(0, (7,)), Finish(0, FinishReason.STOP))
    forbids("SCHED-16", stopping, Append(0, (7,)), Finish(0, FinishReason.LENGTH))
    forbids("SCHED-16", LAST_STEP, Finish(0, FinishReason.STOP))
    forbids("SCHED-16", LAST_STEP, Finish(0, FinishReason.ABORT))


def test_sched_16_a_stop_token_in_the_prompt_stops_nothing() -> None:
    prompted = replace(STEP_1, requests={0: replace(ALICE, stop_token_ids=(5,))})
    forbids("SCHED-16", prompted, Finish(0, FinishReason.STOP))


def test_sched_17_a_sequence_that_ended_is_gone() -> None:
    allows("SCHED-17", LAST_STEP, Finish(0, FinishReason.LENGTH), Complete(2))
    bites("SCHED-17")


def test_sched_18_all_sequences_are_there_before_the_first_token() -> None:
    allows("SCHED-18", TWINS_COMPUTED, Fork(0, 2), Append(0, (7,)))
    bites("SCHED-18")


def test_sched_18_later_a_sibling_may_be_gone() -> None:
    allows("SCHED-18", TWINS_COMPUTED, Fork(0, 2), Append(0, (7,)), Append(2, (8,)), Release(2), Append(0, (8,)))


def test_sched_19_a_fork_has_a_seat() -> None:
    allows("SCHED-19", TWINS_COMPUTED, Fork(0, 2))
    bites("SCHED-19")


def test_sched_19_only_a_running_request_is_forked() -> None:
    waiting = replace(WAITING, block_tables={0: ()})
    forbids("SCHED-19", waiting, Fork(0, 7))
    allows("SCHED-19", EQUALS, Fork(0, 7))


def test_sched_20_what_fits_is_not_refused() -> None:
    allows("SCHED-20", EMPTY, Refuse(Add(replace(ALICE, max_tokens=4))))
    bites("SCHED-20")


def test_sched_20_a_taken_id_is_refused() -> None:
    allows("SCHED-20", WAITING, Refuse(Add(replace(CAROL, request_id=0))))
    allows("SCHED-20", WAITING, Refuse(Add(replace(CAROL, seq_ids=(1,)))))
    allows("SCHED-20", ALONE, Refuse(Fork(0, 1)))


def test_sched_22_forks_keep_what_was_promised() -> None:
    allows("SCHED-22", EQUALS, Fork(0, 7))
    bites("SCHED-22")


def test_sched_23_a_fork_leaves_a_request_that_fits() -> None:
    allows("SCHED-23", TWINS_COMPUTED, Fork(0, 2))
    allows("SCHED-23", EQUALS, Fork(0, 7))
    bites("SCHED-23")


def test_sched_24_what_can_be_forked_is_not_refused() -> None:
    allows("SCHED-24", WAITING, Refuse(Fork(0, 7)))
    allows("SCHED-24", EQUALS, Refuse(Fork(0, 7)))
    bites("SCHED-24")


def test_sched_24_a_fork_without_output_or_in_mid_step_is_refused() -> None:
    silent = follow(THREE_SEATS, Add(ALICE), Begin(1), *served(ALICE, 0), Submit(1), *computed(ALICE, 0))
    spoken = follow(silent, Append(0, (7,)), Complete(1))
    allows("SCHED-24", silent, Refuse(Fork(0, 7)))
    forbids("SCHED-24", spoken, Refuse(Fork(0, 7)))
    allows("SCHED-24", spoken, Begin(2), Allocate(0, 1, (1,)), Refuse(Fork(0, 7)))


def test_what_a_sequence_without_a_scheduler_does_is_its_callers_business() -> None:
    allows("SCHED-18", EMPTY, *stored(0, (5,), (0,)), Append(0, (6,)))


def test_a_request_with_more_sequences_than_seats_never_fits() -> None:
    roomy = Config(num_blocks=8, block_size=1, max_num_seqs=2)
    assert fits_alone(roomy, ALICE, num_seqs=2)
    assert not fits_alone(roomy, ALICE, num_seqs=3)


def test_the_no_evict_rule_wants_blocks_for_the_unborn() -> None:
    wants = {rule: blocks_wanted(follow(under(rule), Add(TWINS)), 0, budget=1) for rule in AdmissionRule}
    assert wants == {AdmissionRule.OPTIMISTIC: 1, AdmissionRule.PROMPT: 1, AdmissionRule.NO_EVICT: 4}


def test_the_optimistic_rule_wants_what_the_next_step_computes_behind_a_hit() -> None:
    cached = follow(EMPTY_PAIRS, *stored(0, (5, 6), (0,), block_size=2), Publish(0, 0), Release(0))
    waiting = follow(under(AdmissionRule.OPTIMISTIC, cached), Add(replace(BOB, prompt=(5, 6, 7, 8))))
    assert num_tokens_at_start(waiting, 1) == 2
    assert blocks_wanted(waiting, 1, budget=1) == 2
    blind = replace(waiting, config=replace(waiting.config, prefix_cache=False))
    assert num_tokens_at_start(blind, 1) == 0
    assert blocks_wanted(blind, 1, budget=1) == 1


def test_a_swapped_sequence_starts_where_it_was_and_hits_nothing() -> None:
    swapped = follow(FULL, Publish(1, 0), SwapOut(1, (0,)), Preempt(1))
    assert num_tokens_at_start(swapped, 1) == 1
    assert num_hits_in_use(swapped, 1) == 0


def test_sched_17_a_stop_token_in_the_prompt_ends_nothing() -> None:
    prompted = replace(STEP_1, requests={0: replace(ALICE, stop_token_ids=(5,))})
    allows("SCHED-17", prompted, Complete(1))


def test_sched_8_a_request_fits_into_what_is_not_reserved() -> None:
    longest = replace(ALICE, max_tokens=3)
    allows("SCHED-8", EMPTY, Add(longest))
    forbids("SCHED-8", RESERVING, Add(longest))
    allows("SCHED-20", RESERVING, Refuse(Add(longest)))
    allows("SCHED-8", RESERVING, Add(replace(ALICE, max_tokens=2)))


def test_sched_25_who_came_first_is_not_passed_over_for_others() -> None:
    bites("SCHED-25")
    both = follow(EMPTY, Add(replace(ALICE, prompt=(5, 5))), Add(BOB), Begin(1), Admit(0), Admit(1))
    allows("SCHED-25", both, Allocate(0, 2, (0, 1)), Submit(1))
    allows("SCHED-25", both, Allocate(0, 1, (0,)), Allocate(1, 1, (1,)), Submit(1))
    forbids("SCHED-25", both, Allocate(1, 1, (0,)), Submit(1))


def test_sched_25_a_sequence_whose_tokens_are_in_flight_is_not_passed_over() -> None:
    both = follow(EMPTY, Add(ALICE), Add(BOB), Begin(1), *served(ALICE, 0), Submit(1), Begin(2), *served(BOB, 1))
    allows("SCHED-25", both, Submit(2))


def test_sched_26_a_rollback_is_for_sequences_that_nobody_serves() -> None:
    bites("SCHED-26")
    allows("SCHED-26", EMPTY, *stored(0, (5, 6), (0, 1)), Rollback(0, 1))


def test_a_reader_without_a_table_holds_no_block() -> None:
    assert follow(ALONE, Begin(1), Submit(1, (0, 9))).flights[1].blocks == {0}
