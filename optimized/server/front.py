"""How a server shows itself, besides its limits: what it answers to whom, and what it says of requests."""

from __future__ import annotations

from dataclasses import dataclass

from optimized.block_residency import BlockResidency
from optimized.server.page import Renderer


@dataclass(frozen=True, kw_only=True)
class Front:
    """Choices of whoever starts a server. Those that ``kvproof serve`` has flags for have their names."""

    shared_prefix_cache: bool = False
    """Whether callers with different keys share cached blocks."""
    renderer: Renderer | None = None
    """Draws the map of the page at ``/``; without one there is no page."""
    self_check: str = "off"
    """How the engine is judged while it serves."""
    residency: BlockResidency | None = None
    """How long blocks keep what is in them, if somebody looks."""
