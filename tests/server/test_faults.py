"""A server in trouble: clients that leave or do not read, a device that fails, an engine that dies or hangs, signals."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimized.checkpoint import Checkpoint
from optimized.model_core import TorchCore
from optimized.plan import Plan
from optimized.server.limits import Limits
from spec.trace import load
from tests.models.tiny_files import write_gguf
from tests.server.conftest import RunningServer, begun, held, running, waited_for
from tests.server.test_observability import value

ROOT = Path(__file__).parents[2]


def core_of(server: RunningServer) -> TorchCore:
    core = server.engine.llm._core
    assert isinstance(core, TorchCore)
    return core


class Turnstile:
    """Steps of a server's engine, as many as are let through."""

    def __init__(self, server: RunningServer) -> None:
        self._gate, self._step = threading.Semaphore(0), server.engine.llm.step
        self.num_waiting = 0
        server.engine.llm.step = self.step  # type: ignore[method-assign]

    def step(self) -> Any:
        self.num_waiting += 1
        self._gate.acquire()
        return self._step()

    def let(self, count: int) -> None:
        """So many steps, and the next one is about to begin."""
        for _ in range(count):
            before = self.num_waiting
            self._gate.release()
            assert waited_for(lambda before=before: self.num_waiting > before)  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("phase", ["waiting", "prompt", "answer"])
def test_who_goes_away_in_any_phase_has_given_back_its_blocks_one_step_later(
    tiny: Checkpoint, phase: str, stream: bool
) -> None:
    server = running(tiny, max_num_seqs=1, max_num_batched_tokens=8, enable_prefix_caching=False)
    stile = Turnstile(server)
    try:
        other = begun(server.port, max_tokens=40) if phase == "waiting" else None
        assert other is None or waited_for(lambda: stile.num_waiting == 1)
        num_seen = server.engine.health.num_unfinished + 1
        leaving = begun(server.port, prompt="x" * 30, max_tokens=20, stream=stream)
        assert waited_for(lambda: server.engine.health.num_unfinished == num_seen and stile.num_waiting >= 1)
        stile.let({"waiting": 2, "prompt": 2, "answer": 6}[phase])
        in_use = server.free_blocks()
        inbox = server.engine._engine._inbox
        assert leaving.sock is not None
        leaving.sock.shutdown(socket.SHUT_RDWR)
        leaving.close()
        assert waited_for(lambda: not inbox.empty())  # the engine is told, and is about to begin a step
        stile.let(1) if other else stile._gate.release()
        assert waited_for(lambda: server.engine.health.num_unfinished == num_seen - 1)
        scheduler = core_of(server).core.scheduler
        assert len(scheduler.requests) == num_seen - 1
        assert other is not None or in_use < scheduler.pool.num_free == server.engine.llm.config.num_blocks
        stile._gate.release(1000)
        assert other is None or other.getresponse().status == 200
    finally:
        stile._gate.release(1000)
        server.stop()


@pytest.mark.slow
def test_who_does_not_read_costs_a_buffer_and_is_given_up(tiny: Checkpoint) -> None:
    longer = replace(tiny, config=replace(tiny.config, max_model_len=512))
    limits = Limits(send_timeout=1, stream_buffer_bytes=4096)
    server = running(longer, limits, enable_prefix_caching=False)
    try:
        for each in server.server.servers[0].sockets:  # or the system takes the whole answer off the server's hands
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(("127.0.0.1", server.port))
            body = {"prompt": "a", "n": 8, "max_tokens": 500, "logprobs": 20, "stream": True, "ignore_eos": True}
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
            connection.sendall(head.encode() + b"\r\n\r\n" + data)
            assert waited_for(lambda: server.engine.health.num_unfinished == 1)
            most = 0
            for _ in range(3000):
                for each in list(server.server.server_state.connections):
                    most = max(most, each.transport.get_write_buffer_size())
                if server.engine.health.num_unfinished == 0:
                    break
                assert server.complete(max_tokens=1).status == 200
            assert waited_for(lambda: server.engine.health.num_unfinished == 0)
            assert waited_for(lambda: value(server, "kvproof:clients_given_up_total") == 1)
        assert value(server, "kvproof:client_stalls_total") >= 1
        assert value(server, "kvproof:stalled_clients") == value(server, "kvproof:stream_unread_bytes") == 0
        assert most > 0
        assert most < (1 << 20)  # one event more than the buffer; the whole answer is many times that
        assert server.complete(max_tokens=1).status == 200
        assert waited_for(lambda: server.free_blocks() == server.engine.llm.config.num_blocks)
        assert server.engine.stats().steps > 0
    finally:
        server.stop()


