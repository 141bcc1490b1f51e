"""What the front end costs: a real server with a real scheduler, a device that answers at once, and callers in another process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from optimized.device import Sampled
from optimized.model_core import EngineArgs, MakeObserver, TorchCore
from optimized.plan import Plan

if TYPE_CHECKING:
    import uvicorn

    from optimized.async_llm import AsyncLLM
    from optimized.beam_search import BeamSearch
    from optimized.checkpoint import Checkpoint
    from optimized.torch_device import SeqSampling, TorchDevice

FIRST_TOKEN, NUM_TOKENS = 64, 128
"""The tokens that are said, one after the other: those of any vocabulary have them."""

NUM_PROBES = 100
OK = b"HTTP/1.1 200 "
PAUSE_S = 0.5
"""A caller that lags takes a rest of so long before it reads on."""


class InstantDevice:
    """Computes nothing, and has a token for every sample."""

    poisons = False

    def __init__(self) -> None:
        self.sampling: dict[int, SeqSampling] = {}
        self.beams: dict[int, BeamSearch] = {}
        self.logprobs: dict[int, dict[int, object]] = {}
        self.prompt_logprobs: dict[int, dict[int, object]] = {}

    def run(self, plan: Plan) -> Sequence[Sampled]:
        return [FIRST_TOKEN + plan.positions[row] % NUM_TOKENS for row in plan.sample_rows]


class InstantCore(TorchCore):
    """The engine core without a model."""

    def __init__(self, checkpoint: Checkpoint, args: EngineArgs, make_observer: MakeObserver | None = None) -> None:
        limits = args.limits(checkpoint.config, max_num_seqs=256, max_num_batched_tokens=8192)
        self.config = args.sized(limits, args.num_gpu_blocks_override or 16384, 1)
        self._overlaps = False  # a device that answers at once leaves nothing to hide
        self._make_observer, self._name = make_observer, "nothing"
        self._begin()

    def _made_device(self) -> TorchDevice:
        return InstantDevice()  # type: ignore[return-value]  # it has what a core asks of a device


@dataclass(frozen=True)
class Load:
    """How many callers ask for how many tokens, how often, and how long they lag."""

    num_connections: int
    num_tokens: int
    num_rounds: int = 1
    pause_s: float = 0.0


@dataclass(frozen=True)
class Told:
    """What callers counted: tokens, events, the seconds until all were there, and the seconds to each first token."""

    num_tokens: int
    num_events: int
    seconds: float
    first_s: Sequence[float]


class BenchServer:
    """A server without a model on a free port, in a thread of this process."""

    def __init__(self, model: str | None, num_connections: int) -> None:
        import uvicorn

        from optimized.llm import LLM
        from optimized.server.app import make_app
        from optimized.server.limits import Limits
        from optimized.server.serve import Address, make_engine, uvicorn_config

        llm = LLM(model, make_core=InstantCore, enable_prefix_caching=False, max_num_seqs=num_connections)
        limits = Limits(keep_alive_timeout=600, head_timeout=600, max_connections=4096, max_num_queued_reqs=4096)
        self.engine: AsyncLLM = make_engine(llm, limits, restarts=False)  # or callers would wait for what never comes
        app, _ = make_app(self.engine, [llm.checkpoint.name], limits)
        self.server: uvicorn.Server = uvicorn.Server(uvicorn_config(app, Address(port=0), limits))
        self._thread = threading.Thread(target=self._run, name="kvproof-bench-server", daemon=True)

    def __enter__(self) -> int:
        """The port."""
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)
        port: int = self.server.servers[0].sockets[0].getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        async def serve() -> None:
            try:
                await self.server.serve()
            finally:
                await self.engine.shutdown()

        asyncio.run(serve())


def bench_server(
    model: str | None, num_connections: int, num_tokens: int, num_idle: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Streamed tokens a second over so many connections, what a first token waits, and what idle connections weigh."""
    with BenchServer(model, num_connections) as port:
        say("warming up")
        asked(port, Load(4, 32))
        say(f"{num_idle} idle connections")
        idle_bytes = idle(port, num_idle)  # before there is memory that others have used
        say("one caller at a time")
        alone = asked(port, Load(1, 2, NUM_PROBES))
        say(f"{num_connections} callers")
        before = time.process_time()
        many = asked(port, Load(num_connections, num_tokens))
        cpu_s = time.process_time() - before
        say("a caller that lags")
        lagging = asked(port, Load(1, num_tokens, pause_s=PAUSE_S))
    return {
        "num_connections": num_connections,
        "tokens_per_s": round(many.num_tokens / many.seconds, 1),
        "cpu_us_per_token": round(cpu_s / many.num_tokens * 1e6, 2),
        "tokens_per_event": round(many.num_tokens / many.num_events, 2),
        "first_token_ms": round(median(alone.first_s) * 1e3, 3),
        "first_token_ms_under_load": round(median(many.first_s) * 1e3, 3),
        "tokens_per_event_lagging": round(lagging.num_tokens / lagging.num_events, 2),
        "num_idle": num_idle,
        "idle_mib": round(idle_bytes / (1 << 20), 2),
    }


