"""An engine that stays up and serves one workload after the other: our side of ``kvproof bench compare``.

    python -m optimized.bench_worker MODEL [--enable-prefix-caching] [--quantization int8|gguf]

When it is ready it prints a line of JSON. Then it reads lines of JSON with ``workload``, a file, and ``serial``, whether its
requests are served one after the other, and answers each with a line: what ``bench offline`` says, and ``work``, how often
which step came, as ``[tokens, samples, keys, count]``. Every round begins with an empty cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from optimized.bench_offline import CountedCore, bench_offline, read_tasks
from optimized.checkpoint import Checkpoint
from optimized.llm import LLM
from optimized.model_core import EngineArgs, MakeObserver


def rounds(
    model: str, dtype: str, prefix_caching: bool, lines: Iterable[str], quantization: str | None = None
) -> Iterator[dict[str, object]]:
    """What is said: first what the engine is, then a round for each line."""
    cores: list[CountedCore] = []

    def make_core(checkpoint: Checkpoint, args: EngineArgs, make_observer: MakeObserver | None) -> CountedCore:
        cores.append(CountedCore(checkpoint, args, make_observer))
        return cores[-1]

    llm = LLM(model, dtype=dtype, enable_prefix_caching=prefix_caching, quantization=quantization, make_core=make_core)
    core = cores[0]
    yield {"engine": "kvproof", "dtype": str(core.device.model.dtype).removeprefix("torch.")}
    for line in lines:
        asked = json.loads(line)
        core.work.clear()
        core.core.reset_cache()
        facts = bench_offline(llm, read_tasks(Path(asked["workload"])), serial=asked["serial"])
        yield facts | {"work": [[*step, count] for step, count in sorted(core.work.items())]}


def main() -> None:
    """Serve what standard input asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--enable-prefix-caching", action="store_true")
    parser.add_argument("--quantization")
    asked = parser.parse_args()
    for facts in rounds(asked.model, asked.dtype, asked.enable_prefix_caching, sys.stdin, asked.quantization):
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
