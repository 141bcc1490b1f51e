"""The Llama forward pass over a paged cache, for any mixture of sequences at any of their positions.

It knows neither requests nor steps: tokens come in one row after the other, ``query_start`` says whose they are, and
the block table says where the keys and values of earlier tokens lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import FP8, QKNorm, add_rms_norm, new_scales, paged_attention, rms_norm, rotate_write, silu_mul
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
        wide = partial(torch.tensor, dtype=torch.float64, device=self.device)
        self._frequencies, self._rope_scale = wide(config.inverse_frequencies()), wide(config.rope_scale)

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
        eps = self.config.rms_norm_eps
        rows = torch.arange(len(positions), device=self.device)
        rotation = self._rotation(positions)
        step = Step(self.config, rows, rotation, slot_mapping, block_tables, seq_lens, query_start, plan)
        residual = F.embedding(token_ids, self.embedding)  # [num_tokens, hidden_size], like all x
        x = rms_norm(residual, self.layers[0].input_norm, eps=eps)
        # A layer ends with the norm of what follows it: whatever adds to the residual norms the sum in the same launch.
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            x, residual = add_rms_norm(step.attend(layer, x, kv_cache), residual, layer.mlp_norm, eps=eps)
            gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)  # each [num_tokens, intermediate_size]
            x, residual = add_rms_norm(F.linear(silu_mul(gate, up), layer.down), residual, next_norm, eps=eps)
        return x

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Logits ``[num_rows, vocab_size]`` in float32, of rows ``[num_rows, hidden_size]`` that ``forward`` gave."""
        return F.linear(x, self.lm_head).float()

    def _rotation(self, positions: Tensor) -> Tensor:
        """Cosines and sines ``[num_tokens, 2, head_size / 2]`` float32 of the step's tokens, by which all layers turn."""
        angles = self._frequencies * positions.unsqueeze(1)  # [num_tokens, head_size / 2] float64
        turns = torch.view_as_real(torch.polar(self._rope_scale.expand_as(angles), angles))
        return turns.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Step:
    """What is the same for every layer of a step but for its weights and its cache."""

    config: ModelConfig
    rows: Tensor  # of rotation, one for each token
    rotation: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    plan: AttentionPlan | None

    def attend(self, layer: Layer, x: Tensor, kv_cache: KVCache) -> Tensor:
        """Attention of one layer, ``[num_tokens, hidden_size]``; the cache is written first, since a token sees itself."""
        config, (key_cache, value_cache, *scales) = self.config, kv_cache
        kv_scales = scales[0] if scales else None
        heads = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_size)
        query, key, value = heads.split_with_sizes([config.num_query_heads, *[config.num_kv_heads] * 2], 1)
        rotate_write(
            query,
            key,
            value,
            key_cache,
            value_cache,
            self.rows,
            self.slot_mapping,
            self.rotation,
            norm=None if layer.qk_norms is None else QKNorm(*layer.qk_norms, config.rms_norm_eps),
            kv_scales=kv_scales,
        )
        out = paged_attention(
            query,
            key_cache,
            value_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start,
            scale=config.scale,
            window=config.sliding_window,
            plan=self.plan,
            kv_scales=kv_scales,
        )  # [num_tokens, num_query_heads, head_size]
        return F.linear(out.flatten(1), layer.o, layer.o_bias)
