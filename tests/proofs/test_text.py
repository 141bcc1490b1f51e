"""The same text that is proved is printed: sentences and formulas for the book."""

import pytest

pytest.importorskip("z3", reason="the extra 'formal' is not installed")

from spec.proofs.clauses import CLAUSES, STEP_CLAUSES
from spec.proofs.text import clause_text, transition_text
from spec.proofs.transitions import TRANSITIONS


@pytest.mark.parametrize("name", [*CLAUSES, *STEP_CLAUSES, *TRANSITIONS])
def test_everything_has_a_sentence(name: str) -> None:
    sentence = {**CLAUSES, **STEP_CLAUSES, **TRANSITIONS}[name].sentence
    assert sentence.endswith(".") and "should" not in sentence


def test_a_clause_prints_as_a_formula() -> None:
    assert clause_text("count_is_holders") == (
        "∀ b ∈ Block: device.entries(b) ≥ 0 and held(b) ≥ 0 and device.ref_count(b) = device.entries(b) + held(b)"
    )


def test_a_step_clause_tells_before_from_after() -> None:
    assert clause_text("holds_end_with_their_step") == (
        "∀ k ∈ Step: ∀ b ∈ Block: holds(k, b) and in_flight'(k) ⇒ holds'(k, b)"
    )


def test_a_transition_prints_its_guard_and_what_it_changes() -> None:
    guard, changes = transition_text("evict")
    assert guard == "cached(b) and device.free(b)"
    assert changes == {"cached": "cached'(x) = x ≠ b and cached(x)"}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_every_transition_prints(name: str) -> None:
    guard, changes = transition_text(name)
    assert guard and changes
