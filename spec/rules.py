"""What a rule is, the registry of all rules, and the report of a violation."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from types import UnionType
from typing import TypeVar, get_args, get_type_hints

from spec.vocabulary import Event, Observe, State


class Kind(Enum):
    """A state rule holds in every state, a step rule for every (before, event, after)."""

    STATE = "state"
    STEP = "step"


@dataclass(frozen=True)
class Rule:
    """A numbered statement that must hold. ``corpus`` names the invariants of the bug corpus that it covers."""

    id: str
    name: str
    sentence: str
    reason: str
    kind: Kind
    events: tuple[type, ...]
    corpus: tuple[str, ...]
    predicate: Callable[..., bool]

    @property
    def area(self) -> str:
        return self.id.split("-")[0]

    @property
    def source(self) -> str:
        """The predicate as it stands in the code."""
        return inspect.getsource(self.predicate)

    def holds(self, *judged: object) -> bool:
        """Whether the rule holds of a state, or of (before, event, after). False for nonsense."""
        try:
            return bool(self.predicate(*judged))
        except (LookupError, TypeError, ValueError, ArithmeticError):
            return False


RULES: dict[str, Rule] = {}
WITHDRAWN: Mapping[str, str] = {
    "COW-1": "The model's fork shares everything, and what an engine makes of it is judged by TABLE-8, PREEMPT-4 and API-3.",
    "SCHED-21": "By SCHED-11 and SCHED-22 what the running ones lack is free, and then PREEMPT-5 lets nobody be preempted.",
}
"""Ids that were given up, with the reason: the rules that it follows from. They are never used again. ``spec.lemmas``."""

AREAS = ("ALLOC", "TABLE", "COW", "CACHE", "PREEMPT", "SWAP", "SCHED", "ATTN", "SAMPLE", "API")

StateRule = Callable[[State], bool]
P = TypeVar("P", bound=Callable[..., bool])


def state_rule(rule_id: str, *, corpus: str = "") -> Callable[[StateRule], StateRule]:
    """The predicate is a rule that holds in every state."""

    def register(predicate: StateRule) -> StateRule:
        _enter(rule_id, Kind.STATE, (), corpus, predicate)
        return predicate

    return register


def step_rule(rule_id: str, *, corpus: str = "") -> Callable[[P], P]:
    """The predicate is a rule that holds for every step whose event has the type that its second parameter names."""

    def register(predicate: P) -> P:
        hint = list(get_type_hints(predicate).values())[1]
        events = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        _enter(rule_id, Kind.STEP, events, corpus, predicate)
        return predicate

    return register


def _enter(rule_id: str, kind: Kind, events: tuple[type, ...], corpus: str, predicate: Callable[..., bool]) -> None:
    area, _, number = rule_id.partition("-")
    if area not in AREAS or not number.isdigit():
        raise ValueError(f"{rule_id!r} is no rule id: AREA-number, the area one of {', '.join(AREAS)}")
    if rule_id in RULES or rule_id in WITHDRAWN:
        raise ValueError(f"the rule id {rule_id} is taken")
    sentence, _, reason = inspect.cleandoc(predicate.__doc__ or "").partition("\n\n")
    if not sentence:
        raise ValueError(f"{rule_id} has no sentence")
    sentence = " ".join(sentence.split())
    RULES[rule_id] = Rule(rule_id, predicate.__name__, sentence, reason, kind, events, tuple(corpus.split()), predicate)


def broken_state_rules(state: State) -> Iterable[Rule]:
    """The state rules that do not hold, in the order of the chapters."""
    return (rule for rule in RULES.values() if rule.kind is Kind.STATE and not rule.holds(state))


FIRST = "API-2"
"""What is not there can not be judged otherwise: whether an event is possible at all is asked before anything else."""


def step_rules_about(kind: type) -> list[Rule]:
    """The step rules about this kind of event, in the order in which they are asked: the first, and then the chapters."""
    about = [rule for rule in RULES.values() if rule.kind is Kind.STEP and issubclass(kind, rule.events)]
    return sorted(about, key=lambda rule: rule.id != FIRST)


def broken_step_rules(before: State, event: Event, after: State) -> Iterable[Rule]:
    """The step rules about this kind of event that do not hold, in the order in which they are asked."""
    return (rule for rule in step_rules_about(type(event)) if not rule.holds(before, event, after))


def broken_rules(before: State, event: Event, after: State) -> list[Rule]:
    """Every rule that the step breaks: first what is wrong with the step, then what is wrong with where it leads. Of
    what an engine shows, first what is wrong with it alone, then where it is not what its events led to."""
    step, state = broken_step_rules(before, event, after), broken_state_rules(after)
    return [*state, *step] if isinstance(event, Observe) else [*step, *state]


def check_rules(
    before: State, event: Event, after: State, *, engine: str = "model", trace: Sequence[Event] = ()
) -> None:
    """Raise ``RuleViolation`` for the first rule that the step breaks."""
    for rule in broken_rules(before, event, after):
        raise RuleViolation(rule, before, event, after, engine=engine, trace=trace)


class RuleViolation(Exception):
    """A rule does not hold. Always a bug of the engine (or of the specification), never the caller's mistake."""

    def __init__(
        self,
        rule: Rule,
        before: State,
        event: Event,
        after: State,
        *,
        engine: str = "model",
        trace: Sequence[Event] = (),
    ) -> None:
        self.rule = rule
        self.before = before
        self.event = event
        self.after = after
        self.engine = engine
        self.trace = tuple(trace)
        super().__init__(report(self))


ALWAYS_SHOWN = ("free", "ref_count", "block_tables")


def report(violation: RuleViolation) -> str:
    """The counterexample as a person reads it: what differs between two lines is what to look at."""
    before, now = violation.before, violation.after
    first = "expected" if isinstance(violation.event, Observe) else "before"
    shown = [
        each.name
        for each in fields(State)
        if each.name in ALWAYS_SHOWN or getattr(before, each.name) != getattr(now, each.name)
    ]
    lines = [
        f"{violation.rule.id} does not hold: {violation.rule.sentence}",
        f"  engine    {violation.engine}",
        f"  event     {violation.event!r}",
        f"  {first:9} " + "   ".join(f"{name} {describe(name, before, now)}" for name in shown),
        "  now       " + "   ".join(f"{name} {describe(name, now, before)}" for name in shown),
    ]
    if violation.trace:
        lines.append("  trace     " + ", ".join(repr(event) for event in violation.trace))
    lines.append(f"  read      docs/rules.html#rule-{violation.rule.id}")
    return "\n".join(lines)


def describe(name: str, state: State, other: State) -> str:
    """One field of a state as text. Zero counts are left out, and what is the same in the other state."""
    value = getattr(state, name)
    if name in ("free", "host_free"):
        return "{" + ", ".join(str(block) for block in value) + "}"
    if name == "ref_count":
        return str({block: count for block, count in enumerate(value) if count})
    if isinstance(value, Mapping) and name not in ALWAYS_SHOWN:
        same = getattr(other, name) or {}
        return str({key: entry for key, entry in value.items() if same.get(key) != entry})
    return str(value)
