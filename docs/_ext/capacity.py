"""What the planner said, as it was recorded: ``.. capacity-picture:: NAME`` and ``.. capacity-table:: FIGURE``.

To record it again, the three presets or what is named, which takes minutes:

    python docs/_ext/capacity.py [workshop] [paper] [baselines] [coarse]
    python docs/_ext/capacity.py speed fleet prediction    # on a quiet machine: these measure time
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, process_time

from recording import ROOT, made_by

RECORDED = ROOT / "docs/capacity.json"
PRESETS = {name: f"kvproof plan --preset {name} --json" for name in ("workshop", "paper", "baselines")}
COARSE = "kvproof plan --replicas 2 --rate 10 --duration 86400 --seeds 1 --coarse --json"
WORKLOAD = "python tests/peers/workloads.py mixed --n 64"
FLEET_REQUESTS, FLEET_REPLICAS, FLEET_RATE = 250_000, 64, 8.0


def read() -> dict[str, dict]:
    """For each preset its command, the commit and the day on which it ran, and its facts."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def record(names: list[str]) -> None:
    """Run what has these names, and write down what it says beside what was there."""
    recorded = read() if RECORDED.exists() else {}
    for name in names:
        command, facts = MEASUREMENTS[name]() if name in MEASUREMENTS else asked(COMMANDS[name])
        recorded[name] = made_by(command) | {"facts": rounded(facts)}
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def asked(command: str) -> tuple[str, dict]:
    """What one of our commands says."""
    arguments = command.split()[1:]
    said = subprocess.run(
        [sys.executable, "-m", "optimized.cli", *arguments], check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ).stdout
    return command, json.loads(said)


def speed() -> tuple[str, dict]:
    """How many simulated seconds pass in one of the processor's, for the workshop's minute; the best of three."""
    from optimized.contiguous import Allocation
    from optimized.workshop import deployment, traffic

    facts = {}
    for kind in (Allocation.CONTIGUOUS, Allocation.PAGED):
        found = []
        for _ in range(3):
            begin = process_time()
            run = deployment(kind).run(traffic().arrivals(0))
            found.append({"simulated_s": run.end_s, "processor_s": process_time() - begin, "steps": run.num_steps})
        facts[kind.value] = min(found, key=lambda each: each["processor_s"])
    return "python docs/_ext/capacity.py speed", facts


def fleet() -> tuple[str, dict]:
    """So many requests over so many replicas, with the exact engine, through the router that looks at every replica."""
    from dataclasses import replace

    from optimized.contiguous import Allocation
    from optimized.fleet import Fleet, Router
    from optimized.workshop import deployment, traffic

    rate = FLEET_RATE * FLEET_REPLICAS
    load = replace(traffic(rate), duration_s=1.01 * FLEET_REQUESTS / rate)
    begin, begin_s = process_time(), perf_counter()
    arrivals = load.arrivals(0)[:FLEET_REQUESTS]
    run = Fleet(deployment(Allocation.PAGED), FLEET_REPLICAS, Router.LEAST_LOADED).run(arrivals, say_now_and_then)
    return "python docs/_ext/capacity.py fleet", {
        "requests": len(run.served),
        "replicas": FLEET_REPLICAS,
        "requests_a_second": rate,
        "simulated_s": run.end_s,
        "steps": run.num_steps,
        "processor_s": process_time() - begin,
        "wall_s": perf_counter() - begin_s,
    }


def say_now_and_then(far: str) -> None:
    """How far it is, for whoever watches: every ten thousandth request, and each replica at the end."""
    if "request" not in far or far.partition(" of ")[0].endswith("0,000"):
        print(far, file=sys.stderr, flush=True)


def prediction() -> tuple[str, dict]:
    """The planner held against this machine."""
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / "mixed.jsonl"
        program, *arguments = WORKLOAD.split()[1:]
        made = subprocess.run([sys.executable, ROOT / program, *arguments], check=True, capture_output=True, text=True)
        workload.write_text(made.stdout, encoding="utf-8")
        _, facts = asked(f"kvproof bench predicted {workload} --json")
    return f"{WORKLOAD} > mixed.jsonl; kvproof bench predicted mixed.jsonl --json", facts


