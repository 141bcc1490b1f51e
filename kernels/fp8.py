"""An fp8 cache: bytes of e4m3, and a scale for each token and head that lies beside them and moves with their block.

A block's tokens arrive one by one, and a scale that has been written can not change under those that are there. So every
token brings its own: it is never changed, does not depend on who was written before or in the same step, and a token that
is computed again gets the same bytes. ``kernels.fp8_kernel`` has the formulas; here they are in torch.
"""

import struct

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
SCALE = torch.bfloat16
LARGEST = 448.0  # of e4m3
SCALE_BYTES = 4  # of a token and head: the scale of K and that of V

NATIVE = ("sm_90", "sm_100")  # have an instruction that decodes; for others the kernel does it bit by bit


def largest_for(dtype: torch.dtype) -> float:
    """The largest e4m3 times a power of two that ``dtype`` holds: 1.875 * 2^15 for float16.

    A number above it, up to the type's own largest, is rounded to it: off by less than 2^-4 of itself, as others are.
    """
    return 1.875 * 2.0 ** (15 if dtype == torch.float16 else 127)


def largest_bits(dtype: torch.dtype) -> int:
    """``largest_for`` as the bits of a float32."""
    [bits] = struct.unpack("<i", struct.pack("<f", largest_for(dtype)))
    return int(bits)


def bytes_of(cache: Tensor) -> Tensor:
    """The cache as kernels take it: an fp8 one as its bytes, any other as it is."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def scale_bytes(kv_scales: Tensor | None) -> int:
    """The bytes of a block's scales; 0 without any."""
    return 0 if kv_scales is None else kv_scales[:1].numel() * SCALE.itemsize


def new_scales(key_cache: Tensor) -> Tensor:
    """Scales for a pool of cells, ``[num_blocks, block_size, num_kv_heads, 2]``."""
    return torch.zeros((*key_cache.shape[:3], 2), dtype=SCALE, device=key_cache.device)


def quantized(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 ``[..., head_size]`` and scales ``[...]`` of numbers ``[..., head_size]``."""
    most = numbers.float().abs().amax(-1)
    is_number = most.isfinite()
    limit = largest_for(numbers.dtype)
    mantissa, exponent = torch.frexp(most.masked_fill(~is_number, 0.0).clamp(max=limit))  # most = mantissa * 2^exponent
    exponent = exponent - torch.where(mantissa <= 0.875, 9, 8)  # 448 is 0.875 * 2^9
    scale = torch.ldexp(torch.ones_like(most), torch.where(most > 0.0, exponent, -126).clamp(min=-126))
    scaled = numbers.float().clamp(-limit, limit) / scale.unsqueeze(-1)
    scaled = torch.where(is_number.unsqueeze(-1), scaled, 0.0)
    return scaled.to(FP8), scale.to(SCALE).masked_fill(~is_number, float("nan"))


def dequantized(cells: Tensor, scales: Tensor) -> Tensor:
    """The numbers, in float32."""
    return cells.float() * scales.float().unsqueeze(-1)
