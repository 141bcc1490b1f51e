"""A server of a tiny random model, listening on a free port in a thread of this process."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from optimized import LLM
from optimized.checkpoint import Checkpoint
from optimized.server.app import make_app
from optimized.server.front import Front
from optimized.server.limits import Limits
from optimized.server.serve import Address, make_engine, uvicorn_config
from tests.llm.conftest import tiny as tiny  # noqa: PLC0414  the fixture

JSON = {"content-type": "application/json"}


@dataclass
class Answer:
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream but for the last, which is checked."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        assert all(line.startswith("data: ") and "\n" not in line for line in lines[:-1])
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


class RunningServer:
    """The server, and a client that says exactly what it is told."""

    def __init__(self, llm: LLM, limits: Limits, keys: tuple[str, ...] = (), front: Front | None = None) -> None:
        self.engine = make_engine(llm, limits)
        self.app, self.service = make_app(self.engine, ["tiny", "alias"], limits, keys, front)
        self.server = uvicorn.Server(uvicorn_config(self.app, Address(port=0), limits))
        self._thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
        self._thread.start()
        while not self.server.started:
            threading.Event().wait(0.005)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = JSON if body is not None else {}
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {**given, **(headers or {})})
        response = connection.getresponse()
        found = Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        connection.close()
        return found

    def complete(self, **body: object) -> Answer:
        return self.ask("POST", "/v1/completions", {"prompt": "hello", "temperature": 0, "ignore_eos": True, **body})

    def chat(self, **body: object) -> Answer:
        messages = [{"role": "user", "content": "hello"}]
        return self.ask(
            "POST", "/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 5, **body}
        )

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(20)
        asyncio.run(self.engine.shutdown())

    def free_blocks(self) -> int:
        return self.engine.stats().num_free_blocks


def running(
    tiny: Checkpoint,
    limits: Limits | None = None,
    keys: tuple[str, ...] = (),
    front: Front | None = None,
    **engine: Any,
) -> RunningServer:
    arguments = {"block_size": 4, "max_num_seqs": 16, **engine}
    return RunningServer(LLM(tiny, **arguments), limits or Limits(), keys, front)


def waited_for(holds: Callable[[], bool]) -> bool:
    """Whether it holds, after a while at the latest."""
    deadline = time.monotonic() + 60
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def begun(port: int, **body: object) -> http.client.HTTPConnection:
    """A request whose answer nobody has read yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"prompt": "hello", "temperature": 0, "ignore_eos": True, **body}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


def slowed(server: RunningServer) -> list[float]:
    """Each step takes longer as long as the list is not empty: so long that a busy machine does other things meanwhile."""
    pause, step = [0.2], server.engine.llm.step

    def slow_step() -> Any:
        time.sleep(pause[0] if pause else 0.0)
        return step()

    server.engine.llm.step = slow_step  # type: ignore[method-assign]
    return pause


def held(server: RunningServer) -> threading.Event:
    """No step begins before the event is set."""
    gate, step = threading.Event(), server.engine.llm.step

    def step_behind_gate() -> Any:
        gate.wait()
        return step()

    server.engine.llm.step = step_behind_gate  # type: ignore[method-assign]
    return gate


@pytest.fixture(scope="module")
def server(tiny: Checkpoint) -> Iterator[RunningServer]:
    started = running(tiny)
    yield started
    started.stop()
