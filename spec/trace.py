"""The event log: newline-delimited JSON, versioned, read back exactly.

The first line names the version, the engine, its limits and its choices; then there is one event a line, or a batch of them
(see ``spec.batches``); the last line counts the events, so that a log that was cut off is known as such. A log grows in a
file beside its own, whole lines only, and gets its name when it is complete: under that name there is never half a log.
"""

import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from io import BytesIO
from pathlib import Path
from types import NoneType, TracebackType, UnionType
from typing import BinaryIO, Self, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from spec.batches import (
    COLUMNS,
    BadColumn,
    Batch,
    Computed,
    Tables,
    allocated_line,
    appended_line,
    computed_line,
    read_batch,
)
from spec.choices import USUAL_CHOICES, Choices
from spec.vocabulary import Config, Event, InvalidConfig, Request, SeqId, State, Token

FORMAT = "kvproof trace"
VERSION = 2
"""Since version 2 a line may hold a batch of events."""
MOST = {"num_blocks": 1 << 24, "num_host_blocks": 1 << 24, "block_size": 1 << 20}
"""Limits beyond which nobody follows a log: a pool of 16 million blocks. A header is a claim, and costs nothing to make."""

Json: TypeAlias = "Mapping[str, Json] | list[Json] | str | int | None"
T = TypeVar("T")


class TraceError(ValueError):
    """A log that cannot be read: where, and why."""

    def __init__(self, file: str, line: int, field: str | None, problem: str) -> None:
        super().__init__(f"{file}, line {line}: {problem if field is None else f'the field {field!r} {problem}'}")
        self.file = file
        self.line = line
        self.field = field
        self.problem = problem


@dataclass(frozen=True)
class Trace:
    """A whole log: which engine, under which limits, and what it did."""

    config: Config
    events: tuple[Event, ...] = ()
    engine: str = "model"
    choices: Choices = USUAL_CHOICES


def dumps(trace: Trace) -> str:
    """The log as text."""
    body = [_line(encode(event)) for event in trace.events]
    return "".join([_line(_header(trace.config, trace.engine, trace.choices)), *body, _line(_footer(len(body)))])


def loads(text: str | bytes, file: str = "trace") -> Trace:
    """The log that a text holds; ``file`` is what errors call it. Raises ``TraceError``."""
    reader = Reader(BytesIO(text if isinstance(text, bytes) else text.encode("utf-8", "replace")), file)
    return Trace(reader.config, tuple(reader), reader.engine, reader.choices)


def load(path: str | Path) -> Trace:
    """The log that a file holds. Raises ``TraceError``, or ``OSError`` when there is no such file."""
    with open(path, "rb") as source:
        reader = Reader(source, str(path))
        return Trace(reader.config, tuple(reader), reader.engine, reader.choices)


def part_of(path: Path) -> Path:
    """Where a log is until it is whole."""
    return path.with_name(f"{path.name}.part")


