"""What the planner said, as it was recorded: ``.. capacity-picture:: NAME`` and ``.. capacity-table:: FIGURE``.

To record it again, which takes minutes:

    python docs/_ext/capacity.py
"""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "docs/capacity.json"
PRESETS = ("workshop", "paper", "baselines")


def read() -> dict[str, dict]:
    """For each preset its command, the commit and the day on which it ran, and its facts."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def record(names: list[str]) -> None:
    """Run the presets, and write down what they say beside what was there."""
    recorded = read() if RECORDED.exists() else {}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    for name in names:
        arguments = ["plan", "--preset", name, "--json"]
        said = subprocess.run(
            [sys.executable, "-m", "optimized.cli", *arguments], check=True, capture_output=True, text=True, cwd=ROOT
        ).stdout
        recorded[name] = as_recorded(name, commit, f"{datetime.now(UTC):%Y-%m-%d}", json.loads(said))
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def as_recorded(name: str, commit: str, day: str, facts: dict) -> dict:
    return {"command": f"kvproof plan --preset {name} --json", "commit": commit, "date": day, "facts": rounded(facts)}


def rounded(value):
    """Five digits of every number."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def rows(figure: str) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table."""
    recorded = read()
    if figure == "baselines":
        facts = recorded["baselines"]["facts"]
        head = ["batching, allocation", "requests that fit", "finished a second", "largest rate"]
        return head, [
            [name, str(each["requests_that_fit"]), f"{each['requests_per_s']:.2f}", f"{each['largest_rate']:.2f}"]
            for name, each in facts.items()
            if isinstance(each, dict) and "largest_rate" in each
        ]
    if figure == "ratios":
        facts = recorded["baselines"]["facts"]
        published = facts["published_ratios"]
        return ["continuous, paged", "here", "published"], [
            [name, f"{ratio:.1f} times", published.get(name, "")]
            for name, ratio in facts["ratio_of_the_largest_rates"].items()
        ]
    facts = recorded["paper"]["facts"]
    if figure == "block-sizes":
        names = sorted(
            {key.rpartition("_wasted")[0] for key in facts["figure_18_block_sizes"]["16"] if "wasted" in key}
        )
        head = ["tokens per block", *(f"{name}: {what}" for name in names for what in ("wasted", "table entries"))]
        return head, [
            [
                size,
                *(
                    text
                    for name in names
                    for text in (f"{each[f'{name}_wasted']:.1%}", str(each[f"{name}_table_entries"]))
                ),
            ]
            for size, each in facts["figure_18_block_sizes"].items()
        ]
    found = facts[figure]
    nested = found if all("ours" not in each for each in found.values()) else {"": found}
    percent = "share" in figure
    head = ["", "published", "here", "distance"]
    extra = any("while_somebody_waits" in each for group in nested.values() for each in group.values())
    return head + (["while somebody waits"] if extra else []), [
        [
            f"{group} {name}".strip(),
            shown(each["published"], percent),
            shown(each["ours"], percent),
            f"{each['distance']:+.0%}",
            *([shown(each["while_somebody_waits"], percent)] if extra else []),
        ]
        for group, entries in nested.items()
        for name, each in entries.items()
    ]


def shown(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.2f}"


def markdown(figure: str) -> str:
    head, body = rows(figure)
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(name: str) -> str:
    """Where the numbers come from, in one sentence."""
    each = read()[name]
    return f"Recorded with `{each['command']}` at commit {each['commit']}, {each['date']}."


def setup(app) -> dict[str, bool]:
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    from optimized import paper, workshop
    from optimized.chart import svg

    drawers = {"workshop": workshop.charts, "paper": paper.charts, "baselines": paper.baseline_charts}

    class CapacityPicture(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            name = self.arguments[0]
            self.env.note_dependency(str(RECORDED))
            drawn = svg(drawers[name](read()[name]["facts"]), f"kvproof plan --preset {name}")
            return [nodes.raw("", drawn, format="html"), *self.parse_text_to_nodes(source(name))]

    class CapacityTable(SphinxDirective):
        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            self.env.note_dependency(str(RECORDED))
            return self.parse_text_to_nodes(markdown(self.arguments[0]))

    app.add_directive("capacity-picture", CapacityPicture)
    app.add_directive("capacity-table", CapacityTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    record(sys.argv[1:] or list(PRESETS))
