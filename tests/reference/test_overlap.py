"""Small stories of steps in flight: the reference engine schedules a step while the one before it still runs."""

from dataclasses import replace

import pytest

from reference.engine import ReferenceEngine
from spec.conformance.judge import JudgedEngine
from spec.engine import Admission, InvalidField, OverlappedEngine, StepReport, TokenSource
from spec.rules import RuleViolation
from spec.vocabulary import AdmissionRule, Config, Policy, Token, Write
from tests.reference.follow import next_token, request

SMALL = Config(num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=4, max_model_len=32)


def judged(config: Config) -> JudgedEngine:
    return JudgedEngine(ReferenceEngine(config), config)


def begin(engine: JudgedEngine) -> StepReport:
    """A step that begins."""
    report = engine.begin_step()
    assert report is not None, "two steps are in flight already"
    return report


def scheduled(engine: JudgedEngine) -> list[dict[int, int]]:
    """What the steps in flight compute, the oldest first."""
    return [dict(flight.scheduled) for flight in engine.state.flights.values()]


def served(engine: JudgedEngine, *, overlap: bool) -> dict[int, tuple[Token, ...]]:
    """What each sequence is given until nothing is left, with one step in flight at a time or two."""
    tokens: dict[int, tuple[Token, ...]] = {}
    for _ in range(1000):
        if not engine.state.requests:
            return tokens
        if overlap:
            begin(engine)
            if len(engine.state.flights) == 1:
                begin(engine)
            report = engine.end_step(next_token)
        else:
            report = engine.step(next_token)
        for event in report.emitted:
            tokens[event.seq] = tokens.get(event.seq, ()) + event.tokens
    raise AssertionError("this never ends")


def test_the_next_chunk_of_a_prompt_is_scheduled_while_the_one_before_is_in_flight() -> None:
    engine = judged(SMALL)
    assert isinstance(engine.engine, OverlappedEngine)
    engine.add(request(0, (1, 0, 1, 1, 0, 1), 2))
    begin(engine)
    begin(engine)
    assert scheduled(engine) == [{0: 4}, {0: 2}]
    assert engine.state.seqs[0].num_scheduled_tokens == 6
    assert not engine.end_step(next_token).emitted
    assert len(engine.end_step(next_token).emitted) == 1


class Idle(ReferenceEngine):
    """Overlaps nothing: while a step is in flight it begins no other."""

    def begin_step(self) -> StepReport:
        return StepReport() if self.snapshot().flights else super().begin_step()


def test_an_engine_that_never_begins_a_second_step_passes_over_whoever_could_be_served() -> None:
    """What runs and lacks tokens (SCHED-13), or who waits and has room (SCHED-12). A token in flight is nobody's lack."""
    engine = JudgedEngine(Idle(SMALL), SMALL)
    engine.add(request(0, (1, 0), 3))
    begin(engine)
    begin(engine)
    engine.add(request(1, (1, 0), 3, (1,)))
    with pytest.raises(RuleViolation, match="SCHED-12"):
        engine.begin_step()
    engine = JudgedEngine(Idle(SMALL), SMALL)
    engine.add(request(0, (1, 0, 1, 1, 0, 1), 2))
    begin(engine)
    with pytest.raises(RuleViolation, match="SCHED-13"):
        engine.begin_step()


def test_a_token_in_flight_is_not_scheduled_again() -> None:
    engine = judged(SMALL)
    engine.add(request(0, (1, 0), 3))
    begin(engine)
    begin(engine)
    assert scheduled(engine) == [{0: 2}]


def test_overlap_changes_no_token() -> None:
    outputs = []
    for overlap in (False, True):
        engine = judged(replace(SMALL, num_blocks=6, max_num_batched_tokens=3, admission_rule=AdmissionRule.OPTIMISTIC))
        engine.add(request(0, (1, 0, 1), 4, (0, 1)))
        engine.add(request(1, (1, 0, 1, 1, 0), 4, (2,)))
        engine.add(request(2, (1,), 5, (3,)))
        outputs.append(served(engine, overlap=overlap))
    assert outputs[0] == outputs[1]
    assert sorted(map(len, outputs[0].values())) == [4, 4, 4, 5]


def test_alloc_5_what_an_aborted_request_has_in_flight_is_free_when_its_step_ends() -> None:
    engine = judged(SMALL)
    engine.add(request(0, (1, 0, 1), 4))
    begin(engine)
    engine.abort(0)
    assert not engine.state.requests
    assert [flight.holds for flight in engine.state.flights.values()] == [(1, 0)]
    assert engine.end_step(next_token) == StepReport()
    assert sorted(engine.state.free) == list(range(8))


def test_a_block_that_two_steps_touch_is_free_when_the_later_one_ends() -> None:
    engine = judged(replace(SMALL, max_num_batched_tokens=1))
    engine.add(request(0, (1, 0, 1), 4))
    begin(engine)
    begin(engine)
    engine.abort(0)
    engine.end_step(next_token)
    assert engine.state.ref_count[0] == 1
    engine.end_step(next_token)
    assert engine.state.ref_count[0] == 0


def test_preempt_5_nobody_is_preempted_while_another_step_is_in_flight() -> None:
    engine = judged(Config(2, block_size=1, max_num_seqs=2, admission_rule=AdmissionRule.OPTIMISTIC))
    engine.add(request(0, (1,), 2))
    engine.add(request(1, (1,), 2))
    begin(engine)
    engine.end_step(next_token)
    assert begin(engine).preempted
    engine = judged(replace(engine.config, num_blocks=3, max_num_batched_tokens=1))
    engine.add(request(0, (1, 1), 2))
    engine.add(request(1, (1, 1), 2))
    for _ in range(3):
        begin(engine)
        engine.end_step(next_token)
    begin(engine)
    assert not begin(engine).preempted


