"""Memory maps: which block holds what, for whom, as text and as SVG. The one renderer of this project."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar
from xml.sax.saxutils import escape
from zlib import crc32

from spec.block_table import first_kept, room
from spec.replay import step
from spec.vocabulary import Add, BlockId, Config, Event, RequestId, SeqId, Slot, State, StepId, initial_state

T = TypeVar("T")
EMPTY, PLANNED, FILLED = ".", "_", "*"
"""How a slot looks that holds nothing, one that a step is about to write, and one whose token is nobody's business."""


@dataclass(frozen=True)
class Block:
    """One block as it is drawn: who holds it, and the request that gives it its colour."""

    block_id: BlockId
    slots: tuple[str, ...]
    seq_ids: tuple[SeqId, ...] = ()
    step_ids: tuple[StepId, ...] = ()
    ref_count: int = 0
    request: RequestId | None = None
    cached: bool = False
    changed: bool = False

    @property
    def shared(self) -> bool:
        """Whether it stands in several block tables."""
        return len(self.seq_ids) > 1

    @property
    def held(self) -> bool:
        return bool(self.seq_ids or self.step_ids)

    @property
    def label(self) -> str:
        """Who holds the block."""
        holders = [*map(str, self.seq_ids), *(f"step{step_id}" for step_id in self.step_ids)]
        return " ".join(holders) if holders else "cached" if self.cached else "free"


@dataclass(frozen=True)
class Line:
    """One sequence or one queue, in words; ``request`` gives it its colour."""

    name: str
    text: str
    request: RequestId | None = None


@dataclass(frozen=True)
class Map:
    """One state as it is drawn."""

    caption: str
    blocks: tuple[Block, ...]
    host_blocks: tuple[Block, ...] = ()
    lines: tuple[Line, ...] = ()


def memory_map(s: State, caption: str = "") -> Map:
    """The map of a state. It draws broken states too."""
    return Map(caption, tuple(_device_blocks(s)), tuple(_host_blocks(s)), tuple(_lines(s)))


def map_without_tokens(s: State, caption: str = "") -> Map:
    """The map of a state for whoever may see how much is stored, and not what. A cached block is full."""

    def blank(block: Block) -> Block:
        full = block.cached and not block.held
        looks = tuple(look if look in (EMPTY, PLANNED) and not full else FILLED for look in block.slots)
        return replace(block, slots=looks)

    seen = memory_map(s, caption)
    blocks, host_blocks = (tuple(map(blank, some)) for some in (seen.blocks, seen.host_blocks))
    return replace(seen, blocks=blocks, host_blocks=host_blocks, lines=tuple(_lines(s, with_tokens=False)))


def frames(config: Config, events: Iterable[Event]) -> list[Map]:
    """A map after each event, from an empty engine on; what an event changed is marked."""
    state = initial_state(config)
    maps = [memory_map(state, "an empty engine")]
    for event in events:
        state = step(state, event)
        maps.append(mark_changes(maps[-1], memory_map(state, caption_of(event))))
    return maps


def mark_changes(before: Map, after: Map) -> Map:
    """The second map, its blocks marked that are not as in the first."""
    old = {block.block_id: replace(block, changed=False) for block in before.blocks}
    return replace(after, blocks=tuple(replace(b, changed=old.get(b.block_id) != b) for b in after.blocks))


def caption_of(event: Event) -> str:
    """An event in a few words."""
    if isinstance(event, Add):
        request = event.request
        return f"Add request {request.request_id}, prompt {_tokens(request.prompt)}, max_tokens {request.max_tokens}"
    facts = (f"{name.removesuffix('_id')} {_words(value)}" for name, value in vars(event).items())
    return f"{type(event).__name__} {', '.join(facts)}".strip()


def _words(value: object) -> str:
    return _tokens(value) if isinstance(value, tuple) else str(getattr(value, "value", value))


def _tokens(tokens: Sequence[object]) -> str:
    return " ".join(map(str, tokens)) or "none"


