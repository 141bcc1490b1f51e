"""The vector kernels beside torch on this CPU, in turn: matrix products, whole steps, what huge pages, fewer bits and contenders save.

    OMP_NUM_THREADS=1 python -m tests.peers.measure_vectors

Seconds are those of the processor and not of the clock, so that a neighbour takes little of them; still, a busy machine has
slower caches. Each figure is the median of the ratios of turns, and in brackets the extremes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from kernels.cpu.instructions import why_not_four_bits, why_not_int8
from kernels.cpu.layout import PackedWeight
from kernels.cpu.memory import Arena
from kernels.cpu.packing import FourBits, pack_four_bits, pack_int8_weight, pack_weight
from kernels.cpu.team import Team
from kernels.cpu.workspace import Workspace
from optimized.checkpoint import ModelConfig, random_checkpoint
from optimized.llama import LlamaModel
from optimized.sampling import Draw, SamplingParams, sample
from optimized.vector_model import VectorModel
from tests.models.test_llama import Paged

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
        work.weight_room(rows, weight)
        work.room("logits", (rows, weight.padded_columns), torch.float32)
        work.set(vocab_columns=weight.padded_columns)
        works.append(work)
    return lambda: [work.run("product") for work in works] and None


def groups(num_columns: int, depth: int) -> FourBits:
    """A weight in groups of 4 bits, with numbers by chance."""
    scales = torch.rand(num_columns, depth // 32).half()
    return FourBits(torch.randint(0, 16, (num_columns, depth), dtype=torch.uint8), scales, -8 * scales)


def steps() -> Mapping[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Steps of a random model with SmolLM2-135M's sizes and a fifth of its layers: by torch in float32, and by the vector kernels."""
    config = ModelConfig(
        num_layers=6,
        hidden_size=576,
        intermediate_size=1536,
        num_query_heads=9,
        num_kv_heads=3,
        head_size=64,
        vocab_size=49152 // 5,
        max_model_len=1024,
        tie_word_embeddings=True,
    )
    tensors = random_checkpoint(config, 0).tensors
    models = LlamaModel(config, tensors, torch.float32), VectorModel(config, tensors, 1)
    prompt = [token % config.vocab_size for token in range(7, 7 * 257, 7)]

    def prefill(model: LlamaModel | VectorModel) -> Callable[[], object]:
        paged = Paged(model, 1, 16, 16)
        return lambda: (paged.computed.__setitem__(0, 0), paged.step({0: prompt}))

    def decode(model: LlamaModel | VectorModel, count: int) -> Callable[[], object]:
        paged = Paged(model, count, 24, 16)
        for seq in range(count):
            paged.step({seq: prompt})
        return lambda: paged.step({seq: [5] for seq in range(count)})

    return {
        "a prompt of 256 tokens": (prefill(models[0]), prefill(models[1])),
        **{f"{n} tokens after 256 others": (decode(models[0], n), decode(models[1], n)) for n in (1, 16, 64)},
    }


def main() -> None:
    torch.set_num_threads(1)
    team, arena = Team(1), Arena()
    plain = [torch.randn(shape).bfloat16() for _ in range(LAYERS) for shape in SHAPES]
    packed = [pack_weight(weight, arena=arena) for weight in plain]
    small_pages = [replace(each, tiles=each.tiles.clone()) for each in packed]
    narrow = {
        "int8": [] if why_not_int8() else [pack_int8_weight(weight, arena=arena) for weight in plain],
        "4 bits": []
        if why_not_four_bits()
        else [pack_four_bits(groups(*weight.shape), arena=arena) for weight in plain],
    }
    arena.to_huge_pages()
    wide = [weight.float() for weight in plain]
    for rows in (1, 8, 64, 256):
        some = len(plain) if rows <= 8 else len(plain) // 5  # more than the caches hold, and no more than patience does
        inputs = [torch.randn(rows, weight.shape[1]).bfloat16() for weight in plain[:some]]

        def by_torch(weights: list[torch.Tensor], inputs: list[torch.Tensor] = inputs) -> Callable[[], None]:
            ours_and_theirs = [(x.to(weight.dtype), weight) for x, weight in zip(inputs, weights, strict=False)]
            return lambda: [torch.nn.functional.linear(x, weight) for x, weight in ours_and_theirs] and None

        ours = products(packed[:some], rows, team)
        print(
            f"layers' products, {rows:3} rows: F.linear in bfloat16 over ours {ratio(by_torch(plain), ours)}", end="; "
        )
        print(f"in float32 {ratio(by_torch(wide), ours)}; ", end="")
        print(f"small pages over huge ones {ratio(products(small_pages[:some], rows, team), ours)}")
        for name, weights in narrow.items():
            if weights:
                print(f"    12 bits over {name} {ratio(ours, products(weights[:some], rows, team))}")
    for name, (theirs, ours) in steps().items():
        print(f"{name}: torch in float32 over ours {ratio(theirs, ours)}")
    logits = np.random.default_rng(0).standard_normal(49152).astype(np.float32) * 3
    draw = Draw(SamplingParams(temperature=1.0), 1, 0, 0)
    print(f"a draw out of 49,152 tokens by all logarithms: {1e3 * seconds(lambda: sample(logits, draw)):.2f} ms")


if __name__ == "__main__":
    main()
