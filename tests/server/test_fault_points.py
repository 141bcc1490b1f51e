"""Every fault point fails, the first time that it is reached, the second, and so on until nothing fails any more: only who may
suffer does, no answer is wrong, every block is free afterwards, and the server answers again."""

import asyncio
import http.client
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from optimized import engine_thread, fault_points
from optimized.checkpoint import Checkpoint
from optimized.cli import app
from optimized.cli.lossy_trace import LossyTraces
from optimized.cli.watch import SelfCheck, Watch
from optimized.fault_points import VARIABLE, FaultPoint, Harm, NthTime, arm, deciding, reach
from optimized.model_core import TorchCore
from optimized.server import heartbeat
from spec.trace import load
from spec.vocabulary import InvalidConfig
from tests.server.conftest import Answer, RunningServer, running, waited_for
from tests.server.test_lossy_trace import serve_one

OTHERS = {FaultPoint.DEVICE_ALIVE: {FaultPoint.FORWARD: 1}, FaultPoint.REMAKE: {FaultPoint.SCHEDULE: 1}}
"""Points that are reached only after another one has failed."""
ELSEWHERE = (FaultPoint.WRITE_TRACE, FaultPoint.BEAT)
"""Points that have a test of their own: no request reaches them."""
MOST_TIMES = 100
IN_CI = 2
"""So many times each point fails where there is little time; at night until nothing fails any more."""

CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}
Ask = Callable[[RunningServer], Answer]
TO_THE_ENGINE: dict[str, Ask] = {
    "whole": lambda server: server.complete(prompt=[5, 6, 7, 8, 9], max_tokens=3, logprobs=1, prompt_logprobs=1),
    "streamed": lambda server: server.complete(max_tokens=3, stream=True),
    "two": lambda server: server.complete(prompt=["a", "b"], max_tokens=2, temperature=0, n=2, stop="zzz"),
    "chat": lambda server: server.chat(max_tokens=2),
    "form": lambda server: server.complete(max_tokens=9, **CHOICE),
}
BESIDE_IT: dict[str, Ask] = {
    "detokenize": lambda server: server.ask("POST", "/detokenize", {"tokens": [5, 6]}),
    "metrics": lambda server: server.ask("GET", "/metrics"),
}


def said(answer: Answer) -> str | None:
    """What an answer says but for ids and times; None if it says that something is wrong. Anything else is a fault of ours."""
    if answer.status != 200:
        assert answer.status in (500, 503), answer
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert "fault point" not in answer.body.decode()
        return None
    if answer.headers["content-type"].startswith("text/plain"):
        return "metrics"
    whole = answer.events if answer.headers["content-type"].startswith("text/event-stream") else [answer.json]
    if any("error" in each for each in whole):
        return None
    if "choices" not in whole[0]:
        return answer.body.decode()
    text: dict[int, str] = {}
    for each in whole:
        for choice in each["choices"]:
            more = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            text[choice["index"]] = text.get(choice["index"], "") + more
    return json.dumps(text)


def asked(server: RunningServer) -> dict[str, str | None]:
    """What everybody gets who asks at once; None is an error that is told."""
    found: dict[str, str | None] = {}

    def ask(name: str, how: Ask) -> None:
        try:
            found[name] = said(how(server))
        except (http.client.IncompleteRead, ConnectionError):  # what was on its way when its client was lost
            found[name] = None

    callers = [threading.Thread(target=ask, args=each) for each in {**TO_THE_ENGINE, **BESIDE_IT}.items()]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return found


@pytest.fixture(scope="module")
def faulty(tiny: Checkpoint) -> Iterator[RunningServer]:
    before, engine_thread.FIRST_PAUSE_S = engine_thread.FIRST_PAUSE_S, 0.001
    started = running(tiny, num_gpu_blocks_override=64)
    yield started
    started.stop()
    engine_thread.FIRST_PAUSE_S = before


@pytest.fixture(scope="module")
def expected(faulty: RunningServer) -> dict[str, str | None]:
    found = asked(faulty)
    assert len(found) == 7 and None not in found.values()
    assert asked(faulty) == found
    return found


def is_clean(server: RunningServer) -> bool:
    """Nothing is left of anybody's request."""
    engine, core = server.engine._engine, server.engine.llm._core
    assert isinstance(core, TorchCore)
    return (
        server.engine.is_running
        and (engine.num_unfinished, engine.num_aside, engine.num_waiting_tokens, server.engine.num_reading)
        == (0, 0, 0, 0)
        and not (engine._streams or engine._names or engine._unanswered or core.device.sampling or core.core.has_work)
        and core.core.scheduler.pool.num_free == core.config.num_blocks
        and not any(server.app._num_of_key.values())
    )


