"""What weights in fewer bits cost in quality: perplexity of a fixed text, and how often the likeliest token is another one.

    python -m tests.peers.measure_int8 [--tokens 1024] [MODEL]

Weights are rounded to 8 bits with a scale for each group of them along a row, and then computed with in float32, like every
other operand: so this is the rounding alone, whatever kernel does it. So it is with what is multiplied with the weights, in
bfloat16. Then the engine's own weights and kernels, in bfloat16 and as ``--quantization int8`` and ``gguf`` have them. Each is
held against the first, weights in bfloat16 and all else in float32. Embeddings and norms keep their numbers. The text is
Python's own manual as ``pydoc`` has it, cut into windows of 256 tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING

import torch
from torch.overrides import TorchFunctionMode

from optimized.checkpoint import Checkpoint, LazyTensors, load_checkpoint
from optimized.cpu_path import why_not_narrow
from optimized.llama import LlamaModel
from spec.vocabulary import InvalidConfig

if TYPE_CHECKING:
    from optimized.gguf_groups import GgufGroups
    from optimized.vector_model import VectorModel

WINDOW = 256


def in_int8(weight: torch.Tensor, group: int | None) -> torch.Tensor:
    """A weight ``[rows, columns]`` as its int8 numbers give it back: a scale for each ``group`` of a row, None: for the row."""
    groups = weight.view(len(weight), -1, group or weight.shape[1])
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (torch.round(groups / scale) * scale).view(weight.shape)


class Rounded(LazyTensors):
    """The tensors of a checkpoint in bfloat16, products' weights as ``change`` gives them."""

    def __init__(self, checkpoint: Checkpoint, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(checkpoint.tensors)
        self._tensors, self._change = checkpoint.tensors, change

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name].bfloat16().float()
        return self._change(tensor) if "_proj.weight" in name else tensor


class LeftInBfloat16(TorchFunctionMode):
    """What is multiplied with a weight is rounded to bfloat16, while this holds."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        if func is torch.nn.functional.linear and isinstance(args[0], torch.Tensor):
            args = (args[0].bfloat16().float(), *args[1:])
        return func(*args, **(kwargs if isinstance(kwargs, dict) else {}))


@torch.inference_mode()
def logits(model: LlamaModel | VectorModel, windows: torch.Tensor) -> torch.Tensor:
    """Logits after each token of each window, ``[num_windows, WINDOW, vocab_size]`` float32."""
    found = []
    caches = model.new_kv_caches(WINDOW // 16, 16)
    for window in windows:
        steps, table = torch.arange(WINDOW), torch.arange(WINDOW // 16, dtype=torch.int32)[None]
        lengths, start = torch.tensor([WINDOW], dtype=torch.int32), torch.tensor([0, WINDOW], dtype=torch.int32)
        found.append(model.logits(model.forward(window, steps, caches, steps, table, lengths, start)).clone())
    return torch.stack(found)


def in_float32(checkpoint: Checkpoint) -> Iterator[tuple[str, LlamaModel]]:
    """The model with its weights rounded in each way, computing in float32."""
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "bfloat16": lambda weight: weight,
        "int8, a scale for each row": lambda weight: in_int8(weight, None),
        "int8, for 64 of a row": lambda weight: in_int8(weight, 64),
        "int8, for 32 of a row": lambda weight: in_int8(weight, 32),
    }
    for name, change in changes.items():
        yield name, LlamaModel(checkpoint.config, Rounded(checkpoint, change), torch.float32)
        if name == "bfloat16":
            narrow = LlamaModel(checkpoint.config, Rounded(checkpoint, change), torch.float32)
            with LeftInBfloat16():
                yield "bfloat16, and what they multiply too", narrow


def by_the_engine(checkpoint: Checkpoint) -> Iterator[tuple[str, VectorModel]]:
    """The model as the vector kernels have it."""
    from optimized.gguf_groups import groups_of
    from optimized.vector_model import VectorModel

    def made(in_int8: bool = False, groups: GgufGroups | None = None) -> VectorModel:
        return VectorModel(checkpoint.config, checkpoint.tensors, torch.get_num_threads(), in_int8, groups)

    yield "the engine, bfloat16", made()
    yield "the engine, int8", made(in_int8=True)
    try:
        yield "the engine, the file's 4 bits", made(groups=groups_of(checkpoint))
    except InvalidConfig as error:
        print(f"no weights as the file has them: {error}")


def show(models: Iterator[tuple[str, LlamaModel | VectorModel]], windows: torch.Tensor) -> None:
    """A line for each; logits and the likeliest tokens are held against those of the first."""
    first: torch.Tensor | None = None
    for name, model in models:
        found = logits(model, windows)
        first = found if first is None else first
        loss = -found.log_softmax(-1)[:, :-1].gather(-1, windows[:, 1:, None]).mean().item()
        same = (found.argmax(-1) == first.argmax(-1)).double().mean().item()
        off = (found - first).square().mean().sqrt().item()
        print(
            f"{name:38} perplexity {math.exp(loss):.4f}, the likeliest token is the same {100 * same:.2f} %, "
            f"logits are {off:.4f} off",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    asked = parser.parse_args()
    checkpoint = load_checkpoint(asked.model)
    if checkpoint.tokenizer is None:
        raise SystemExit("the model has no tokenizer")
    text = "".join(topics.topics[name] for name in sorted(topics.topics))
    ids = checkpoint.tokenizer.encode(text[: 8 * asked.tokens])[: asked.tokens // WINDOW * WINDOW]
    windows = torch.tensor(ids).view(-1, WINDOW)
    print(
        f"{checkpoint.name}, Python {sys.version.split()[0]}'s manual, {len(windows)} windows of {WINDOW} tokens",
        flush=True,
    )
    if (reason := why_not_narrow("gguf")) is not None:
        print(f"the engine has no such weights: {reason}")
    show(chain(in_float32(checkpoint), by_the_engine(checkpoint) if reason is None else ()), windows)


if __name__ == "__main__":
    main()
