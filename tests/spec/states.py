"""How a test says that a rule holds, or that it does not; the small states are those of ``spec.broken``."""

from spec.broken import BROKEN, BrokenState, follow
from spec.replay import step
from spec.rules import RULES
from spec.vocabulary import Event, State


def holds(rule_id: str, state: State) -> None:
    """The state rule holds."""
    assert RULES[rule_id].holds(state), f"{rule_id} does not hold of {state}"


def fails(rule_id: str, state: State) -> None:
    """The state rule does not hold."""
    assert not RULES[rule_id].holds(state), f"{rule_id} holds of {state}"


def judge(rule_id: str, start: State, events: tuple[Event, ...], leads_to: State | None) -> bool:
    """What the step rule says of the last event."""
    before, event = follow(start, *events[:-1]), events[-1]
    assert isinstance(event, RULES[rule_id].events), f"{rule_id} does not judge {event}"
    return RULES[rule_id].holds(before, event, step(before, event) if leads_to is None else leads_to)


def allows(rule_id: str, start: State, *events: Event, leads_to: State | None = None) -> None:
    """The step rule holds of the last event."""
    assert judge(rule_id, start, events, leads_to), f"{rule_id} forbids {events[-1]}"


def forbids(rule_id: str, start: State, *events: Event, leads_to: State | None = None) -> None:
    """The step rule does not hold of the last event."""
    assert not judge(rule_id, start, events, leads_to), f"{rule_id} allows {events[-1]}"


def bites(rule_id: str) -> None:
    """The rule does not hold of its broken example."""
    example = BROKEN[rule_id]
    judged = (example.state,) if isinstance(example, BrokenState) else (example.before, example.event, example.after)
    assert not RULES[rule_id].holds(*judged), f"{rule_id} holds though: {example.story}"