def _device_blocks(s: State) -> Iterator[Block]:
    size = s.config.block_size
    looks = {**_expected(s), **{at: str(prefix[-1]) for at, prefix in s.cells.items() if prefix}}
    holders: dict[BlockId, list[SeqId]] = {}
    for i, table in s.block_tables.items():
        for block in dict.fromkeys(table):
            holders.setdefault(block, []).append(i)
    for block in range(s.config.num_blocks):
        seqs = holders.get(block, [])
        steps = [step_id for step_id, flight in s.flights.items() if block in flight.holds]
        yield Block(
            block,
            tuple(looks.get(at, EMPTY) for at in range(block * size, (block + 1) * size)),
            seq_ids=tuple(seqs),
            step_ids=tuple(steps),
            ref_count=s.ref_count[block],
            request=next((s.seqs[i].request_id for i in seqs if i in s.seqs), None),
            cached=block in s.cached,
        )


def _expected(s: State) -> dict[Slot, str]:
    """What the slots of all sequences look like if everything is where the tables say."""
    looks: dict[Slot, str] = {}
    for i, table in s.block_tables.items():
        if i not in s.seqs:
            continue
        seq, size = s.seqs[i], s.config.block_size
        for position in range(first_kept(seq, size), room(seq)):
            index = position // size - seq.num_dropped_blocks
            if 0 <= index < len(table):
                token = seq.tokens[position] if 0 <= position < len(seq.tokens) else "?"
                look = str(token) if position < seq.num_computed_tokens else PLANNED
                looks[table[index] * size + position % size] = look
    return looks


def _host_blocks(s: State) -> Iterator[Block]:
    size = s.config.block_size
    for block in range(s.config.num_host_blocks):
        seqs = [i for i, table in s.host_tables.items() if block in table]
        prefixes = (s.host_cells.get(at) for at in range(block * size, (block + 1) * size))
        looks = tuple(str(prefix[-1]) if prefix else EMPTY for prefix in prefixes)
        request = next((s.seqs[i].request_id for i in seqs if i in s.seqs), None)
        yield Block(block, looks, seq_ids=tuple(seqs), ref_count=len(seqs), request=request)


MOST_TOKENS = 16
"""A longer sequence is shown by its beginning and its end."""


MANY_BLOCKS = 64
"""A pool of more blocks is drawn as a field of small squares, and its sequences by their numbers only."""


def _lines(s: State, with_tokens: bool = True) -> Iterator[Line]:
    if s.requests:
        yield Line("running", _tokens(s.running))
        yield Line("waiting", " ".join(_waiting(s, request_id) for request_id in s.waiting) or "none")
    for i, seq in s.seqs.items():
        tokens = [*map(str, seq.tokens[: seq.num_prompt_tokens])]
        tokens += ["+", *map(str, seq.tokens[seq.num_prompt_tokens :])] if seq.num_output_tokens > 0 else []
        shown = tokens if len(tokens) <= MOST_TOKENS else [*tokens[: MOST_TOKENS - 4], "...", *tokens[-3:]]
        if len(_tokens(shown)) > 5 * MOST_TOKENS:
            shown = [*tokens[:5], "...", *tokens[-3:]]
        counts = f"computed {seq.num_computed_tokens} of {seq.num_tokens}"
        if s.config.num_blocks > MANY_BLOCKS or not with_tokens:
            where = (
                f"{len(s.host_tables[i])} host blocks"
                if i in s.host_tables
                else f"{len(s.block_tables.get(i, ()))} blocks"
            )
            yield Line(f"seq {i}", f"{counts}   {where}", seq.request_id)
            continue
        yield Line(f"seq {i}", f"{_tokens(shown)}   {counts}   {_where(s, i)}", seq.request_id)


def _waiting(s: State, request_id: RequestId) -> str:
    times = s.num_preemptions.get(request_id, 0)
    return f"{request_id} (preempted {times}x)" if times else str(request_id)


def _where(s: State, seq_id: SeqId) -> str:
    if seq_id in s.host_tables:
        return f"host {_tokens(s.host_tables[seq_id])}"
    return f"table {_tokens(s.block_tables.get(seq_id, ()))}"


# As text


def text(picture: Map, width: int = 100) -> str:
    """Three rows a block: its id and reference count, its slots, its sequences. Then the queues and the sequences."""
    rows = [*_text_blocks(picture.blocks, "block", width), *_text_blocks(picture.host_blocks, "host", width)]
    rows += [f"{line.name:7} {line.text}" for line in picture.lines]
    return "\n".join([picture.caption, *rows] if picture.caption else rows)


