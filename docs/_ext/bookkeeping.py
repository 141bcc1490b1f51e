"""What the bookkeeping costs, as it was recorded: ``.. bookkeeping-table::``.

To record all of it again, which takes some twenty minutes of a machine that does nothing else meanwhile:

    python docs/_ext/bookkeeping.py [--vllm PYTHON MODEL] [--rounds 5] [--model]

PYTHON is the interpreter of an environment with vLLM (``tests/peers/setup_vllm_cpu.sh``), MODEL a folder with a config.json;
without them what vLLM takes is left out. With ``--model`` the steps of a real model are timed too. ``--only NAME`` records one
of the measurements anew, and leaves the others as they are.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from recording import ROOT, made_by

RECORDED = ROOT / "docs/bookkeeping.json"
POOLS = (1_000, 100_000, 10_000_000)
WAITING = (1, 1_000_000)
FITS = ("--max-num-seqs", "12")
"""So few sequences of the workload fit into the smallest pool at once that nobody is ever preempted: the same steps in each."""


def bench(*options: str) -> dict:
    """What ``kvproof bench scheduler`` says, in a process of its own."""
    command = [sys.executable, "-m", "optimized.cli", "bench", "scheduler", "--json", *options]
    return facts_of(command)


def facts_of(command: list[str]) -> dict:
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return json.loads(said[said.index("{") :])


def tokens(asked: argparse.Namespace) -> dict:
    """Microseconds per output token, round by round, in turn with vLLM."""
    found: dict = {name: {"kvproof": [], "vllm": []} for name in ("plain", "prefix")}
    for _ in range(asked.rounds):
        for name, options in (("plain", []), ("prefix", ["--prefix"])):
            found[name]["kvproof"].append(bench(*options)["us_per_token_out"])
            if asked.vllm:
                peer = [asked.vllm[0], str(ROOT / "tests/peers/bench_vllm_scheduler.py"), asked.vllm[1]]
                found[name]["vllm"].append(facts_of([*peer, *options])["us_per_token_out"])
    return found


def pools(asked: argparse.Namespace) -> dict:
    """Microseconds per step for each size of pool."""
    rounds = [{n: bench("--num-blocks", str(n), *FITS) for n in POOLS} for _ in range(asked.rounds)]
    return {str(n): statistics.median(each[n]["us_per_step"] for each in rounds) for n in POOLS}


def waiting(asked: argparse.Namespace) -> dict:
    """Microseconds per step, with so many requests behind the workload, until all of the workload runs."""
    rounds = [{n: bench("--waiting", str(n), "--max-num-seqs", "64") for n in WAITING} for _ in range(asked.rounds)]
    return {str(n): statistics.median(each[n]["us_per_step"] for each in rounds) for n in WAITING}


def pool_memory(asked: argparse.Namespace) -> dict:
    """Start-up and memory of the largest pool, with a prefix cache, and the look-up of a long prompt."""
    largest, usual = bench("--prefix", "--num-blocks", str(POOLS[-1]), "--requests", "1"), bench("--prefix")
    return {
        "startup_s": largest["startup_s"],
        "bytes_per_block": largest["bytes_per_block"],
        "bytes_per_cached_block": usual["bytes_per_cached_block"],
        "lookup_cold_ms": usual["lookup_cold_ms"],
        "lookup_warm_ms": usual["lookup_warm_ms"],
    }


def watched(asked: argparse.Namespace) -> dict:
    """Microseconds of processor time per scheduled sequence of a step, by who watches; 256 sequences of 200 tokens."""
    from tests.measure_traces import bookkeeping

    with tempfile.TemporaryDirectory() as folder:
        return {name: 1e6 * seconds for name, seconds in bookkeeping(Path(folder), 256, 200).items()}


def model_steps(asked: argparse.Namespace) -> dict:
    """Seconds of processor time of a step of SmolLM2-135M with 16 sequences, by who watches."""
    from tests.measure_traces import model_steps

    with tempfile.TemporaryDirectory() as folder:
        return model_steps(Path(folder), 16)


MEASUREMENTS = {
    "tokens": tokens,
    "pools": pools,
    "waiting": waiting,
    "pool_memory": pool_memory,
    "watched": watched,
    "model_steps": model_steps,
}


def ratio(found: dict) -> str:
    """The median of the rounds, and the extremes."""
    if not found["vllm"]:
        return f"{statistics.median(found['kvproof']):.2f} us; vLLM was not there"
    ratios = sorted(their / our for our, their in zip(found["kvproof"], found["vllm"], strict=True))
    ours, theirs = statistics.median(found["kvproof"]), statistics.median(found["vllm"])
    return f"{statistics.median(ratios):.1f} times ({ratios[0]:.1f} to {ratios[-1]:.1f}): {ours:.2f} us, vLLM {theirs:.2f} us"


def spread(found: dict, unit: str) -> str:
    """Each of several figures, and how far the largest is above the smallest."""
    values = [f"{int(name):,}: {value:,.0f}" for name, value in found.items()]
    return f"{', '.join(values)} {unit}, {max(found.values()) / min(found.values()) - 1:.0%} apart"


def more(found: dict, name: str) -> str:
    return f"{found[name] - found['unwatched']:.2f} us"


def percent(found: dict, name: str) -> str:
    return f"{100 * (found[name] / found['unwatched'] - 1):+.1f} %"


ROWS = (
    ("time per output token", "vLLM takes 5 times as long", "tokens", lambda f: ratio(f["plain"])),
    ("the same with a prefix cache, `--prefix`", "vLLM takes 5 times as long", "tokens", lambda f: ratio(f["prefix"])),
    (
        "time per step, by blocks of the pool, `--num-blocks`",
        "within 20 %",
        "pools",
        lambda f: spread(f, "us"),
    ),
    ("time per step, by requests that wait, `--waiting`", "within 20 %", "waiting", lambda f: spread(f, "us")),
    ("memory of a block of the pool", "32 bytes", "pool_memory", lambda f: f"{f['bytes_per_block']:.1f} bytes"),
    ("memory of a cached block", "400 bytes", "pool_memory", lambda f: f"{f['bytes_per_cached_block']:.1f} bytes"),
    ("start-up of a pool of 10,000,000 blocks", "2 s", "pool_memory", lambda f: f"{f['startup_s']:.2f} s"),
    ("look-up of 100,000 tokens, none cached", "20 ms", "pool_memory", lambda f: f"{f['lookup_cold_ms']:.1f} ms"),
    ("the same, all cached", "40 ms", "pool_memory", lambda f: f"{f['lookup_warm_ms']:.1f} ms"),
    ("`--trace`, for each scheduled sequence", "1 us", "watched", lambda f: more(f, "--trace")),
    ("`--self-check sampled`, the same", "", "watched", lambda f: more(f, "--self-check sampled")),
    ("`--trace`, of a step of SmolLM2-135M", "3 %", "model_steps", lambda f: percent(f, "--trace")),
    ("`--self-check sampled`, the same", "3 %", "model_steps", lambda f: percent(f, "--self-check sampled")),
)
"""What is measured, its limit, the measurement that has it, and how it reads."""


def machine() -> str:
    """The processor, and how many of it."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{len(names)} x {names[0] if names else platform.processor()}"


