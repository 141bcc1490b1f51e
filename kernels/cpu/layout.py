"""How weights and KV blocks lie in memory for the vector kernels: in the order in which they are read.

A product reads its right matrix as rows of pairs, because one instruction of AVX-512 multiplies two bf16 numbers by two
others and adds both to a sum. A weight is packed once, when it is loaded; a narrow one needs no pairs, as each number is widened
before it is multiplied. A KV block keeps its size and its place in the pool,
only the cells inside it are in another order, so that whoever copies, swaps or shares whole blocks need not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.instructions import HERE, why_not_four_bits, why_not_int8
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
class Narrow:
    """How a weight lies in a tile whose numbers are whole ones of few bits: one group of its depth after the other.

    Of a group come the scales of all columns, then their minima if it has them, then the numbers ``[depth / together,
    TILE_COLUMNS, together]``. What is multiplied is scale * number + minimum.
    """

    code: int  # what a task's record calls it; 0 are weights in bf16
    bits: int
    group: int  # numbers of a row that have one scale; the last of a row may be fewer
    scales: torch.dtype  # the type of a scale and of a minimum
    has_minima: bool
    together: int  # numbers of a column that lie together, the first in the lowest bits
    turn: int  # numbers of a column that a kernel reads in one turn
    widened_rows: int  # rows for which a tile is made one in bf16 first

    @property
    def scales_bytes(self) -> int:
        """The scales of a group of a tile."""
        return self.scales.itemsize * TILE_COLUMNS

    @property
    def head_bytes(self) -> int:
        """What stands before the numbers of a group of a tile."""
        return self.scales_bytes * (2 if self.has_minima else 1)

    @property
    def row_bytes(self) -> int:
        """The numbers of a tile that lie side by side, of all columns."""
        return self.together * self.bits * TILE_COLUMNS // 8

    @property
    def turn_bytes(self) -> int:
        """The numbers of a tile that a kernel reads in one turn."""
        return self.turn // self.together * self.row_bytes

    def tile_bytes(self, depth: int) -> int:
        """A tile of this depth."""
        return depth // self.together * self.row_bytes + -(-depth // self.group) * self.head_bytes


INT8 = Narrow(code=1, bits=8, group=64, scales=torch.float32, has_minima=False, together=1, turn=4, widened_rows=24)
"""Weights that are rounded to 8 bits."""

FOUR_BITS = Narrow(code=2, bits=4, group=32, scales=torch.float16, has_minima=True, together=8, turn=8, widened_rows=8)
"""Weights as GGUF's types Q4_0 and Q4_1 have them."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight ``[num_columns, depth]`` as bf16 ``[tiles, depth / 2, TILE_COLUMNS, 2]``, zeros where it was padded.

    If it is narrow, ``tiles`` are bytes. With ``num_parts`` 2 the tiles of two weights of the same shape alternate.
    """

    tiles: Tensor
    num_columns: int
    depth: int
    num_parts: int = 1
    narrow: Narrow | None = None

    @property
    def code(self) -> int:
        """What a task's record calls the way in which it lies."""
        return 0 if self.narrow is None else self.narrow.code

    @property
    def padded_columns(self) -> int:
        """Columns of each part, padding included."""
        return len(self.tiles) * TILE_COLUMNS // self.num_parts

    @property
    def padded_depth(self) -> int:
        return rounded_up(self.depth, 4)

    def numbers(self) -> Tensor:
        """What a product multiplies with, ``[num_parts, num_columns, depth]`` float32."""
        if self.narrow is not None:
            groups = torch.split(self.tiles, self.narrow.tile_bytes(self.narrow.group), dim=1)
            rows = torch.cat([_numbers_of_group(each, self.narrow) for each in groups], dim=1)
        else:
            rows = self.tiles.float().transpose(2, 3).reshape(len(self.tiles), -1, TILE_COLUMNS)
        parts = rows.view(-1, self.num_parts, self.padded_depth, TILE_COLUMNS).permute(1, 0, 3, 2)
        whole = parts.reshape(self.num_parts, self.padded_columns, self.padded_depth)
        return whole[:, : self.num_columns, : self.depth]


