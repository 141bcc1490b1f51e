"""What a layer does around attention, on the CPU, in torch: computed in float32, rounded once."""

import torch
from torch import Tensor

from kernels.arguments import check_slot_values, demand, values_are_checked
from kernels.cache_twin import write_cells
from kernels.layer_arguments import QKNorm, check_norm, check_position_values, check_rotate, check_rows


def cpu_rms_norm(hidden: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """``rms_norm`` for CPU tensors."""
    check_norm(hidden, weight, None)
    demand("hidden", "device", hidden.device.type, "cpu")
    return _normed(hidden.float(), weight, eps).to(hidden.dtype)


def cpu_add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` for CPU tensors."""
    check_norm(hidden, weight, residual)
    demand("hidden", "device", hidden.device.type, "cpu")
    total = hidden + residual
    return _normed(total.float(), weight, eps).to(hidden.dtype), total


def _normed(numbers: Tensor, weight: Tensor, eps: float) -> Tensor:
    return numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps) * weight.float()


def cpu_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu_mul`` for CPU tensors."""
    check_rows("gate", gate)
    check_rows("up", up, gate)
    demand("gate", "device", gate.device.type, "cpu")
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def cpu_rotate_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    rotation: Tensor,
    *,
    is_interleaved: bool = False,
    norm: QKNorm | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """``rotate_write`` for CPU tensors."""
    check_rotate(query, key, value, key_cache, value_cache, positions, slot_mapping, rotation, norm, kv_scales)
    demand("query", "device", query.device.type, "cpu")
    if values_are_checked():
        check_position_values(positions, len(rotation))
        check_slot_values(slot_mapping, key_cache.shape[0] * key_cache.shape[1])
    queries, keys = query.float(), key.float()
    if norm is not None:
        queries, keys = _normed(queries, norm.query_weight, norm.eps), _normed(keys, norm.key_weight, norm.eps)
    heads = torch.cat((queries, keys), 1)
    _turn(heads, rotation[positions], is_interleaved)
    query.copy_(heads[:, : query.shape[1]])
    rotated = heads[:, query.shape[1] :].to(key.dtype)
    write_cells(rotated, value, key_cache, value_cache, slot_mapping, kv_scales)


def _turn(heads: Tensor, turns: Tensor, is_interleaved: bool) -> None:
    """``heads`` [num_tokens, num_heads, head_size] are turned by ``turns`` [num_tokens, 2, rotary_size // 2], in place."""
    half = turns.shape[2]
    cosine, sine = turns[:, None, 0], turns[:, None, 1]
    places = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if is_interleaved else (slice(half), slice(half, 2 * half))
    first, second = (heads[..., place] for place in places)
    turned = first * cosine - second * sine, second * cosine + first * sine  # both, before either is written
    first.copy_(turned[0])
    second.copy_(turned[1])
