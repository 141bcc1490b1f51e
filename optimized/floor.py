"""The least time that a workload's arithmetic takes on this CPU: its matrix products, and its keys and values read once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.bench_offline import Work
from optimized.checkpoint import ModelConfig

MOST_MEASURED = 24
"""Steps that are measured; each stands for as many as it has neighbours in the order of their tokens."""
COPIED_BYTES = 1 << 28


class Floor:
    """A model's matrix products and nothing else, with random weights as large as its own.

    A step's time is that of all layers' products for its tokens, of the head's for its samples, and of its keys and values
    at the bandwidth of a copy, counted as read and written. Weights are packed beforehand as oneDNN likes them.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        width, inner, head_size = config.hidden_size, config.intermediate_size, config.head_size
        heads = (config.num_query_heads + 2 * config.num_kv_heads) * head_size
        inside = config.num_query_heads * head_size
        shapes = ((heads, width), (width, inside), (2 * inner, width), (width, inner))  # qkv, o, gate and up, down
        self._layers = [[_Product(rows, columns, dtype) for rows, columns in shapes] for _ in range(config.num_layers)]
        self._head = _Product(config.vocab_size, width, dtype)
        self._bytes_per_key = 2 * config.num_layers * config.num_kv_heads * head_size * dtype.itemsize
        self._widest, self._dtype = max(width, inside, inner), dtype
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
        x = torch.ones(step.num_tokens, self._widest).to(self._dtype)

        def run() -> None:
            for layer in self._layers:
                for product in layer:
                    product(x)
            if step.num_samples:
                self._head(x[: step.num_samples])

        return _least_s(run, 2)


class _Product:
    """``x @ weight.T``, the weight ``[rows, columns]`` packed if oneDNN can."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        self._columns = columns
        self._weight = torch.randn(rows, columns).to(dtype)
        self._packed: Tensor | None = None
        try:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, 64)
        except RuntimeError:  # this CPU, or this type of numbers, has no packed product
            return

    def __call__(self, x: Tensor) -> Tensor:
        x = x[:, : self._columns].contiguous()
        if self._packed is None:
            return F.linear(x, self._weight)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return out


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