def _numbers_of_group(group: Tensor, how: Narrow) -> Tensor:
    """Of a group of each tile, as bytes, what is multiplied, ``[tiles, depth, TILE_COLUMNS]`` float32."""
    heads = group[:, : how.head_bytes].contiguous().view(how.scales).float().view(len(group), -1, 1, TILE_COLUMNS)
    cells = group[:, how.head_bytes :].reshape(len(group), -1, TILE_COLUMNS, how.together * how.bits // 8)
    if how.bits == 4:
        cells = torch.stack((cells & 15, cells >> 4 & 15), dim=-1).flatten(3)
    numbers = cells.transpose(2, 3).reshape(len(group), -1, TILE_COLUMNS)
    return heads[:, 0] * numbers + (heads[:, 1] if how.has_minima else 0)


@dataclass(frozen=True)
class FourBits:
    """A weight ``[num_columns, depth]`` in groups of 32 numbers of 4 bits: scale * number + minimum."""

    numbers: Tensor  # [num_columns, depth] uint8, up to 15
    scales: Tensor  # [num_columns, depth / 32] float16
    minima: Tensor  # like scales


def in_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of a weight ``[num_columns, depth]`` in int8, and the scale of each group, ``[num_columns, groups]`` float32.

    A number is the nearest multiple of its scale, which is a 127th of the largest of the group. A group with a number that is
    not finite has none that is.
    """
    num_columns, depth = weight.shape
    padded = torch.zeros(num_columns, rounded_up(depth, INT8.group))
    padded[:, :depth] = weight
    groups = padded.view(num_columns, -1, INT8.group)
    scales = groups.abs().amax(-1) / 127
    units = groups / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    numbers = units.nan_to_num(0.0).round_().clamp_(-127, 127).to(torch.int8)
    return numbers.view(num_columns, -1)[:, :depth], scales


def pack_int8_weight(*parts: Tensor, arena: Arena | None = None) -> PackedWeight:
    """Weights ``[num_columns, depth]`` of one shape in int8 as one packed weight, in this arena's memory."""
    if (reason := why_not_int8()) is not None:
        raise NotImplementedError(reason)
    num_columns, depth = parts[0].shape
    packed = _narrow_tiles(INT8, num_columns, depth, len(parts), arena)
    for index, part in enumerate(parts):
        numbers, scales = in_int8(part)
        padded = torch.zeros(num_columns, rounded_up(depth, 4), dtype=torch.int8)
        padded[:, :depth] = numbers
        _fill(packed[:, index], INT8, padded, scales.unsqueeze(2))
    return PackedWeight(packed.flatten(0, 1), num_columns, depth, len(parts), INT8)


def pack_four_bits(*parts: FourBits, arena: Arena | None = None) -> PackedWeight:
    """Weights of one shape in groups of 4 bits as one packed weight, in this arena's memory; no number is rounded."""
    if (reason := why_not_four_bits()) is not None:
        raise NotImplementedError(reason)
    num_columns, depth = parts[0].numbers.shape
    packed = _narrow_tiles(FOUR_BITS, num_columns, depth, len(parts), arena)
    for index, part in enumerate(parts):
        bytes_of = (part.numbers[:, ::2] | part.numbers[:, 1::2] << 4).view(torch.int8)
        _fill(packed[:, index], FOUR_BITS, bytes_of, torch.stack((part.scales, part.minima), dim=2))
    return PackedWeight(packed.flatten(0, 1), num_columns, depth, len(parts), FOUR_BITS)


def _narrow_tiles(how: Narrow, num_columns: int, depth: int, num_parts: int, arena: Arena | None) -> Tensor:
    """Zero bytes ``[tiles, num_parts, bytes of a tile]``."""
    num_tiles = rounded_up(num_columns, TILE_COLUMNS) // TILE_COLUMNS
    shape = (num_tiles, num_parts, how.tile_bytes(rounded_up(depth, 4)))
    return (arena or Arena()).zeros(shape, torch.int8)


def _fill(tiles: Tensor, how: Narrow, numbers: Tensor, heads: Tensor) -> None:
    """Numbers ``[num_columns, bytes of the depth]`` and what stands before them, ``[num_columns, groups, 1 or 2]``, go to their tiles."""
    num_tiles, num_columns, width = len(tiles), len(numbers), how.together * how.bits // 8
    cells = torch.zeros(num_tiles * TILE_COLUMNS, numbers.shape[1], dtype=torch.int8)
    cells[:num_columns] = numbers
    before = torch.zeros(num_tiles * TILE_COLUMNS, *heads.shape[1:], dtype=how.scales)
    before[:num_columns] = heads
    rows = cells.view(num_tiles, TILE_COLUMNS, -1, width).transpose(1, 2).reshape(num_tiles, -1)
    before = before.view(num_tiles, TILE_COLUMNS, -1).permute(0, 2, 1).contiguous()
    starts = before.view(torch.int8).view(num_tiles, -1, how.head_bytes)
    size = how.group // how.together * how.row_bytes
    full, each = rows.shape[1] // size, how.head_bytes + size
    whole = tiles[:, : full * each].view(num_tiles, full, each)
    whole[..., : how.head_bytes] = starts[:, :full]
    whole[..., how.head_bytes :] = rows[:, : full * size].view(num_tiles, full, size)
    if rows.shape[1] > full * size:
        rest = tiles[:, full * each :]
        rest[:, : how.head_bytes] = starts[:, full]
        rest[:, how.head_bytes :] = rows[:, full * size :]


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