COMMANDS = {**PRESETS, "coarse": COARSE}
MEASUREMENTS = {"speed": speed, "fleet": fleet, "prediction": prediction}


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
    if figure in TABLES:
        name, head, table = TABLES[figure]
        return head, table(recorded[name]["facts"])
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
    each = next(each for group in nested.values() for each in group.values())
    extra = {key: words for key, words in EXTRA.items() if key in each}
    return head + list(extra.values()), [
        [
            f"{group} {name}".strip(),
            shown(each["published"], percent),
            shown(each["ours"], percent),
            f"{each['distance']:+.0%}",
            *(shown(each[key], percent) for key in extra),
        ]
        for group, entries in nested.items()
        for name, each in entries.items()
    ]


EXTRA = {"while_somebody_waits": "while somebody waits", "least": "least", "most": "most"}


def recovery_rows(facts: dict) -> list[list[str]]:
    return [
        [
            size,
            f"{1e3 * each['swap_s']:.1f}",
            f"{1e3 * each['recompute_s']:.1f}",
            f"{each['ratio']:.2f}",
            *(f"{each[key]:.2f}" if key in each else "" for key in ("swap_requests_per_s", "recompute_requests_per_s")),
        ]
        for size, each in facts["figure_19_recovery"].items()
    ]


def prediction_rows(facts: dict) -> list[list[str]]:
    return [
        [name, what.replace("_", " "), f"{each['measured']:.4g}", f"{each['predicted']:.4g}", f"{each['error']:+.1%}"]
        for name, run in facts["runs"].items()
        for what, each in run.items()
    ]


def coarse_rows(facts: dict) -> list[list[str]]:
    return [
        [name.replace("_", " "), f"{each['exact']:.4g}", f"{each['coarse']:.4g}", f"{each['error']:+.1%}"]
        for name, each in facts["coarse"]["errors"].items()
    ]


def speed_rows(facts: dict) -> list[list[str]]:
    return [
        [
            name,
            f"{each['simulated_s']:.1f}",
            f"{each['processor_s']:.2f}",
            f"{each['simulated_s'] / each['processor_s']:.0f}",
        ]
        for name, each in facts.items()
    ]


def fleet_rows(facts: dict) -> list[list[str]]:
    return [
        [
            f"{facts['requests']:,}",
            f"{facts['replicas']}",
            f"{facts['simulated_s']:.0f}",
            *(f"{facts[name]:.0f}" if name in facts else "" for name in ("wall_s", "processor_s")),
        ]
    ]


TABLES = {
    "recovery": (
        "paper",
        ["tokens per block", "swap, ms", "recompute, ms", "ratio", "crowd with swap, a second", "with recompute"],
        recovery_rows,
    ),
    "prediction": ("prediction", ["requests", "", "measured", "predicted", "error"], prediction_rows),
    "coarse": ("coarse", ["", "exact", "coarse", "error"], coarse_rows),
    "speed": ("speed", ["", "simulated seconds", "processor seconds", "simulated seconds a second"], speed_rows),
    "fleet": ("fleet", ["requests", "replicas", "simulated seconds", "took, seconds", "of a processor"], fleet_rows),
}


def shown(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.2f}"


def markdown(figure: str) -> str:
    if figure in TABLES and TABLES[figure][0] not in read():
        return f"**Not recorded yet.** To record it: `python docs/_ext/capacity.py {TABLES[figure][0]}`."
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
            figure = self.arguments[0]
            name = TABLES[figure][0] if figure in TABLES else None
            said = f"\n\n{source(name)}" if name in read() and name != "paper" else ""
            return self.parse_text_to_nodes(markdown(figure) + said)

    app.add_directive("capacity-picture", CapacityPicture)
    app.add_directive("capacity-table", CapacityTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def main() -> None:
    parser = argparse.ArgumentParser(description="Record again what the planner says, into docs/capacity.json.")
    names = [*COMMANDS, *MEASUREMENTS]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; the presets if none is given"
    )
    asked = parser.parse_args().names
    if unknown := [name for name in asked if name not in names]:
        parser.error(f"there is no {unknown[0]}: it must be one of {', '.join(names)}")
    record(asked or list(PRESETS))


if __name__ == "__main__":
    main()
