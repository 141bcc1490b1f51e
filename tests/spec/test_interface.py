"""The caller's side: refusals, names, and what an engine shows."""

from dataclasses import replace

import pytest

from spec.broken import ALICE, ALONE, BOB, EMPTY, EMPTY_PAIRS, FORKED, STEP_1, SWAPPED, WAITING, follow
from spec.interface import names_exist, request_named, seq_named, step_named
from spec.replay import step
from spec.rules import broken_rules
from spec.vocabulary import (
    Abort,
    Add,
    Admit,
    Allocate,
    Append,
    Begin,
    Complete,
    Copy,
    Event,
    Finish,
    FinishReason,
    Flight,
    Fork,
    Hit,
    Observe,
    Preempt,
    Publish,
    Read,
    Refuse,
    Release,
    Reset,
    Rollback,
    Slide,
    Start,
    Submit,
    SwapIn,
    SwapOut,
    Write,
)
from tests.spec.states import allows, bites, forbids

UNKNOWN: list[Event] = [
    Abort(9),
    Admit(9),
    Preempt(9),
    Complete(9),
    Submit(9),
    Allocate(9, 1, (0,)),
    Append(9, (1,)),
    Copy(9, 0, 0, 1),
    Finish(9, FinishReason.STOP),
    Fork(9, 10),
    Hit(9, (0,)),
    Publish(9, 0),
    Read(9, ()),
    Release(9),
    Rollback(9, 1),
    Slide(9, 1),
    SwapIn(9, (0,)),
    SwapOut(9, (0,)),
    Write(9, 0, (0,)),
]


def test_events_name_sequences_requests_and_steps() -> None:
    assert [seq_named(event) for event in (Fork(3, 4), Write(3, 0, ()), Add(ALICE), Start(3, ()))] == [3, 3, None, None]
    assert [request_named(event) for event in (Abort(3), Admit(3), Preempt(3), Release(3))] == [3, 3, 3, None]
    assert [step_named(event) for event in (Submit(3), Complete(3), Begin(3))] == [3, 3, None]


def test_api_1_a_refusal_leaves_no_trace() -> None:
    allows("API-1", EMPTY, Refuse(Add(ALICE)))
    bites("API-1")


def test_api_2_events_name_what_exists() -> None:
    allows("API-2", ALONE, Release(0))
    bites("API-2")


@pytest.mark.parametrize("event", UNKNOWN, ids=lambda event: type(event).__name__)
def test_api_2_an_event_about_nothing_leads_nowhere(event: Event) -> None:
    forbids("API-2", WAITING, event)
    assert follow(WAITING, event) == WAITING


@pytest.mark.parametrize("event", [Copy(0, 0, 0, 1), Write(0, 0, ()), SwapOut(0, ()), Fork(0, 5)], ids=str)
def test_api_2_what_moves_blocks_needs_a_table(event: Event) -> None:
    forbids("API-2", WAITING, event)


@pytest.mark.parametrize(
    "event", [Copy(0, 1, 0, 1), Copy(0, -1, 0, 1), Publish(0, 1), SwapOut(0, ()), SwapOut(0, (0, 1))], ids=str
)
def test_api_2_an_event_is_about_entries_that_are_there(event: Event) -> None:
    forbids("API-2", ALONE, event)


def test_api_2_only_a_swapped_sequence_is_swapped_in() -> None:
    allows("API-2", SWAPPED, SwapIn(0, (0,)))
    forbids("API-2", ALONE, SwapIn(0, (1,)))


def test_api_2_a_new_sequence_is_not_there_yet() -> None:
    forbids("API-2", ALONE, Start(0, (5,)))
    assert names_exist(ALONE, Start(1, (5,)))


def test_api_3_a_snapshot_shows_every_block() -> None:
    allows("API-3", FORKED, Observe(), leads_to=replace(FORKED, free=(2, 1)))
    bites("API-3")


def test_api_3_the_free_list_counts() -> None:
    forbids("API-3", FORKED, Observe(), leads_to=replace(FORKED, free=(1,)))


def test_api_4_a_snapshot_shows_every_request() -> None:
    allows("API-4", WAITING, Observe(), leads_to=WAITING)
    bites("API-4")


def test_api_4_in_the_order_of_arrival() -> None:
    forbids("API-4", WAITING, Observe(), leads_to=replace(WAITING, requests={1: BOB, 0: ALICE}))


def test_api_5_a_snapshot_shows_every_step() -> None:
    allows("API-5", STEP_1, Observe(), leads_to=STEP_1)
    bites("API-5")


def test_api_5_no_step_is_made_up() -> None:
    forbids("API-5", EMPTY_PAIRS, Observe(), leads_to=replace(EMPTY_PAIRS, flights={1: Flight()}))


@pytest.mark.parametrize("event", [Refuse(Reset()), Read(0, (0,)), Observe()], ids=str)
def test_some_events_change_nothing(event: Event) -> None:
    assert follow(ALONE, event) == ALONE


def test_api_2_an_event_about_nothing_is_reported_as_such() -> None:
    """Whatever else it breaks: of what is not there every other rule says no, and says nothing."""
    for event in (Write(9, 0, (0,)), Read(9, (0,)), Hit(9, (0,)), Publish(9, 0), Copy(9, 0, 0, 1), Submit(9)):
        broken = broken_rules(EMPTY, event, step(EMPTY, event))
        assert broken[0].id == "API-2"
        assert len(broken) > 1
