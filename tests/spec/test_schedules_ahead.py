"""An engine that schedules ahead: the device is a queue, and a step computes the token that the one before still draws."""

from spec.broken import follow
from spec.choices import Choices, Publication
from spec.conformance.judge import JudgedEngine
from spec.conformance.machine import next_token
from spec.engine import Admission
from spec.monitor import Monitor
from spec.preemption import run_out, unschedule
from spec.scheduler import admission
from spec.trace import Trace, dumps, loads
from spec.vocabulary import (
    Abort,
    Add,
    AdmissionRule,
    Admit,
    Allocate,
    Append,
    Begin,
    CacheKey,
    Complete,
    Config,
    Preempt,
    Publish,
    Read,
    Request,
    Submit,
    Write,
    initial_state,
    replace,
)
from tests.spec.model_engine import AHEAD, make_engine_ahead
from tests.spec.states import allows, fails, forbids, holds

CONFIG = Config(num_blocks=6, block_size=2, max_num_seqs=2, max_num_batched_tokens=4, prefix_cache=True)
CHOICES = Choices(publication=Publication.AT_SCHEDULE, schedules_ahead=True)
ALICE = Request(request_id=0, prompt=(5, 6, 7), max_tokens=3, seq_ids=(0,))
ADMITTED = follow(initial_state(CONFIG, CHOICES), Add(ALICE), Begin(1), Admit(0))
DRAWING = follow(ADMITTED, Allocate(0, 3, (0, 1)), Publish(0, 0), Submit(1), Begin(2))
"""A step computes the prompt and is to draw a token, and the next one is being scheduled."""
IN_CHUNKS = follow(ADMITTED, Allocate(0, 2, (0,)), Publish(0, 0), Submit(1), Begin(2))
"""The same, but the step computes only a part of the prompt."""
DRAWN = (Write(0, 0, (0, 1, 2)), Read(0, (0, 1, 2)), Append(0, (8,)), Complete(1))


def test_sched_5_the_token_that_is_being_drawn_can_be_computed() -> None:
    allows("SCHED-5", DRAWING, Allocate(0, 1, ()))
    allows("SCHED-5", replace(DRAWING, requests={0: replace(ALICE, max_tokens=2)}), Allocate(0, 1, ()))
    forbids("SCHED-5", replace(DRAWING, choices=replace(CHOICES, schedules_ahead=False)), Allocate(0, 1, ()))


def test_sched_5_nothing_beyond_it() -> None:
    forbids("SCHED-5", DRAWING, Allocate(0, 2, (2,)))
    forbids("SCHED-5", IN_CHUNKS, Allocate(0, 2, (1,)))
    allows("SCHED-5", IN_CHUNKS, Allocate(0, 1, (1,)))


def test_sched_5_the_last_token_of_a_sequence_is_computed_by_nobody() -> None:
    last = replace(DRAWING, requests={0: replace(ALICE, max_tokens=1)})
    forbids("SCHED-5", last, Allocate(0, 1, ()))


def test_a_step_knows_how_many_tokens_are_computed_when_it_is_over() -> None:
    assert follow(ADMITTED, Allocate(0, 3, (0, 1))).flights[1].stops == {0: 3}


def test_a_step_that_is_not_submitted_forgets_who_gives_way() -> None:
    flights = unschedule(follow(DRAWING, Allocate(0, 1, ())), 0).flights
    assert (flights[1].stops, flights[2].stops, flights[2].scheduled) == ({0: 3}, {}, {})


def test_what_a_submitted_step_writes_for_a_token_that_is_not_there_is_not_known() -> None:
    """The fourth token is still being drawn."""
    assert run_out(follow(DRAWING, Allocate(0, 1, ()), Submit(2)), 0).cells == {0: (5,), 1: (5, 6), 2: (5, 6, 7)}


def test_cache_6_a_block_is_published_when_its_last_token_is_there() -> None:
    ahead = follow(DRAWING, Allocate(0, 1, ()))
    forbids("CACHE-6", ahead, Publish(0, 1))
    allows("CACHE-6", follow(ahead, Submit(2), *DRAWN), Publish(0, 1))


def test_cache_15_nobody_owes_the_cache_a_block_whose_last_token_is_not_there() -> None:
    allows("CACHE-15", DRAWING, Allocate(0, 1, ()), Submit(2))
    forbids("CACHE-15", ADMITTED, Allocate(0, 3, (0, 1)), Submit(1))


def test_alloc_5_what_is_given_up_in_flight_is_free_at_once() -> None:
    gone = follow(DRAWING, Abort(0))
    holds("ALLOC-5", gone)
    assert sorted(gone.free) == [0, 1, 2, 3, 4, 5]


def test_cache_1_what_a_submitted_step_writes_is_as_good_as_written() -> None:
    gone = follow(DRAWING, Abort(0))
    assert gone.cached == {0: CacheKey((5, 6))}
    holds("CACHE-1", gone)


def test_cache_1_what_was_scheduled_and_not_submitted_is_not() -> None:
    fails("CACHE-1", follow(ADMITTED, Allocate(0, 3, (0, 1)), Publish(0, 0), Abort(0)))


def test_preempt_7_a_request_may_be_preempted_in_flight() -> None:
    allows("PREEMPT-7", DRAWING, Preempt(0))


def test_sched_6_who_was_preempted_in_flight_is_given_the_token_that_was_drawn() -> None:
    allows("SCHED-6", DRAWING, Preempt(0), Append(0, (8,)))
    forbids("SCHED-6", DRAWING, Preempt(0), Append(0, (8,)), Append(0, (9,)))


def test_sched_6_not_if_none_was_drawn() -> None:
    forbids("SCHED-6", IN_CHUNKS, Preempt(0), Append(0, (8,)))


def test_sched_11_who_was_preempted_comes_back_after_his_token() -> None:
    waiting = follow(DRAWING, Preempt(0), Submit(2), Begin(3))
    assert admission(waiting, 0, budget=4) is Admission.LATER
    forbids("SCHED-11", waiting, Admit(0))
    forbids("SCHED-11", IN_CHUNKS, Preempt(0), Submit(2), Begin(3), Admit(0))
    allows("SCHED-11", waiting, Append(0, (8,)), Complete(1), Admit(0))


def test_a_name_that_is_used_again_is_owed_nothing() -> None:
    again = follow(DRAWING, Preempt(0), Abort(0), Add(ALICE))
    assert admission(again, 0, budget=4) is Admission.NOW


def test_a_monitor_judges_such_an_engine_by_the_rules_themselves_and_a_log_says_what_it_chose() -> None:
    config = replace(CONFIG, block_size=1, admission_rule=AdmissionRule.OPTIMISTIC)
    judged = JudgedEngine(make_engine_ahead(config), config)
    judged.add(replace(ALICE, max_tokens=3))
    judged.add(Request(1, (5, 6), 4, (1,)))
    while judged.state.requests or judged.state.flights:
        judged.begin_step()
        judged.begin_step() if len(judged.state.flights) == 1 else None
        judged.end_step(next_token)
    log = loads(dumps(Trace(config, tuple(judged.follower.trace), "ahead", AHEAD.choices)))
    assert log.choices.schedules_ahead
    monitor = Monitor(log.config, log.engine, log.choices)
    for event in log.events:
        monitor.event(event)
    assert {type(event) for event in log.events} >= {Preempt, Publish, Append}
    assert not monitor.requests
