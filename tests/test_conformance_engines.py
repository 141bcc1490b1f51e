"""Both engines go through the door that everybody's engine goes through, alone and side by side."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import optimized
import reference
from spec.conformance.machine import lockstep_machine_for, machine_for
from spec.engine import EngineFactory


@pytest.mark.parametrize("factory", [reference.make_engine, optimized.make_engine], ids=["reference", "optimized"])
def test_an_engine_keeps_every_rule_whatever_its_caller_does(factory: EngineFactory) -> None:
    run_state_machine_as_test(machine_for(factory), settings=settings(stateful_step_count=30))


def test_both_engines_decide_alike_whatever_their_caller_does() -> None:
    machine = lockstep_machine_for(reference.make_engine, optimized.make_engine)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=30))