def test_logits_that_are_no_numbers_fail_their_request(tiny: Checkpoint) -> None:
    server = running(tiny)
    try:
        device = core_of(server).device
        compute = device._sample

        def spoiled(plan: Plan, logits: Any) -> Any:
            logits = logits.clone()
            for row, seq_id in enumerate(plan.sample_seq_ids):
                if seq_id == 0 and plan.positions[plan.sample_rows[row]] > 6:
                    logits[row, 5] = np.nan
            return compute(plan, logits)

        device._sample = spoiled  # type: ignore[method-assign]
        two = [
            begun(server.port, max_tokens=20, temperature=1) for _ in range(2)
        ]  # all greedy, and rows are not drawn one by one
        answers = [each.getresponse() for each in two]
        assert sorted(each.status for each in answers) == [200, 500]  # whichever came first
        [error] = [json.loads(each.read())["error"] for each in answers if each.status == 500]
        assert (error["code"], error["type"]) == ("numerical_error", "server_error")
        page = server.ask("GET", "/metrics").body.decode()
        assert re.search(r"vllm:corrupted_requests_total{.*} 1\.0", page)
        assert server.ask("GET", "/health").status == 200
    finally:
        server.stop()


def test_an_error_of_the_device_is_not_told_outside(tiny: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    server = running(tiny)
    try:

        def failing(plan: Plan) -> Any:
            raise RuntimeError("the kernel at 0x7f00deadbeef has failed")

        core_of(server).device.compute = failing  # type: ignore[method-assign]
        answer = server.complete()
        assert (answer.status, answer.json["error"]["code"]) == (500, "no_token")
        assert b"deadbeef" not in answer.body
        assert "deadbeef" in caplog.text
        assert server.ask("GET", "/health").status == 200
    finally:
        server.stop()


def test_an_engine_that_dies_is_made_anew_and_its_clients_are_told(tiny: Checkpoint) -> None:
    server = running(tiny)
    try:
        stile = Turnstile(server)
        expected = None
        stream = begun(server.port, max_tokens=30, stream=True)
        assert waited_for(lambda: stile.num_waiting == 1)
        stile.let(3)

        def gone() -> Any:
            raise RuntimeError("the device at 0xdeadbeef is gone")

        step, stile._step = stile._step, gone
        stile._gate.release()
        text = stream.getresponse().read().decode()
        *_, error, done, end = text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_stopped"
        assert "deadbeef" not in text
        stile._step = step
        stile._gate.release(1000)
        assert waited_for(lambda: server.ask("GET", "/ready").status == 200)
        expected = server.complete(max_tokens=5)
        assert expected.status == 200
        assert server.ask("GET", "/health").status == 200
        assert re.search(r"kvproof:engine_restarts_total{.*} 1\.0", server.ask("GET", "/metrics").body.decode())
    finally:
        server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["step", "prompt_of"])
def test_health_is_about_progress(tiny: Checkpoint, part: str) -> None:
    """Whoever is in the way: the engine in a step, or who reads the prompts."""
    server = running(tiny, Limits(stall_seconds=1))
    gate = held(server) if part == "step" else threading.Event()
    if part == "prompt_of":
        read = server.engine.llm.prompt_of

        def slow(prompt: Any) -> Any:
            gate.wait()
            return read(prompt)

        server.engine.llm.prompt_of = slow  # type: ignore[method-assign]
    try:
        assert server.ask("GET", "/health").status == 200
        waiting = begun(server.port, max_tokens=3)
        assert waited_for(lambda: server.ask("GET", "/health").status == 503)
        assert server.ask("GET", "/health").json["error"]["code"] == "stalled"
        gate.set()
        assert waiting.getresponse().status == 200
        assert waited_for(lambda: server.ask("GET", "/health").status == 200)
    finally:
        gate.set()
        server.stop()


