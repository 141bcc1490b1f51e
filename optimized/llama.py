"""The Llama forward pass over a paged cache, for any mixture of sequences at any of their positions.

It knows neither requests nor steps: tokens come in one row after the other, ``query_start`` says whose they are, and
the block table says where the keys and values of earlier tokens lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import FP8, new_scales, paged_attention, write_kv
from optimized.checkpoint import ModelConfig
from optimized.weights import Layer, WeightReader

if TYPE_CHECKING:
    from kernels import AttentionPlan

KVCache = tuple[Tensor, ...]
"""Keys and values of one layer, each ``[num_blocks, block_size, num_kv_heads, head_size]``; in fp8, their scales too."""


class LlamaModel:
    """A model with its weights on a device: Llama, or one of those that differ from it in a bias or a norm."""

    likeliest: npt.NDArray[np.int64] | None = None
    """The likeliest token of each row of the last ``logits``, -1 where no number is the largest; None if nobody has looked."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.kv_cache_dtype = kv_cache_dtype or dtype
        self.dtype = dtype
        self.device = torch.device(device)
        weights = WeightReader(config, tensors, dtype, self.device)
        self.embedding = weights.tensor("model.embed_tokens.weight")  # [vocab_size, hidden_size]
        self.layers = tuple(weights.layer(index) for index in range(config.num_layers))
        self.norm = weights.tensor("model.norm.weight")  # [hidden_size]
        tied = config.tie_word_embeddings
        self.lm_head = self.embedding if tied else weights.tensor("lm_head.weight")  # [vocab_size, hidden_size]
        # float64, so that positions of any length turn by the right angle.
        self._frequencies = torch.tensor(config.inverse_frequencies(), dtype=torch.float64, device=self.device)

    @property
    def num_weight_bytes(self) -> int:
        """The size of the weights on the device."""
        tensors = [self.embedding, self.norm, *(() if self.lm_head is self.embedding else (self.lm_head,))]
        for layer in self.layers:
            for weight in vars(layer).values():
                tensors += weight if isinstance(weight, tuple) else () if weight is None else (weight,)
        return sum(tensor.nbytes for tensor in tensors)

    def contenders(self, draws: Sequence[tuple[int, int, float]]) -> list[npt.NDArray[np.int64] | None]:
        """For each draw, ``(row of the last logits, key, temperature)``, the tokens that can win it; None: all."""
        return [None] * len(draws)

    def new_kv_caches(self, num_blocks: int, block_size: int) -> list[KVCache]:
        """An empty cache: for each layer keys and values of ``num_blocks`` blocks."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_size)
        caches: list[KVCache] = []
        for _ in self.layers:
            key, value = (torch.zeros(shape, dtype=self.kv_cache_dtype, device=self.device) for _ in range(2))
            caches.append((key, value, new_scales(key)) if self.kv_cache_dtype == FP8 else (key, value))
        return caches

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,  # [num_tokens] int64
        positions: Tensor,  # [num_tokens] int64
        kv_caches: Sequence[KVCache],  # one for each layer
        slot_mapping: Tensor,  # [num_tokens] int64, where each token's key and value go
        block_tables: Tensor,  # [num_seqs, max_blocks_per_seq] int32; entries that the window has passed may say anything
        seq_lens: Tensor,  # [num_seqs] int32, keys including this step's
        query_start: Tensor,  # [num_seqs + 1] int32
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """What ``logits`` reads, ``[num_tokens, hidden_size]``; the caches get the keys and values of all tokens."""
        angles = self._frequencies * positions.unsqueeze(1)  # [num_tokens, head_size / 2] float64
        scale = self.config.rope_scale
        cos, sin = ((scale * wave).float().unsqueeze(1) for wave in (angles.cos(), angles.sin()))
        turn = (cos, sin)  # each [num_tokens, 1, head_size / 2]
        window = self.config.sliding_window
        attention = Attention(slot_mapping, block_tables, seq_lens, query_start, self.config.scale, window, plan)
        x = F.embedding(token_ids, self.embedding)  # [num_tokens, hidden_size]
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = x + self._attend(layer, self._normed(x, layer.input_norm), turn, kv_cache, attention)
            x = x + self._mlp(layer, self._normed(x, layer.mlp_norm))
        return x

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Logits ``[num_rows, vocab_size]`` in float32, of rows ``[num_rows, hidden_size]`` that ``forward`` gave."""
        return F.linear(self._normed(x, self.norm), self.lm_head).float()

    def _attend(
        self, layer: Layer, x: Tensor, turn: tuple[Tensor, Tensor], kv_cache: KVCache, attention: Attention
    ) -> Tensor:
        """Attention of one layer, ``[num_tokens, hidden_size]``; the cache is written first, since a token sees itself."""
        num_query, num_kv, head_size = self.config.num_query_heads, self.config.num_kv_heads, self.config.head_size
        heads = F.linear(x, layer.qkv, layer.qkv_bias).view(-1, num_query + 2 * num_kv, head_size)
        straight = heads[:, : num_query + num_kv]
        if layer.qk_norms is not None:
            parts = zip((straight[:, :num_query], straight[:, num_query:]), layer.qk_norms, strict=True)
            straight = torch.cat([self._normed(part, weight) for part, weight in parts], dim=1)
        turned = _rotate(straight, turn)
        query, key = turned[:, :num_query], turned[:, num_query:]
        out = attention(
            query, key, heads[:, num_query + num_kv :], kv_cache
        )  # [num_tokens, num_query_heads, head_size]
        return F.linear(out.reshape(-1, num_query * head_size), layer.o, layer.o_bias)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)  # each [num_tokens, intermediate_size]
        return F.linear(F.silu(gate) * up, layer.down)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm, the mean in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return wide.to(self.dtype) * weight


@dataclass(frozen=True)
class Attention:
    """Attention of a step: the same for every layer but for its cache."""

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    scale: float
    window: int | None
    plan: AttentionPlan | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: KVCache) -> Tensor:
        """``[num_tokens, num_query_heads, head_size]``, after the step's keys and values are in their slots."""
        key_cache, value_cache = kv_cache[:2]
        kv_scales = kv_cache[2] if len(kv_cache) == 3 else None
        write_kv(key, value, key_cache, value_cache, self.slot_mapping, kv_scales)
        return paged_attention(
            query,
            key_cache,
            value_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start,
            scale=self.scale,
            window=self.window,
            plan=self.plan,
            kv_scales=kv_scales,
        )


def _rotate(heads: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Heads ``[num_tokens, num_heads, head_size]`` turned by their positions: element ``i`` pairs with the half further."""
    cos, sin = turn
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
