"""The life of a block and of a request: the places there are, and the events that move between them, found by a search."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from math import hypot
from typing import TypeAlias
from xml.sax.saxutils import escape

from spec.canonical import Key
from spec.engine import EngineFactory
from spec.explore import explore
from spec.ledger import events_of_turn
from spec.picture import style
from spec.replay import step
from spec.schedules import LOADS, Load, schedule_key, turns
from spec.scope import CACHE, FLIGHTS, PLAIN, ROLLBACK, SWAP, Scope
from spec.sharing import num_entries
from spec.vocabulary import Abort, BlockId, Config, Event, RequestId, State, all_blocks, seqs_of

Edges: TypeAlias = Mapping[tuple[str, str], tuple[str, ...]]
"""From one place to another: the kinds of event that do it."""

BLOCK_PLACES: Mapping[str, tuple[float, float]] = {
    "in flight": (0.5, 0),
    "free": (0, 1),
    "held": (1, 1),
    "shared": (2, 1),
    "cached, free": (0, 2.3),
    "cached, held": (1, 2.3),
    "cached, shared": (2, 2.3),
    "cached, in flight": (0.5, 3.3),
}
"""Where a block can be, and where that is drawn: column and row."""

REQUEST_PLACES: Mapping[str, tuple[float, float]] = {
    "not there": (0, 0),
    "waiting": (1, 0),
    "running": (2, 0),
    "finished": (3, 0),
    "aborted": (0, 1),
    "waiting, preempted": (1, 1),
    "waiting, swapped": (1, 2),
    "running, swapped": (2, 2),
}
"""Where a request can be. It is swapped while any of its sequences is in host memory."""

_WINDOW = Config(num_blocks=4, block_size=2, window=3, num_host_blocks=2)
_CACHED = Config(num_blocks=3, block_size=2, prefix_cache=True, num_host_blocks=2)
BLOCK_SCOPES = (
    Scope(_WINDOW, max_tokens=5, operations=PLAIN | SWAP | ROLLBACK),
    Scope(
        _CACHED,
        num_token_values=1,
        max_flights=1,
        max_append=2,
        operations=PLAIN | CACHE | SWAP | FLIGHTS | ROLLBACK,
    ),
)
"""Where the life of a block is looked at. In the lenses, which take longer, blocks move in the same ways."""

REQUEST_LOADS = tuple(replace(LOADS[name], max_requests=3) for name in ("fcfs", "recovery"))
"""Under what the life of a request is looked at."""

ENDS = ("free", "not there", "finished", "aborted")
"""Where a life begins or ends."""


def place_of_block(s: State, block: BlockId) -> str:
    """Where the block is: who holds it, and whether the prefix cache names it."""
    entries = num_entries(s, block)
    held_by_step = any(block in flight.holds for flight in s.flights.values())
    where = "shared" if entries > 1 else "held" if entries else "in flight" if held_by_step else "free"
    return f"cached, {where}" if block in s.cached else where


def place_of_request(s: State, request_id: RequestId) -> str:
    """Where the request is: in which of the two lines, and what became of its blocks."""
    line = "waiting" if request_id in s.waiting else "running"
    if any(i in s.host_tables for i in seqs_of(s, request_id)):
        return f"{line}, swapped"
    return "waiting, preempted" if line == "waiting" and s.num_preemptions.get(request_id) else line


class Moves:
    """What was seen to move, collected step by step."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], set[str]] = {}

    def block(self, before: State, event: Event, after: State) -> None:
        for block in all_blocks(before):
            self._enter(place_of_block(before, block), event, place_of_block(after, block))

    def request(self, before: State, event: Event, after: State) -> None:
        gone = "aborted" if isinstance(event, Abort) else "finished"
        for request_id in before.requests.keys() | after.requests.keys():
            old = place_of_request(before, request_id) if request_id in before.requests else "not there"
            self._enter(old, event, place_of_request(after, request_id) if request_id in after.requests else gone)

    def _enter(self, old: str, event: Event, new: str) -> None:
        if old != new:
            self.seen.setdefault((old, new), set()).add(type(event).__name__)

    def edges(self) -> Edges:
        return {pair: tuple(sorted(names)) for pair, names in sorted(self.seen.items())}


def life_of_a_block(scopes: Iterable[Scope] = BLOCK_SCOPES) -> Edges:
    """How blocks move in every state of these scopes."""
    moved = Moves()
    for scope in scopes:
        explore(scope, on_edge=moved.block)
    return moved.edges()


def life_of_a_request(loads: Iterable[Load], make: EngineFactory) -> Edges:
    """How requests move in every state that an engine can be in under these loads, if anybody may give up at any time."""
    moved = Moves()
    for load in loads:
        for before, event, after in _steps_under(load, make):
            moved.request(before, event, after)
    return moved.edges()


def _steps_under(load: Load, make: EngineFactory) -> Iterator[tuple[State, Event, State]]:
    engine = make(load.config)
    first = engine.snapshot()
    seen: set[Key] = {schedule_key(first)}
    queue = deque([(engine, first)])
    while queue:
        engine, state = queue.popleft()
        for request_id in state.requests:
            yield state, Abort(request_id), step(state, Abort(request_id))
        for turn in turns(state, load):
            twin = deepcopy(engine)
            events, shown = events_of_turn(twin, state, turn, load)
            at = state
            for event in events:
                yield at, event, (after := step(at, event))
                at = after
            if schedule_key(shown) not in seen:
                seen.add(schedule_key(shown))
                queue.append((twin, shown))


