"""A device that computes nothing and takes the time that a real one would: a roofline and a virtual clock.

The time of a pass is the larger of computing and reading memory, plus a constant overhead, plus what blocks take to move
between device and host and what cards take to add up their parts. Of the tokens nothing is known: each one is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from optimized.cards import Card
from optimized.plan import Plan
from spec.vocabulary import Token

if TYPE_CHECKING:
    from optimized.checkpoint import ModelConfig


PIECE_S = 10e-6
"""An assumption: starting a copy takes ten microseconds, on any card."""


@dataclass(frozen=True)
class ModelCost:
    """What a model costs: bytes to keep, bytes and operations to run. A multiplication and an addition are two operations.

    ``flops_per_pair`` is for a query and a key, in all layers: scores and mixture. ``reduced_bytes_per_token`` is what each
    card adds up with the others, in all layers.
    """

    name: str
    weight_bytes: float
    kv_bytes_per_token: int
    flops_per_token: float
    flops_per_sample: float
    flops_per_pair: float
    reduced_bytes_per_token: float
    activation_bytes_per_token: float
    max_model_len: int
    pieces_per_block: int = 1
    """How many separate transfers move a block: K and V of each layer."""

    @staticmethod
    def of(config: ModelConfig, name: str, dtype_bytes: int = 2) -> ModelCost:
        """The cost of a dense transformer with these shapes; the embedding is looked up, not multiplied."""
        from optimized.checkpoint import tensor_shapes

        sizes = {tensor: _product(shape) for tensor, shape in tensor_shapes(config).items()}
        matrices = sum(size for tensor, size in sizes.items() if tensor.startswith("model.layers"))
        head = config.vocab_size * config.hidden_size
        return ModelCost(
            name=name,
            weight_bytes=sum(sizes.values()) * dtype_bytes,
            kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_size * dtype_bytes,
            flops_per_token=2.0 * matrices,
            flops_per_sample=2.0 * head,
            flops_per_pair=4.0 * config.num_layers * config.num_query_heads * config.head_size,
            reduced_bytes_per_token=2.0 * config.num_layers * config.hidden_size * dtype_bytes,
            activation_bytes_per_token=(4 * config.hidden_size + 3 * config.intermediate_size) * dtype_bytes,
            max_model_len=config.max_model_len,
            pieces_per_block=2 * config.num_layers,
        )


def _product(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


@dataclass(frozen=True)
class Rates:
    """What a group of cards reaches, per second, and what every pass costs besides (``overhead_s``)."""

    flops: float
    bandwidth: float
    overhead_s: float
    host_link: float
    peer_link: float = 0.0
    num_cards: int = 1
    piece_s: float = 0.0
    """What each transfer between host and device takes besides, however small it is."""

    @staticmethod
    def of(card: Card, compute: float, bandwidth: float, overhead_s: float, num_cards: int = 1) -> Rates:
        """The stated parts of the published rates, of all cards together."""
        return Rates(
            card.flops * compute * num_cards,
            card.bandwidth * bandwidth * num_cards,
            overhead_s,
            card.host_link * bandwidth * num_cards,
            card.peer_link * bandwidth,
            num_cards,
            PIECE_S,
        )


class SimulatedDevice:
    """Runs plans on a virtual clock, ``now`` in seconds. ``busy_s`` is the time spent in passes."""

    def __init__(self, cost: ModelCost, rates: Rates, block_size: int) -> None:
        self.cost = cost
        self.rates = rates
        self.now = 0.0
        self.busy_s = 0.0
        self._block_bytes = block_size * cost.kv_bytes_per_token

    def run(self, plan: Plan) -> Sequence[Token]:
        seconds = self.seconds(plan)
        self.now += seconds
        self.busy_s += seconds
        return (0,) * len(plan.sample_rows)

    def seconds(self, plan: Plan) -> float:
        """How long a pass takes. O(sequences)."""
        num_tokens, num_keys, num_pairs = plan.num_tokens, sum(plan.seq_lens), num_pairs_of(plan)
        num_swapped = sum([len(swap.blocks) for swap in plan.swaps])
        return self.pass_seconds(num_tokens, len(plan.sample_rows), num_pairs, num_keys, len(plan.copies), num_swapped)

    @property
    def swap_seconds(self) -> float:
        """How long a block takes to move between host and device."""
        return self._block_bytes / self.rates.host_link + self.cost.pieces_per_block * self.rates.piece_s

    def pass_seconds(
        self,
        num_tokens: int,
        num_samples: int,
        num_pairs: int,
        num_keys: int,
        num_copied: int = 0,
        num_swapped: int = 0,
    ) -> float:
        """How long a pass takes in which so many tokens are computed, samples drawn, pairs of query and key multiplied, keys
        read, and blocks copied and swapped. O(1)."""
        cost, rates = self.cost, self.rates
        flops = cost.flops_per_token * num_tokens + cost.flops_per_sample * num_samples
        flops += cost.flops_per_pair * num_pairs
        copied = 2 * self._block_bytes * num_copied
        seconds = max(
            flops / rates.flops, (cost.weight_bytes + num_keys * cost.kv_bytes_per_token + copied) / rates.bandwidth
        )
        if num_swapped:
            seconds += num_swapped * self.swap_seconds
        if rates.num_cards > 1:  # a ring: each card sends and gets every part but its own, twice
            sent = 2 * (rates.num_cards - 1) / rates.num_cards * cost.reduced_bytes_per_token * num_tokens
            seconds += sent / rates.peer_link
        return seconds + rates.overhead_s


def num_pairs_of(plan: Plan) -> int:
    """The pairs of a query and a key in a pass. O(sequences)."""
    if plan.num_tokens == len(plan.seq_lens):
        return sum(plan.seq_lens)
    # A token sees everything up to itself: of the last ``count`` of ``length`` tokens that is one trapezium.
    bounds = pairwise(plan.query_start)
    return sum(
        [
            (stop - start) * (2 * length - (stop - start) + 1) // 2
            for (start, stop), length in zip(bounds, plan.seq_lens, strict=True)
        ]
    )
