"""A disk that is full: serving goes on, and what the trace lacks is counted."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from optimized.checkpoint import Checkpoint
from optimized.cli.lossy_trace import LossyTraces
from optimized.cli.watch import SelfCheck, Watch
from optimized.engine import SymbolicEngine
from optimized.server.front import Front
from spec.trace import Writer, load
from spec.vocabulary import Request
from tests.optimized.test_block_residency import CONFIG
from tests.server.conftest import running, waited_for
from tests.server.test_observability import value


def test_a_server_goes_on_without_its_trace(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_full, flush = [False], Writer.flush

    def may_fail(writer: Any) -> None:
        if is_full[0]:
            writer._file = None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(writer)

    monkeypatch.setattr(Writer, "flush", may_fail)
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
            lost = value(server, "kvproof:trace_events_lost_total")
            assert lost > 10
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

        def full(writer: Any) -> None:
            raise OSError(errno.ENOSPC, "full")

        monkeypatch.setattr(Writer, "flush", full)
    assert not path.exists() and waited_for(path.with_name("trace.jsonl.part").exists)
