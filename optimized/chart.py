"""Charts: curves with bands, and bars, as SVG that is readable in light and dark and says in words what it shows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape
from zlib import crc32

VARIABLES = {
    "ink": ("#1c1917", "#f5f5f4"),
    "quiet": ("#57534e", "#c7c2bd"),
    "line": ("#d6d3d1", "#57534e"),
    "back": ("#ffffff", "#1c1917"),
    "series0": ("#b45309", "#fbbf24"),
    "series1": ("#1d4ed8", "#93c5fd"),
    "series2": ("#15803d", "#86efac"),
    "series3": ("#7e22ce", "#d8b4fe"),
}
"""Each colour twice, light and dark; the fifth curve has the first colour again."""
NUM_COLOURS = sum(name.startswith("series") for name in VARIABLES)
WIDTH, LEFT, RIGHT, HEIGHT, ROW = 744, 74, 132, 230, 22


@dataclass(frozen=True)
class Curve:
    """Points: x, the median, and the quartiles below and above it."""

    name: str
    points: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True)
class Curves:
    """Curves over one axis, each with its band; ``marks`` are places on the axis that have a name. With ``log_x`` the axis
    has its names where the points are."""

    caption: str
    x: str
    y: str
    curves: tuple[Curve, ...]
    marks: tuple[tuple[float, str], ...] = ()
    log: bool = False
    log_x: bool = False


@dataclass(frozen=True)
class Bars:
    """Numbers with names. So many colours take turns as ``num_kinds`` says."""

    caption: str
    values: tuple[tuple[str, float], ...]
    num_kinds: int = NUM_COLOURS


def style() -> str:
    """The style sheet. Renderers without variables take the light colours."""
    light, dark = ("".join(f"--kc-{name}:{pair[i]};" for name, pair in VARIABLES.items()) for i in (0, 1))
    paint = {name: f"{pair[0]};WHAT:var(--kc-{name})" for name, pair in VARIABLES.items()}
    fills = "".join(f".kc-{name}{{fill:{paint[name].replace('WHAT', 'fill')}}}" for name in VARIABLES)
    lines = "".join(
        f".kc-{name}-line{{fill:none;stroke-width:2;stroke:{paint[name].replace('WHAT', 'stroke')}}}"
        for name in VARIABLES
    )
    return (
        f"svg.kc{{{light}font:12px ui-monospace,Menlo,Consolas,monospace;max-width:100%;height:auto}}"
        f"@media (prefers-color-scheme:dark){{svg.kc{{{dark}}}}}"
        f'[data-theme="light"] svg.kc{{{light}}}[data-theme="dark"] svg.kc{{{dark}}}'
        f"{fills}{lines}.kc-bold{{font-weight:bold}}.kc-band{{fill-opacity:.2}}.kc-thin{{stroke-width:1}}.kc-dash{{stroke-dasharray:5 4}}"
    )


def svg(charts: Sequence[Bars | Curves], title: str) -> str:
    """The charts, one below the other, with a text alternative."""
    name, top, body = f"kc{crc32(repr((title, charts)).encode()):08x}", 8.0, list[str]()
    for chart in charts:
        body.append(_text("ink kc-bold", 12, top + 14, chart.caption))
        if isinstance(chart, Bars):
            body += _bars(chart, top + 30)
            top += 30 + ROW * len(chart.values) + 18
        else:
            body += _curves(chart, top + 46)
            top += 46 + HEIGHT + 58
    words = escape(" ".join(describe(chart) for chart in charts))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kc" role="img" aria-labelledby="{name}t {name}d" '
        f'width="{WIDTH}" height="{top:g}" viewBox="0 0 {WIDTH} {top:g}">'
    )
    alternative = f'<title id="{name}t">{escape(title)}</title>\n<desc id="{name}d">{words}</desc>'
    back = f'<rect class="kc-back" width="{WIDTH}" height="{top:g}"/>'
    return "\n".join([head, alternative, f"<style>{style()}</style>", back, *body, "</svg>\n"])


def html(charts: Sequence[Bars | Curves], title: str) -> str:
    """One HTML file that asks nobody for anything: the charts, and below them what they say in words."""
    words = "".join(f"<p>{escape(describe(chart))}</p>" for chart in charts)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title>\n<style>:root{{color-scheme:light dark}}"
        f"body{{font:15px system-ui,sans-serif;max-width:760px;margin:2em auto;padding:0 1em}}</style>\n"
        f"<h1>{escape(title)}</h1>\n{svg(charts, title)}<details><summary>In words</summary>{words}</details></html>\n"
    )


def describe(chart: Bars | Curves) -> str:
    """What a chart shows, in sentences."""
    if isinstance(chart, Bars):
        return f"{chart.caption}: {', '.join(f'{name} {_digits(number, 4)}' for name, number in chart.values)}."
    said = [f"{chart.caption}, {chart.y} against {chart.x}."]
    for curve in chart.curves:
        said.append(f"{curve.name}: {', '.join(f'{_digits(p[1], 3)} at {p[0]:g}' for p in curve.points)}.")
    return " ".join([*said, *(f"{name} at {_digits(x, 3)}." for x, name in chart.marks)])


def _bars(chart: Bars, top: float) -> Iterator[str]:
    most = max((number for _, number in chart.values), default=0.0) or 1.0
    left = 24 + 7.3 * max((len(name) for name, _ in chart.values), default=0)
    for i, (name, number) in enumerate(chart.values):
        y, wide = top + i * ROW, (WIDTH - left - 90) * number / most
        yield _text("quiet", 12, y + 13, name)
        yield f'<rect class="kc-series{i % chart.num_kinds % NUM_COLOURS}" x="{left:g}" y="{y:g}" width="{wide:.1f}" height="{ROW - 6}"/>'
        yield _text("ink", left + wide + 6, y + 13, _digits(number, 4))


def _curves(chart: Curves, top: float) -> Iterator[str]:
    points = [point for curve in chart.curves for point in curve.points]
    xs = [point[0] for point in points] + [x for x, _ in chart.marks]
    ys = [y for point in points for y in point[1:] if y > 0.0 or not chart.log] or [1.0]
    x_ticks = sorted(set(xs)) if chart.log_x else _ticks(min(xs), max(xs))
    y_ticks = _decades(min(ys), max(ys)) if chart.log else _ticks(0.0, max(ys))
    wide = WIDTH - LEFT - RIGHT

    def across(x: float) -> float:
        low, high = min(xs), max(xs)
        if chart.log_x:
            low, high, x = math.log(low), math.log(high), math.log(x)
        return LEFT + wide * ((x - low) / (high - low) if high > low else 0.5)

    def down(y: float) -> float:
        low, high = y_ticks[0], max(y_ticks[-1], max(ys))
        if chart.log:
            low, high, y = math.log(low), math.log(high), math.log(max(y, y_ticks[0]))
        return top + HEIGHT * (1 - (y - low) / (high - low))

    yield _text("quiet", 12, top - 12, chart.y)
    for y in y_ticks:
        yield f'<path class="kc-line-line kc-thin" d="M{LEFT} {down(y):.1f}h{wide}"/>'
        yield _text("quiet", LEFT - 8, down(y) + 4, f"{y:g}", "end")
    for x in x_ticks:
        if min(xs) <= x <= max(xs):
            yield _text("quiet", across(x), top + HEIGHT + 18, f"{x:g}", "middle")
    yield _text("quiet", LEFT + wide / 2, top + HEIGHT + 38, chart.x, "middle")
    for i, (x, name) in enumerate(chart.marks):
        yield f'<path class="kc-quiet-line kc-thin kc-dash" d="M{across(x):.1f} {top}v{HEIGHT}"/>'
        right = across(x) < LEFT + (wide * 3 / 4 if i % 2 else wide / 3)
        anchor, gap = ("start", 4) if right else ("end", -4)
        yield _text("quiet", across(x) + gap, top + 14 + 16 * i, f"{name} {x:.1f}", anchor)
    ends = _apart([down(curve.points[-1][1]) for curve in chart.curves if curve.points])
    for i, (curve, end) in enumerate(zip([each for each in chart.curves if each.points], ends, strict=True)):
        colour, dash = f"series{i % NUM_COLOURS}", " kc-dash" if i % 2 else ""
        upper = [f"{across(x):.1f} {down(high):.1f}" for x, _, _, high in curve.points]
        lower = [f"{across(x):.1f} {down(low):.1f}" for x, _, low, _ in reversed(curve.points)]
        yield f'<path class="kc-{colour} kc-band" d="M{"L".join([*upper, *lower])}Z"/>'
        middle = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y, _, _ in curve.points)
        yield f'<path class="kc-{colour}-line{dash}" d="M{middle}"/>'
        yield _text(colour, across(curve.points[-1][0]) + 8, end + 4, curve.name)


def _digits(number: float, count: int) -> str:
    """A number with so many digits; a large one whole, and never as a power of ten."""
    return f"{number:,.0f}" if abs(number) >= 10.0 ** (count - 1) else f"{number:.{count}g}"


def _apart(places: list[float]) -> list[float]:
    """The same places, moved down where two names would lie on each other."""
    moved: dict[int, float] = {}
    for i in sorted(range(len(places)), key=places.__getitem__):
        moved[i] = max(places[i], max(moved.values(), default=-math.inf) + 14)
    return [moved[i] for i in range(len(places))]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose both."""
    span = high - low or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(times for times in (1, 2, 5, 10) if span / (step * times) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten that enclose both."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**i for i in range(first, max(last, first + 1) + 1)]


def _text(colour: str, x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text class="kc-{colour}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
