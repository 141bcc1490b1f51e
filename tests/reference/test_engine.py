"""Small stories of the reference engine, each followed event by event in the executable model."""

from dataclasses import replace

import pytest

from reference.engine import ReferenceEngine, make_engine
from reference.roster import Roster
from spec.engine import Admission, Engine, InvalidField, InvalidRequest, PromptTooLong, StepReport, UnknownId
from spec.vocabulary import (
    Abort,
    Add,
    Admit,
    Allocate,
    Append,
    Begin,
    Complete,
    Config,
    Copy,
    Finish,
    FinishReason,
    Fork,
    Preempt,
    Read,
    Refuse,
    Release,
    Request,
    Submit,
    Write,
    initial_state,
)
from tests.reference.follow import followed, next_token, request

SMALL = Config(num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32)


def run_to_the_end(engine: ReferenceEngine) -> list[StepReport]:
    """Every report until nothing is left."""
    reports = []
    while engine.has_work:
        reports.append(engine.step(next_token))
        assert len(reports) < 1000, "this never ends"
    return reports


def outputs(reports: list[StepReport]) -> dict[int, tuple[int, ...]]:
    """What each sequence was given."""
    tokens: dict[int, tuple[int, ...]] = {}
    for report in reports:
        for event in report.emitted:
            tokens[event.seq] = tokens.get(event.seq, ()) + event.tokens
    return tokens


def test_make_engine_gives_an_engine() -> None:
    engine = make_engine(SMALL)
    assert isinstance(engine, Engine)
    assert engine.snapshot() == initial_state(SMALL)


def test_an_idle_step_does_nothing() -> None:
    engine, follower = followed(SMALL)
    assert engine.step(next_token) == StepReport()
    assert follower.trace == []


def test_one_request_is_told_event_by_event() -> None:
    engine, follower = followed(SMALL)
    asked = request(0, (1, 0, 1), 2)
    engine.add(asked)
    tokens = iter((7, 9))
    first = engine.step(lambda seq, prefix: next(tokens))
    second = engine.step(lambda seq, prefix: next(tokens))
    assert follower.trace == [
        Add(asked),
        Begin(0),
        Admit(0),
        Allocate(0, 3, (0, 1)),
        Submit(0),
        Write(0, 0, (0, 1, 2)),
        Read(0, (0, 1, 2)),
        Append(0, (7,)),
        Complete(0),
        Begin(1),
        Allocate(0, 1, ()),
        Submit(1),
        Write(0, 3, (3,)),
        Read(0, (0, 1, 2, 3)),
        Append(0, (9,)),
        Finish(0, FinishReason.LENGTH),
        Complete(1),
    ]
    assert first == StepReport(device=(Write(0, 0, (0, 1, 2)), Read(0, (0, 1, 2))), emitted=(Append(0, (7,)),))
    assert second.finished == (Finish(0, FinishReason.LENGTH),)
    assert engine.snapshot().requests == {}


def test_a_stop_token_ends_a_sequence() -> None:
    engine, _ = followed(SMALL)
    engine.add(request(0, (1,), 5, stop_token_ids=(7,)))
    report = engine.step(lambda seq, prefix: 7)
    assert report.finished == (Finish(0, FinishReason.STOP),)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine, _ = followed(replace(SMALL, max_num_batched_tokens=4))
    engine.add(request(0, (1,) * 9, 2))
    reports = run_to_the_end(engine)
    assert [len(write.slots) for report in reports for write in report.writes] == [4, 4, 1, 1]
    assert [len(report.emitted) for report in reports] == [0, 0, 1, 1]


def test_those_who_run_come_before_those_who_wait_in_one_budget() -> None:
    engine, _ = followed(replace(SMALL, max_num_batched_tokens=4))
    engine.add(request(0, (1, 1), 4))
    engine.step(next_token)
    engine.add(request(1, (0,) * 5, 1))
    report = engine.step(next_token)
    assert [(write.seq, len(write.slots)) for write in report.writes] == [(0, 1), (1, 3)]


