"""The event log: newline-delimited JSON, versioned, read back exactly.

The first line names the version, the engine and its limits; then there is one event a line; the last line counts them, so
that a log that was cut off is known as such. A log grows in a file beside its own, whole lines only, and gets its name
when it is complete: under that name there is never half a log.
"""

import json
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from io import BytesIO
from pathlib import Path
from types import NoneType, TracebackType, UnionType
from typing import BinaryIO, Self, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from spec.vocabulary import Config, Event, InvalidConfig, Request, State

FORMAT = "kvproof trace"
VERSION = 1

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


def dumps(trace: Trace) -> str:
    """The log as text."""
    body = [_line(encode(event)) for event in trace.events]
    return "".join([_line(_header(trace.config, trace.engine)), *body, _line(_footer(len(body)))])


def loads(text: str | bytes, file: str = "trace") -> Trace:
    """The log that a text holds; ``file`` is what errors call it. Raises ``TraceError``."""
    reader = Reader(BytesIO(text if isinstance(text, bytes) else text.encode("utf-8", "replace")), file)
    return Trace(reader.config, tuple(reader), reader.engine)


def load(path: str | Path) -> Trace:
    """The log that a file holds. Raises ``TraceError``, or ``OSError`` when there is no such file."""
    with open(path, "rb") as source:
        reader = Reader(source, str(path))
        return Trace(reader.config, tuple(reader), reader.engine)


class Writer:
    """Writes a log while it happens; an observer, so that it can be given to an engine.

    Closing it gives the file its name, also when the engine failed: what happened until then is a whole log.
    """

    def __init__(self, path: str | Path, config: Config, engine: str = "model") -> None:
        self.path = Path(path)
        self.part = self.path.with_name(self.path.name + ".part")
        self.num_events = 0
        self._file: BinaryIO | None = open(self.part, "wb")  # noqa: SIM115  close() closes it
        self._write(_header(config, engine))

    def event(self, event: Event) -> None:
        self._write(encode(event))
        self.num_events += 1

    def settled(self, snapshot: Callable[[], State]) -> None:
        """Nothing: a log holds events only."""

    def close(self) -> None:
        """The log is complete. To close it again does nothing."""
        if self._file is None:
            return
        self._write(_footer(self.num_events))
        self._file.close()
        self._file = None
        os.replace(self.part, self.path)

    def _write(self, record: Json) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is closed")
        try:
            self._file.write(_line(record).encode())
            self._file.flush()
        except OSError:
            self._file = None  # a line may be cut off: this log never gets its name
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Reader:
    """Reads a log event by event, however long it is. Raises ``TraceError`` where it is wrong."""

    def __init__(self, source: Iterable[bytes], file: str) -> None:
        self._lines = iter(source)
        self._place = Place(file, 0)
        header = self._next()
        if header.get("format") != FORMAT:
            raise self._place.error("format", f"is {reprlib.repr(header.get('format'))}, it must be {FORMAT!r}")
        version = read(int, header.get("version"), "version", self._place)
        if not 1 <= version <= VERSION:
            raise self._place.error("version", f"is {version}, this kvproof reads up to version {VERSION}")
        _same_fields(header, ("format", "version", "engine", "config"), "", self._place)
        self.engine = read(str, header["engine"], "engine", self._place)
        self.config = read(Config, header["config"], "config", self._place)

    def __iter__(self) -> Iterator[Event]:
        num_events = 0
        while "event" in (record := self._next()):
            yield read_event(record, self._place)
            num_events += 1
        _same_fields(record, ("num_events",), "", self._place)
        if (counted := read(int, record["num_events"], "num_events", self._place)) != num_events:
            raise self._place.error("num_events", f"is {counted}, and there are {num_events} events before it")
        if next(self._lines, None) is not None:
            raise Place(self._place.file, self._place.line + 1).error(None, "the log has ended above")

    def _next(self) -> Mapping[str, object]:
        """The next line, which must be there."""
        self._place = Place(self._place.file, self._place.line + 1)
        line = next(self._lines, b"")
        if not line.endswith(b"\n"):
            raise self._place.error(None, "the log is cut off")
        return read_line(line, self._place)


@dataclass(frozen=True)
class Place:
    """A line of a file."""

    file: str
    line: int

    def error(self, field: str | None, problem: str) -> TraceError:
        return TraceError(self.file, self.line, field, problem)


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
    kind: get_type_hints(kind) for kind in (Config, Request, *get_args(Event))
}
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


def _header(config: Config, engine: str) -> Json:
    return {"format": FORMAT, "version": VERSION, "engine": engine, "config": encode(config)}


def _footer(num_events: int) -> Json:
    return {"num_events": num_events}


def _line(record: Json) -> str:
    return json.dumps(record) + "\n"
