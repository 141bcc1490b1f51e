"""How weights and KV blocks lie in memory for the vector kernels: in the order in which they are read.

A product reads its right matrix as rows of pairs, because one instruction of AVX-512 multiplies two bf16 numbers by two
others and adds both to a sum. A weight is packed once, when it is loaded; in int8 it needs no pairs, as each number is widened
before it is multiplied. A KV block keeps its size and its place in the pool,
only the cells inside it are in another order, so that whoever copies, swaps or shares whole blocks need not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.instructions import HERE, why_not_int8
from kernels.cpu.memory import Arena

TILE_COLUMNS = 48
"""Columns of one tile of a product: with 8 rows, 24 of the 32 vector registers of AVX-512."""

LEFT = torch.bfloat16 if HERE.left_bytes == 2 else torch.float32
"""The type of a product's left matrix."""

GROUP = 64
"""Numbers of a weight's row that have one scale in int8; the last of a row may be fewer."""

SCALE_BYTES = 4 * TILE_COLUMNS
"""The scales of a group of a tile, before its numbers."""

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

    In int8, ``tiles`` are bytes: of each tile one group after the other, of a group ``TILE_COLUMNS`` scales in float32 and then
    its numbers ``[GROUP, TILE_COLUMNS]``. With ``num_parts`` 2 the tiles of two weights of the same shape alternate.
    """

    tiles: Tensor
    num_columns: int
    depth: int
    num_parts: int = 1
    in_int8: bool = False

    @property
    def padded_columns(self) -> int:
        """Columns of each part, padding included."""
        return len(self.tiles) * TILE_COLUMNS // self.num_parts

    @property
    def padded_depth(self) -> int:
        return rounded_up(self.depth, 4)

    def numbers(self) -> Tensor:
        """What a product multiplies with, ``[num_parts, num_columns, depth]`` float32."""
        if self.in_int8:
            groups = [
                _numbers_of_group(each) for each in torch.split(self.tiles, SCALE_BYTES + GROUP * TILE_COLUMNS, dim=1)
            ]
            rows = torch.cat(groups, dim=1)
        else:
            rows = self.tiles.float().transpose(2, 3).reshape(len(self.tiles), -1, TILE_COLUMNS)
        parts = rows.view(-1, self.num_parts, self.padded_depth, TILE_COLUMNS).permute(1, 0, 3, 2)
        whole = parts.reshape(self.num_parts, self.padded_columns, self.padded_depth)
        return whole[:, : self.num_columns, : self.depth]


def _numbers_of_group(group: Tensor) -> Tensor:
    """Of a group of each tile, as bytes, the numbers ``[tiles, depth, TILE_COLUMNS]`` float32."""
    scales = group[:, :SCALE_BYTES].contiguous().view(torch.float32)
    return scales.unsqueeze(1) * group[:, SCALE_BYTES:].reshape(len(group), -1, TILE_COLUMNS)


def in_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of a weight ``[num_columns, depth]`` in int8, and the scale of each group, ``[num_columns, groups]`` float32.

    A number is the nearest multiple of its scale, which is a 127th of the largest of the group. A group with a number that is
    not finite has none that is.
    """
    num_columns, depth = weight.shape
    padded = torch.zeros(num_columns, rounded_up(depth, GROUP))
    padded[:, :depth] = weight
    groups = padded.view(num_columns, -1, GROUP)
    scales = groups.abs().amax(-1) / 127
    units = groups / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    numbers = units.nan_to_num(0.0).round_().clamp_(-127, 127).to(torch.int8)
    return numbers.view(num_columns, -1)[:, :depth], scales


def pack_int8_weight(*parts: Tensor, arena: Arena | None = None) -> PackedWeight:
    """Weights ``[num_columns, depth]`` of one shape in int8 as one packed weight, in this arena's memory."""
    if (reason := why_not_int8()) is not None:
        raise NotImplementedError(reason)
    num_columns, depth = parts[0].shape
    num_tiles, padded_depth = rounded_up(num_columns, TILE_COLUMNS) // TILE_COLUMNS, rounded_up(depth, 4)
    starts = range(0, padded_depth, GROUP)
    size = padded_depth * TILE_COLUMNS + len(starts) * SCALE_BYTES
    packed = (arena or Arena()).zeros((num_tiles, len(parts), size), torch.int8)
    for index, part in enumerate(parts):
        rows, scales = in_int8(part)
        numbers = torch.zeros(num_tiles * TILE_COLUMNS, padded_depth, dtype=torch.int8)
        numbers[:num_columns, :depth] = rows
        of_group = torch.zeros(num_tiles * TILE_COLUMNS, len(starts))
        of_group[:num_columns] = scales
        tiles = numbers.view(num_tiles, TILE_COLUMNS, padded_depth).transpose(1, 2)
        scales_of = of_group.view(num_tiles, TILE_COLUMNS, len(starts)).transpose(1, 2).contiguous().view(torch.int8)
        for group, start in enumerate(starts):
            to = packed[:, index, start * TILE_COLUMNS + group * SCALE_BYTES :]
            cells = tiles[:, start : start + GROUP].reshape(num_tiles, -1)
            to[:, :SCALE_BYTES] = scales_of[:, group]
            to[:, SCALE_BYTES : SCALE_BYTES + cells.shape[1]] = cells
    return PackedWeight(packed.view(-1, size), num_columns, depth, len(parts), in_int8=True)


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