def _text_blocks(blocks: Sequence[Block], name: str, width: int) -> Iterator[str]:
    names = (f"{name:5}", "slots", "seqs ")
    columns = [_text_block(block) for block in blocks]
    for row in _rows(columns, [len(column[0]) + 2 for column in columns], width - len(name)):
        yield from ("  ".join(parts).rstrip() for parts in zip(names, *row, strict=True))


def _text_block(block: Block) -> tuple[str, ...]:
    count = f" x{block.ref_count}" if block.ref_count else ""
    rows = (f" {block.block_id}{count}", f"[{' '.join(block.slots)}]", f" {block.label}")
    return tuple(row.ljust(max(map(len, rows))) for row in rows)


def _rows(items: Sequence[T], widths: Sequence[float], limit: float) -> Iterator[list[T]]:
    """The items in rows no wider than the limit."""
    row: list[T] = []
    used = 0.0
    for item, width in zip(items, widths, strict=True):
        if row and used + width > limit:
            yield row
            row, used = [], 0.0
        row.append(item)
        used += width
    if row:
        yield row


# As SVG. Renderers without variables take the light colours: each colour stands twice.

COLOURS = (
    ("#bfdbfe", "#1e40af"),
    ("#fed7aa", "#9a3412"),
    ("#bbf7d0", "#166534"),
    ("#fbcfe8", "#9d174d"),
    ("#fde68a", "#78500b"),
    ("#ddd6fe", "#5b21b6"),
    ("#a5f3fc", "#155e75"),
    ("#e7e5e4", "#57534e"),
)
"""The colours of requests, light and dark; the ninth request has the first colour again."""

VARIABLES = {
    "ink": ("#1c1917", "#f5f5f4"),
    "quiet": ("#57534e", "#c7c2bd"),
    "line": ("#78716c", "#a8a29e"),
    "back": ("#ffffff", "#1c1917"),
    "mark": ("#b91c1c", "#fca5a5"),
    **{f"request{i}": pair for i, pair in enumerate(COLOURS)},
}
WIDTH, MARGIN, ROW, LETTER = 720, 12, 18, 7.3
BLOCK_HEIGHT, GAP, SMALL = 26, 14, 16


def style() -> str:
    """The style sheet, the same for all pictures."""
    light, dark = ("".join(f"--kv-{name}:{pair[i]};" for name, pair in VARIABLES.items()) for i in (0, 1))

    def paint(name: str, what: str) -> str:
        return f"{what}:{VARIABLES[name][0]};{what}:var(--kv-{name});"

    return (
        f"svg.kv{{{light}font:12px ui-monospace,Menlo,Consolas,monospace;max-width:100%;height:auto}}"
        f"@media (prefers-color-scheme:dark){{svg.kv{{{dark}}}}}"
        f'[data-theme="light"] svg.kv{{{light}}}[data-theme="dark"] svg.kv{{{dark}}}'
        f".kv-back{{{paint('back', 'fill')}}}"
        f".kv-ink{{{paint('ink', 'fill')}}}"
        f".kv-quiet{{{paint('quiet', 'fill')}}}"
        f".kv-caption{{{paint('ink', 'fill')}font-weight:bold}}"
        f".kv-box{{fill:none;{paint('line', 'stroke')}}}"
        f".kv-free{{fill:none;{paint('line', 'stroke')}stroke-dasharray:3 3}}"
        f".kv-changed{{fill:none;{paint('mark', 'stroke')}stroke-width:2.5}}"
        f".kv-hatch{{{paint('ink', 'stroke')}stroke-width:1.2;stroke-opacity:.45}}"
        f".kv-hatch-free{{{paint('line', 'fill')}fill-opacity:.35}}"
        f".kv-cell{{{paint('line', 'stroke')}stroke-opacity:.5}}"
        + "".join(f".kv-request{i}{{{paint(f'request{i}', 'fill')}}}" for i in range(len(COLOURS)))
    )