def test_a_request_with_no_budget_left_runs_with_an_empty_table() -> None:
    engine, _ = followed(replace(SMALL, max_num_batched_tokens=2))
    engine.add(request(0, (1, 1), 3, seq_ids=(0, 1, 2)))
    engine.step(next_token)
    report = engine.step(next_token)
    assert [write.seq for write in report.writes] == [0, 1]
    assert engine.snapshot().seqs[2].num_computed_tokens == 2


def test_samples_share_the_prompt_and_all_but_the_last_copy_its_tail() -> None:
    engine, follower = followed(SMALL)
    engine.add(request(0, (1, 0, 1), 2, seq_ids=(0, 1, 2)))
    first = engine.step(next_token)
    assert [event for event in follower.trace if isinstance(event, Fork)] == [Fork(0, 1), Fork(0, 2)]
    assert [event.seq for event in first.emitted] == [0, 1, 2]
    tables = engine.snapshot().block_tables
    assert tables[0] == tables[1] == tables[2] == (0, 1)
    second = engine.step(next_token)
    assert second.copies == (Copy(0, 1, 1, 2), Copy(1, 1, 1, 3))
    assert [write.slots for write in second.writes] == [(5,), (7,), (3,)], "the last holder writes in place"
    assert not engine.has_work


def test_a_full_tail_is_shared_and_not_copied() -> None:
    engine, _ = followed(SMALL)
    engine.add(request(0, (1, 0), 3, seq_ids=(0, 1)))
    reports = run_to_the_end(engine)
    assert not any(report.copies for report in reports)


def test_a_caller_forks_a_running_sequence() -> None:
    engine, _ = followed(SMALL)
    engine.add(request(0, (1, 0, 1), 4))
    engine.step(next_token)
    assert engine.fork(0, 5) is Admission.NOW
    state = engine.snapshot()
    assert state.seqs[5] == state.seqs[0]
    assert state.block_tables[5] == state.block_tables[0]
    report = engine.step(next_token)
    assert report.copies == (Copy(0, 1, 1, 2),)
    assert [event.seq for event in report.emitted] == [0, 5]


def test_a_fork_without_a_seat_waits_and_one_without_blocks_never_comes() -> None:
    engine, follower = followed(replace(SMALL, max_num_seqs=1))
    engine.add(request(0, (1, 0, 1), 4))
    engine.step(next_token)
    assert engine.fork(0, 1) is Admission.LATER
    assert follower.trace[-1] == Refuse(Fork(0, 1))
    engine, _ = followed(replace(SMALL, num_blocks=3))
    engine.add(request(0, (1, 0, 1), 4))
    engine.step(next_token)
    assert engine.fork(0, 1) is Admission.NEVER


def test_forks_of_what_cannot_be_forked_are_refused() -> None:
    engine, _ = followed(SMALL)
    engine.add(request(0, (1, 0, 1), 4, seq_ids=(0, 7)))
    with pytest.raises(UnknownId):
        engine.fork(9, 10)
    with pytest.raises(InvalidField):
        engine.fork(0, 10)  # it waits
    engine.step(next_token)
    with pytest.raises(InvalidField):
        engine.fork(0, 7)  # the id is taken


def preempting_pair() -> tuple[ReferenceEngine, list[StepReport]]:
    """Two requests that fit together at first and not to the end."""
    engine, _ = followed(replace(SMALL, num_blocks=4))
    engine.add(request(0, (1, 0, 1), 6))
    engine.add(request(1, (0, 1, 1), 6))
    return engine, run_to_the_end(engine)


def test_preempt_1_the_newest_is_preempted_and_loses_no_token() -> None:
    _, reports = preempting_pair()
    assert [event for report in reports for event in report.preempted] == [Preempt(1)]
    alone, _ = followed(SMALL)
    alone.add(request(1, (0, 1, 1), 6))
    assert outputs(reports)[1] == outputs(run_to_the_end(alone))[1]


def test_a_preempted_request_is_computed_again_from_its_first_token() -> None:
    _, reports = preempting_pair()
    again = [write for report in reports for write in report.writes if write.seq == 1 and write.start == 0]
    assert [len(write.slots) for write in again] == [3, 5]


