"""How a server shows itself, besides its limits: what it answers to whom, and what it says of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optimized.block_residency import BlockResidency
from optimized.server.page import Renderer
from spec.vocabulary import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class Front:
    """Choices of whoever starts a server. Those that ``kvproof serve`` has flags for have their names."""

    shared_prefix_cache: bool = False
    """Whether callers with different keys share cached blocks."""
    renderer: Renderer | None = None
    """Draws the map of the page at ``/``; without one there is no page."""
    self_check: str = "off"
    """How the engine is judged while it serves."""
    num_judged: Callable[[], int] | None = None
    """How many of the engine's events were judged, if they are."""
    num_lost_events: Callable[[], int] | None = None
    """How many of the engine's events could not be written down, if they are."""
    num_unwritten_bytes: Callable[[], int] = lambda: 0
    """How much of what is written down waits for the disk."""
    num_dropped_lines: Callable[[], int] = lambda: 0
    """How many lines of the log nobody can read."""
    residency: BlockResidency | None = None
    """How long blocks keep what is in them, if somebody looks."""
    root_path: str = ""
    """What stands before every path where a proxy passes it on."""
    disable_fastapi_docs: bool = False
    """Whether there is no ``/openapi.json``; other docs of FastAPI's are never there."""
    metrics_public: bool = False
    """Whether ``/metrics`` wants no key."""
    sse_keep_alive_interval: float = 0.0
    """Seconds after which a stream without news says that it is still there; 0 is never."""
    enable_log_requests: bool = False
    """Whether the log has each request's parameters, and at DEBUG its prompt."""
    max_log_len: int = 1000
    """Characters of each that the log has at most."""

    def __post_init__(self) -> None:
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidConfig("root_path", self.root_path, "a path that begins with / and does not end with it")
        interval = self.sse_keep_alive_interval
        if type(interval) not in (int, float) or not 0.0 <= interval < 1e9:
            raise InvalidConfig("sse_keep_alive_interval", interval, "a number of seconds, at least 0")
        if type(self.max_log_len) is not int or not 0 <= self.max_log_len < 1 << 40:
            raise InvalidConfig("max_log_len", self.max_log_len, "a whole number, at least 0")
