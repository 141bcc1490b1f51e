"""The launchers of the Triton kernels of ``kernels.layer``."""

import torch
from torch import Tensor

from kernels.arguments import check_slot_values, values_are_checked
from kernels.fp8 import bytes_of, largest_bits
from kernels.launching import check_device
from kernels.layer_arguments import QKNorm, check_norm, check_position_values, check_rotate, check_rows
from kernels.layer_kernel import rms_norm_kernel, rotate_write_kernel, silu_mul_kernel
from kernels.tile_shape import GATE_TILE, power_of_two


def triton_rms_norm(hidden: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """``rms_norm`` by a Triton kernel."""
    check_norm(hidden, weight, None)
    check_device("hidden", hidden)
    return _norm(hidden, weight, hidden, eps, has_residual=False)[0]


def triton_add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` by a Triton kernel."""
    check_norm(hidden, weight, residual)
    check_device("hidden", hidden)
    return _norm(hidden, weight, residual, eps, has_residual=True)


def _norm(hidden: Tensor, weight: Tensor, residual: Tensor, eps: float, *, has_residual: bool) -> tuple[Tensor, Tensor]:
    num_tokens, hidden_size = hidden.shape
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    total = torch.empty_like(out) if has_residual else out
    if num_tokens:
        rms_norm_kernel[(num_tokens,)](
            out,
            total,
            hidden,
            residual,
            weight,
            eps,
            hidden.stride(0),
            residual.stride(0),
            hidden_size=hidden_size,
            HIDDEN=power_of_two(hidden_size),
            HAS_RESIDUAL=has_residual,
            num_warps=norm_warps(hidden_size),
            enable_fp_fusion=True,
        )
    return out, total


def norm_warps(hidden_size: int) -> int:
    """The warps that share a row: a thread holds 16 numbers of it, or what 512 threads leave."""
    return min(max(power_of_two(hidden_size) // 512, 1), 16)


def triton_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu_mul`` by a Triton kernel."""
    check_rows("gate", gate)
    check_rows("up", up, gate)
    check_device("gate", gate)
    num_tokens, size = gate.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        silu_mul_kernel[(num_tokens, -(-size // GATE_TILE))](
            out, gate, up, gate.stride(0), up.stride(0), size=size, TILE=GATE_TILE, enable_fp_fusion=True
        )
    return out


def triton_rotate_write(
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
    """``rotate_write`` by a Triton kernel."""
    check_rotate(query, key, value, key_cache, value_cache, positions, slot_mapping, rotation, norm, kv_scales)
    check_device("query", query)
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    rotary_size = 2 * rotation.shape[2]
    if values_are_checked():
        check_position_values(positions, len(rotation))
        check_slot_values(slot_mapping, num_blocks * block_size)
    if len(query) == 0:
        return
    rotate_write_kernel[(len(query),)](
        query,
        key,
        value,
        bytes_of(key_cache),
        bytes_of(value_cache),
        positions if kv_scales is None else kv_scales.view(torch.int32),
        positions,
        slot_mapping,
        rotation,
        rotation if norm is None else norm.query_weight,
        rotation if norm is None else norm.key_weight,
        0.0 if norm is None else norm.eps,
        num_blocks * block_size,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        num_query_heads=query.shape[1],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rotary_size=rotary_size,
        block_size=block_size,
        QUERY_HEADS=power_of_two(query.shape[1]),
        KV_HEADS=power_of_two(num_kv_heads),
        HEAD=power_of_two(head_size),
        HALF=power_of_two(rotary_size // 2),
        REST=power_of_two(head_size - rotary_size),
        IS_INTERLEAVED=is_interleaved,
        HAS_NORM=norm is not None,
        IS_FP8=kv_scales is not None,
        LARGEST=largest_bits(key.dtype),
        enable_fp_fusion=True,
    )