class Writer:
    """Writes a log while it happens; an observer, so that it can be given to an engine.

    Closing it gives the file its name, also when the engine failed: what happened until then is a whole log.
    """

    def __init__(
        self, path: str | Path, config: Config, engine: str = "model", choices: Choices = USUAL_CHOICES
    ) -> None:
        self.path = Path(path)
        self.part = part_of(self.path)
        self.num_events = 0
        self._tables = Tables()
        self._lines = [_line(_header(config, engine, choices))]
        self._file: BinaryIO | None = open(self.part, "wb")  # noqa: SIM115  close() closes it
        self.flush()

    def event(self, event: Event) -> None:
        self._lines.append(event_line(event))
        self.num_events += 1

    def allocated(self, seqs: Sequence[SeqId]) -> None:
        """A token's room for each of these sequences, none of which needed a block."""
        self._lines.append(allocated_line(seqs))
        self.num_events += len(seqs)

    def computed(self, step: Computed) -> None:
        """The writes of a step, and then its reads."""
        seqs = self._tables.column(step.seqs)
        self._lines.append(computed_line(seqs, step, self._tables.seen(step)))
        self.num_events += len(step)

    def appended(self, seqs: Sequence[SeqId], tokens: Sequence[Token]) -> None:
        """A token for each of these sequences."""
        self._lines.append(appended_line(self._tables.column(seqs), tokens))
        self.num_events += len(seqs)

    def settled(self, snapshot: Callable[[], State]) -> None:
        """What happened until now is in the file, so that it outlives whatever ends this process."""
        self.flush()

    def flush(self) -> None:
        """Every line so far is in the file."""
        lines, self._lines = self._lines, []
        self.write("".join(lines))

    def write(self, text: str) -> None:
        """These lines are in the file."""
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError:
            self._file = None  # a line may be cut off: this log never gets its name
            raise

    def close(self) -> None:
        """The log is complete. To close it again does nothing."""
        if self._file is None:
            return
        self._lines.append(_line(_footer(self.num_events)))
        self.flush()
        self.leave()
        os.replace(self.part, self.path)

    def leave(self) -> None:
        """Nothing more is written. A log that is left before it is closed never gets its name. To leave it again does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Reader:
    """Reads a log event by event, however long it is. Raises ``TraceError`` where it is wrong."""

    def __init__(self, source: Iterable[bytes], file: str) -> None:
        self._lines = iter(source)
        self.file = file
        self.line = 0
        """The number of the line that was read last."""
        self.num_events = 0
        """The events that were read so far."""
        self.num_judged = 0
        """The events that whoever judges them has come to."""
        header = self._next()
        if header.get("format") != FORMAT:
            raise self._place.error("format", f"is {reprlib.repr(header.get('format'))}, it must be {FORMAT!r}")
        version = read(int, header.get("version"), "version", self._place)
        if not 1 <= version <= VERSION:
            raise self._place.error("version", f"is {version}, this kvproof reads up to version {VERSION}")
        header = {**header, "choices": _with_usual(USUAL_CHOICES, header.get("choices", {}))}
        _same_fields(header, ("format", "version", "engine", "config", "choices"), "", self._place)
        self.engine = read(str, header["engine"], "engine", self._place)
        self.config = read(Config, _with_usual(Config(1), header["config"]), "config", self._place)
        self.choices = read(Choices, header["choices"], "choices", self._place)
        if not 0 <= (count := self.choices.num_reserved_blocks) < self.config.num_blocks:
            limit = f"must be 0 to {self.config.num_blocks - 1}"
            raise self._place.error("choices.num_reserved_blocks", f"is {count}, it {limit}")
        for name, most in MOST.items():
            if (value := getattr(self.config, name)) > most:
                raise self._place.error(f"config.{name}", f"is {value}, a log is followed up to {most}")
        self._tables = Tables()

    @property
    def _place(self) -> "Place":
        return Place(self.file, self.line)

    def __iter__(self) -> Iterator[Event]:
        for line in self.lines():
            record = read_line(line, self._place)
            if "event" in record:
                yield self.event(record)
            elif "events" in record:
                yield from self.batch(record).events(self.config.block_size)
            else:
                return self.end(record)

    def lines(self) -> Iterator[bytes]:
        """The lines after the first one, as they stand. Whoever reads them says ``end`` when it comes to the last."""
        while True:
            self.line += 1
            line = next(self._lines, b"")
            if not line.endswith(b"\n"):
                raise self._place.error(None, "the log is cut off")
            yield line

    def event(self, record: Mapping[str, object]) -> Event:
        """The event on the line read last."""
        event = read_event(record, self._place)
        self.num_events += 1
        return event

    def batch(self, record: Mapping[str, object]) -> Batch:
        """The batch on the line read last."""
        kind = record["events"]
        if not isinstance(kind, str) or kind not in COLUMNS:
            raise self._place.error("events", f"is {reprlib.repr(kind)}, which is no batch")
        columns = {name: value for name, value in record.items() if name != "events"}
        _same_fields(columns, COLUMNS[kind], "", self._place)
        try:
            batch = read_batch(kind, columns, self.config, self._tables)
        except BadColumn as error:
            raise self._place.error(error.field, error.problem) from None
        self.num_events += len(batch)
        return batch

    def record(self, line: bytes) -> Mapping[str, object]:
        """The record of the line read last, every mistake in it named."""
        return read_line(line, self._place)

    def end(self, record: Mapping[str, object]) -> None:
        """The line read last counts the events and is the last one."""
        if "gap" in record:
            why = read(str, record["gap"], "gap", self._place)
            raise self._place.error(None, f"events are missing from here on: {reprlib.repr(why)}")
        _same_fields(record, ("num_events",), "", self._place)
        if (counted := read(int, record["num_events"], "num_events", self._place)) != self.num_events:
            raise self._place.error("num_events", f"is {counted}, and there are {self.num_events} events before it")
        if next(self._lines, None) is not None:
            raise Place(self.file, self.line + 1).error(None, "the log has ended above")

    def _next(self) -> Mapping[str, object]:
        """The next line, which must be there."""
        return read_line(next(self.lines()), self._place)


@dataclass(frozen=True)
class Place:
    """A line of a file."""

    file: str
    line: int

    def error(self, field: str | None, problem: str) -> TraceError:
        return TraceError(self.file, self.line, field, problem)


def gap_line(why: str) -> str:
    """The last line of a log of which the rest is missing: it is no whole log, and says so."""
    return _line({"gap": why})


def event_line(event: Event) -> str:
    """An event as a line, ``encode`` at a third of the price for those that hold numbers only."""
    kind = type(event)
    if kind in PLAIN:
        return _ENCODER.encode({"event": kind.__name__, **vars(event)}) + "\n"
    return _line(encode(event))


LATER: Mapping[type, frozenset[str]] = {
    Choices: frozenset(each.name for each in fields(Choices)),
    Config: frozenset({"max_num_partial_prefills"}),
}
"""Fields that there were not yet when some logs were written."""


def _with_usual(usual: Choices | Config, said: object) -> object:
    """What a log says, and what is usual where it was written before there was a choice."""
    values = {name: encode(getattr(usual, name)) for name in LATER[type(usual)]}
    return {**values, **said} if isinstance(said, dict) else said


def encode(value: object) -> Json:
    """A value as JSON: events by name, other records by field, choices by value."""
    if is_dataclass(value):
        record = {each.name: encode(getattr(value, each.name)) for each in fields(value)}
        return {"event": type(value).__name__, **record} if type(value) in get_args(Event) else record
    if isinstance(value, tuple):
        return [encode(each) for each in value]
    if isinstance(value, Enum):
        return encode(value.value)
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"a log has no place for {value!r}")


def read_line(line: bytes, place: Place) -> Mapping[str, object]:
    """The record that a line holds."""

    def record_of(pairs: list[tuple[str, object]]) -> Mapping[str, object]:
        record = dict(pairs)
        if len(record) < len(pairs):
            raise place.error(None, "a field is there twice")
        return record

    try:
        record: object = json.loads(line.decode(), object_pairs_hook=record_of)
    except TraceError:
        raise
    except UnicodeDecodeError as error:
        raise place.error(None, f"byte {error.start + 1} is no UTF-8") from None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise place.error(None, "this is no JSON object")
    return record


def read_event(value: object, place: Place, kinds: Iterable[type] = get_args(Event), field: str = "") -> Event:
    """The event that a record stands for; one of these kinds."""
    name = value.get("event") if isinstance(value, dict) else None
    kind = next((each for each in kinds if each.__name__ == name), None)
    if not isinstance(value, dict) or kind is None:
        raise place.error(_inside(field, "event"), f"is {reprlib.repr(name)}, which is no event here")
    event: Event = _record(kind, {each: value[each] for each in value if each != "event"}, field, place)
    return event


def read(hint: type[T], value: object, field: str, place: Place) -> T:
    """A value of this type, or an error that names the field."""
    result = _read(hint, value, field, place)
    if not isinstance(result, hint):
        raise place.error(field, f"is {reprlib.repr(value)}, it must be {NAMES.get(hint, hint.__name__)}")
    return result


FIELDS: Mapping[type, Mapping[str, object]] = {
    kind: get_type_hints(kind) for kind in (Config, Choices, Request, *get_args(Event))
}
PLAIN = frozenset(get_args(Event)) - {
    kind for kind in get_args(Event) if not set(FIELDS[kind].values()) <= {int, tuple[int, ...]}
}
_ENCODER = json.JSONEncoder()
NAMES: Mapping[object, str] = {int: "a whole number", str: "a text", bool: "true or false"}


def _read(hint: object, value: object, field: str, place: Place) -> object:
    if isinstance(hint, UnionType):
        if NoneType in get_args(hint):
            rest = next(each for each in get_args(hint) if each is not NoneType)
            return None if value is None else _read(rest, value, field, place)
        return read_event(value, place, get_args(hint), field)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise place.error(field, f"is {reprlib.repr(value)}, it must be a list")
        if get_args(hint)[0] is int and (not value or set(map(type, value)) == {int}):
            return tuple(value)
        return tuple(_read(get_args(hint)[0], each, f"{field}[{i}]", place) for i, each in enumerate(value))
    if isinstance(hint, type) and is_dataclass(hint):
        return _record(hint, value, field, place)
    if isinstance(hint, type) and issubclass(hint, Enum):
        choices = {each.value: each for each in hint}
        if not isinstance(value, str) or value not in choices:
            raise place.error(field, f"is {reprlib.repr(value)}, it must be one of {', '.join(choices)}")
        return choices[value]
    if type(value) is not hint:
        raise place.error(field, f"is {reprlib.repr(value)}, it must be {NAMES[hint]}")
    return value


def _record(kind: type[T], value: object, field: str, place: Place) -> T:
    if not isinstance(value, dict):
        raise place.error(field, f"is {reprlib.repr(value)}, it must be an object")
    hints = FIELDS[kind]
    _same_fields(value, tuple(hints), field, place)
    facts = {name: _read(hint, value[name], _inside(field, name), place) for name, hint in hints.items()}
    try:
        return kind(**facts)
    except InvalidConfig as error:
        raise place.error(_inside(field, error.field), f"is {error.value!r}, it must be {error.limit}") from None


def _same_fields(record: Mapping[str, object], names: tuple[str, ...], field: str, place: Place) -> None:
    """Every field is there, and no other."""
    for name in names:
        if name not in record:
            raise place.error(_inside(field, name), "is missing")
    for name in record:
        if name not in names:
            raise place.error(_inside(field, name), "is unknown")


def _inside(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def _header(config: Config, engine: str, choices: Choices) -> Json:
    limits, chosen = encode(config), encode(choices)
    return {"format": FORMAT, "version": VERSION, "engine": engine, "config": limits, "choices": chosen}


def _footer(num_events: int) -> Json:
    return {"num_events": num_events}


def _line(record: Json) -> str:
    return json.dumps(record) + "\n"