def test_a_preempted_request_comes_back_before_everybody_who_arrived_later() -> None:
    engine, follower = followed(replace(SMALL, num_blocks=4))
    engine.add(request(0, (1, 0, 1), 6))
    engine.add(request(1, (0, 1, 1), 6))
    for _ in range(3):
        engine.step(next_token)
    engine.add(request(2, (1,), 1))
    state = engine.snapshot()
    assert state.waiting == (1, 2)
    assert state.num_preemptions == {1: 1}
    run_to_the_end(engine)
    assert [event.request_id for event in follower.trace if isinstance(event, Admit)] == [0, 1, 1, 2]


def test_a_request_that_must_preempt_itself_gives_its_copies_up() -> None:
    engine, follower = followed(replace(SMALL, num_blocks=3, max_num_batched_tokens=4))
    engine.add(request(0, (1,), 2))
    engine.add(request(1, (0,), 2, seq_ids=(1, 2, 3)))
    engine.step(next_token)
    report = engine.step(next_token)
    assert Copy(1, 0, 1, 2) in follower.trace
    assert report.preempted == (Preempt(1),)
    assert report.copies == (), "the device was not told of the copy"
    run_to_the_end(engine)
    assert len(engine.snapshot().free) == 3


def test_a_victim_takes_its_own_copies_out_of_the_step_and_nobody_elses() -> None:
    engine, follower = followed(replace(SMALL, num_blocks=4, max_num_seqs=5))
    engine.add(request(0, (1,), 2, seq_ids=(0, 1)))
    engine.add(request(1, (0,), 2, seq_ids=(2, 3, 4)))
    engine.step(next_token)
    report = engine.step(next_token)
    assert [event for event in follower.trace if isinstance(event, Copy)] == [Copy(0, 0, 0, 2), Copy(2, 0, 1, 3)]
    assert report.preempted == (Preempt(1),)
    assert report.copies == (Copy(0, 0, 0, 2),)


def test_the_watermark_keeps_blocks_free_while_somebody_runs() -> None:
    engine, _ = followed(replace(SMALL, num_blocks=4, watermark_blocks=2))
    engine.add(request(0, (1, 1, 1), 3))
    engine.add(request(1, (1,), 1))
    engine.step(next_token)
    assert engine.snapshot().waiting == (1,), "one block would be left, the watermark is two"
    reports = run_to_the_end(engine)
    assert outputs(reports).keys() == {0, 1}


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    engine, _ = followed(replace(SMALL, num_blocks=4))
    engine.add(request(0, (1,) * 5, 2))
    engine.add(request(1, (1,) * 5, 2))
    engine.add(request(2, (1,), 1))
    engine.step(next_token)
    assert engine.snapshot().running == (0,)
    assert engine.snapshot().waiting == (1, 2)


def test_a_preempted_request_waits_before_whoever_came_later_whatever_their_names_are() -> None:
    engine, _ = followed(replace(SMALL, num_blocks=4))
    engine.add(request(5, (0, 1), 5))
    engine.add(request(3, (0, 1), 5))
    engine.step(next_token)
    engine.add(request(1, (1,) * 7, 1))
    for _ in range(3):
        engine.step(next_token)
    assert engine.snapshot().running == (5,)
    assert engine.snapshot().waiting == (3, 1)


def test_preempt_1_of_three_the_newest_goes_first() -> None:
    engine, _ = followed(replace(SMALL, num_blocks=6))
    for i in range(3):
        engine.add(request(i, (0, 1), 5))
    reports = [engine.step(next_token) for _ in range(4)]
    assert [report.preempted for report in reports] == [(), (), (), (Preempt(2),)]
    assert engine.snapshot().running == (0, 1)


def test_a_request_counts_how_often_it_was_preempted() -> None:
    roster = Roster(SMALL)
    roster.add(request(0, (0, 1), 2))
    for _ in range(3):
        roster.admit(0)
        roster.preempt(0)
    assert roster.num_preemptions == {0: 3}


