"""The scheduler chart: who computes, runs and waits in each step of a trace, how many tokens a step has, what is free."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import NamedTuple
from xml.sax.saxutils import escape

from spec.choices import USUAL_CHOICES, Choices
from spec.picture import COLOURS, LETTER, MARGIN, Map, caption_of, mark_changes, memory_map
from spec.replay import step
from spec.vocabulary import (
    Admit,
    Begin,
    BlockId,
    Complete,
    Config,
    Event,
    Preempt,
    RequestId,
    State,
    Submit,
    initial_state,
)


class Slots(NamedTuple):
    """Where the slots of a cache are: the four add up to all of them (Kwon et al. 2023, figure 2).

    ``tokens`` hold a token of a running sequence, ``reserved`` are slots of its blocks that its limits allow it to fill yet,
    ``internal`` will never be used, and ``external`` belong to blocks that nobody holds.
    """

    tokens: int
    reserved: int
    internal: int
    external: int


def account_of(s: State) -> Slots:
    """The account of a state. A block that several sequences hold counts once, by whoever fills it most.

    A sequence without a request has no limit: it may fill its blocks. O(blocks in use).
    """
    size, filled, fillable = s.config.block_size, dict[BlockId, int](), dict[BlockId, int]()
    for seq_id, table in s.block_tables.items():
        seq = s.seqs[seq_id]
        request = s.requests.get(seq.request_id)
        # The last token is never stored.
        most = seq.num_prompt_tokens + request.max_tokens - 1 if request else None
        for index, block in enumerate(table, start=seq.num_dropped_blocks):
            start = index * size
            stop = start + size if most is None else most
            filled[block] = max(filled.get(block, 0), min(size, max(0, seq.num_computed_tokens - start)))
            fillable[block] = max(fillable.get(block, 0), min(size, max(0, stop - start)))
    tokens, external = sum(filled.values()), len(s.free) * size
    reserved = sum(max(0, count - filled[block]) for block, count in fillable.items())
    return Slots(tokens, reserved, s.config.num_slots - external - tokens - reserved, external)


class Doing(Enum):
    """What a request does in a step."""

    COMPUTES = "computes"
    RUNS = "runs, and computes nothing"
    WAITS = "waits"
    PREEMPTED = "was preempted, and waits"


@dataclass(frozen=True)
class Step:
    """One step of an engine, as the chart shows it. ``num_events`` are those up to its end."""

    number: int
    num_tokens: int
    slots: Slots
    num_free: int
    doing: Mapping[RequestId, Doing]
    num_events: int
    admitted: tuple[RequestId, ...] = ()
    preempted: tuple[RequestId, ...] = ()

    @property
    def caption(self) -> str:
        """The step in a few words."""
        count = {each: sum(doing is each for doing in self.doing.values()) for each in Doing}
        waiting = count[Doing.WAITS] + count[Doing.PREEMPTED]
        facts = [f"step {self.number}: {self.num_tokens} tokens, {count[Doing.COMPUTES]} requests compute"]
        facts += [f"{waiting} wait; {self.num_free} blocks are free"]
        slots = self.slots
        facts += [f"slots: {slots.tokens} tokens, {slots.reserved} reserved, {slots.internal} never used"]
        facts += [f"admitted {' '.join(map(str, self.admitted))}"] if self.admitted else []
        facts += [f"preempted {' '.join(map(str, self.preempted))}"] if self.preempted else []
        return "; ".join(facts)


@dataclass(frozen=True)
class Timeline:
    """A trace, step by step."""

    config: Config
    steps: tuple[Step, ...] = ()
    maps: tuple[Map, ...] = ()
    """The memory after each step, what the step changed marked: at most so many as were asked for, evenly spread."""
    map_steps: tuple[int, ...] = ()
    """The place in ``steps`` of each map."""

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """In the order in which they came."""
        return tuple(dict.fromkeys(i for each in self.steps for i in each.doing))


@dataclass
class _Current:
    """The step that is being scheduled or computed."""

    num_tokens: int = 0
    computing: frozenset[RequestId] = frozenset()
    admitted: list[RequestId] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)


def timeline(
    config: Config, events: Sequence[Event], most_maps: int = 400, choices: Choices = USUAL_CHOICES
) -> Timeline:
    """The timeline of a trace; it draws broken ones too. Events without a scheduler are a step each."""
    has_steps = any(isinstance(event, Complete) for event in events)
    ends = [i for i, event in enumerate(events) if isinstance(event, Complete) or not has_steps]
    drawn = set(_evenly(len(ends), most_maps))
    state, now, seen = initial_state(config, choices), _Current(), set[RequestId]()
    steps, maps, places, last = list[Step](), list[Map](), list[int](), state
    for number, event in enumerate(events):
        before, state = state, step(state, event)
        match event:
            case Begin():
                now = _Current()
            case Admit(request_id=request_id):
                now.admitted.append(request_id)
            case Preempt(request_id=request_id):
                now.preempted.append(request_id)
                seen.add(request_id)
            case Submit(step_id=step_id) if step_id in before.flights:
                scheduled = before.flights[step_id].scheduled
                now.num_tokens = sum(scheduled.values())
                now.computing = frozenset(before.seqs[i].request_id for i in scheduled if i in before.seqs)
        if len(steps) < len(ends) and number == ends[len(steps)]:
            doing = {**_doing(before, now.computing, seen), **_doing(state, now.computing, seen)}
            facts = (number + 1, tuple(now.admitted), tuple(now.preempted))
            steps.append(Step(len(steps), now.num_tokens, account_of(state), len(state.free), doing, *facts))
            seen -= {i for i in seen if i not in state.requests}
            if len(steps) - 1 in drawn:
                caption = steps[-1].caption if has_steps else caption_of(event)
                maps.append(mark_changes(memory_map(last), memory_map(state, caption)))
                places.append(len(steps) - 1)
            last = state
            now = _Current()
    return Timeline(config, tuple(steps), tuple(maps), tuple(places))


def _evenly(count: int, most: int) -> Iterable[int]:
    """At most so many of the first ``count`` numbers, the last one among them."""
    every = -(-count // most) if count else 1
    return range((count - 1) % every, count, every)


def _doing(s: State, computing: frozenset[RequestId], preempted: set[RequestId]) -> dict[RequestId, Doing]:
    doing = {i: Doing.COMPUTES if i in computing else Doing.RUNS for i in s.running}
    return {**doing, **{i: Doing.PREEMPTED if i in preempted else Doing.WAITS for i in s.waiting}}


# As SVG

LEFT, CHART_ROW, BAR = MARGIN + 90, 15, 54
"""Where the columns begin, the height of a request's row, and that of the bars below."""


