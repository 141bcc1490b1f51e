"""The launchers of the Triton kernels that move cells of the paged cache."""

import torch
from torch import Tensor

from kernels.arguments import (
    check_copy,
    check_copy_values,
    check_pack,
    check_pack_values,
    check_slot_values,
    check_write,
    new_packed,
    values_are_checked,
)
from kernels.cache_kernel import copy_blocks_kernel, pack_blocks_kernel, write_kv_kernel
from kernels.fp8 import bytes_of, largest_bits, scale_bytes
from kernels.launching import check_device
from kernels.tile_shape import COPY_TILE, power_of_two, write_warps


def triton_write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """``write_kv`` by a Triton kernel."""
    check_write(key, value, key_cache, value_cache, slot_mapping, kv_scales)
    check_device("key_cache", key_cache)
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    if values_are_checked():
        check_slot_values(slot_mapping, num_blocks * block_size)
    if len(slot_mapping) == 0:
        return
    write_kv_kernel[(len(slot_mapping),)](
        key,
        value,
        bytes_of(key_cache),
        bytes_of(value_cache),
        slot_mapping if kv_scales is None else kv_scales.view(torch.int32),
        slot_mapping,
        num_blocks * block_size,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        HEADS=power_of_two(num_kv_heads),
        HEAD=power_of_two(head_size),
        IS_FP8=kv_scales is not None,
        LARGEST=largest_bits(key.dtype),
        num_warps=write_warps(num_kv_heads, head_size),
        enable_fp_fusion=True,
    )


def triton_copy_blocks(
    key_cache: Tensor, value_cache: Tensor, block_copies: Tensor, kv_scales: Tensor | None = None
) -> None:
    """``copy_blocks`` by a Triton kernel."""
    check_copy(key_cache, value_cache, block_copies, kv_scales)
    check_device("key_cache", key_cache)
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    if values_are_checked():
        check_copy_values(block_copies, num_blocks)
    if len(block_copies) == 0:
        return
    copy_blocks_kernel[(len(block_copies), _pieces(key_cache, kv_scales))](
        bytes_of(key_cache),
        bytes_of(value_cache),
        block_copies if kv_scales is None else kv_scales.view(torch.uint8),
        block_copies,
        block_copies.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        SCALE_BYTES=scale_bytes(kv_scales),
        TILE=COPY_TILE,
        enable_fp_fusion=True,
    )


def _pieces(key_cache: Tensor, kv_scales: Tensor | None) -> int:
    """The programs that move a block."""
    return -(-max(key_cache[:1].numel(), scale_bytes(kv_scales)) // COPY_TILE)


def triton_pack_blocks(
    key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, kv_scales: Tensor | None = None
) -> Tensor:
    """``pack_blocks`` by a Triton kernel."""
    packed = new_packed(key_cache, block_ids)
    _pack(packed, key_cache, value_cache, block_ids, kv_scales, is_unpacking=False)
    return packed


def triton_unpack_blocks(
    packed: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, kv_scales: Tensor | None = None
) -> None:
    """``unpack_blocks`` by a Triton kernel."""
    _pack(packed, key_cache, value_cache, block_ids, kv_scales, is_unpacking=True)


def _pack(
    packed: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_ids: Tensor,
    kv_scales: Tensor | None,
    *,
    is_unpacking: bool,
) -> None:
    check_pack(packed, key_cache, value_cache, block_ids, kv_scales)
    check_device("key_cache", key_cache)
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    if values_are_checked():
        check_pack_values(block_ids, num_blocks)
    if len(block_ids) == 0:
        return
    pack_blocks_kernel[(len(block_ids), _pieces(key_cache, kv_scales))](
        packed,
        bytes_of(key_cache),
        bytes_of(value_cache),
        block_ids if kv_scales is None else kv_scales.view(torch.uint8),
        block_ids,
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        SCALE_BYTES=scale_bytes(kv_scales),
        TILE=COPY_TILE,
        IS_UNPACKING=is_unpacking,
        enable_fp_fusion=True,
    )