def test_samples_that_are_not_forked_yet_have_their_seats() -> None:
    engine, _ = followed(SMALL)
    engine.add(request(0, (1,), 2, seq_ids=(0, 1, 2)))
    engine.add(request(1, (1,), 2, seq_ids=(3, 4)))
    engine.step(next_token)
    assert engine.snapshot().waiting == (1,)


def test_a_cache_of_one_block_serves_one_request_after_the_other() -> None:
    engine, _ = followed(Config(num_blocks=1, block_size=4, max_model_len=8))
    for i in range(3):
        engine.add(request(i, (1, 0), 3))
    assert outputs(run_to_the_end(engine)).keys() == {0, 1, 2}


def test_a_sequence_can_be_ended_alone() -> None:
    engine, follower = followed(SMALL)
    engine.add(request(0, (1, 0, 1), 4, (0, 1)))
    with pytest.raises(InvalidField, match="seq_id is 0, it must be a sequence with output"):
        engine.release(0)
    engine.step(next_token)
    engine.release(0)
    engine.release(99)
    assert list(engine.snapshot().seqs) == [1]
    assert outputs(run_to_the_end(engine)).keys() == {1}
    assert [event for event in follower.trace if isinstance(event, Release)] == [Release(0)]


def test_abort_while_waiting_and_while_running_gives_everything_back() -> None:
    engine, follower = followed(replace(SMALL, max_num_seqs=1))
    engine.add(request(0, (1, 0, 1), 4))
    engine.add(request(1, (1, 0, 1), 4))
    engine.step(next_token)
    engine.abort(1)
    engine.abort(0)
    engine.abort(0)
    engine.abort(99)
    assert [event for event in follower.trace if isinstance(event, Abort)] == [Abort(1), Abort(0)]
    assert sorted(engine.snapshot().free) == list(range(8))
    assert not engine.has_work


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (request(9, (), 1), InvalidField),
        (request(9, (1,), 0), InvalidField),
        (request(9, (1,), 1, seq_ids=()), InvalidField),
        (request(9, (1,), 1, seq_ids=(4, 4)), InvalidField),
        (request(0, (1,), 1, seq_ids=(4,)), InvalidField),
        (request(9, (1,), 1, seq_ids=(0,)), InvalidField),
        (request(9, (1,), 32), InvalidField),
        (request(9, (1,), 1, seq_ids=(4, 5, 6, 7, 8)), InvalidField),
        (request(9, (1,) * 17, 1), PromptTooLong),
        (request(9, (1,) * 8, 2, seq_ids=(4, 5)), PromptTooLong),
    ],
    ids=[
        "empty prompt",
        "no token wanted",
        "no sequence",
        "a sequence twice",
        "request id taken",
        "sequence id taken",
        "longer than the model",
        "more sequences than seats",
        "longer than the cache",
        "samples longer than the cache",
    ],
)
def test_the_door_refuses_what_can_never_be_served(asked: Request, error: type[InvalidRequest]) -> None:
    engine, follower = followed(SMALL)
    engine.add(request(0, (1, 0), 3, seq_ids=(0, 1)))
    before = engine.snapshot()
    with pytest.raises(error):
        engine.add(asked)
    assert engine.snapshot() == before
    assert follower.trace[-1] == Refuse(Add(asked))


def test_an_id_that_is_promised_to_a_sample_is_taken() -> None:
    engine = make_engine(SMALL)
    engine.add(request(0, (1, 0), 3, seq_ids=(0, 1)))
    with pytest.raises(InvalidField):
        engine.add(request(9, (1,), 1, seq_ids=(1,)))


def test_the_last_sampled_token_needs_no_slot() -> None:
    engine, _ = followed(SMALL)
    engine.add(request(0, (1,) * 8, 9))
    assert len(outputs(run_to_the_end(engine))[0]) == 9


def test_a_snapshot_is_a_value_that_later_calls_do_not_change() -> None:
    engine, _ = followed(SMALL)
    engine.add(request(0, (1, 0), 3))
    engine.step(next_token)
    shown, again = engine.snapshot(), engine.snapshot()
    run_to_the_end(engine)
    assert shown == again
