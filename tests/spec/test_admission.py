"""Admission: what it wants, what it owes to whoever runs, and what it may count on."""

from dataclasses import replace

from spec.broken import ALICE, ALONE, BOB, EMPTY, EMPTY_PAIRS, FULL, TWINS, WAITING, computed, follow, served, stored
from spec.engine import Admission
from spec.scheduler import admission, blocks_owed, blocks_wanted, num_hits_in_use
from spec.vocabulary import (
    Abort,
    Add,
    AdmissionRule,
    Admit,
    Allocate,
    Append,
    Begin,
    Complete,
    Flight,
    Fork,
    Policy,
    Preempt,
    Publish,
    State,
    Submit,
    initial_state,
)
from tests.spec.states import allows, forbids


def under(rule: AdmissionRule, start: State = EMPTY) -> State:
    return replace(start, config=replace(start.config, admission_rule=rule))


def test_the_watermark_is_not_for_whoever_is_alone() -> None:
    tight, pair = replace(EMPTY, config=replace(EMPTY.config, watermark_blocks=2)), replace(ALICE, prompt=(5, 6))
    assert admission(follow(tight, Add(pair)), 0, budget=2) is Admission.NOW
    assert admission(follow(tight, Add(BOB), Admit(1), Add(pair)), 0, budget=2) is Admission.LATER


def test_the_optimistic_rule_admits_what_the_budget_lets_begin() -> None:
    one_free = follow(under(AdmissionRule.OPTIMISTIC), *stored(9, (8, 9), (0, 1)), Add(replace(ALICE, prompt=(5, 6))))
    assert [admission(one_free, 0, budget) for budget in (1, 2)] == [Admission.NOW, Admission.LATER]


def test_admission_takes_nothing_away() -> None:
    assert follow(replace(WAITING, block_tables={0: (2,)}), Admit(0)).block_tables == {0: (2,)}


def half_full(max_tokens: int, rule: AdmissionRule, free: tuple[int, ...] = (1, 2)) -> State:
    """A running request with one computed token, in a block that has room for another, and a sequence to be forked."""
    running = follow(under(rule, EMPTY_PAIRS), Add(replace(TWINS, max_tokens=max_tokens)), Admit(0))
    whole = replace(running.seqs[0], num_computed_tokens=1)
    return replace(running, seqs={0: whole}, block_tables={0: (0,)}, free=free, ref_count=(1, 0, 0))


def shared_tail(max_tokens: int, rule: AdmissionRule) -> State:
    """Both sequences, in one block."""
    return follow(half_full(max_tokens, rule), Fork(0, 2))


def test_the_no_evict_rule_owes_a_copy_to_whoever_goes_on() -> None:
    assert [blocks_owed(shared_tail(most, AdmissionRule.NO_EVICT), 0) for most in (1, 2, 4)] == [0, 1, 3]


def test_every_sequence_of_a_waiting_request_wants_blocks() -> None:
    waiting = follow(shared_tail(2, AdmissionRule.PROMPT), Preempt(0))
    assert blocks_wanted(waiting, 0, budget=2) == 2


def test_hits_count_only_where_they_will_be_made() -> None:
    used = follow(ALONE, Publish(0, 0), Add(replace(BOB, prompt=(5, 6), seq_ids=(7,))))
    assert num_hits_in_use(used, 7) == 1
    assert num_hits_in_use(replace(used, host_tables={7: (0,)}), 7) == 0
    assert num_hits_in_use(under(AdmissionRule.NO_EVICT, used), 7) == 0
    assert num_hits_in_use(replace(used, config=replace(used.config, prefix_cache=False)), 7) == 0


def test_sched_22_a_fork_may_leave_exactly_what_was_promised() -> None:
    """The two sequences are owed a copy of their tail."""
    allows("SCHED-22", half_full(2, AdmissionRule.NO_EVICT, free=(1,)), Fork(0, 2))
    forbids("SCHED-22", half_full(2, AdmissionRule.NO_EVICT, free=()), Fork(0, 2))
    allows("SCHED-22", half_full(2, AdmissionRule.PROMPT, free=()), Fork(0, 2))


def test_sched_13_whoever_lacks_blocks_may_be_passed_over_while_another_step_is_in_flight() -> None:
    """Two sequences lack a block each. With blocks for both, or without a step that will give some back, none may."""
    overlapping = replace(FULL, flights={1: Flight(submitted=True), **FULL.flights})
    allows("SCHED-13", overlapping, Submit(2))
    forbids("SCHED-13", replace(overlapping, free=(0, 1)), Submit(2))
    forbids("SCHED-13", FULL, Submit(2))


def test_sched_11_nobody_joins_a_static_batch_that_has_a_token() -> None:
    static = replace(WAITING, config=replace(WAITING.config, policy=Policy.STATIC, max_num_seqs=3))
    allows("SCHED-11", static, Begin(1), *served(ALICE, 0), Admit(1))
    begun = follow(static, Begin(1), *served(ALICE, 0), Submit(1), *computed(ALICE, 0), Append(0, (7,)), Complete(1))
    forbids("SCHED-11", begun, Begin(2), Admit(1))
    allows("SCHED-12", begun, Begin(2), Allocate(0, 1, (1,)), Submit(2))
    allows("SCHED-11", follow(begun, Abort(0)), Begin(2), Admit(1))


STATIC = initial_state(replace(EMPTY.config, policy=Policy.STATIC, num_blocks=8, max_num_seqs=3))


def test_sched_11_whoever_comes_back_to_a_static_batch_with_a_token_is_alone() -> None:
    """Both have a token and were preempted: the second one waits for the end of the first, though there is room."""
    both = (Add(ALICE), Add(BOB), Begin(1), *served(ALICE, 0), *served(BOB, 1), Submit(1))
    begun = follow(STATIC, *both, *computed(ALICE, 0), *computed(BOB, 1), Append(0, (7,)), Append(1, (7,)), Complete(1))
    waiting = follow(begun, Begin(2), Preempt(1), Preempt(0), Complete(2), Begin(3))
    allows("SCHED-11", waiting, Admit(0))
    forbids("SCHED-11", waiting, Admit(0), Allocate(0, 1, (0,)), Admit(1))
    by_arrival = replace(waiting, config=replace(STATIC.config, policy=Policy.FCFS))
    allows("SCHED-11", by_arrival, Admit(0), Allocate(0, 1, (0,)), Admit(1))


def test_sched_11_a_static_batch_is_open_while_none_of_those_who_run_has_a_token() -> None:
    """Alice has got one, and goes; of Bob's prompt a part is computed."""
    long, carol = replace(BOB, prompt=(6, 6, 6)), replace(BOB, request_id=2, seq_ids=(2,))
    first = (Add(ALICE), Add(long), Add(carol), Begin(1), *served(ALICE, 0), Admit(1), Allocate(1, 1, (1,)), Submit(1))
    begun = follow(STATIC, *first, *computed(ALICE, 0), Append(0, (7,)))
    forbids("SCHED-11", begun, Begin(2), Admit(2))
    allows("SCHED-11", begun, Abort(0), Begin(2), Admit(2))
