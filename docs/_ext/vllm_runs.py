"""What vLLM's adapter has found: ``.. vllm-runs::``, ``.. vllm-pool::``, ``.. vllm-installed::`` and ``.. vllm-story::``
show what was recorded. To record it again: ``tests/peers/record_vllm.py``.
"""

import json
from pathlib import Path

from docutils import nodes
from ledger import Words, links, table
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

RECORDED = Path(__file__).parent.parent / "vllm_conformance.json"


def read() -> dict:
    """What was recorded."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


class Runs(Words):
    """A row for each policy, with the prefix cache and without."""

    def text(self) -> str:
        recorded = read()
        rows = [
            (
                row.get("scheduler", "sync"),
                row["policy"],
                "on" if row["prefix_cache"] else "off",
                f"all but {links(row['but'])}" if row["but"] else "all",
                f"{row['steps']:,}",
                f"{row['tokens']:,}",
                f"{row['preemptions']:,}",
                f"{row['seed']} to {row['seed'] + row['runs'] - 1}",
                ", ".join(f"{links([rule])}: {count}" for rule, count in row["violations"].items()) or "none",
            )
            for row in recorded["rows"]
        ]
        head = (
            "scheduler",
            "policy",
            "prefix cache",
            "rules",
            "steps",
            "tokens written",
            "preemptions",
            "seeds",
            "violations",
        )
        total = sum(row["steps"] for row in recorded["rows"])
        facts = f"vLLM {recorded['vllm']}, {total:,} judged steps:"
        said = "\n".join(origin(row) for row in recorded["rows"])
        return (
            f"{facts}\n\n{table(head, rows, (10, 9, 8, 16, 11, 12, 12, 9, 13))}\n\nThe rows, in this order:\n\n{said}\n"
        )


def origin(row: dict) -> str:
    """How a row can be had again."""
    if "commit" not in row:
        return "* before commands were recorded"
    cpu = f", {row['cpu_seconds']:,.0f} s of a processor" if row.get("cpu_seconds") else ""
    made = f"on {row['date']} at commit {row['commit']}, {row['versions']}, {row['seconds']:,.0f} s{cpu}"
    return f"* ``{row['command']}`` {made}"


class Pool(Words):
    """What came of the walk through a whole scope."""

    def text(self) -> str:
        pool = read()["pool"]
        found = f"``{pool['fault']}``" if pool["fault"] else "no difference"
        return (
            f"{pool['states']:,} states, {pool['calls']:,} calls, {pool['refusals']:,} of them refused for want of room, "
            f"{pool['mistakes']:,} refused as the caller's mistake: {found}."
        )


class Story(SphinxDirective):
    """The story of a finding, as the suite reports it: ``.. vllm-story:: `` and its title."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        text = read()["findings"].get(self.arguments[0])
        if text is None:
            raise self.error(f"no finding is called {self.arguments[0]!r}")
        return [nodes.literal_block(text, text, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    for name, directive in {"vllm-runs": Runs, "vllm-pool": Pool, "vllm-story": Story}.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