@dataclass(frozen=True)
class Chart:
    """A scheduler chart as SVG elements, its height, and how wide a step is."""

    elements: tuple[str, ...]
    height: float
    column: float


def chart(time: Timeline, width: float, top: float = 0.0) -> Chart:
    """A row a request, a column a step; below them the tokens of each step, its free blocks, and its slots."""
    column = min(16.0, (width - LEFT - MARGIN) / max(1, len(time.steps)))
    out, y = list(_legend(top + 12)), top + 28
    for request in time.requests:
        out.append(_words("kv-quiet", MARGIN, y + 11, f"request {request}"))
        out += _request_row(time, request, y, column)
        y += CHART_ROW
    tokens, free = [each.num_tokens for each in time.steps], [each.num_free for each in time.steps]
    held = [each.slots.tokens for each in time.steps]
    fillable = [each.slots.tokens + each.slots.reserved for each in time.steps]
    taken = [each.slots.tokens + each.slots.reserved + each.slots.internal for each in time.steps]
    bars = (
        ("tokens", (tokens,), max(tokens, default=0), "kv-bar"),
        ("free blocks", (free,), time.config.num_blocks, "kv-low"),
        # One over the other: what holds tokens is darkest, then what may yet, then what never will.
        ("slots taken", (taken, fillable, held), time.config.num_slots, "kv-low"),
    )
    for name, layers, most, colour in bars:
        y += 12
        out += [_words("kv-quiet", MARGIN, y + 10, name), _words("kv-quiet", MARGIN, y + 24, f"0 to {most}")]
        for heights in layers:
            out += _bars(heights, most, y, column, colour)
        out.append(f'<path class="kv-box" d="M{LEFT:g} {y + BAR:g}h{len(time.steps) * column:g}"/>')
        y += BAR
    return Chart(tuple(out), y + MARGIN - top, column)


