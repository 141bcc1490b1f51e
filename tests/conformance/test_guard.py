"""An adapter that does not keep to the protocol is said to be at fault, by method; no rule is blamed, nothing crashes."""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis.errors import Flaky

from spec.conformance import guard, hunt
from spec.conformance.declared import try_engine
from spec.conformance.door import judged_engine
from spec.conformance.guard import AdapterFault, within
from spec.conformance.machine import EngineMachine, next_token
from spec.conformance.story import Setting
from spec.conformance.target import Kind, Target, load
from spec.vocabulary import AdmissionRule, Config, Request
from tests.conformance import faulty

CONFIG = Config(num_blocks=4, block_size=2, prefix_cache=True, admission_rule=AdmissionRule.OPTIMISTIC)


def story(make: Callable[[Config], faulty.Adapter], limit_s: float = 10.0) -> None:
    """Two requests that do not fit together, one that is refused, and an abort."""
    judged = judged_engine(make, CONFIG, limit_s)
    for request_id in (0, 1):
        judged.add(Request(request_id, (0, 1, 0), 5, (request_id,)))
    judged.add(Request(2, (), 1, (2,)))
    for _ in range(4):
        judged.step(next_token)
    judged.abort(0)
    judged.step(next_token)


def test_the_story_itself_is_fine() -> None:
    story(faulty.Adapter)


@pytest.mark.parametrize(
    ("make", "method", "words"),
    [
        (faulty.Raises, "abort", "raised KeyError: 0"),
        (faulty.RefusesSteps, "step", "raised InvalidRequest: not today, and has nothing to refuse"),
        (faulty.Exits, "step", "raised SystemExit: 3"),
        (faulty.Skips, "step", "raised Skipped: too hard"),
        (faulty.AnswersLists, "step", ", it must be tuple[Append, ...]"),
        (faulty.AnswersFloats, "snapshot", "it.ref_count[0] is 0.0, it must be int"),
        (faulty.AnswersFalse, "add", "it is False, it must be None"),
        (faulty.AsksForNobody, "step", "it asks for a token with (0, [0, 1, 0])"),
        (faulty.HidesWhatItRaised, "step", "it asks for a token with (0, [0, 1, 0])"),
        (faulty.ShowsItsOwnVariables, "snapshot", "seqs in it changed from {} to {0: Seq("),
        (faulty.ShowsOtherLimits, "snapshot", "it shows the limits"),
        (
            faulty.PreemptsInSecret,
            "step",
            "it reports Preempt(request_id=1), and the profile does not declare PREEMPTION",
        ),
        (faulty.CachesInSecret, "snapshot", "it shows cached blocks, and the profile does not declare PREFIX_CACHE"),
        (faulty.ChangesItsMind, "profile", "it was Profile("),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_names_the_method(make: type[faulty.Adapter], method: str, words: str) -> None:
    with pytest.raises(AdapterFault) as raised:
        story(make)
    assert raised.value.method == method
    assert words in str(raised.value)


def test_a_call_that_hangs_is_ended_even_if_it_catches_what_it_can() -> None:
    with pytest.raises(AdapterFault, match="^step: did not return within 0.5 s$"):
        story(faulty.Hangs, limit_s=0.5)


def test_a_factory_has_more_time_when_it_is_called_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may import its engine then; vLLM and its framework take most of a minute on a busy machine."""
    slept: list[float] = []

    def first(config: Config) -> faulty.Adapter:
        if not slept:
            slept.append(0.2)
            time.sleep(0.2)
        return faulty.Adapter(config)

    monkeypatch.setattr(guard, "MAKE_LIMIT_S", 0.1)
    monkeypatch.setattr(faulty, "first", first, raising=False)
    assert load("tests.conformance.faulty:first", Path()).kind is Kind.ENGINE
    slept.clear()
    with pytest.raises(AdapterFault, match="^first: did not return within 0.1 s$"):
        story(first)


def test_a_factory_makes_something_new_each_time() -> None:
    story(faulty.OneForAll)
    with pytest.raises(AdapterFault, match="^OneForAll: what it makes is not new: it shows requests"):
        story(faulty.OneForAll)


@pytest.mark.parametrize(
    ("make", "method", "words"),
    [
        (faulty.NeverForks, "fork", "the profile declares FORK, and with room for everything it says Admission.LATER"),
        (faulty.NeverAborts, "abort", "the profile declares ABORT, and it changes nothing"),
        (faulty.NeverCaches, "snapshot", "the profile declares PREFIX_CACHE, and no block can ever be found"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_declared_and_never_done_is_a_lie(make: type[faulty.Adapter], method: str, words: str) -> None:
    try_engine(faulty.Adapter)
    with pytest.raises(AdapterFault) as raised:
        try_engine(make)
    assert (raised.value.method, raised.value.sentence) == (method, words)


def test_a_hunt_that_is_cut_off_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis tells a story again, this time there is no time left for it, and to Hypothesis that is an engine that does
    not do the same twice."""

    class Over(Exception):
        pass

    def check_time(done: Callable[[], str]) -> None:
        raise Over

    def tell(machine: object, settings: object) -> None:
        with suppress(Over):
            cut.begin(CONFIG)
        raise Flaky("Inconsistent data generation!")

    target = Target("faulty:Adapter", Kind.ENGINE, faulty.Adapter)
    cut = hunt.Hunt(target, Setting("", {}), partial(judged_engine, faulty.Adapter), check_time)
    monkeypatch.setattr(hunt, "run_state_machine_as_test", tell)
    with pytest.raises(Over):
        cut.run(EngineMachine, max_examples=1)


def test_somebody_elses_alarm_still_rings() -> None:
    """pytest-timeout sets one."""
    rung: list[int] = []
    others = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        assert within(10.0, lambda: 7) == 7
        time.sleep(0.2)
        assert rung
    finally:
        signal.signal(signal.SIGALRM, others)
        signal.setitimer(signal.ITIMER_REAL, *before)
