"""Judges a log line by line: what is plain goes straight to the counters, what is not is read with care."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spec.batches import Allocated, Computed
from spec.excerpt import concerned
from spec.monitor import METHODS, Monitor
from spec.replay import step
from spec.rules import RuleViolation, broken_rules
from spec.trace import FIELDS, PLAIN, Reader
from spec.vocabulary import Event, initial_state


@dataclass(frozen=True)
class Plain:
    """A kind of event whose fields are whole numbers, and lists of them. ``num_quotes`` are the quotation marks of its
    line: a field that is there twice would bring more."""

    kind: type
    method: Callable[..., bool]
    numbers: tuple[str, ...]
    lists: tuple[str, ...]
    num_quotes: int

    def fits(self, record: dict[str, Any]) -> bool:  # Any: whatever JSON can hold
        """Whether a record has these fields, and no other beside the event's name."""
        for name in self.numbers:
            if type(record.get(name)) is not int:
                return False
        for name in self.lists:
            value = record.get(name)
            if type(value) is not list or (value and set(map(type, value)) != _INT):
                return False
        return len(record) == len(self.numbers) + len(self.lists) + 1

    def event(self, record: dict[str, Any]) -> Event:
        event: Event = self.kind(**{name: _frozen(value) for name, value in record.items()})
        return event


_INT = {int}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(kind: type) -> Plain:
    fields = FIELDS[kind]
    numbers = tuple(name for name, hint in fields.items() if hint is int)
    lists = tuple(name for name, hint in fields.items() if hint is not int)
    return Plain(kind, METHODS[kind], numbers, lists, 2 * (len(fields) + 2))


_KINDS = {kind.__name__: _plain(kind) for kind in PLAIN if kind in METHODS}


def check_log(reader: Reader) -> int:
    """Judge a whole log by counters, and say how many events it has. Raises ``RuleViolation`` at the first event that
    breaks a rule, and ``TraceError`` at the first line that is wrong."""
    monitor, decode = Monitor(reader.config, reader.engine, reader.choices), json.JSONDecoder().raw_decode
    try:
        for line in reader.lines():
            try:
                text = line.decode()
                record, end = decode(text)
                plain = _KINDS[record["event"]] if end == len(text) - 1 else None
            except (LookupError, TypeError, ValueError, RecursionError):
                plain = None
            if plain is not None and text.count('"') == plain.num_quotes and plain.fits(record):
                del record["event"]
                reader.num_events += 1
                monitor.num_events += 1
                if monitor.judges_all or not plain.method(monitor, **record):
                    monitor.judge(plain.event(record))
            elif not _judge_carefully(monitor, reader, reader.record(line)):
                break
    finally:
        reader.num_judged = monitor.num_events
    return monitor.num_events


def _judge_carefully(monitor: Monitor, reader: Reader, record: Mapping[str, object]) -> bool:
    """The event or the batch of a line; False if it was the last line."""
    if "event" in record:
        monitor.event(reader.event(record))
    elif "events" in record:
        match reader.batch(record):
            case Computed() as batch:
                monitor.computed(batch)
            case Allocated(seqs):
                monitor.allocated(seqs)
            case batch:
                monitor.appended(batch.seqs, batch.tokens)
    else:
        reader.end(record)
        return False
    return True


def replay_log(reader: Reader) -> int:
    """The same by every rule, in the whole model."""
    state = initial_state(reader.config, reader.choices)
    for event in reader:
        reader.num_judged += 1
        after = step(state, event)
        for rule in broken_rules(state, event, after):
            before, after = concerned(state, event, after)
            raise RuleViolation(rule, before, event, after, engine=reader.engine)
        state = after
    return reader.num_judged
