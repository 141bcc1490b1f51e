"""A trace as one file that needs nothing else: HTML to step through, or SVG to print."""

import json
from dataclasses import replace
from xml.sax.saxutils import escape, quoteattr

from spec.picture import MARGIN, VARIABLES, WIDTH, describe, film, style
from spec.timeline import LEFT, Timeline, chart, chart_style, describe_chart

MOST_MAPS, MOST_MAPS_IN_SVG = 400, 4
"""Maps in a file: those of a longer trace are spread evenly over it, and the file says which they are."""
WIDE = WIDTH + 2 * MARGIN


def svg(time: Timeline, title: str) -> str:
    """The chart, and below it the maps."""
    drawn, pictures = chart(time, WIDE, top=MARGIN), film(time.maps)
    y, body = drawn.height + MARGIN, list(drawn.elements)
    for frame in pictures.frames:
        body.append(f'<g transform="translate(0 {y:g})">{"".join(pictures.pieces[piece] for piece in frame)}</g>')
        y += pictures.height
    words = " ".join([describe_chart(time), *map(describe, time.maps)])
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kv" role="img" aria-labelledby="t d" width="{WIDE}" '
        f'height="{y:g}" viewBox="0 0 {WIDE} {y:g}"><title id="t">{escape(title)}</title><desc id="d">{escape(words)}</desc>'
    )
    back = f'<rect class="kv-back" width="{WIDE}" height="{y:g}"/>'
    return "\n".join([head, f"<style>{style()}{chart_style()}</style>", pictures.defs, back, *body, "</svg>\n"])


def html(time: Timeline, title: str) -> str:
    """The chart, and one map that a slider, buttons and the arrow keys move through the steps."""
    drawn, pictures = chart(time, WIDE), film([replace(each, caption="") for each in time.maps])
    words = describe_chart(time)
    if len(time.maps) < len(time.steps):
        words += f" {len(time.maps)} of the {len(time.steps)} steps have a map."
    scene = {
        "pieces": pictures.pieces,
        "frames": pictures.frames,
        "x": [round(LEFT + (place + 0.5) * drawn.column, 2) for place in time.map_steps],
        "words": [each.caption for each in time.maps],
    }
    data = json.dumps(scene, separators=(",", ":")).replace("<", "\\u003c")
    light, dark = ("".join(f"--kv-{name}:{pair[i]};" for name, pair in VARIABLES.items()) for i in (0, 1))
    sheet = (
        f":root{{{light}color-scheme:light dark}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "body{margin:1rem auto;max-width:60rem;padding:0 1rem;background:var(--kv-back);color:var(--kv-ink);"
        "font:15px system-ui,sans-serif}h1{font-size:1.2rem}svg{display:block}"
        "#at{stroke:var(--kv-mark);stroke-width:1.5}nav{display:flex;gap:.5rem;align-items:center;position:sticky;top:0;"
        "padding:.5rem 0;background:var(--kv-back)}nav input{flex:1}button{font:inherit;padding:.2rem .7rem}"
        ":focus-visible{outline:2px solid var(--kv-mark)}output{display:block;min-height:1.4em}"
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    view = f'class="kv" role="img" width="{WIDE}"'
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{style()}{chart_style()}{sheet}</style></head><body>
<h1>{escape(title)}</h1><p>{escape(words)}</p>
<svg {view} aria-label={quoteattr(words)} height="{drawn.height:g}" viewBox="0 0 {WIDE} {drawn.height:g}">
{"".join(drawn.elements)}<path id="at" d="M0 22V{drawn.height:g}"/></svg>
<nav aria-label="Steps"><button id="back" aria-keyshortcuts="p">Previous</button>
<input id="place" type="range" min="0" max="{max(len(time.maps) - 1, 0)}" value="0" aria-label="Step">
<button id="on" aria-keyshortcuts="n">Next</button></nav>
<p>Arrow keys, n and p move by one step, Home and End to the ends.</p>
<output id="words" for="place" aria-live="polite"></output>
<svg {view} aria-labelledby="words" height="{pictures.height:g}" viewBox="0 0 {WIDE} {pictures.height:g}">
{pictures.defs}<g id="map"></g></svg>
<noscript>The maps need JavaScript, the chart does not.</noscript>
<script type="application/json" id="scene">{data}</script>
<script>{SCRIPT}</script></body></html>
"""


SCRIPT = """
const scene = JSON.parse(document.getElementById("scene").textContent);
const part = name => document.getElementById(name);
const place = part("place"), last = scene.frames.length - 1;
function show(index) {
  if (last < 0) return;
  const at = Math.min(last, Math.max(0, index));
  place.value = at;
  place.setAttribute("aria-valuetext", scene.words[at]);
  part("words").textContent = scene.words[at];
  part("map").innerHTML = scene.frames[at].map(piece => scene.pieces[piece]).join("");
  part("at").setAttribute("transform", `translate(${scene.x[at]} 0)`);
}
const here = () => Number(place.value);
part("back").onclick = () => show(here() - 1);
part("on").onclick = () => show(here() + 1);
place.oninput = () => show(here());
const moves = {ArrowLeft: () => here() - 1, p: () => here() - 1, ArrowRight: () => here() + 1, n: () => here() + 1,
  Home: () => 0, End: () => last};
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.altKey || event.metaKey || !(event.key in moves)) return;
  if (event.target === place && event.key.length > 1) return;
  event.preventDefault();
  show(moves[event.key]());
});
show(0);
"""
