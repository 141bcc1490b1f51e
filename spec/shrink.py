"""Makes a trace minimal: whatever it does not need to break the same rule is left out, request by request, step by step,
event by event."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spec.choices import USUAL_CHOICES, Choices
from spec.interface import request_named, seq_named
from spec.monitor import Monitor
from spec.replay import step
from spec.rules import RULES, RuleViolation, broken_rules
from spec.uncounted import CONTENTS, UNCOUNTED
from spec.vocabulary import (
    Abort,
    Add,
    Admit,
    Begin,
    Complete,
    Config,
    Event,
    Finish,
    Fork,
    InvalidConfig,
    Preempt,
    Refuse,
    Release,
    RequestId,
    Sample,
    SeqId,
    Start,
    Submit,
    initial_state,
    seqs_of,
)


@dataclass(frozen=True)
class Broken:
    """The first event of a trace that breaks rules, and which, the one that is reported first."""

    index: int
    rule_ids: tuple[str, ...]


@dataclass(frozen=True)
class Shrunk:
    """A trace whose last event breaks the rule, and none before it any rule; without any one event that is not so."""

    config: Config
    events: tuple[Event, ...]
    rule_id: str
    choices: Choices = USUAL_CHOICES


def first_broken(config: Config, events: Sequence[Event], choices: Choices = USUAL_CHOICES) -> Broken | None:
    """Where the whole model sees the first rule broken."""
    state = initial_state(config, choices)
    for index, event in enumerate(events):
        after = step(state, event)
        if rules := broken_rules(state, event, after):
            return Broken(index, tuple(rule.id for rule in rules))
        state = after
    return None


def shrunk(
    config: Config,
    events: Sequence[Event],
    say: Callable[[str], None] = lambda _: None,
    choices: Choices = USUAL_CHOICES,
) -> Shrunk:
    """The trace, which breaks a rule, made minimal. It is judged without the contents of slots as long as that is enough,
    and in the end, and if need be all the time, by the whole model."""
    broken = first_broken(config, events, choices)
    if broken is None:
        raise ValueError("every rule holds, so there is nothing to shrink")
    whole = tuple(events[: broken.index + 1])
    for exactly in (False, True):
        search = _Search(config, choices, broken.rule_ids, exactly, say)
        found = search.shrink(whole)
        if search.is_the_same(first_broken(found.config, found.events, choices), found.events):
            return found
    return Shrunk(config, whole, broken.rule_ids[0], choices)


_CONTENTS = {rule_id for rule_id, why in UNCOUNTED.items() if why == CONTENTS}
LOOKS_AHEAD: Mapping[type, str] = {Admit: "SCHED-11", Submit: "SCHED-12", Preempt: "PREEMPT-5"}
"""The rules about the state before an event that a monitor leaves out."""


def _goes_on(monitor: Monitor, event: Event) -> bool:
    """Whether the event breaks no rule but perhaps one about contents; the monitor has then followed it."""
    ahead = LOOKS_AHEAD.get(type(event))
    if ahead is not None and not RULES[ahead].holds(monitor.state(), event, None):
        return False
    try:
        monitor.event(event)
    except RuleViolation:
        return False
    return True


@dataclass(frozen=True)
class _Search:
    """What is sought: a trace whose last event breaks the first of these rules, and none but these."""

    config: Config
    choices: Choices
    rule_ids: tuple[str, ...]
    exactly: bool
    """Whether each trace on the way is judged by the whole model."""
    say: Callable[[str], None]

    def shrink(self, events: tuple[Event, ...]) -> Shrunk:
        before: tuple[Event, ...] | None = None
        unserved = _without_scheduler(self.config, self.choices, events)
        if self._breaks(self._monitor(self.config), unserved, ()):
            events = unserved
        while before != events:
            before = events
            for groups_of in (_by_request, _by_step, _one_by_one):
                groups = sorted(groups_of(events), key=min)
                size = max(1, len(groups) // 2)
                while size:
                    events, groups = self._without(events, groups, size)
                    size //= 2
                self.say(f"{len(events):,} events are left")
        return Shrunk(self._smaller(events), events, self.rule_ids[0], self.choices)

    def _monitor(self, config: Config) -> Monitor:
        return Monitor(config, choices=self.choices)

    def _without(
        self, events: tuple[Event, ...], groups: list[frozenset[int]], size: int
    ) -> tuple[tuple[Event, ...], list[frozenset[int]]]:
        """The events without those groups that can be spared, so many at a time; and the groups that are left, renumbered.

        What comes before a group is as it was without it: a trace is followed once, and tried from there.
        """
        gone, left = set[int](), list[frozenset[int]]()
        here, place = self._monitor(self.config), 0
        for first in range(0, len(groups), size):
            chunk = groups[first : first + size]
            tried = gone.union(*chunk)
            while place < min(chunk[0]):
                if place not in gone:
                    here.event(events[place])
                place += 1
            rest = [events[i] for i in range(place, len(events)) if i not in tried]
            ended = len(events) - 1 in tried
            if not ended and self._breaks(here.copy(), rest, [events[i] for i in range(place) if i not in gone]):
                gone = tried
            else:
                left += chunk
        names = {old: new for new, old in enumerate(i for i in range(len(events)) if i not in gone)}
        return tuple(events[i] for i in names), [frozenset(names[i] for i in group) for group in left]

    def _breaks(self, monitor: Monitor, rest: Sequence[Event], before: Sequence[Event]) -> bool:
        if not rest or not all(_goes_on(monitor, event) for event in rest[:-1]):
            return False
        if self.exactly or self.rule_ids[0] in UNCOUNTED:
            events = [*before, *rest]
            return self.is_the_same(first_broken(monitor.config, events, self.choices), events)
        state, last = monitor.state(), rest[-1]
        broken = broken_rules(state, last, step(state, last))
        return self._is_like(tuple(rule.id for rule in broken if rule.id not in _CONTENTS))

    def is_the_same(self, broken: Broken | None, events: Sequence[Event]) -> bool:
        """Whether what was found is what was sought."""
        return broken is not None and broken.index == len(events) - 1 and self._is_like(broken.rule_ids)

    def _is_like(self, rule_ids: tuple[str, ...]) -> bool:
        """An event about what is not there breaks nearly every rule, which explains nothing."""
        return rule_ids[:1] == self.rule_ids[:1] and set(rule_ids) <= set(self.rule_ids)

    def _smaller(self, events: Sequence[Event]) -> Config:
        """The limits with as few blocks, on the device and in host memory, as halving them leads to."""
        config = self.config
        for name in ("num_host_blocks", "num_blocks"):
            low, high = 0, getattr(config, name)
            while low < high:
                middle = (low + high) // 2
                try:
                    smaller = replace(config, **{name: middle})
                    monitor = self._monitor(smaller)
                except InvalidConfig:
                    low = middle + 1
                    continue
                if self._breaks(monitor, events, ()):
                    config, high = smaller, middle
                else:
                    low = middle + 1
        return config


def _without_scheduler(config: Config, choices: Choices, events: Sequence[Event]) -> tuple[Event, ...]:
    """The same done to a pool: a sequence starts where its request is admitted, and is released where it is preempted.
    What breaks a rule about blocks mostly does so without requests, queues and steps, and then needs none of them."""
    state, result = initial_state(config, choices), list[Event]()
    for event in events:
        match event:
            case Admit(request_id=request_id):
                result += [Start(i, state.seqs[i].tokens) for i in seqs_of(state, request_id)]
            case Preempt(request_id=request_id) | Abort(request_id=request_id):
                result += [Release(i) for i in seqs_of(state, request_id) if i in state.block_tables]
            case Finish(seq=seq):
                result.append(Release(seq))
            case Add() | Begin() | Submit() | Complete() | Refuse() | Sample():
                pass
            case _:
                result.append(event)
        state = step(state, event)
    return tuple(result)


def _by_request(events: Sequence[Event]) -> list[frozenset[int]]:
    """For each request, or sequence of a pool, all events about it."""
    told_of: dict[SeqId, tuple[str, int]] = {}
    groups: dict[tuple[str, int], set[int]] = {}
    for index, event in enumerate(events):
        named: tuple[str, int] | None = None
        match event:
            case Add(request=request):
                named = ("request", request.request_id)
                told_of |= {seq: named for seq in request.seq_ids}
            case Start(seq=seq):
                named = told_of[seq] = ("seq", seq)
            case _:
                request_id: RequestId | None = request_named(event)
                seq_id = seq_named(event)
                if request_id is not None:
                    named = ("request", request_id)
                elif seq_id is not None:
                    named = told_of.get(seq_id)
                if isinstance(event, Fork) and named is not None:
                    told_of[event.child] = named
        if named is not None:
            groups.setdefault(named, set()).add(index)
    return [frozenset(group) for group in groups.values()]


def _by_step(events: Sequence[Event]) -> list[frozenset[int]]:
    """For each step all events from its beginning to its end, and the refusals one by one."""
    return list(_spans(events))


def _spans(events: Sequence[Event]) -> Iterator[frozenset[int]]:
    begun: dict[int, int] = {}
    for index, event in enumerate(events):
        if isinstance(event, Begin):
            begun[event.step_id] = index
        elif isinstance(event, Complete) and event.step_id in begun:
            yield frozenset(range(begun[event.step_id], index + 1))
        elif isinstance(event, Refuse):
            yield frozenset({index})


def _one_by_one(events: Sequence[Event]) -> list[frozenset[int]]:
    return [frozenset({index}) for index in range(len(events))]
