"""A model's weights in the form in which a forward pass takes them: what reads the same input is one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.checkpoint import ConfigError, ModelConfig, tensor_shapes


@dataclass(frozen=True)
class Vectors:
    """The norms and biases of one layer."""

    input_norm: Tensor  # [hidden_size]
    mlp_norm: Tensor  # [hidden_size]
    qkv_bias: Tensor | None  # [(num_query_heads + 2 * num_kv_heads) * head_size]
    o_bias: Tensor | None  # [hidden_size]
    qk_norms: tuple[Tensor, Tensor] | None  # each [head_size]


@dataclass(frozen=True)
class Layer(Vectors):
    """The weights of one layer."""

    qkv: Tensor  # [(num_query_heads + 2 * num_kv_heads) * head_size, hidden_size]
    o: Tensor  # [hidden_size, num_query_heads * head_size]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]
    down: Tensor  # [hidden_size, intermediate_size]


def matrices_of(index: int) -> dict[str, tuple[str, ...]]:
    """The tensors of a layer's matrices, those together that are one matrix."""
    attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
    return {
        "qkv": tuple(f"{attention}.{part}_proj.weight" for part in "qkv"),
        "o": (f"{attention}.o_proj.weight",),
        "gate_up": (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
        "down": (f"{mlp}.down_proj.weight",),
    }


class WeightReader:
    """Reads the tensors of a checkpoint, in one type, onto one device."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self._tensors = tensors
        self._shapes = tensor_shapes(config)
        self._dtype = dtype
        self._device = device

    def layer(self, index: int) -> Layer:
        """One of the model's layers, read now."""
        qkv, o, gate_up, down = (self.tensor(*parts) for parts in matrices_of(index).values())
        return Layer(**vars(self.vectors(index)), qkv=qkv, o=o, gate_up=gate_up, down=down)

    def vectors(self, index: int) -> Vectors:
        """A layer's norms and biases, read now."""
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        config, read = self.config, self.tensor
        return Vectors(
            input_norm=read(f"{prefix}.input_layernorm.weight"),
            mlp_norm=read(f"{prefix}.post_attention_layernorm.weight"),
            qkv_bias=read(*(f"{attention}.{part}_proj.bias" for part in "qkv")) if config.qkv_bias else None,
            o_bias=read(f"{attention}.o_proj.bias") if config.o_bias else None,
            qk_norms=(read(f"{attention}.q_norm.weight"), read(f"{attention}.k_norm.weight"))
            if config.qk_norm
            else None,
        )

    def tensor(self, *names: str) -> Tensor:
        """A tensor, several as one matrix of all their rows. Raises ``ConfigError`` for a shape that is not the model's."""
        parts = []
        for name in names:
            tensor = self._tensors[name]
            if tuple(tensor.shape) != self._shapes[name]:
                raise ConfigError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(self._shapes[name])}")
            parts.append(tensor.to(device=self._device, dtype=self._dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
