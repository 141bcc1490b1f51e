"""What a test says has happened: where it leads without breaking a rule, and what an engine reports of it."""

from spec.answers import StepReport
from spec.replay import step
from spec.rules import broken_rules
from spec.vocabulary import Append, Copy, Event, Finish, Preempt, Read, State, SwapIn, SwapOut, Write


def led_to(state: State, events: list[Event]) -> State:
    """Where the events lead; none of them breaks a rule."""
    for event in events:
        after = step(state, event)
        assert [rule.id for rule in broken_rules(state, event, after)] == [], event
        state = after
    return state


def report_of(events: list[Event]) -> StepReport:
    """What an engine reports of a step in which this happened."""
    return StepReport(
        device=tuple(e for e in events if isinstance(e, Write | Read | Copy | SwapOut | SwapIn)),
        emitted=tuple(e for e in events if isinstance(e, Append)),
        preempted=tuple(e for e in events if isinstance(e, Preempt)),
        finished=tuple(e for e in events if isinstance(e, Finish)),
    )