def svg(pictures: Map | Sequence[Map], title: str) -> str:
    """One map, or a strip of them one below the other, with a text alternative for whoever does not see it."""
    maps = [pictures] if isinstance(pictures, Map) else list(pictures)
    top, body = float(MARGIN), list[str]()
    hatch = f"kv{crc32(repr((title, maps)).encode()):08x}"
    shape = _shape(maps, hatch)
    for picture in maps:
        drawn, top = _svg_map(picture, top, shape)
        body += drawn
    wide = WIDTH + 2 * MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kv" role="img" aria-labelledby="{hatch}t {hatch}d" '
        f'width="{wide}" height="{top:g}" viewBox="0 0 {wide} {top:g}">'
    )
    words = escape(" ".join(describe(picture) for picture in maps))
    alternative = [f'<title id="{hatch}t">{escape(title)}</title>', f'<desc id="{hatch}d">{words}</desc>']
    back = f'<rect class="kv-back" width="{wide}" height="{top:g}"/>'
    return "\n".join([head, *alternative, f"<style>{style()}</style>", pattern(hatch), back, *body, "</svg>\n"])


@dataclass(frozen=True)
class Film:
    """Maps of one engine, drawn over each other: pieces of SVG, and for each map the pieces that it is made of. A block
    that did not change is one piece in many maps."""

    width: float
    height: float
    defs: str
    pieces: tuple[str, ...]
    frames: tuple[tuple[int, ...], ...]


def film(maps: Sequence[Map]) -> Film:
    """The maps, all in one layout."""
    shape, places, high = _shape(maps, "kvfilm"), dict[str, int](), float(MARGIN)
    drawn = [_svg_map(picture, MARGIN, shape) for picture in maps]
    frames = tuple(tuple(places.setdefault(piece, len(places)) for piece in pieces) for pieces, _ in drawn)
    high = max((bottom for _, bottom in drawn), default=high)
    return Film(WIDTH + 2 * MARGIN, high, pattern("kvfilm"), tuple(places), frames)


def pattern(name: str) -> str:
    """How shared blocks are hatched."""
    return (
        f'<defs><pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="kv-hatch" d="M0 0V6"/></pattern></defs>'
    )


def describe(picture: Map) -> str:
    """What a map shows, in sentences."""
    parts = [f"{picture.caption}:"] if picture.caption else []
    for name, blocks in (("block", picture.blocks), ("host block", picture.host_blocks)):
        used = [block for block in blocks if block.held or block.cached]
        parts += [_describe_block(name, block) for block in used]
        if blocks:
            free = [str(block.block_id) for block in blocks if block not in used]
            parts.append(f"Free {name}s: {_tokens(free)}.")
    parts += [f"{line.name}: {' '.join(line.text.split())}." for line in picture.lines]
    return " ".join(parts)


def _describe_block(name: str, block: Block) -> str:
    holds = [look for look in block.slots if look not in (EMPTY, PLANNED)]
    holders = [*(f"sequence {i}" for i in block.seq_ids), *(f"step {i}" for i in block.step_ids)]
    state = f"held by {' and '.join(holders)}" if holders else "cached"
    shared = f", shared, reference count {block.ref_count}" if block.shared else ""
    return f"{name.capitalize()} {block.block_id}: {state}{shared}, holds {_tokens(holds)}."


@dataclass(frozen=True)
class Shape:
    """What all blocks of a picture have in common: the widths of a slot and of a block with the gap after it, whether
    slots are wide enough for tokens, the pattern of shared blocks, and whether a block is one small square."""

    slot: float
    column: float
    tokens: bool
    hatch: str
    small: bool = False


def _shape(maps: Sequence[Map], hatch: str) -> Shape:
    if any(len(picture.blocks) > MANY_BLOCKS for picture in maps):
        return Shape(SMALL - 2, SMALL, False, hatch, small=True)
    blocks = [block for picture in maps for block in (*picture.blocks, *picture.host_blocks)]
    num_slots = max((len(block.slots) for block in blocks), default=1)
    longest = max((len(look) for block in blocks for look in block.slots), default=1)
    tokens = num_slots <= 8
    slot = max(20, LETTER * longest + 8) if tokens else 9
    labels = max((LETTER * len(_svg_label(block)) for block in blocks), default=0)
    return Shape(slot, max(slot * num_slots, labels, 44) + GAP, tokens, hatch)


def _svg_label(block: Block) -> str:
    return f"seq {block.label}" if block.seq_ids else block.label