@pytest.mark.parametrize("point", [each for each in FaultPoint if each not in ELSEWHERE], ids=lambda p: p.title)
def test_only_who_may_suffer_from_a_fault_does(
    faulty: RunningServer, expected: dict[str, str | None], point: FaultPoint, caplog: pytest.LogCaptureFixture
) -> None:
    harm = Harm.RUNNING if point in OTHERS else point.harm
    is_night = os.environ.get("KVPROOF_TIER") == "soak"
    for n in range(1, MOST_TIMES if is_night else IN_CI + 1):
        decide = NthTime(point, n, OTHERS.get(point))
        with deciding(decide):
            found = asked(faulty)
            assert waited_for(lambda: is_clean(faulty)), point
        failed = {name for name, answer in found.items() if answer is None}
        assert {name: found[name] or expected[name] for name in expected} == expected  # no answer is wrong
        if harm is Harm.ONE:
            assert len(failed) <= 1, (n, failed)
        else:
            assert failed <= TO_THE_ENGINE.keys(), (n, failed)
        assert said(TO_THE_ENGINE["whole"](faulty)) == expected["whole"]
        if not decide.has_failed(point):
            break
        assert n < MOST_TIMES - 1
    assert n > 1  # it was reached


def test_a_disk_that_is_full_at_any_time_harms_nobody(tmp_path: Path) -> None:
    for n in range(1, MOST_TIMES):
        decide, path, traces = NthTime(FaultPoint.WRITE_TRACE, n), tmp_path / str(n), LossyTraces()
        with deciding(decide), Watch("optimized", SelfCheck.OFF, path, traces=traces) as watch:
            serve_one(watch)
        if not decide.has_failed(FaultPoint.WRITE_TRACE):
            break
        assert traces.num_lost > 0
        assert not path.exists()
    assert n > 1
    assert len(load(path).events) > 5 and traces.num_lost == 0


def test_a_heartbeat_that_fails_is_not_the_last_one(
    faulty: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.001)
    decide = NthTime(FaultPoint.BEAT, 2)
    reached = [0]

    def counted(point: FaultPoint) -> Exception | None:
        reached[0] += point is FaultPoint.BEAT
        return decide(point)

    async def beaten() -> None:
        beating = asyncio.ensure_future(heartbeat.beat_for_ever(faulty.engine))
        while reached[0] < 4:
            await asyncio.sleep(0.001)
        beating.cancel()

    with deciding(counted):
        asyncio.run(asyncio.wait_for(beaten(), 60))
    assert "there is no line this time" in caplog.text


def test_a_point_that_nobody_lets_fail_does_nothing() -> None:
    for point in FaultPoint:
        reach(point)
    with deciding(lambda point: None):
        reach(FaultPoint.FORWARD)
    assert len({point.title for point in FaultPoint}) == len(FaultPoint) == 24


def test_doctor_lists_them_and_a_release_refuses_to_let_one_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = CliRunner().invoke(app, ["doctor", "--fault-points"]).stdout
    assert all(point.title in shown and point.what in shown for point in FaultPoint)
    listed: list[dict[str, Any]] = json.loads(CliRunner().invoke(app, ["doctor", "--fault-points", "--json"]).stdout)[
        "fault_points"
    ]
    assert [each["name"] for each in listed] == [point.title for point in FaultPoint]
    monkeypatch.setattr(fault_points, "_decide", None)
    assert not arm({})
    assert arm({VARIABLE: "device.forward:2, trace.write"})
    reach(FaultPoint.FORWARD)
    for point in (FaultPoint.FORWARD, FaultPoint.WRITE_TRACE):
        with pytest.raises(point.error, match=point.title):
            reach(point)
    with pytest.raises(InvalidConfig, match="each is there once"):
        arm({VARIABLE: "trace.write:1,trace.write:2"})
    for wrong in ("nothing", "device.forward:0", "device.forward:x", ",", f"device.forward:{'9' * 5_000}"):
        with pytest.raises(InvalidConfig, match="NAME:N"):
            arm({VARIABLE: wrong})
    monkeypatch.setattr(fault_points, "is_release", lambda: True)
    done = CliRunner().invoke(app, ["doctor", "--fault-points"], env={VARIABLE: "trace.write"})
    assert (done.exit_code, done.stdout) == (2, "")
    assert "this is a release" in done.stderr
