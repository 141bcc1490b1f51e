"""Both engines go through the door that everybody's engine goes through, alone and side by side."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import optimized
import reference
from spec.conformance.machine import EngineMachine, lockstep_machine_for, machine_for

MACHINES = {
    "reference": machine_for(reference.make_engine),
    "optimized": machine_for(optimized.make_engine),
    "side by side": lockstep_machine_for(reference.make_engine, optimized.make_engine),
}
BOTH = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())


@BOTH
def test_an_engine_keeps_every_rule_in_short_stories(machine: type[EngineMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=15))


@pytest.mark.slow
@BOTH
def test_an_engine_keeps_every_rule_whatever_its_caller_does(machine: type[EngineMachine]) -> None:
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40))