@pytest.mark.slow
def test_a_grammar_that_takes_its_time_is_no_lack_of_progress(tiny: Checkpoint) -> None:
    server = running(tiny, Limits(stall_seconds=1))
    gate, make = threading.Event(), server.engine.llm.grammar_of

    def slow(params: Any) -> Any:
        gate.wait()
        return make(params)

    server.engine.llm.grammar_of = slow  # type: ignore[method-assign]
    try:
        waiting = begun(server.port, max_tokens=3, ignore_eos=False, structured_outputs={"choice": ["a"]})
        assert waited_for(lambda: server.engine.health.num_unfinished == 1)
        time.sleep(1.5)
        assert server.ask("GET", "/health").status == 200
        gate.set()
        assert waiting.getresponse().status == 200
    finally:
        gate.set()
        server.stop()


# --- signals ----------------------------------------------------------------------------------------------------------

SLOW = "import os, time\nfrom optimized.model_core import TorchCore\nstep = TorchCore.step\n"
SLOW += "TorchCore.step = lambda core: (time.sleep(0 if os.path.exists({hurry!r}) else 0.3), step(core))[1]\n"


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A server whose steps take a third of a second, until there is a file ``hurry``, as a process of its own."""
    write_gguf(tmp_path / "tiny.gguf")
    code = f"{SLOW.format(hurry=str(tmp_path / 'hurry'))}from optimized.cli import main\nmain()"
    started = subprocess.Popen(
        [
            *(
                sys.executable,
                "-c",
                code,
                "serve",
                str(tmp_path / "tiny.gguf"),
                "--port",
                "0",
                "--shutdown-timeout",
                "20",
            ),
            *("--self-check", "sampled", "--trace", str(tmp_path / "trace.jsonl"), "--log-format", "json"),
        ],
        cwd=ROOT,
        env=os.environ | {"KVPROOF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    yield started
    started.kill()
    started.wait()
    assert started.stderr is not None
    started.stderr.close()


def port_of(process: "subprocess.Popen[str]") -> int:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.match(r"listening on http://127.0.0.1:(\d+)", line):
            return int(found[1])
    raise AssertionError("it does not listen")


def status_of(port: int, path: str) -> tuple[int, str]:
    """What a path answers on a connection of its own, and the code of an error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body.get("error", {}).get("code", "")


@pytest.mark.slow
@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_signal_lets_requests_finish_and_a_second_one_ends_them(
    process: "subprocess.Popen[str]", num_signals: int, tmp_path: Path
) -> None:
    port = port_of(process)
    stream = begun(port, max_tokens=40, stream=True).getresponse()
    first = stream.readline()
    asked: list[tuple[int, str]] = []
    for _ in range(num_signals):
        process.send_signal(signal.SIGTERM)
        if not asked:  # who asks meanwhile is answered, on a new connection too
            assert waited_for(lambda: status_of(port, "/ready") == (503, "draining"))
            asked = [status_of(port, path) for path in ("/health", "/v1/models")]
            if num_signals == 1:
                (tmp_path / "hurry").touch()
    events = (first + stream.read()).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    if num_signals == 1:
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert chunks[-1]["error"]["code"] == "engine_stopped"
        assert len(chunks) < 40
    assert [status for status, _ in asked] == [200, 200]
    assert process.wait(60) == 0
    assert process.stderr is not None
    lines = [json.loads(line) for line in process.stderr]
    assert [line["status"] for line in lines if line.get("path") == "/v1/completions"] == [200]
    assert len(load(tmp_path / "trace.jsonl").events) > 10
