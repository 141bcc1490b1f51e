"""A disk that is full, or slow: serving goes on, and what the trace lacks is counted."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from optimized.checkpoint import Checkpoint
from optimized.cli import app, lossy_trace
from optimized.cli.lossy_trace import LossyTraces
from optimized.cli.watch import SelfCheck, Watch
from optimized.engine import SymbolicEngine
from optimized.server.front import Front
from spec.log_check import check_log
from spec.trace import Reader, TraceError, Writer, load
from spec.vocabulary import Request
from tests.optimized.test_block_residency import CONFIG
from tests.server.conftest import running, waited_for
from tests.server.test_observability import value


def test_a_server_goes_on_without_its_trace(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_full, write = [False], Writer.write

    def may_fail(writer: Any, text: str) -> None:
        if is_full[0]:
            writer._file = None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(writer, text)

    monkeypatch.setattr(Writer, "write", may_fail)
    traces, path = LossyTraces(), tmp_path / "trace.jsonl"
    with Watch("optimized", SelfCheck.SAMPLED, path, traces=traces) as watch:
        front = Front(num_lost_events=lambda: traces.num_lost)
        server = running(tiny, front=front, make_observer=watch.make_observer)
        try:
            expected = server.complete(prompt=[5, 6, 7], max_tokens=4).json["choices"][0]["text"]
            assert value(server, "kvproof:trace_events_lost_total") == 0
            is_full[0] = True
            for _ in range(2):
                assert server.complete(prompt=[5, 6, 7], max_tokens=4).json["choices"][0]["text"] == expected
            assert waited_for(lambda: value(server, "kvproof:trace_events_lost_total") > 10)
            assert value(server, "kvproof:engine_restarts_total") == 0
            server.engine.llm.restart()  # its new trace can not be written either
            assert server.complete(prompt=[5, 6, 7], max_tokens=4).json["choices"][0]["text"] == expected
        finally:
            server.stop()
    assert not path.exists()
    assert path.with_name("trace.jsonl.part").stat().st_size > 0


def serve_one(watch: Watch) -> None:
    """An engine that is watched serves a request."""
    engine = SymbolicEngine(CONFIG, watch.make_observer(CONFIG))
    engine.add(Request(0, (1, 2, 3), 2, (0,)))
    while engine.core.has_work:
        engine.step(lambda seq_id, prefix: 0)


def test_whoever_starts_with_a_trace_that_can_not_be_is_told(tmp_path: Path) -> None:
    traces = LossyTraces()
    watch = Watch("optimized", SelfCheck.OFF, tmp_path / "no" / "trace", traces=traces)
    with pytest.raises(FileNotFoundError):
        watch.make_observer(CONFIG)
    with pytest.raises(IsADirectoryError):  # and not when the trace gets its name, when all is over
        Watch("optimized", SelfCheck.OFF, tmp_path, traces=LossyTraces()).make_observer(CONFIG)
    serve_one(watch)  # a second engine goes on without one
    with Watch("optimized", SelfCheck.OFF, tmp_path / "trace") as whole:
        serve_one(whole)
    assert traces.num_lost == len(load(tmp_path / "trace").events) > 5


def test_a_trace_that_can_be_written_is_whole(tmp_path: Path) -> None:
    traces, path = LossyTraces(), tmp_path / "trace.jsonl"
    with Watch("optimized", SelfCheck.OFF, path, traces=traces) as watch:
        serve_one(watch)
    assert len(load(path).events) > 5
    assert traces.num_lost == 0


def test_a_disk_that_fills_up_at_the_end_leaves_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces, path = LossyTraces(), tmp_path / "trace.jsonl"
    with Watch("optimized", SelfCheck.OFF, path, traces=traces) as watch:
        watch.make_observer(CONFIG)

        def full(writer: Any, text: str) -> None:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(Writer, "write", full)
    assert not path.exists() and waited_for(path.with_name("trace.jsonl.part").exists)


def test_no_step_waits_for_a_slow_disk_and_a_trace_with_a_gap_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), Writer.write

    def slow(writer: Any, text: str) -> None:
        if threading.current_thread().name == "kvproof-trace":
            gate.wait(60)
        write(writer, text)

    monkeypatch.setattr(Writer, "write", slow)
    traces, path = LossyTraces(most_bytes=2000), tmp_path / "trace.jsonl"
    with Watch("optimized", SelfCheck.OFF, path, traces=traces) as watch:
        engine = SymbolicEngine(CONFIG, watch.make_observer(CONFIG))
        for request_id in range(20):
            engine.add(Request(request_id, (1, 2, 3), 2, (request_id,)))
            while engine.core.has_work:  # no write has ended yet
                engine.step(lambda seq_id, prefix: 0)
            assert 0 < traces.num_waiting_bytes <= 2000
        assert traces.num_lost > 10
        gate.set()
    part = path.with_name("trace.jsonl.part")
    assert not path.exists()
    with part.open("rb") as source:
        reader = Reader(source, "part")
        with pytest.raises(TraceError, match="events are missing from here on: 'the disk was too slow'"):
            check_log(reader)
        assert reader.num_judged > 10  # what there is was judged, and is sound
    checked = CliRunner().invoke(app, ["trace", "check", str(part)])
    assert checked.exit_code == 2
    assert "events are missing from here on" in checked.stderr


def test_a_disk_that_hangs_at_the_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), Writer.write

    def hangs(writer: Any, text: str) -> None:
        if threading.current_thread().name == "kvproof-trace":
            gate.wait(60)
        write(writer, text)

    monkeypatch.setattr(Writer, "write", hangs)
    monkeypatch.setattr(lossy_trace, "SECONDS_TO_WRITE", 0.05)
    traces, path = LossyTraces(), tmp_path / "trace.jsonl"
    with Watch("optimized", SelfCheck.OFF, path, traces=traces) as watch:
        serve_one(watch)
    assert not path.exists()
    gate.set()
    assert waited_for(lambda: b'{"gap": "not written within' in path.with_name("trace.jsonl.part").read_bytes())
