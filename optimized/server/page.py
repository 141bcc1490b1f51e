"""The built-in page: a chat, and the cache as it is now. Only what changed of the map goes to those who look at it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import html
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import HTMLResponse

from optimized.async_llm import AsyncLLM
from optimized.server.errors import RequestError
from optimized.server.stream import event
from optimized.snapshot import Look
from spec.vocabulary import State

INTERVAL_S = 0.25
"""Nobody sees more than four maps a second."""

KEEP_ALIVE_S = 15.0
MAX_VIEWERS = 8
MAX_BLOCKS = 8192
"""Blocks of the largest cache that is drawn: each is a piece of every new viewer's first map."""
FOLDER = Path(__file__).parent
encode = msgspec.json.Encoder().encode

SLOTS = {"tokens": "tokens", "reserved": "reserved", "internal": "never used", "external": "free"}
"""What the page calls the classes of slots."""


@dataclass(frozen=True)
class Drawing:
    """A map of the cache as pieces of SVG, in an order in which most stay what they are from map to map."""

    width: float
    height: float
    defs: str
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Renderer:
    """Whoever starts the server knows how a state is drawn: the style sheet of all drawings, and one drawing."""

    style: str
    draw: Callable[[State], Drawing]


def html_of(model: str, style: str) -> HTMLResponse:
    """The page, whole: it asks for nothing but the API, and its browser sees to that."""
    css, script = _read("page.css") + style, _read("page.js")
    body = _read("page.html").replace("{{model}}", html.escape(model))
    body = body.replace("{{style}}", css).replace("{{script}}", script)
    policy = (
        f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(script)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
    return HTMLResponse(body, headers=headers)


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class LiveMap:
    """The newest map, drawn once for all who look."""

    def __init__(self, engine: AsyncLLM, renderer: Renderer) -> None:
        self._engine = engine
        self._renderer = renderer
        self._lock = asyncio.Lock()
        self._look: Look | None = None
        self._drawing: Drawing | None = None
        self._drawn_at = 0.0
        self._num_viewers = 0

    async def events(self, is_over: Callable[[], bool]) -> AsyncGenerator[bytes]:
        """Events for one more viewer: the whole map, and then what changed. Raises ``RequestError`` if there are too
        many viewers, or blocks."""
        if self._engine.llm.config.num_blocks > MAX_BLOCKS:
            raise RequestError(
                404, "not_found", f"the cache has more than {MAX_BLOCKS} blocks: it is too large for a map"
            )
        if self._num_viewers >= MAX_VIEWERS:
            raise RequestError(503, "too_many_viewers", f"{MAX_VIEWERS} others look at the map")
        events = self._events(is_over)
        await anext(events)  # counted before anybody else is asked, and given back however it ends
        return events

    async def _events(self, is_over: Callable[[], bool]) -> AsyncGenerator[bytes]:
        self._num_viewers += 1
        try:
            yield b""
            seen: Drawing | None = None
            told = time.monotonic()
            while not is_over():
                look, drawing = await self._newest()
                if drawing is not seen:
                    yield event(encode(_news(seen, drawing, look)))
                    seen, told = drawing, time.monotonic()
                elif time.monotonic() - told > KEEP_ALIVE_S:
                    yield b": still here\n\n"
                    told = time.monotonic()
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._num_viewers -= 1

    async def _newest(self) -> tuple[Look, Drawing]:
        async with self._lock:
            if self._look is None or self._drawing is None or time.monotonic() - self._drawn_at >= INTERVAL_S:
                look = await self._engine.look()
                if look != self._look or self._drawing is None:
                    self._drawing = await asyncio.to_thread(self._renderer.draw, look.state)
                self._look, self._drawn_at = look, time.monotonic()
            return self._look, self._drawing


def _news(seen: Drawing | None, now: Drawing, look: Look) -> dict[str, Any]:
    """What a viewer does not know yet."""
    known = () if seen is None else seen.pieces
    changed = {str(i): piece for i, piece in enumerate(now.pieces) if i >= len(known) or known[i] != piece}
    news = {"width": now.width, "height": now.height, "count": len(now.pieces), "pieces": changed}
    if seen is None:
        news["defs"] = now.defs
    slots = {SLOTS[name]: count for name, count in asdict(look.slots).items()}
    return {**news, "slots": slots, "words": words(look)}


def words(look: Look) -> str:
    """The map in a sentence or two, for whoever does not see it."""
    state = look.state
    held = [count for count in state.ref_count if count]
    shared = sum(count > 1 for count in held)
    cached = sum(not state.ref_count[block] for block in state.cached)
    queue = ", ".join(
        f"{each} (preempted {times}x)" if (times := state.num_preemptions.get(each, 0)) else f"{each}"
        for each in state.waiting
    )
    return (
        f"Requests that run: {', '.join(map(str, state.running)) or 'none'}. Requests that wait: {queue or 'none'}. "
        f"Blocks of {state.config.block_size} tokens: {len(state.ref_count)}; held: {len(held)}, of these shared: {shared}; "
        f"cached and held by nobody: {cached}. Preemptions so far: {look.num_preemptions}."
    )
