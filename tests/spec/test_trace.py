"""The event log: exact, versioned, never half written, and clear about what is wrong with it."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.choices import USUAL_CHOICES, Choices, EvictionOrder
from spec.engine import Observer
from spec.replay import replay
from spec.trace import FORMAT, VERSION, Reader, Trace, TraceError, Writer, dumps, load, loads
from spec.vocabulary import (
    Add,
    Allocate,
    Config,
    Event,
    Finish,
    FinishReason,
    Read,
    Refuse,
    Request,
    Start,
    Write,
)
from tests.spec.strategies import EVENTS, configs, events

CONFIG = Config(num_blocks=2, block_size=4)
STORY: tuple[Event, ...] = (Start(0, (5, 6)), Allocate(0, 2, (1,)), Write(0, 0, (4, 5)), Read(0, (4, 5)))
TRACE = Trace(CONFIG, STORY, engine="ours")
TEXT = dumps(TRACE)
LINES = TEXT.splitlines(keepends=True)


def with_line(number: int, **changed: object) -> str:
    """The log with other fields in one line."""
    record = {**json.loads(LINES[number - 1]), **changed}
    return "".join([*LINES[: number - 1], json.dumps(record) + "\n", *LINES[number:]])


def error_of(text: str | bytes) -> TraceError:
    with pytest.raises(TraceError) as caught:
        loads(text, file="a.jsonl")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"a.jsonl, line {caught.value.line}: ")
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(Event), ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_event_comes_back_exactly(kind: type, data: st.DataObject) -> None:
    event = data.draw(EVENTS[kind])
    back = loads(dumps(Trace(CONFIG, (event,)))).events
    assert back == (event,) and type(back[0]) is kind


@pytest.mark.slow
@given(configs, st.lists(events, max_size=6), st.text())
def test_every_log_comes_back_exactly(config: Config, some: list[Event], engine: str) -> None:
    trace = Trace(config, tuple(some), engine)
    assert loads(dumps(trace)) == trace
    assert dumps(loads(dumps(trace))) == dumps(trace)


def test_one_event_is_one_line_that_says_what_it_is() -> None:
    assert len(LINES) == 1 + len(STORY) + 1
    assert LINES[2] == '{"event": "Allocate", "seq": 0, "num_tokens": 2, "blocks": [1]}\n'
    assert json.loads(LINES[0])["config"]["policy"] == "fcfs"
    assert LINES[-1] == '{"num_events": 4}\n'


def test_what_was_read_can_be_replayed() -> None:
    trace = loads(TEXT)
    assert replay(trace.config, trace.events) == replay(CONFIG, STORY)


def test_a_log_is_read_while_it_is_read() -> None:
    reader = Reader(iter(line.encode() for line in LINES[:-2]), "a.jsonl")
    assert (reader.config, reader.engine) == (CONFIG, "ours")
    some = iter(reader)
    assert [next(some) for _ in STORY[:-1]] == list(STORY[:-1])
    with pytest.raises(TraceError, match="cut off"):
        next(some)


def test_a_log_of_nothing_is_a_log() -> None:
    assert loads(dumps(Trace(CONFIG))) == Trace(CONFIG)


def test_a_request_and_a_refusal_keep_their_fields() -> None:
    request = Request(3, (1, 2), 4, (7, 8), stop_token_ids=(0,), priority=-1, cache_salt='ü "\n')
    some: tuple[Event, ...] = (Add(request), Refuse(Add(request)), Finish(7, FinishReason.STOP))
    assert loads(dumps(Trace(CONFIG, some))).events == some


# Bad input


def test_an_empty_file_is_cut_off() -> None:
    error = error_of("")
    assert (error.line, error.problem) == (1, "the log is cut off")


@pytest.mark.parametrize("num_bytes", range(1, len(TEXT)))
def test_a_log_that_is_cut_off_anywhere_is_known_as_such(num_bytes: int) -> None:
    assert error_of(TEXT[:num_bytes]).problem == "the log is cut off"


def test_another_format_is_refused() -> None:
    error = error_of(with_line(1, format="something"))
    assert (error.line, error.field) == (1, "format")
    assert str(error) == f"a.jsonl, line 1: the field 'format' is 'something', it must be {FORMAT!r}"


def test_a_newer_version_is_refused_whatever_else_it_has() -> None:
    error = error_of(with_line(1, version=VERSION + 1, novelty=1))
    assert (error.line, error.field) == (1, "version")
    assert error.problem == f"is {VERSION + 1}, this kvproof reads up to version {VERSION}"


@pytest.mark.parametrize(
    ("line", "changed", "field", "problem"),
    [
        (1, {"version": "1"}, "version", "is '1', it must be a whole number"),
        (1, {"version": True}, "version", "is True, it must be a whole number"),
        (1, {"engine": 7}, "engine", "is 7, it must be a text"),
        (1, {"config": []}, "config", "is [], it must be an object"),
        (1, {"novelty": 1}, "novelty", "is unknown"),
        (2, {"event": "Begone"}, "event", "is 'Begone', which is no event here"),
        (2, {"event": None}, "event", "is None, which is no event here"),
        (2, {"seq": None}, "seq", "is None, it must be a whole number"),
        (2, {"seq": 1.0}, "seq", "is 1.0, it must be a whole number"),
        (2, {"tokens": "56"}, "tokens", "is '56', it must be a list"),
        (2, {"tokens": [5, "6"]}, "tokens[1]", "is '6', it must be a whole number"),
        (2, {"novelty": 1}, "novelty", "is unknown"),
        (6, {"num_events": 3}, "num_events", "is 3, and there are 4 events before it"),
        (6, {"novelty": 1}, "novelty", "is unknown"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(line: int, changed: dict, field: str, problem: str) -> None:
    error = error_of(with_line(line, **changed))
    assert (error.line, error.field, error.problem) == (line, field, problem)


def test_a_missing_field_is_named() -> None:
    error = error_of(LINES[0] + '{"event": "Start", "seq": 0}\n')
    assert (error.line, error.field, error.problem) == (2, "tokens", "is missing")


def test_a_limit_that_makes_no_sense_is_named() -> None:
    config = {**json.loads(LINES[0])["config"], "block_size": 0}
    error = error_of(with_line(1, config=config))
    assert (error.field, error.problem) == ("config.block_size", "is 0, it must be at least 1")


def test_a_choice_that_does_not_exist_is_named() -> None:
    config = {**json.loads(LINES[0])["config"], "policy": "lottery"}
    assert error_of(with_line(1, config=config)).problem == "is 'lottery', it must be one of fcfs, priority, static"


def test_the_choices_of_the_engine_are_part_of_the_log() -> None:
    choices = Choices(eviction_order=EvictionOrder.LRU, num_reserved_blocks=1)
    assert loads(dumps(Trace(CONFIG, choices=choices))).choices == choices
    error = error_of(with_line(1, choices={**json.loads(LINES[0])["choices"], "num_reserved_blocks": -1}))
    assert (error.field, error.problem) == ("choices.num_reserved_blocks", "is -1, it must be 0 to 1")


def test_a_log_that_is_older_than_a_choice_has_the_usual_one_and_an_unknown_choice_is_refused() -> None:
    written = json.loads(LINES[0])["choices"]
    older = {name: value for name, value in written.items() if name != "schedules_ahead"}
    assert loads(with_line(1, choices=older)).choices == USUAL_CHOICES
    error = error_of(with_line(1, choices={**written, "reads_minds": True}))
    assert "reads_minds" in str(error)


def test_a_log_that_is_older_than_a_limit_has_the_usual_one_and_no_other_may_be_missing() -> None:
    written = json.loads(LINES[0])["config"]
    older = {name: value for name, value in written.items() if name != "max_num_partial_prefills"}
    assert loads(with_line(1, config=older)).config == CONFIG
    error = error_of(with_line(1, config={name: value for name, value in older.items() if name != "policy"}))
    assert (error.field, error.problem) == ("config.policy", "is missing")
    header = {name: value for name, value in json.loads(LINES[0]).items() if name != "config"}
    assert error_of(json.dumps(header) + "\n").problem == "is missing"


def test_an_event_is_no_call() -> None:
    refusal = {"event": "Refuse", "call": {"event": "Admit", "request_id": 0}}
    error = error_of(LINES[0] + json.dumps(refusal) + "\n")
    assert (error.field, error.problem) == ("call.event", "is 'Admit', which is no event here")


@pytest.mark.parametrize(
    "line",
    ["", "x", "[]", "7", "{", '{"event": NaN', "\x00", "[" * 100_000, '{"seq": ' + "9" * 5000 + "}", "[[]"],
    ids=len,
)
def test_a_line_that_is_no_object_is_named(line: str) -> None:
    error = error_of(LINES[0] + line + "\n" + LINES[1])
    assert (error.line, error.field, error.problem) == (2, None, "this is no JSON object")


def test_bytes_that_are_no_text_are_refused() -> None:
    assert error_of(LINES[0].encode() + b'{"event": "\xff"}\n').problem == "byte 12 is no UTF-8"


def test_a_field_that_is_there_twice_is_refused() -> None:
    error = error_of(LINES[0] + '{"event": "Begin", "step_id": 1, "step_id": 2}\n')
    assert error.problem == "a field is there twice"


def test_nothing_follows_the_last_line() -> None:
    error = error_of(TEXT + "\n")
    assert (error.line, error.problem) == (7, "the log has ended above")


def test_a_long_value_is_shortened_in_the_message() -> None:
    assert len(str(error_of(with_line(2, tokens="x" * 10_000)))) < 200


@given(st.integers(0, len(TEXT) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_a_clear_error_or_another_log(at: int, flip: int) -> None:
    raw = bytearray(TEXT.encode())
    raw[at] ^= flip
    try:
        trace = loads(bytes(raw))
    except TraceError as error:
        assert 1 <= error.line <= len(LINES) + 2
    else:
        assert loads(dumps(trace)) == trace


@given(st.binary(max_size=200))
def test_noise_is_a_clear_error(noise: bytes) -> None:
    error_of(noise)


# Writing


def test_a_log_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Writer(path, CONFIG, "ours") as writer:
        for event in STORY:
            writer.event(event)
        assert not path.exists()
        writer.settled(lambda: replay(CONFIG, STORY))
        assert writer.part.read_text() == "".join(LINES[:-1]), "whole lines, when a call is over"
    assert path.read_text() == TEXT
    assert load(path) == TRACE
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_engine_leaves_a_whole_log(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(ZeroDivisionError), Writer(path, CONFIG) as writer:
        writer.event(STORY[0])
        raise ZeroDivisionError
    assert load(path).events == STORY[:1]


def test_an_older_log_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    Writer(path, CONFIG).close()
    before = path.read_text()
    writer = Writer(path, replace(CONFIG, num_blocks=9))
    writer.event(STORY[0])
    assert path.read_text() == before
    writer.close()
    assert load(path).config.num_blocks == 9


def test_a_closed_log_takes_no_more(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl", CONFIG)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.flush()


class FullDisk(BytesIO):
    """Takes half a line."""

    def write(self, line: bytes) -> int:
        super().write(line[:9])
        raise OSError("no space left on device")


def test_a_log_that_could_not_be_written_gets_no_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space"), Writer(tmp_path / "a.jsonl", CONFIG) as writer:
        writer._file = FullDisk()
        writer.event(STORY[0])
        writer.flush()
    assert not writer.path.exists()


def test_a_writer_is_an_observer(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.jsonl", CONFIG)
    observer: Observer = writer
    observer.event(STORY[0])
    observer.settled(lambda: replay(CONFIG, STORY[:1]))
    writer.close()
    assert load(writer.path).events == STORY[:1]


def test_a_missing_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.jsonl")
