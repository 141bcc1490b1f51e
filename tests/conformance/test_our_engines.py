"""Both engines and both pools go through the door that everybody's engine goes through; and the engines side by side."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import optimized
import reference
from spec.conformance.machine import lockstep_machine_for
from tests.conformance.conftest import Run

OURS = pytest.mark.parametrize("package", ["reference", "optimized"])
PAIR = lockstep_machine_for(reference.make_engine, optimized.make_engine)


@OURS
def test_an_engine_keeps_every_rule_in_some_stories(package: str, run: Run) -> None:
    done = run("--engine", f"{package}:make_engine", "-k", "works_together", "--conformance-max-examples", "12")
    assert done.status == pytest.ExitCode.OK, done.output
    assert set(done.outcomes().values()) == {"passed"}


@OURS
def test_a_pool_keeps_every_rule_in_a_small_scope(package: str, run: Run) -> None:
    done = run("--engine", f"{package}:make_pool", "-k", "small_pool or host_memory", "--conformance-level", "L0,L1")
    assert done.status == pytest.ExitCode.OK, done.output
    assert set(done.outcomes().values()) == {"passed"}


@pytest.mark.slow
@OURS
def test_engine_and_pool_pass_the_whole_suite(package: str, run: Run) -> None:
    names = ["--engine", f"{package}:make_engine", "--engine", f"{package}:make_pool"]
    done = run(*names, "--conformance-max-examples", "6", "--conformance-level", "L0,L1,L2,L3", "-rs")
    assert done.status == pytest.ExitCode.OK, done.output
    assert all("does not declare" in test["reason"] for test in done.tests.values() if test["outcome"] != "passed")
    assert {"passed"} <= set(done.outcomes().values()) <= {"passed", "skipped"}


def test_the_engines_stay_side_by_side_in_short_stories() -> None:
    run_state_machine_as_test(PAIR, settings=settings(max_examples=25, stateful_step_count=15))


@pytest.mark.slow
def test_the_engines_stay_side_by_side_whatever_their_caller_does() -> None:
    run_state_machine_as_test(PAIR, settings=settings(stateful_step_count=40))
