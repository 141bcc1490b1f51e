"""Server-sent events to one client: as fast as it reads, and not at all when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from optimized.fault_points import FaultPoint, reach


class EventStream(Response):
    """A response whose body is events. ``events`` is closed when the client goes away, which ends its requests, and what
    they wait to begin is given up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], begin: asyncio.Future[AsyncIterator[bytes]] | None = None) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self.begin = begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, TimeoutError, OSError):
                await sending
            if self.begin is not None:
                self.begin.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self.events) as events:  # type: ignore[type-var]  # they are generators
            async for event in events:
                reach(FaultPoint.WRITE_EVENT)
                # A client that does not read makes this wait, until its connection gives it up.
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def kept_alive(events: AsyncIterator[bytes], interval: float) -> AsyncIterator[bytes]:
    """The events, and a comment after each ``interval`` seconds without one, so that no proxy thinks that nothing comes."""
    pending = asyncio.ensure_future(_next(events))
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=interval)
            if not done:
                yield KEEP_ALIVE
                continue
            news = pending.result()
            if news is None:
                return
            yield news
            pending = asyncio.ensure_future(_next(events))
    finally:
        pending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pending
        await events.aclose()  # type: ignore[attr-defined]  # they are generators


async def _next(events: AsyncIterator[bytes]) -> bytes | None:
    """The next event, None after the last one. A task can not raise ``StopAsyncIteration``."""
    return await anext(events, None)


KEEP_ALIVE = b": keep-alive\n\n"


def event(json: bytes) -> bytes:
    """One event of one line."""
    reach(FaultPoint.MAKE_EVENT)
    return b"data: " + json + b"\n\n"


DONE = event(b"[DONE]")

EVENT_SCHEMA = {
    "description": "An event: a chunk of the answer, an error, or the end.",
    "type": "object",
    "required": ["data"],
    "properties": {
        "event": {"const": "message"},
        "data": {
            "anyOf": [
                {"type": "string", "contentMediaType": "application/json", "pattern": "^\\{.*\\}$"},
                {"const": "[DONE]"},
            ]
        },
    },
}
"""What ``/openapi.json`` says of an event: in OpenAPI 3.1 the schema of a stream is that of each event, and no text."""