def asked(port: int, load: Load) -> Told:
    """What callers in a process of their own are told."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_ask_and_tell, args=(theirs, port, load))
    process.start()
    theirs.close()  # so that its end is seen if it dies
    try:
        return _received(ours)
    finally:
        process.join()


def _received(pipe: Connection) -> Told:
    told: Told | str = pipe.recv()
    if isinstance(told, str):
        raise RuntimeError(f"a caller failed: {told}")  # noqa: TRY004  it is no wrong type, it says why
    return told


def _ask_and_tell(pipe: Connection, port: int, load: Load) -> None:
    try:
        pipe.send(asyncio.run(_ask(port, load)))
    except Exception as error:  # noqa: BLE001  whoever waits for it must not wait for ever
        pipe.send(f"{type(error).__name__}: {error}")


async def _ask(port: int, load: Load) -> Told:
    started = time.perf_counter()
    each = await asyncio.gather(*[_caller(port, load) for _ in range(load.num_connections)])
    seconds = time.perf_counter() - started
    firsts = [first for _, _, found in each for first in found]
    return Told(sum(tokens for tokens, _, _ in each), sum(events for _, events, _ in each), seconds, firsts)


async def _caller(port: int, load: Load) -> tuple[int, int, list[float]]:
    """One connection: tokens and events that it got, and how long each first event took."""
    fields = {"prompt": "a", "max_tokens": load.num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    body = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    tokens, events, firsts = 0, 0, []
    for _ in range(load.num_rounds):
        began = time.perf_counter()
        writer.write(head.encode() + b"\r\n\r\n" + body)
        found = b""
        while b"data: " not in found:
            found += await _some(reader)
            if not found.startswith(OK[: len(found)]):
                raise ConnectionError(f"the server answered {found[:200]!r}")
        firsts.append(time.perf_counter() - began)
        await asyncio.sleep(load.pause_s)
        while not found.endswith(b"0\r\n\r\n"):
            found += await _some(reader)
        usage = found[found.rindex(b'"completion_tokens":') :]
        tokens += int(usage[len('"completion_tokens":') :].split(b",")[0])
        events += found.count(b'"index":')
    writer.close()
    return tokens, events, firsts


async def _some(reader: asyncio.StreamReader) -> bytes:
    more = await reader.read(1 << 16)
    if not more:
        raise ConnectionError("the server hung up")
    return more


def idle(port: int, count: int) -> int:
    """The bytes by which this process grows for so many connections that have asked once and say nothing more."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_wait, args=(theirs, port, count))
    before = _resident_bytes()
    process.start()
    theirs.close()
    ours.recv()
    grown = _resident_bytes() - before
    ours.send("enough")
    process.join()
    return grown


def _wait(pipe: Connection, port: int, count: int) -> None:
    async def connect() -> None:
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            await reader.readuntil(b"}")
            kept.append(writer)
        pipe.send("all are here")
        await asyncio.to_thread(pipe.recv)

    kept: list[asyncio.StreamWriter] = []
    asyncio.run(connect())


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
