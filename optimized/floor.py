"""A yardstick for a workload's time on this CPU: its matrix products, and its keys and values read once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels.cpu.team import why_not
from optimized.bench_offline import Work
from optimized.checkpoint import ModelConfig

MOST_MEASURED = 24
"""Steps that are measured; each stands for as many as it has neighbours in the order of their tokens."""
COPIED_BYTES = 1 << 28
REPEATS = 2


class Floor:
    """A model's matrix products and nothing else, with random weights as large as its own.

    A step's time is that of all layers' products for its tokens, of the head's for its samples, and of its keys and values
    at the bandwidth of a copy, counted as read and written. Each kind of product is made by oneDNN on packed weights and,
    where they run, by the vector kernels, and the faster one counts. It is a yardstick, then, and no bound: still better
    products would beat it, and so does at batch 1 an engine that begins one parallel region where this begins one for each.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        width, inner, head_size = config.hidden_size, config.intermediate_size, config.head_size
        heads = (config.num_query_heads + 2 * config.num_kv_heads) * head_size
        inside = config.num_query_heads * head_size
        shapes = ((heads, width), (width, inside), (2 * inner, width), (width, inner))  # qkv, o, gate and up, down
        makers: list[Callable[[int, int, int], Product]] = [partial(Packed, dtype=dtype)]
        if dtype == torch.bfloat16 and why_not() is None:
            makers.append(Vectors)
        self._layers = config.num_layers
        self._sides = [
            ([make(rows, columns, self._layers) for rows, columns in shapes], make(config.vocab_size, width, 1))
            for make in makers
        ]
        self._bytes_per_key = 2 * config.num_layers * config.num_kv_heads * head_size * dtype.itemsize
        self.bytes_per_s = copy_bandwidth()

    @torch.inference_mode()
    def seconds(self, work: Mapping[Work, int]) -> float:
        """The floor of all these steps together, ``work`` says how often each comes."""
        steps = sorted(each for each, count in work.items() for _ in range(count))
        total = sum(each.num_keys for each in steps) * self._bytes_per_key / self.bytes_per_s
        measured = min(MOST_MEASURED, len(steps))
        for index in range(measured):
            first, stop = index * len(steps) // measured, (index + 1) * len(steps) // measured
            total += (stop - first) * self._products_s(steps[(first + stop) // 2])
        return total

    def _products_s(self, step: Work) -> float:
        """The least time of each kind of product, all layers together, by whoever is the fastest at it."""
        sides = [self._kinds_s(kinds, head, step) for kinds, head in self._sides]
        least: float = sum(min(times) for times in zip(*sides, strict=True))
        return least

    def _kinds_s(self, kinds: Sequence[Product], head: Product, step: Work) -> list[float]:
        """The least of some times of each kind, and of the head. Layers come in their order, so caches are as in a step."""
        for product in kinds:
            product.prepare(step.num_tokens)
        if step.num_samples:
            head.prepare(step.num_samples)
        least = [float("inf")] * (len(kinds) + 1)
        for repeat in range(REPEATS + 1):
            spent = [0.0] * len(least)
            for layer in range(self._layers):
                for kind, product in enumerate(kinds):
                    started = time.perf_counter()
                    product(layer)
                    spent[kind] += time.perf_counter() - started
            if step.num_samples:
                started = time.perf_counter()
                head(0)
                spent[-1] = time.perf_counter() - started
            if repeat:
                least = list(map(min, least, spent))
        return least


class Product(Protocol):
    """``x @ weight.T`` for each layer's weight of one kind, ``[rows, columns]``."""

    def prepare(self, num_tokens: int) -> None:
        """Have an ``x`` of so many rows."""
        ...

    def __call__(self, layer: int) -> object: ...


class Packed:
    """By oneDNN, which packs weights; in float32 by torch where it has no packed product of this type."""

    def __init__(self, rows: int, columns: int, layers: int, dtype: torch.dtype) -> None:
        self._columns, self._dtype, self._is_packed = columns, dtype, True
        weights = [torch.randn(rows, columns).to(dtype) for _ in range(layers)]
        try:
            self._weights = [torch.ops.mkldnn._reorder_linear_weight(weight, 64) for weight in weights]
        except RuntimeError:  # this CPU has none
            self._dtype, self._is_packed = torch.float32, False
            self._weights = [weight.float() for weight in weights]

    def prepare(self, num_tokens: int) -> None:
        self._x = torch.ones(num_tokens, self._columns, dtype=self._dtype)

    def __call__(self, layer: int) -> object:
        if self._is_packed:
            return torch.ops.mkldnn._linear_pointwise(self._x, self._weights[layer], None, "none", [], "")
        return F.linear(self._x, self._weights[layer])


class Vectors:
    """By the vector kernels."""

    def __init__(self, rows: int, columns: int, layers: int) -> None:
        from kernels.cpu.memory import Arena
        from kernels.cpu.packing import pack_weight
        from kernels.cpu.team import Team
        from kernels.cpu.workspace import Workspace

        arena, self._work = Arena(), Workspace(Team(torch.get_num_threads()))
        self._weights = [pack_weight(torch.randn(rows, columns), arena=arena) for _ in range(layers)]
        arena.to_huge_pages()

    def prepare(self, num_tokens: int) -> None:
        weight, work = self._weights[0], self._work
        work.weight_room(num_tokens, weight).fill_(1)
        work.room("logits", (num_tokens, weight.padded_columns), torch.float32)
        work.set(vocab_columns=weight.padded_columns)

    def __call__(self, layer: int) -> None:
        self._work.hold("head", self._weights[layer].tiles)
        self._work.run("product")


def copy_bandwidth() -> float:
    """Bytes read and written in a second by a copy that no cache can hold."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return 2 * COPIED_BYTES / _least_s(lambda: target.copy_(source), 5)


def _least_s(work: Callable[[], object], repeats: int) -> float:
    """The least of some times, in seconds, after one that does not count."""
    least = float("inf")
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        work()
        if repeat:
            least = min(least, time.perf_counter() - started)
    return least
