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
    values_are_checked,
)
from kernels.cache_kernel import copy_blocks_kernel, pack_blocks_kernel, write_kv_kernel
from kernels.launching import check_device
from kernels.tile_shape import COPY_TILE, power_of_two, write_warps


def triton_write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """``write_kv`` by a Triton kernel."""
    check_write(key, value, key_cache, value_cache, slot_mapping)
    check_device("key_cache", key_cache)
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    if values_are_checked():
        check_slot_values(slot_mapping, num_blocks * block_size)
    if len(slot_mapping) == 0:
        return
    write_kv_kernel[(len(slot_mapping),)](
        key,
        value,
        key_cache,
        value_cache,
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
        num_warps=write_warps(num_kv_heads, head_size),
        enable_fp_fusion=True,
    )


def triton_copy_blocks(key_cache: Tensor, value_cache: Tensor, block_copies: Tensor) -> None:
    """``copy_blocks`` by a Triton kernel."""
    check_copy(key_cache, value_cache, block_copies)
    check_device("key_cache", key_cache)
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    if values_are_checked():
        check_copy_values(block_copies, num_blocks)
    if len(block_copies) == 0:
        return
    pieces = -(-block_size * num_kv_heads * head_size // COPY_TILE)
    copy_blocks_kernel[(len(block_copies), pieces)](
        key_cache,
        value_cache,
        block_copies,
        block_copies.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        TILE=COPY_TILE,
        enable_fp_fusion=True,
    )


def triton_pack_blocks(key_cache: Tensor, value_cache: Tensor, block_ids: Tensor) -> Tensor:
    """``pack_blocks`` by a Triton kernel."""
    packed = torch.empty((len(block_ids), 2, *key_cache.shape[1:]), dtype=key_cache.dtype, device=key_cache.device)
    _pack(packed, key_cache, value_cache, block_ids, is_unpacking=False)
    return packed


def triton_unpack_blocks(packed: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor) -> None:
    """``unpack_blocks`` by a Triton kernel."""
    _pack(packed, key_cache, value_cache, block_ids, is_unpacking=True)


def _pack(packed: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, *, is_unpacking: bool) -> None:
    check_pack(packed, key_cache, value_cache, block_ids)
    check_device("key_cache", key_cache)
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    if values_are_checked():
        check_pack_values(block_ids, num_blocks)
    if len(block_ids) == 0:
        return
    pieces = -(-block_size * num_kv_heads * head_size // COPY_TILE)
    pack_blocks_kernel[(len(block_ids), pieces)](
        packed,
        key_cache,
        value_cache,
        block_ids,
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        TILE=COPY_TILE,
        IS_UNPACKING=is_unpacking,
        enable_fp_fusion=True,
    )
