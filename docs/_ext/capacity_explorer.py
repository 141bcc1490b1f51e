"""The planner with sliders: ``.. capacity-explorer::`` shows simulations that were recorded before. To record them again:

python docs/_ext/capacity_explorer.py
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
RECORDED = HERE.parent / "capacity_explorer.json"
SCRIPT = HERE / "capacity_explorer.js"
PROMPTS, OUTPUTS, RATES, DURATION_S = (256, 1024), (64, 256, 1024), (2, 6, 10, 14, 18, 24), 20
BLOCK_SIZES = (16, 64, 256)
SLOTS = ("tokens", "reserved", "internal", "external")


def record() -> dict[str, object]:
    """Each combination, once, with the card and the model of the workshop: what fits, the median time to the first token,
    and where the slots are."""
    from optimized.contiguous import Allocation
    from optimized.planner import percentile
    from optimized.workload import Lengths, PoissonTraffic
    from optimized.workshop import deployment

    kinds = {f"blocks of {size}": (Allocation.PAGED, size) for size in BLOCK_SIZES}
    kinds |= {kind.value: (kind, 16) for kind in Allocation if kind is not Allocation.PAGED}
    runs = {}
    for (name, (kind, size)), prompt, output in product(kinds.items(), PROMPTS, OUTPUTS):
        here, points = replace(deployment(kind), block_size=size), []
        for rate in RATES:
            load = PoissonTraffic(
                rate, DURATION_S, Lengths("exponential", prompt), Lengths("exponential", output), 8192
            )
            run = here.run(load.arrivals(0), counted=lambda now, _: now <= DURATION_S)
            first = percentile([each.first_token_s for each in run.served], 50)
            points.append([digits(each) for each in (first, run.mean_running, *(run.shares[slot] for slot in SLOTS))])
        runs[f"{name}|{prompt}|{output}"] = {"fit": here.requests_that_fit(prompt, output), "points": points}
    return {
        "allocations": list(kinds),
        "prompts": PROMPTS,
        "outputs": OUTPUTS,
        "rates": RATES,
        "duration_s": DURATION_S,
        "runs": runs,
    }


def digits(number: float) -> float:
    return float(f"{number:.3g}")


def html() -> str:
    """The page's piece: its data, its script, and what stands there without one."""
    data = json.dumps(json.loads(RECORDED.read_text(encoding="utf-8")), separators=(",", ":"))
    return (
        '<div class="capacity-explorer"><noscript>The sliders need JavaScript; the tables of this page do not.</noscript>'
        f'<script type="application/json">{data}</script><script>{SCRIPT.read_text(encoding="utf-8")}</script></div>'
    )


def setup(app) -> dict[str, bool]:
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class CapacityExplorer(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            for path in (RECORDED, SCRIPT):
                self.env.note_dependency(str(path))
            return [nodes.raw("", html(), format="html")]

    app.add_directive("capacity-explorer", CapacityExplorer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(), separators=(",", ":")) + "\n", encoding="utf-8")
