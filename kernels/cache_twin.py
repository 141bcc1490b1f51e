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
    values_are_checked,
)


def cpu_write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """``write_kv`` for CPU tensors, of any head size and any strides."""
    check_write(key, value, key_cache, value_cache, slot_mapping)
    demand("key_cache", "device", key_cache.device.type, "cpu")
    num_blocks, block_size = key_cache.shape[:2]
    if values_are_checked():
        check_slot_values(slot_mapping, num_blocks * block_size)
    live = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    if not bool(live.all()):
        key, value, slot_mapping = key[live], value[live], slot_mapping[live]
    cells = slot_mapping // block_size, slot_mapping % block_size
    key_cache[cells] = key
    value_cache[cells] = value


def cpu_copy_blocks(key_cache: Tensor, value_cache: Tensor, block_copies: Tensor) -> None:
    """``copy_blocks`` for CPU tensors, of any strides."""
    check_copy(key_cache, value_cache, block_copies)
    demand("key_cache", "device", key_cache.device.type, "cpu")
    if values_are_checked():
        check_copy_values(block_copies, key_cache.shape[0])
    sources, targets = block_copies.unbind(1)
    for cache in (key_cache, value_cache):
        cache[targets] = cache[sources]


def cpu_pack_blocks(key_cache: Tensor, value_cache: Tensor, block_ids: Tensor) -> Tensor:
    """``pack_blocks`` for CPU tensors, of any strides."""
    packed = torch.empty((len(block_ids), 2, *key_cache.shape[1:]), dtype=key_cache.dtype, device=key_cache.device)
    _check_pack(packed, key_cache, value_cache, block_ids)
    packed[:, 0], packed[:, 1] = key_cache[block_ids], value_cache[block_ids]
    return packed


def cpu_unpack_blocks(packed: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor) -> None:
    """``unpack_blocks`` for CPU tensors, of any strides."""
    _check_pack(packed, key_cache, value_cache, block_ids)
    key_cache[block_ids], value_cache[block_ids] = packed[:, 0], packed[:, 1]


def _check_pack(packed: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor) -> None:
    check_pack(packed, key_cache, value_cache, block_ids)
    demand("key_cache", "device", key_cache.device.type, "cpu")
    if values_are_checked():
        check_pack_values(block_ids, key_cache.shape[0])