# The picture

COLUMN, ROW, BOX_WIDTH, BOX_HEIGHT, LETTER, LINE, MARGIN = 240, 138, 136, 34, 7.3, 13, 12
ASIDE = 12
"""How far two arrows that go both ways keep from the middle."""


@dataclass(frozen=True)
class Rectangle:
    """A box, or the room of some words, around its middle."""

    x: float
    y: float
    width: float = BOX_WIDTH
    height: float = BOX_HEIGHT

    def meets(self, other: "Rectangle") -> bool:
        beside = abs(self.x - other.x) * 2 >= self.width + other.width
        return not beside and abs(self.y - other.y) * 2 < self.height + other.height

    @property
    def shape(self) -> str:
        left, top = self.x - self.width / 2, self.y - self.height / 2
        return f'x="{left:.1f}" y="{top:.1f}" width="{self.width:.1f}" height="{self.height:.1f}"'


def svg(edges: Edges, places: Mapping[str, tuple[float, float]], title: str) -> str:
    """The places and what moves between them, in the colours of the memory maps, with a text alternative."""
    boxes = {
        name: Rectangle(BOX_WIDTH / 2 + MARGIN + column * COLUMN, BOX_HEIGHT / 2 + MARGIN + row * ROW)
        for name, (column, row) in places.items()
    }
    wide = max(box.x for box in boxes.values()) + BOX_WIDTH / 2 + MARGIN
    high = max(box.y for box in boxes.values()) + BOX_HEIGHT / 2 + MARGIN
    name = "kv-" + "-".join(title.lower().split())
    arrows, words, taken = list[str](), list[str](), list(boxes.values())
    for (old, new), names in edges.items():
        begin, end = _ends(boxes[old], boxes[new], ASIDE if (new, old) in edges else 0)
        room = _free_room(begin, end, names, taken)
        taken.append(room)
        path = f"M{begin.x:.1f} {begin.y:.1f}L{end.x:.1f} {end.y:.1f}"
        arrows.append(f'<path class="kv-box" d="{path}" marker-end="url(#{name}-tip)"/>')
        words += _words(room, names)
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" class="kv" role="img" aria-labelledby="{name}-t {name}-d" '
                f'width="{wide:.0f}" height="{high:.0f}" viewBox="0 0 {wide:.0f} {high:.0f}">'
            ),
            f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(describe(edges))}</desc>',
            f"<style>{style()}</style>",
            (
                f'<defs><marker id="{name}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                'orient="auto"><path class="kv-ink" d="M0 0L8 4L0 8z"/></marker></defs>'
            ),
            f'<rect class="kv-back" width="{wide:.0f}" height="{high:.0f}"/>',
            *arrows,
            *words,
            *(line for place, box in boxes.items() for line in _box(place, box)),
            "</svg>\n",
        ]
    )


def describe(edges: Edges) -> str:
    """The picture in sentences."""
    return " ".join(f"From {old} to {new}: {', '.join(names)}." for (old, new), names in edges.items())


def _box(place: str, box: Rectangle) -> Iterator[str]:
    yield f'<rect class="kv-request{7 if place in ENDS else 0}" {box.shape} rx="8"/>'
    yield f'<text class="kv-ink" x="{box.x:.1f}" y="{box.y + 4:.1f}" text-anchor="middle">{escape(place)}</text>'


def _ends(old: Rectangle, new: Rectangle, aside: float) -> tuple[Rectangle, Rectangle]:
    """Where an arrow from box to box begins and ends; of two that go both ways each keeps to its own side."""
    dx, dy = new.x - old.x, new.y - old.y
    length = hypot(dx, dy)
    across, along = dx / length, dy / length
    points = []
    for box, sign in ((old, 1), (new, -1)):
        x, y = -along * aside * (1 if dx else 3), across * aside
        to_side = (box.width / 2 - sign * across / abs(across) * x) / abs(across) if across else float("inf")
        to_top = (box.height / 2 - sign * along / abs(along) * y) / abs(along) if along else float("inf")
        far = sign * (min(to_side, to_top) + 1)
        points.append(Rectangle(box.x + x + across * far, box.y + y + along * far, 0, 0))
    return points[0], points[1]


def _free_room(begin: Rectangle, end: Rectangle, names: tuple[str, ...], taken: list[Rectangle]) -> Rectangle:
    """Room for the words on their arrow, where no box and no other words are; as near to its middle as can be."""
    width, height = LETTER * max(map(len, names)) + 6, LINE * len(names) + 2
    level = abs(begin.y - end.y) < 1
    outside = (height / 2 - 6) * (1 if begin.x < end.x else -1) if level and len(names) > 1 else 0
    rooms = [
        Rectangle(begin.x + (end.x - begin.x) * at / 20, begin.y + (end.y - begin.y) * at / 20 + outside, width, height)
        for at in sorted(range(2, 19), key=lambda at: abs(at - 10))
    ]
    return next((room for room in rooms if not any(map(room.meets, taken))), rooms[0])


def _words(room: Rectangle, names: tuple[str, ...]) -> Iterator[str]:
    yield f'<rect class="kv-back" {room.shape}/>'
    for number, name in enumerate(names):
        y = room.y - room.height / 2 + LINE * (number + 1) - 2
        yield f'<text class="kv-ink" x="{room.x:.1f}" y="{y:.1f}" text-anchor="middle">{name}</text>'
