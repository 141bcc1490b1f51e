"""How weights and KV blocks lie in memory for the vector kernels: in the order in which they are read.

A product reads its right matrix as rows of pairs, because one instruction of AVX-512 multiplies two bf16 numbers by two
others and adds both to a sum. A weight is packed once, when it is loaded. A KV block keeps its size and its place in the pool,
only the cells inside it are in another order, so that whoever copies, swaps or shares whole blocks need not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.instructions import HERE
from kernels.cpu.memory import Arena

TILE_COLUMNS = 48
"""Columns of one tile of a product: with 8 rows, 24 of the 32 vector registers of AVX-512."""

LEFT = torch.bfloat16 if HERE.left_bytes == 2 else torch.float32
"""The type of a product's left matrix."""

GATE_ROWS = 32
"""Rows whose gate and up values stay in a thread's fastest cache until they are multiplied."""

CHUNK_ROWS = 24
"""Queries of a chunk: as many as have their scores against 16 keys in vector registers at once."""

CONTENDERS = 1024
"""Tokens that can win one draw, at most; beyond that all are compared."""


def rounded_up(count: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is at least ``count``.

    >>> rounded_up(49, 48)
    96
    """
    return -(-count // unit) * unit


@dataclass(frozen=True)
class PackedWeight:
    """A weight ``[num_columns, depth]`` as bf16 ``[tiles, depth / 2, TILE_COLUMNS, 2]``, zeros where it was padded.

    With ``num_parts`` 2 the tiles of two weights of the same shape alternate.
    """

    tiles: Tensor
    num_columns: int
    depth: int
    num_parts: int = 1

    @property
    def padded_columns(self) -> int:
        """Columns of each part, padding included."""
        return len(self.tiles) * TILE_COLUMNS // self.num_parts

    @property
    def padded_depth(self) -> int:
        return self.tiles.shape[1] * 2


def pack_weight(*parts: Tensor, arena: Arena | None = None) -> PackedWeight:
    """Weights ``[num_columns, depth]`` of one shape as one packed weight, in this arena's memory."""
    num_columns, depth = parts[0].shape
    pairs = rounded_up(depth, 4) // 2
    shape = (rounded_up(num_columns, TILE_COLUMNS), pairs * 2)
    packed_shape = (shape[0] // TILE_COLUMNS, len(parts), pairs, TILE_COLUMNS)
    packed = (arena or Arena()).zeros(packed_shape, torch.int32)
    for index, part in enumerate(parts):
        wide = part.to(torch.bfloat16)
        if part.shape != shape:
            wide = torch.zeros(shape, dtype=torch.bfloat16)
            wide[:num_columns, :depth] = part
        # Pairs move as one number each, which takes half the time.
        packed[:, index] = wide.contiguous().view(torch.int32).view(-1, TILE_COLUMNS, pairs).transpose(1, 2)
    tiles = packed.view(torch.bfloat16).view(-1, pairs, TILE_COLUMNS, 2)
    return PackedWeight(tiles, num_columns, depth, len(parts))


def pack_blocks_for_products(key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Plain caches ``[num_blocks, block_size, num_kv_heads, head_size]`` in the order of the vector kernels.

    Of a block and a KV head, keys are ``[head_size / 2, block_size, 2]`` and values ``[block_size / 2, head_size, 2]``. The
    shape stays that of the plain caches, so that a block is a block for whoever copies it.
    """
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    keys = key_cache.reshape(num_blocks, block_size, num_kv_heads, head_size // 2, 2).permute(0, 2, 3, 1, 4)
    values = value_cache.reshape(num_blocks, block_size // 2, 2, num_kv_heads, head_size).permute(0, 3, 1, 4, 2)
    return keys.reshape(key_cache.shape).contiguous(), values.reshape(value_cache.shape).contiguous()