def _request_row(time: Timeline, request: RequestId, y: float, column: float) -> Iterator[str]:
    place = 0
    for doing, steps in groupby(time.steps, lambda each: each.doing.get(request)):
        count = len(list(steps))
        if doing is not None:
            last = place + count - 1
            tip = f"request {request} {doing.value}: step{f' {place}' if count == 1 else f's {place} to {last}'}"
            yield _span(doing, request % len(COLOURS), LEFT + place * column, y, count * column, tip)
        place += count
    for place, each in enumerate(time.steps):
        if request in each.preempted:
            yield f'<path class="kv-cut" d="M{LEFT + place * column:g} {y:g}v{CHART_ROW - 2}"/>'


def _span(doing: Doing, colour: int, x: float, y: float, width: float, tip: str) -> str:
    look = {
        Doing.COMPUTES: f'class="kv-cell kv-request{colour}" height="{CHART_ROW - 3}"',
        Doing.RUNS: f'class="kv-box" height="{CHART_ROW - 3}"',
        Doing.WAITS: f'class="kv-wait" height="3" transform="translate(0 {CHART_ROW // 2 - 2})"',
        Doing.PREEMPTED: f'class="kv-out" height="3" transform="translate(0 {CHART_ROW // 2 - 2})"',
    }[doing]
    return f'<rect {look} x="{x:.2f}" y="{y:g}" width="{max(width, 0.8):.2f}"><title>{escape(tip)}</title></rect>'


def _bars(heights: Sequence[int], most: int, y: float, column: float, colour: str) -> Iterator[str]:
    """One path for all bars."""
    tall = [BAR * height / most if most else 0.0 for height in heights]
    outline = "".join(f"V{y + BAR - each:.1f}h{column:.2f}" for each in tall)
    yield f'<path class="{colour}" d="M{LEFT:g} {y + BAR:g}{outline}V{y + BAR:g}Z"/>'


def _legend(y: float) -> Iterator[str]:
    x = float(LEFT)
    for doing in Doing:
        yield _span(doing, 0, x, y - 10, 18, doing.value)
        yield _words("kv-quiet", x + 24, y, doing.value)
        x += 40 + LETTER * len(doing.value)


def _words(colour: str, x: float, y: float, words: str) -> str:
    return f'<text class="{colour}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def chart_style() -> str:
    """What a chart adds to the style sheet of pictures."""
    quiet, mark = "fill:#57534e;fill:var(--kv-quiet)", "#b91c1c;{0}:var(--kv-mark)"
    return (
        f".kv-wait{{{quiet};fill-opacity:.45}}.kv-out{{fill:{mark.format('fill')}}}"
        f".kv-cut{{stroke:{mark.format('stroke')};stroke-width:2.5}}.kv-bar{{{quiet};fill-opacity:.75}}"
        f".kv-low{{{quiet};fill-opacity:.35}}"
    )


def describe_chart(time: Timeline) -> str:
    """What a chart shows, in sentences."""
    tokens, free = [each.num_tokens for each in time.steps], [each.num_free for each in time.steps]
    cut = sum(len(each.preempted) for each in time.steps)
    return (
        f"{len(time.requests)} requests in {len(time.steps)} steps; at most {max(tokens, default=0)} tokens in a step, at "
        f"least {min(free, default=time.config.num_blocks)} of {time.config.num_blocks} blocks free, {cut} preemptions."
    )
