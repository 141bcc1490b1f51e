"""The rules as a whole: each bites alone, is worded like a rule, and answers whatever it is asked."""

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.broken import BROKEN, EXAMPLES, Broken, BrokenState
from spec.replay import step
from spec.rules import (
    AREAS,
    RULES,
    WITHDRAWN,
    Kind,
    Rule,
    RuleViolation,
    broken_rules,
    broken_state_rules,
    check_rules,
    state_rule,
    step_rule,
)
from spec.vocabulary import Event, Seq, State, replace
from tests.spec.strategies import events, states

ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
ALL_EXAMPLES = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.rule_id)


def broken_by(example: Broken) -> set[str]:
    if isinstance(example, BrokenState):
        return {rule.id for rule in broken_state_rules(example.state)}
    return {rule.id for rule in broken_rules(example.before, example.event, example.after)}


def test_every_rule_has_one_broken_example() -> None:
    assert sorted(example.rule_id for example in EXAMPLES) == sorted(RULES)
    assert list(BROKEN) == list(RULES), "the examples stand in the order of the chapters"


@ALL_EXAMPLES
def test_an_example_breaks_its_rule_and_no_other(example: Broken) -> None:
    assert broken_by(example) == {example.rule_id}


@ALL_EXAMPLES
def test_nothing_is_wrong_before_an_example(example: Broken) -> None:
    assert isinstance(example, BrokenState) or not list(broken_state_rules(example.before))


@ALL_EXAMPLES
def test_an_example_tells_in_one_sentence_what_went_wrong(example: Broken) -> None:
    assert re.fullmatch(r"[A-Z][^.]*\.", example.story)


@ALL_EXAMPLES
def test_an_example_is_of_the_kind_of_its_rule(example: Broken) -> None:
    assert (RULES[example.rule_id].kind is Kind.STATE) == isinstance(example, BrokenState)


@ALL_EXAMPLES
def test_a_violation_reports_the_rule_it_is_about(example: Broken) -> None:
    if isinstance(example, BrokenState):
        return
    with pytest.raises(RuleViolation, match=f"^{example.rule_id} does not hold: ") as caught:
        check_rules(example.before, example.event, example.after, engine="ours", trace=[example.event])
    report = str(caught.value)
    assert caught.value.rule.sentence in report
    assert repr(example.event) in report
    assert f"docs/rules.html#rule-{example.rule_id}" in report


@ALL_RULES
def test_a_rule_is_one_sentence(rule: Rule) -> None:
    assert rule.sentence[0].isupper() or rule.sentence[0] == "`"
    assert rule.sentence.endswith(".") and ". " not in rule.sentence
    assert not re.search(r"\b(should|must have|may not|shall)\b", rule.sentence)


@ALL_RULES
def test_a_predicate_is_short(rule: Rule) -> None:
    """At most six lines of code, at most ten where one comparison is spelt out; if longer, a definition is missing."""
    body = rule.source.split('"""')[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 8, rule.id


@ALL_RULES
def test_a_rule_covers_something_of_the_corpus(rule: Rule) -> None:
    assert rule.corpus and all(re.fullmatch(r"[ATCPRSKX]\d+", invariant) for invariant in rule.corpus)


def test_ids_count_up_in_every_area() -> None:
    for area in AREAS:
        numbers = sorted(int(each.partition("-")[2]) for each in [*RULES, *WITHDRAWN] if each.startswith(area + "-"))
        assert numbers == list(range(1, len(numbers) + 1)), area


def test_names_are_unique() -> None:
    assert len({rule.name for rule in RULES.values()}) == len(RULES)


def test_a_rule_id_is_taken_once() -> None:
    with pytest.raises(ValueError, match="COW-2 is taken"):
        state_rule("COW-2")(lambda s: True)


@pytest.mark.parametrize("rule_id", ["COW", "COW-", "COW-x", "MOO-1"])
def test_a_rule_id_is_an_area_and_a_number(rule_id: str) -> None:
    with pytest.raises(ValueError, match="is no rule id"):
        state_rule(rule_id)(lambda s: True)


def test_a_rule_has_a_sentence() -> None:
    def silent(before: State, event: Event, after: State) -> bool:
        return True

    with pytest.raises(ValueError, match="no sentence"):
        step_rule("COW-999")(silent)


def test_every_event_is_judged_by_a_rule_or_changes_no_block() -> None:
    judged = {event for rule in RULES.values() for event in rule.events}
    assert {event.__name__ for event in get_args(Event) if event not in judged} <= {"Begin"}


@given(states())
def test_a_state_rule_answers_for_any_state(state: State) -> None:
    for rule in RULES.values():
        if rule.kind is Kind.STATE:
            assert rule.holds(state) in (True, False)


@given(states(), events, states())
def test_a_step_rule_answers_for_any_step(before: State, event: Event, after: State) -> None:
    for rule in RULES.values():
        if rule.kind is Kind.STEP and isinstance(event, rule.events):
            assert rule.holds(before, event, after) in (True, False)


SOUND = [example.before for example in EXAMPLES if not isinstance(example, BrokenState)]


@given(st.sampled_from(SOUND), events)
def test_the_model_follows_any_event_from_a_sound_state(before: State, event: Event) -> None:
    """So that an engine's nonsense ends in a violation, and never in an exception of ours."""
    assert isinstance(step(before, event), State)


def test_a_transition_changes_the_named_fields_of_a_record_and_no_other() -> None:
    seq = Seq(request_id=3, tokens=(5, 6), num_prompt_tokens=2)
    assert replace(seq, num_computed_tokens=1) == Seq(3, (5, 6), 2, num_computed_tokens=1)
    assert seq.num_computed_tokens == 0
    with pytest.raises(TypeError, match="Seq has no field num_tokens"):
        replace(seq, num_tokens=1)  # type: ignore[call-arg]
