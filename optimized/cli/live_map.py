"""How the server's page draws the cache: with the one renderer of this project, and without anybody's tokens."""

from __future__ import annotations

from optimized.server.page import Drawing, Renderer
from spec.picture import film, map_without_tokens, style
from spec.vocabulary import State


def live_map() -> Renderer:
    """What ``kvproof serve`` gives to its page."""
    return Renderer(style(), draw)


def draw(state: State) -> Drawing:
    """The blocks, the queues and the sequences, each as one piece."""
    made = film([map_without_tokens(state)])
    [indices] = made.frames
    return Drawing(made.width, made.height, made.defs, tuple(made.pieces[index] for index in indices))
