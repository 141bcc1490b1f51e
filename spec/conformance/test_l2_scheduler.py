"""Level L2: who runs, who waits, how many tokens a step computes."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from spec.conformance.machine import machine_for
from spec.conformance.suite import Suite
from spec.engine import EngineFactory


def test_an_engine_keeps_every_rule_whatever_its_caller_does(suite: Suite, make_engine: EngineFactory) -> None:
    tier = settings(
        max_examples=suite.max_examples,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine_for(make_engine), settings=tier)
