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
from spec.vocabulary import Event, Read, Slot, initial_state


@dataclass(frozen=True)
class Plain:
    """A kind of event whose fields are whole numbers, and lists of them, and what counts it."""

    kind: type
    method: Callable[..., bool]
    names: frozenset[str]

    def event(self, record: dict[str, Any]) -> Event:  # Any: whatever JSON can hold
        event: Event = self.kind(**{name: _frozen(value) for name, value in record.items()})
        return event


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


NUMBERS = b"0123456789, "
"""What numbers are written with, and lists of them."""


def _shape(kind: type) -> bytes:
    """What is left of a plain event's line without its numbers. JSON in which these are no numbers is none."""
    fields = (f'"{name}":' + ("" if hint is int else "[]") for name, hint in FIELDS[kind].items())
    return f'{{"event":"{kind.__name__}"{"".join(fields)}}}\n'.encode()


_KINDS = {_shape(kind): Plain(kind, METHODS[kind], frozenset(FIELDS[kind])) for kind in PLAIN if kind in METHODS}


class Records:
    """Decodes the lines of plain events. What a read spells out begins as the last one of its sequence: so only what is
    new in it is decoded."""

    def __init__(self) -> None:
        self._decode = json.JSONDecoder().raw_decode
        self._last: dict[bytes, tuple[bytes, list[Slot]]] = {}

    def record(self, plain: Plain, line: bytes) -> dict[str, Any] | None:
        """The fields of the event; None if the line is not what its shape says: there may be digits in a name."""
        if plain.kind is not Read:
            return self._fields(plain, line)
        head, end = line[: line.find(b"[")], line.rfind(b"]")
        text, slots = self._last.get(head, (b"", []))
        if text and line.startswith(text) and line.startswith(b", ", len(text)):
            fields = self._fields(plain, head + b"[" + line[len(text) + 2 :])
            if fields is not None:
                fields["slots"] = slots + fields["slots"]
        else:
            fields = self._fields(plain, line)
        if fields is not None and fields["slots"]:
            if len(self._last) > MOST_READERS:
                self._last.clear()
            self._last[head] = line[:end], fields["slots"]
        return fields

    def _fields(self, plain: Plain, line: bytes) -> dict[str, Any] | None:
        try:
            record, end = self._decode(line.decode("ascii"))
        except ValueError:
            return None
        if end != len(line) - 1 or record.pop("event", None) != plain.kind.__name__ or record.keys() != plain.names:
            return None
        fields: dict[str, Any] = record
        return fields


MOST_READERS = 4096
"""Sequences whose last read is remembered."""


def check_log(reader: Reader) -> int:
    """Judge a whole log by counters, and say how many events it has. Raises ``RuleViolation`` at the first event that
    breaks a rule, and ``TraceError`` at the first line that is wrong."""
    monitor, records = Monitor(reader.config, reader.engine, reader.choices), Records()
    try:
        for line in reader.lines():
            plain = _KINDS.get(line.translate(None, NUMBERS))
            record = records.record(plain, line) if plain is not None else None
            if plain is not None and record is not None:
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