def record(asked: argparse.Namespace) -> None:
    """Measure, and write down what came of it after every measurement."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    versions = [f"Python {platform.python_version()}", f"numpy {version('numpy')}"]
    if asked.vllm:
        ask = "from importlib.metadata import version; print(version('vllm-cpu'))"
        said = subprocess.run([asked.vllm[0], "-c", ask], check=True, capture_output=True, text=True).stdout
        versions.append(f"vllm-cpu {said.strip()}")
    for name, measure in MEASUREMENTS.items():
        if asked.only not in (None, name) or (name == "model_steps" and not asked.model):
            continue
        busy = os.getloadavg()[0]
        options = [f"--only {name}", f"--rounds {asked.rounds}"]
        options += ["--vllm PYTHON MODEL"] if asked.vllm else []
        options += ["--model"] if name == "model_steps" else []
        recorded[name] = made_by(f"python docs/_ext/bookkeeping.py {' '.join(options)}") | {
            "machine": machine(),
            "versions": ", ".join(versions),
            "load_before": round(busy, 2),
            "facts": measure(asked),
        }
        print(f"{name}: {json.dumps(recorded[name]['facts'])}", flush=True)
        RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def text() -> str:
    """The table, and where each measurement comes from."""
    from ledger import table

    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    rows = [
        (
            what.replace("`", "``"),
            limit,
            reads(recorded[name]["facts"]) if name in recorded else f"not measured yet: ``--only {name}``",
        )
        for what, limit, name, reads in ROWS
    ]
    origins = [
        f"* ``{each['command']}`` on {each['date']} at commit {each['commit']}: {each['machine']}, {each['versions']}, "
        f"load before it {each['load_before']}"
        for each in recorded.values()
    ]
    return f"{table(('what', 'limit', 'measured'), rows, (40, 16, 44))}\n\n" + "\n".join(origins) + "\n"


def setup(app) -> dict[str, bool]:
    from ledger import Words

    class Bookkeeping(Words):
        """The table of what the bookkeeping costs."""

        def text(self) -> str:
            return text()

    app.add_directive("bookkeeping-table", Bookkeeping)
    return {"parallel_read_safe": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", nargs=2, metavar=("PYTHON", "MODEL"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--only", choices=MEASUREMENTS)
    sys.path.insert(0, str(ROOT))
    record(parser.parse_args())


if __name__ == "__main__":
    main()
