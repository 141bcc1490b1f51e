"""Moves into, within and out of the paged cache on the CPU, in torch."""

import torch
from torch import Tensor

from kernels.arguments import (
    check_copy,
    check_copy_values,
    check_pack,
    check_pack_values,
    check_slot_values,
    check_write,
    demand,
    new_packed,
    values_are_checked,
)
from kernels.fp8 import bytes_of, quantized


def cpu_write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """``write_kv`` for CPU tensors, of any head size and any strides."""
    check_write(key, value, key_cache, value_cache, slot_mapping, kv_scales)
    demand("key_cache", "device", key_cache.device.type, "cpu")
    num_blocks, block_size = key_cache.shape[:2]
    if values_are_checked():
        check_slot_values(slot_mapping, num_blocks * block_size)
    write_cells(key, value, key_cache, value_cache, slot_mapping, kv_scales)


def write_cells(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None,
) -> None:
    """The write itself, of arguments that are checked."""
    num_blocks, block_size = key_cache.shape[:2]
    live = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    if not bool(live.all()):
        key, value, slot_mapping = key[live], value[live], slot_mapping[live]
    cells = slot_mapping // block_size, slot_mapping % block_size
    if kv_scales is None:
        key_cache[cells], value_cache[cells] = key, value
        return
    for which, (numbers, cache) in enumerate(((key, key_cache), (value, value_cache))):
        written, scales = quantized(numbers)
        bytes_of(cache)[cells] = bytes_of(written)
        kv_scales[*cells, :, which] = scales


def cpu_copy_blocks(
    key_cache: Tensor, value_cache: Tensor, block_copies: Tensor, kv_scales: Tensor | None = None
) -> None:
    """``copy_blocks`` for CPU tensors, of any strides."""
    check_copy(key_cache, value_cache, block_copies, kv_scales)
    demand("key_cache", "device", key_cache.device.type, "cpu")
    if values_are_checked():
        check_copy_values(block_copies, key_cache.shape[0])
    sources, targets = block_copies.unbind(1)
    for moved in (bytes_of(key_cache), bytes_of(value_cache), *(() if kv_scales is None else (kv_scales,))):
        moved[targets] = moved[sources]


def cpu_pack_blocks(
    key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, kv_scales: Tensor | None = None
) -> Tensor:
    """``pack_blocks`` for CPU tensors, of any strides."""
    packed = new_packed(key_cache, block_ids)
    _check_pack(packed, key_cache, value_cache, block_ids, kv_scales)
    if kv_scales is None:
        packed[:, 0], packed[:, 1] = key_cache[block_ids], value_cache[block_ids]
    else:
        moved = (bytes_of(key_cache), bytes_of(value_cache), kv_scales.view(torch.uint8))
        packed.copy_(torch.cat([each[block_ids].flatten(1) for each in moved], 1))
    return packed


def cpu_unpack_blocks(
    packed: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, kv_scales: Tensor | None = None
) -> None:
    """``unpack_blocks`` for CPU tensors, of any strides."""
    _check_pack(packed, key_cache, value_cache, block_ids, kv_scales)
    if kv_scales is None:
        key_cache[block_ids], value_cache[block_ids] = packed[:, 0], packed[:, 1]
        return
    moved = (bytes_of(key_cache), bytes_of(value_cache), kv_scales.view(torch.uint8))
    for each, part in zip(moved, packed.split_with_sizes([each[:1].numel() for each in moved], 1), strict=True):
        each[block_ids] = part.view(len(block_ids), *each.shape[1:])


def _check_pack(
    packed: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, kv_scales: Tensor | None
) -> None:
    check_pack(packed, key_cache, value_cache, block_ids, kv_scales)
    demand("key_cache", "device", key_cache.device.type, "cpu")
    if values_are_checked():
        check_pack_values(block_ids, key_cache.shape[0])
