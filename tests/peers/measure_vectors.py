"""The vector kernels beside torch on this CPU: matrix products in turn, and what huge pages and contenders save.

    OMP_NUM_THREADS=1 python -m tests.peers.measure_vectors

Seconds are those of the processor and not of the clock, so that a neighbour takes little of them; still, a busy machine has
slower caches. Each figure is the median of the ratios of turns, and in brackets the extremes.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

from kernels.cpu.layout import PackedWeight, pack_weight
from kernels.cpu.memory import Arena
from kernels.cpu.team import Team
from kernels.cpu.workspace import Workspace
from optimized.sampling import Draw, SamplingParams, sample

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # the products of a layer of SmolLM2-135M
LAYERS, TURNS = 30, 9


def seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def ratio(slow: Callable[[], object], fast: Callable[[], object]) -> str:
    slow(), fast()
    found = sorted(seconds(slow) / seconds(fast) for _ in range(TURNS))
    return f"{median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def products(weights: Sequence[PackedWeight], rows: int, team: Team) -> Callable[[], None]:
    works = []
    for weight in weights:
        work = Workspace(team)
        work.room("normed", (rows, weight.padded_depth), torch.bfloat16)
        work.room("logits", (rows, weight.padded_columns), torch.float32)
        work.hold("head", weight.tiles)
        work.set(rows=rows, hidden_depth=weight.padded_depth, vocab_columns=weight.padded_columns)
        works.append(work)
    return lambda: [work.run("product") for work in works] and None


def main() -> None:
    torch.set_num_threads(1)
    team, arena = Team(1), Arena()
    plain = [torch.randn(shape).bfloat16() for _ in range(LAYERS) for shape in SHAPES]
    packed = [pack_weight(weight, arena=arena) for weight in plain]
    small_pages = [PackedWeight(each.tiles.clone(), each.num_columns, each.depth) for each in packed]
    for rows in (1, 8, 64, 256):
        inputs = [torch.randn(rows, weight.shape[1]).bfloat16() for weight in plain]

        def by_torch(inputs: list[torch.Tensor] = inputs) -> None:
            for x, weight in zip(inputs, plain, strict=True):
                torch.nn.functional.linear(x, weight)

        ours = products(packed, rows, team)
        print(f"all layers' products, {rows:3} rows: F.linear over ours {ratio(by_torch, ours)}", end="; ")
        print(f"small pages over huge ones {ratio(products(small_pages, rows, team), ours)}")
    logits = np.random.default_rng(0).standard_normal(49152).astype(np.float32) * 3
    draw = Draw(SamplingParams(temperature=1.0), 1, 0, 0)
    print(f"a draw out of 49,152 tokens by all logarithms: {1e3 * seconds(lambda: sample(logits, draw)):.2f} ms")


if __name__ == "__main__":
    main()
