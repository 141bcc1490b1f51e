"""A story: the calls that were made, as Python, and where each of them led; and the report of one that ended badly."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from itertools import groupby
from types import FunctionType

from spec.conformance.guard import AdapterFault
from spec.picture import Map, mark_changes, memory_map, text
from spec.rules import RULES, RuleViolation
from spec.scope import Move
from spec.vocabulary import Config, Observe, State


class Differs(Exception):
    """An engine does not what it must, and no event says so. ``rule`` is the id of the rule that does; ``check`` is Python
    that must hold after the story, in which CALL stands for its last call; none if the last call does not end well."""

    def __init__(self, sentence: str, rule: str | None = None, check: str = "") -> None:
        super().__init__(sentence)
        self.rule = rule
        self.check = check


@dataclass(frozen=True)
class Call:
    """A method of the judged engine, and what it was given. As text it is Python."""

    method: str
    arguments: tuple[object, ...] = ()

    def __str__(self) -> str:
        return f"{self.method}({', '.join(map(source_of, self.arguments))})"

    @property
    def caption(self) -> str:
        """What is called in the end: of a pool, the move."""
        return next((str(each) for each in self.arguments if isinstance(each, Move)), str(self))


@dataclass(frozen=True)
class Told:
    """A call, and the state in which it left the engine: none if it did not end well."""

    call: Call
    state: State | None


@dataclass(frozen=True)
class Setting:
    """Who plays: the expression that makes the judged engine, and what is imported for it."""

    make: str
    imports: Mapping[str, frozenset[str]]


class Failed(Exception):
    """A test of the suite failed: why, and the story that shows it. What a profile declares is tried without a story."""

    def __init__(
        self, target: str, why: Exception, config: Config | None, story: tuple[Told, ...], setting: Setting
    ) -> None:
        self.why = why
        self.config = config
        self.story = story
        self.rule = why.rule.id if isinstance(why, RuleViolation) else why.rule if isinstance(why, Differs) else None
        self.method = why.method if isinstance(why, AdapterFault) else None
        self.kind = self.rule or self.method or type(why).__name__
        self.target = target
        self.setting = setting
        super().__init__(target, headline(why))

    @property
    def test(self) -> str:
        """A test that replays the story."""
        return test_of(self, self.setting)

    def __str__(self) -> str:
        return report(self)


class Recorder:
    """Looks like the judged engine that it records, but for its calls, which go into the story."""

    def __init__(self, judged: object, on_failure: Callable[[Exception], None]) -> None:
        self.judged = judged
        self._on_failure = on_failure
        self.story: list[Told] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(self.judged, name)
        return (lambda *arguments: self.tell(Call(name, arguments))) if callable(found) else found

    def tell(self, call: Call) -> object:
        """Make the call, and remember where it led."""
        self.story.append(Told(call, None))
        try:
            answer: object = getattr(self.judged, call.method)(*call.arguments)
        except (RuleViolation, AdapterFault, Differs) as error:
            self._on_failure(error)
            raise
        self.story[-1] = Told(call, getattr(self.judged, "state", None))
        return answer


def source_of(value: object) -> str:
    """A value as Python that makes it again; fields that have their default are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        shown = [each for each in fields(value) if not _is_default(each.default, getattr(value, each.name))]
        return f"{type(value).__name__}({', '.join(f'{e.name}={source_of(getattr(value, e.name))}' for e in shown)})"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        return f"({', '.join(map(source_of, value))}{',' if len(value) == 1 else ''})"
    return value.__name__ if isinstance(value, FunctionType) else repr(value)


def _is_default(default: object, value: object) -> bool:
    return default is not MISSING and default == value


# The report


def report(failed: Failed) -> str:
    """What was broken, the story as memory maps, what differs at its end, and a test that replays it."""
    why = failed.why
    lines = [headline(why), f"  engine    {failed.target}"]
    if isinstance(why, RuleViolation):
        lines += [line for line in str(why).splitlines()[2:] if not line.startswith("  trace ")]
    if failed.config is not None:
        lines += ["", f"The story, under {source_of(failed.config)}:"]
        lines += _told(failed)
    lines += _end(why)
    lines += ["", "A test that replays it:", "", *(f"    {line}".rstrip() for line in failed.test.splitlines())]
    return "\n".join(lines)


def headline(why: Exception) -> str:
    """The failure in one sentence."""
    if isinstance(why, RuleViolation):
        return f"{why.rule.id} does not hold: {why.rule.sentence}"
    if isinstance(why, Differs) and why.rule is not None:
        return f"{why.rule} does not hold: {RULES[why.rule].sentence} Here: {why}"
    if isinstance(why, AdapterFault):
        return f"AdapterFault in {why.method}: {why.sentence}"
    return str(why)


def _told(failed: Failed) -> list[str]:
    lines: list[str] = []
    number, before = 0, None
    for call, same in groupby(failed.story, key=lambda told: told.call.caption):
        told = list(same)
        times = f"   ({len(told)} times)" if len(told) > 1 else ""
        number += len(told)
        lines += ["", f"{number:3}. {call}{times}"]
        if told[-1].state is None:
            lines.append("     does not end well: see below")
        else:
            drawn = memory_map(told[-1].state)
            lines += _indented(drawn if before is None else mark_changes(before, drawn))
            before = drawn
    return lines


def _end(why: Exception) -> list[str]:
    """The two states between which a rule was broken."""
    if not isinstance(why, RuleViolation):
        return []
    before, after = memory_map(why.before), memory_map(why.after)
    if isinstance(why.event, Observe):
        names = ("expected, where its events lead:", "shown:")
    else:
        names = (f"before {source_of(why.event)}:", "after:")
    if before == after:
        return ["", f"{names[0].removesuffix(':')}, and {names[1]}", *_indented(before)]
    return ["", names[0], *_indented(before), names[1], *_indented(after)]


def _indented(drawn: Map) -> list[str]:
    return [f"     {line}" for line in text(drawn).splitlines()]


# The test


IMPORTED = {
    "spec.conformance.door": ("all_end",),
    "spec.conformance.machine": ("next_token",),
    "spec.scope": ("Move",),
    "spec.vocabulary": ("AdmissionRule", "Config", "Policy", "Recovery", "Request"),
}
"""Where the names come from that a call may use."""


def test_of(failed: Failed, setting: Setting) -> str:
    """A test that fails as long as the engine does what it did."""
    is_story = failed.config is not None
    body = [f"config = {source_of(failed.config)}", f"judged = {setting.make}"] if is_story else [setting.make]
    for call, same in groupby(str(told.call) for told in failed.story):
        count = len(list(same))
        body += [f"for _ in range({count}):", f"    judged.{call}"] if count > 1 else [f"judged.{call}"]
    if isinstance(failed.why, Differs) and "CALL" in failed.why.check:
        body[-1] = failed.why.check.replace("CALL", body[-1])
    elif isinstance(failed.why, Differs) and failed.why.check:
        body.append(failed.why.check)
    words = "\n".join(body)
    names = {module: {name for name in names if f"{name}" in words} for module, names in IMPORTED.items()}
    for module, more in setting.imports.items():
        names.setdefault(module, set()).update(more)
    imports = [f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(names.items()) if found]
    name = failed.rule.lower().replace("-", "_") if failed.rule else "the_protocol"
    return "\n".join([*imports, "", "", f"def test_{name}_holds():", *(f"    {line}" for line in body)])
