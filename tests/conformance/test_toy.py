"""The toy of the book passes, and the one with a bug fails as the book shows it."""

import sys
from pathlib import Path

import pytest

from tests.conformance.conftest import Run

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture(autouse=True)
def examples_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


@pytest.mark.slow
def test_the_toy_passes_and_is_skipped_where_it_declares_nothing(run: Run) -> None:
    done = run("--engine", "toy_adapter:ToyPool", "--conformance-level", "L0,L1", "--conformance-max-examples", "5")
    assert done.status == pytest.ExitCode.OK, done.output
    assert [test for test, outcome in done.outcomes().items() if outcome == "passed"] == [
        "test_l0_allocator.py::test_every_state_of_a_small_pool",
        "test_l0_allocator.py::test_long_stories_of_a_pool",
        "test_l1_sharing.py::test_a_fixed_story[three tables grow and go]",
        "test_l1_sharing.py::test_long_stories_with_everything_that_is_declared",
    ]
    assert set(done.outcomes().values()) == {"passed", "skipped"}


def test_the_bug_in_the_toy_is_reported_as_the_book_shows(run: Run) -> None:
    done = run("--engine", "toy_with_a_bug:ForgetfulPool", "-k", "small_pool")
    assert done.status == pytest.ExitCode.TESTS_FAILED
    [test] = done.tests.values()
    assert test["rule"] == "ALLOC-2"
    assert test["reason"] == (EXAMPLES / "toy_report.txt").read_text().rstrip("\n")