def _svg_map(picture: Map, top: float, shape: Shape) -> tuple[list[str], float]:
    """The map, and where the next one begins."""
    out: list[str] = []
    if picture.caption:
        out.append(_svg_text("kv-caption", MARGIN, top + 12, picture.caption))
        top += ROW + 4
    for name, blocks in (("device", picture.blocks), ("host", picture.host_blocks)):
        for row in _rows(blocks, [shape.column] * len(blocks), WIDTH - 60 + GAP):
            out.append(_svg_text("kv-quiet", MARGIN, top + (10 if shape.small else ROW + 17), name))
            left: float = MARGIN + 60
            for block in row:
                draw = _svg_small_block if shape.small else _svg_block
                out.append("\n".join(draw(block, left, top, shape)))
                left += shape.column
            top += SMALL if shape.small else BLOCK_HEIGHT + 2 * ROW + 8
        top += 8 if shape.small and blocks else 0
    for line in picture.lines:
        if line.request is not None:
            colour = line.request % len(COLOURS)
            out.append(
                f'<rect class="kv-request{colour}" x="{MARGIN}" y="{top}" width="52" height="{ROW - 3}" rx="3"/>'
            )
        out.append(_svg_text("kv-ink", MARGIN + 3, top + 12, line.name))
        out.append(_svg_text("kv-ink", MARGIN + 62, top + 12, line.text))
        top += ROW
    return out, top + MARGIN


def _svg_small_block(block: Block, left: float, top: float, shape: Shape) -> Iterator[str]:
    """A square as full as the block; what it holds is said where the pointer rests."""
    place = f'x="{left:g}" width="{shape.slot:g}"'
    outline = f'{place} y="{top:g}" height="{shape.slot:g}" rx="2"'
    high = shape.slot * sum(look not in (EMPTY, PLANNED) for look in block.slots) / len(block.slots)
    if high:
        fill = "kv-hatch-free" if block.request is None else f"kv-request{block.request % len(COLOURS)}"
        yield f'<rect class="{fill}" {place} y="{top + shape.slot - high:.1f}" height="{high:.1f}"/>'
    if block.shared:
        yield f'<rect fill="url(#{shape.hatch})" {outline}/>'
    look = "kv-changed" if block.changed else "kv-box" if block.held else "kv-free"
    yield f'<rect class="{look}" {outline}><title>{escape(f"block {block.block_id}: {_svg_label(block)}")}</title></rect>'


def _svg_block(block: Block, left: float, top: float, shape: Shape) -> Iterator[str]:
    """Its id and count, its slots, its holders."""
    y, wide = top + ROW, shape.slot * len(block.slots)
    yield _svg_text("kv-quiet", left, top + 13, str(block.block_id))
    if block.ref_count:
        badge = left + max(wide - 9, 30)
        colour = "kv-box" if block.request is None else f"kv-request{block.request % len(COLOURS)}"
        yield f'<circle class="{colour}" cx="{badge:g}" cy="{top + 8:g}" r="8"/>'
        yield _svg_text("kv-ink", badge, top + 12, str(block.ref_count), middle=True)
    for i, look in enumerate(block.slots):
        x = left + i * shape.slot
        if look not in (EMPTY, PLANNED):
            fill = "kv-free" if block.request is None else f"kv-cell kv-request{block.request % len(COLOURS)}"
            yield f'<rect class="{fill}" x="{x:g}" y="{y:g}" width="{shape.slot:g}" height="{BLOCK_HEIGHT}"/>'
        if look != EMPTY and shape.tokens:
            ink = "kv-ink" if block.held else "kv-quiet"
            yield _svg_text(ink, x + shape.slot / 2, y + 17, look, middle=True)
    outline = f'x="{left:g}" y="{y:g}" width="{wide:g}" height="{BLOCK_HEIGHT}" rx="2"'
    if block.shared:
        yield f'<rect fill="url(#{shape.hatch})" {outline}/>'
    yield f'<rect class="{"kv-box" if block.held else "kv-free"}" {outline}/>'
    if block.changed:
        yield f'<rect class="kv-changed" {outline}/>'
    yield _svg_text("kv-ink" if block.held else "kv-quiet", left, y + BLOCK_HEIGHT + 14, _svg_label(block))


def _svg_text(colour: str, x: float, y: float, words: str, *, middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text class="{colour}" x="{x:g}" y="{y:g}"{anchor} xml:space="preserve">{escape(words)}</text>'
