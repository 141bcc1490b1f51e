"""Kernels: attention over a paged cache and the writes into it, as functions of tensors that are usable alone.

Each operation has three names: ``paged_attention`` takes the Triton kernel for tensors on a GPU and the CPU twin
otherwise; ``triton_paged_attention`` and ``cpu_paged_attention`` say which. Under ``TRITON_INTERPRET=1`` the Triton
ones take CPU tensors too. ``import kernels`` loads neither torch nor triton: every name is fetched when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.arguments import PAD_SLOT, BadArgument
    from kernels.arrays import tensor_of
    from kernels.attention import paged_attention
    from kernels.attention_launch import triton_paged_attention
    from kernels.attention_plan import AttentionPlan, plan_attention
    from kernels.attention_twin import cpu_paged_attention
    from kernels.cache import copy_blocks, pack_blocks, unpack_blocks, write_kv
    from kernels.cache_launch import triton_copy_blocks, triton_pack_blocks, triton_unpack_blocks, triton_write_kv
    from kernels.cache_twin import cpu_copy_blocks, cpu_pack_blocks, cpu_unpack_blocks, cpu_write_kv
    from kernels.fp8 import FP8, bytes_of, new_scales
    from kernels.layer import add_rms_norm, rms_norm, rotate_write, silu_mul
    from kernels.layer_arguments import QKNorm
    from kernels.layer_launch import triton_add_rms_norm, triton_rms_norm, triton_rotate_write, triton_silu_mul
    from kernels.layer_twin import cpu_add_rms_norm, cpu_rms_norm, cpu_rotate_write, cpu_silu_mul
    from kernels.sampling import draw_tokens
    from kernels.sampling_arguments import NO_TOKEN
    from kernels.sampling_launch import triton_draw_tokens
    from kernels.sampling_twin import cpu_draw_tokens
    from kernels.tile_shape import TileShape, TileShapes, tile_shapes

__all__ = [
    "FP8",
    "NO_TOKEN",
    "PAD_SLOT",
    "AttentionPlan",
    "BadArgument",
    "QKNorm",
    "TileShape",
    "TileShapes",
    "add_rms_norm",
    "bytes_of",
    "copy_blocks",
    "cpu_add_rms_norm",
    "cpu_copy_blocks",
    "cpu_draw_tokens",
    "cpu_pack_blocks",
    "cpu_paged_attention",
    "cpu_rms_norm",
    "cpu_rotate_write",
    "cpu_silu_mul",
    "cpu_unpack_blocks",
    "cpu_write_kv",
    "draw_tokens",
    "new_scales",
    "pack_blocks",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rotate_write",
    "silu_mul",
    "tensor_of",
    "tile_shapes",
    "triton_add_rms_norm",
    "triton_copy_blocks",
    "triton_draw_tokens",
    "triton_pack_blocks",
    "triton_paged_attention",
    "triton_rms_norm",
    "triton_rotate_write",
    "triton_silu_mul",
    "triton_unpack_blocks",
    "triton_write_kv",
    "unpack_blocks",
    "write_kv",
]

_HOME = {
    "AttentionPlan": "attention_plan",
    "BadArgument": "arguments",
    "FP8": "fp8",
    "NO_TOKEN": "sampling_arguments",
    "PAD_SLOT": "arguments",
    "QKNorm": "layer_arguments",
    "TileShape": "tile_shape",
    "TileShapes": "tile_shape",
    "add_rms_norm": "layer",
    "bytes_of": "fp8",
    "copy_blocks": "cache",
    "cpu_add_rms_norm": "layer_twin",
    "cpu_copy_blocks": "cache_twin",
    "cpu_draw_tokens": "sampling_twin",
    "cpu_pack_blocks": "cache_twin",
    "cpu_paged_attention": "attention_twin",
    "cpu_rms_norm": "layer_twin",
    "cpu_rotate_write": "layer_twin",
    "cpu_silu_mul": "layer_twin",
    "cpu_unpack_blocks": "cache_twin",
    "cpu_write_kv": "cache_twin",
    "draw_tokens": "sampling",
    "new_scales": "fp8",
    "pack_blocks": "cache",
    "paged_attention": "attention",
    "plan_attention": "attention_plan",
    "rms_norm": "layer",
    "rotate_write": "layer",
    "silu_mul": "layer",
    "tensor_of": "arrays",
    "tile_shapes": "tile_shape",
    "triton_add_rms_norm": "layer_launch",
    "triton_copy_blocks": "cache_launch",
    "triton_draw_tokens": "sampling_launch",
    "triton_pack_blocks": "cache_launch",
    "triton_paged_attention": "attention_launch",
    "triton_rms_norm": "layer_launch",
    "triton_rotate_write": "layer_launch",
    "triton_silu_mul": "layer_launch",
    "triton_unpack_blocks": "cache_launch",
    "triton_write_kv": "cache_launch",
    "unpack_blocks": "cache",
    "write_kv": "cache",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    found: object = getattr(import_module(f"kernels.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
