"""The executable model keeps its own rules, whatever its caller does."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from spec.conformance.machine import machine_for
from spec.engine import Engine
from spec.vocabulary import Config
from tests.spec.model_engine import ModelEngine, make_engine, make_engine_at_schedule


def test_the_model_is_an_engine() -> None:
    assert isinstance(make_engine(Config(num_blocks=1)), Engine)


@pytest.mark.parametrize("make", [make_engine, make_engine_at_schedule])
def test_the_model_keeps_every_rule_whatever_its_caller_does(make: Callable[[Config], ModelEngine]) -> None:
    """Also a check of the rules: one that the plainest engine breaks asks for too much."""
    run_state_machine_as_test(machine_for(make), settings=settings(max_examples=20, stateful_step_count=15))
