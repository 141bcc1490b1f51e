"""Llama, Mistral, Qwen2 or Qwen3 in float64: token ids and their positions in, logits out.

``weights`` maps the names of ``transformers``' Llama to arrays, each weight ``[out_features, in_features]``::

    model.embed_tokens.weight                            [vocab_size, hidden_size]
    model.layers.{i}.input_layernorm.weight              [hidden_size]
    model.layers.{i}.self_attn.q_proj.weight             [num_query_heads * head_size, hidden_size]
    model.layers.{i}.self_attn.{k,v}_proj.weight         [num_kv_heads * head_size, hidden_size]
    model.layers.{i}.self_attn.o_proj.weight             [hidden_size, num_query_heads * head_size]
    model.layers.{i}.self_attn.{q,k,v,o}_proj.bias       [out_features]; absent: none
    model.layers.{i}.self_attn.{q,k}_norm.weight         [head_size]; absent: heads are not normed
    model.layers.{i}.post_attention_layernorm.weight     [hidden_size]
    model.layers.{i}.mlp.{gate,up}_proj.weight           [intermediate_size, hidden_size]
    model.layers.{i}.mlp.down_proj.weight                [hidden_size, intermediate_size]
    model.norm.weight                                    [hidden_size]
    lm_head.weight                                       [vocab_size, hidden_size]; absent: the embedding is used

The model does not know where keys and values lie: it hands them to ``attend`` and is given the attention's result.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from reference.attention import Floats, dense_attention, visible
from spec.vocabulary import Token

Attend: TypeAlias = Callable[[int, Floats, Floats, Floats], Floats]
"""Given a layer and its new queries, keys and values ``[num_tokens, num_heads, head_size]``: what the queries get."""

Weights: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""Any floating point type: it is widened."""


class ModelConfig(Protocol):
    """The numbers that fix the arithmetic.

    The angle of rotary pair ``i`` at position ``p`` is ``p * rope_theta ** (-2 * i / head_size) / rope_divisors[i]``;
    no divisors at all means ones. Turned queries and keys are ``rope_scale`` times as long.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def num_query_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_divisors(self) -> tuple[float, ...]: ...
    @property
    def rope_scale(self) -> float: ...


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Each row divided by the root of its mean square, times the weight."""
    mean_square: Floats = (x**2).mean(axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + eps) * weight


def silu(x: Floats) -> Floats:
    """``x * sigmoid(x)``, the sigmoid written so that nothing overflows."""
    return x * (1.0 + np.tanh(x / 2.0)) / 2.0


def rotate(x: Floats, positions: Sequence[int], config: ModelConfig) -> Floats:
    """Rotary embedding of ``x [num_tokens, num_heads, head_size]``: element i turns with element i + head_size / 2."""
    half = config.head_size // 2
    divisors = np.array(config.rope_divisors or (1.0,) * half)
    frequencies = config.rope_theta ** (-2.0 * np.arange(half) / config.head_size) / divisors
    angles = np.asarray(positions, dtype=np.float64)[:, None, None] * frequencies
    first, second = config.rope_scale * x[..., :half], config.rope_scale * x[..., half:]
    return np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )


class Llama:
    """The weights, widened to float64 once, and the forward pass."""

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        self.config = config
        self.weights = {name: np.asarray(weight, dtype=np.float64) for name, weight in weights.items()}

    def hidden_states(self, tokens: Sequence[Token], positions: Sequence[int], attend: Attend) -> Floats:
        """The last layer's output after the final norm, ``[num_tokens, hidden_size]``."""
        x = self.weights["model.embed_tokens.weight"][np.asarray(tokens, dtype=int)]
        for layer in range(self.config.num_layers):
            x = x + self._attention(layer, x, positions, attend)
            x = x + self._mlp(layer, x)
        return self._norm("model.norm.weight", x)

    def logits(self, hidden_states: Floats) -> Floats:
        """``[num_tokens, vocab_size]``."""
        return self._linear("lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens", hidden_states)

    def _attention(self, layer: int, x: Floats, positions: Sequence[int], attend: Attend) -> Floats:
        prefix, config = f"model.layers.{layer}", self.config
        x = self._norm(f"{prefix}.input_layernorm.weight", x)
        query = self._normed_heads(f"{prefix}.self_attn.q", x, config.num_query_heads)
        key = self._normed_heads(f"{prefix}.self_attn.k", x, config.num_kv_heads)
        value = self._heads(f"{prefix}.self_attn.v_proj", x, config.num_kv_heads)
        out = attend(layer, rotate(query, positions, config), rotate(key, positions, config), value)
        return self._linear(f"{prefix}.self_attn.o_proj", out.reshape(len(positions), -1))

    def _mlp(self, layer: int, x: Floats) -> Floats:
        prefix = f"model.layers.{layer}"
        x = self._norm(f"{prefix}.post_attention_layernorm.weight", x)
        gate = self._linear(f"{prefix}.mlp.gate_proj", x)
        up = self._linear(f"{prefix}.mlp.up_proj", x)
        return self._linear(f"{prefix}.mlp.down_proj", silu(gate) * up)

    def _norm(self, name: str, x: Floats) -> Floats:
        return rms_norm(x, self.weights[name], self.config.rms_norm_eps)

    def _linear(self, name: str, x: Floats) -> Floats:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def _heads(self, name: str, x: Floats, num_heads: int) -> Floats:
        return self._linear(name, x).reshape(len(x), num_heads, self.config.head_size)

    def _normed_heads(self, name: str, x: Floats, num_heads: int) -> Floats:
        heads = self._heads(f"{name}_proj", x, num_heads)
        return self._norm(f"{name}_norm.weight", heads) if f"{name}_norm.weight" in self.weights else heads


def dense_logits(model: Llama, tokens: Sequence[Token], window: int | None = None) -> Floats:
    """The logits of every position ``[num_tokens, vocab_size]``, without a cache: what the paged ones are judged by."""
    positions = range(len(tokens))
    sees = visible(positions, positions, window)
    scale = model.config.head_size**-0.5

    def attend(layer: int, query: Floats, key: Floats, value: Floats) -> Floats:
        return dense_attention(query, key, value, sees, scale)[0]

    return model.logits(model.hidden_states(tokens, positions, attend))
