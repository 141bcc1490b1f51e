"""The histograms of vLLM's ``/metrics`` and their bounds, as its own source says them, for a test to compare ours with.

    python tests/peers/record_vllm_metrics.py VLLM_PACKAGE tests/server/vllm_histograms.json

VLLM_PACKAGE is the folder of an installed or unpacked vLLM. Nothing of it is imported but its list of bounds.
"""

import ast
import json
import runpy
import sys
from pathlib import Path

MODEL_LEN = 64
"""For the bounds that end where a sequence does: that of the model of the tests."""


def main(package: Path, out: Path) -> None:
    bounds = runpy.run_path(str(package / "v1" / "metrics" / "buckets.py"))["histogram_buckets"]
    version = (package / "_version.py").read_text(encoding="utf-8")
    tree = ast.parse((package / "v1" / "metrics" / "loggers.py").read_text(encoding="utf-8"))
    families: dict[str, str] = {}
    found: dict[str, list[float]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Name(id="histogram_buckets"), args=[ast.Constant(value=family), *_]),
            ):
                families[name] = family
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            said = {each.arg: each.value for each in node.keywords}
            if isinstance(buckets := said.get("buckets"), ast.Name) and buckets.id in families:
                family = families[buckets.id]
                found[ast.literal_eval(said["name"])] = [float(each) for each in bounds(family, MODEL_LEN)]
    said_version = next(line for line in version.splitlines() if line.startswith("__version__ ="))
    record = {"vllm": said_version.split("'")[1], "max_model_len": MODEL_LEN, "histograms": dict(sorted(found.items()))}
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