def test_only_two_steps_are_in_flight_and_no_whole_step_beside_them() -> None:
    engine = ReferenceEngine(SMALL)
    engine.add(request(0, (1, 0, 1, 1, 0, 1, 1, 1, 1), 2))
    engine.begin_step()
    with pytest.raises(
        InvalidField, match="the number of steps in flight is 1, it must be 0 when a step is made whole"
    ):
        engine.step(next_token)
    engine.begin_step()
    before = engine.snapshot()
    with pytest.raises(InvalidField, match="the number of steps in flight is 2, it must be below 2 when a step begins"):
        engine.begin_step()
    assert engine.snapshot() == before


def test_an_idle_engine_begins_and_ends_nothing() -> None:
    engine = judged(SMALL)
    assert begin(engine) == engine.end_step(next_token) == StepReport()
    assert not engine.state.flights


def test_a_sequence_in_flight_is_not_forked_and_its_id_is_in_use_after_an_abort() -> None:
    engine = judged(SMALL)
    engine.add(request(0, (1, 0), 4))
    engine.step(next_token)
    begin(engine)
    assert engine.fork(0, 7) is None
    engine.abort(0)
    assert not engine.add(request(1, (1,), 1, (0,)))
    engine.end_step(next_token)
    assert engine.add(request(1, (1,), 1, (0,)))


def test_the_id_of_a_sample_that_an_abort_prevented_is_free_at_once() -> None:
    engine = judged(SMALL)
    engine.add(request(0, (1, 0), 4, (0, 1)))
    begin(engine)
    engine.abort(0)
    assert engine.add(request(1, (1,), 1, (1,)))
    assert not engine.end_step(next_token).emitted
    assert served(engine, overlap=True)[1] == (next_token(1, (1,)),)


def test_cow_2_two_that_share_a_tail_write_to_blocks_of_their_own_while_in_flight() -> None:
    engine = judged(SMALL)
    engine.add(request(0, (1,), 4))
    engine.step(next_token)
    assert engine.fork(0, 1) is Admission.NOW
    begin(engine)
    report = engine.end_step(next_token)
    assert len(report.copies) == 1
    assert len({slot for write in report.writes for slot in write.slots}) == 2


class Forgetful(ReferenceEngine):
    """An engine whose device leaves out the copies of a step."""

    def end_step(self, token_source: TokenSource) -> StepReport:
        self.plans = [replace(plan, copies=()) for plan in self.plans]
        return super().end_step(token_source)


def test_table_5_a_copy_that_a_step_decided_and_its_device_left_out_is_noticed() -> None:
    engine = JudgedEngine(Forgetful(SMALL), SMALL)
    engine.add(request(0, (1,), 4))
    begin(engine)
    engine.end_step(next_token)
    engine.fork(0, 1)
    begin(engine)
    with pytest.raises(RuleViolation, match="TABLE-5"):
        engine.end_step(next_token)


class TooLate(ReferenceEngine):
    """An engine whose device copies after it has written."""

    def end_step(self, token_source: TokenSource) -> StepReport:
        report = super().end_step(token_source)
        return replace(report, device=tuple(sorted(report.device, key=lambda event: not isinstance(event, Write))))


def test_a_copy_that_comes_after_the_writes_of_its_step_is_noticed() -> None:
    engine = JudgedEngine(TooLate(SMALL), SMALL)
    engine.add(request(0, (1,), 4))
    begin(engine)
    engine.end_step(next_token)
    engine.fork(0, 1)
    begin(engine)
    with pytest.raises(RuleViolation) as raised:
        engine.end_step(next_token)
    assert raised.value.rule.id == "TABLE-5"


def test_a_sequence_in_flight_can_be_ended_alone() -> None:
    engine = ReferenceEngine(SMALL)
    engine.add(request(0, (1,), 4, (0, 1)))
    engine.step(next_token)
    engine.begin_step()
    engine.release(0)
    assert [event.seq for event in engine.end_step(next_token).emitted] == [1]


def test_sched_25_nobody_is_served_before_a_request_that_lacks_blocks_while_a_step_is_in_flight() -> None:
    """The urgent request 0 has every free block, and its last step is in flight. Of those behind it 1 and 3 have room for
    their next token, and 2 has none."""
    config = Config(9, 2, 4, 5, policy=Policy.PRIORITY, admission_rule=AdmissionRule.OPTIMISTIC)
    engine = judged(config)
    for request_id, length in ((1, 2), (2, 1), (3, 2)):
        engine.add(request(request_id, (1,) * length, 4, priority=1))
    engine.step(next_token)
    engine.add(request(0, (0,) * 7, 1))
    engine.step(next_token)
    begin(engine)
    assert not engine.state.free
    begin(engine)
    assert scheduled(engine) == [{0: 5}, {1: 1}]


def test_a_copy_for_somebody_who_is_gone_is_not_made() -> None:
    engine = ReferenceEngine(SMALL)
    engine.add(request(0, (1,), 3, seq_ids=(0, 1)))
    engine.step(next_token)
    engine.begin_step()
    assert [copy.seq for copy in engine.plans[0].copies] == [0]
    engine.abort(0)
    report = engine.end_step(next_token)
    assert (report.copies, report.writes) == ((), ())
