"""How weights and KV blocks lie in memory for the vector kernels: in the order in which they are read.

A product reads its right matrix as rows of pairs, because one instruction multiplies two numbers by two others and adds both:
bf16 numbers with AVX-512, whole numbers of 16 bits with AVX2. A weight is packed once, when it is loaded. A KV block keeps its
size and its place in the pool, only the cells inside it are in another order, so that whoever copies, swaps or shares whole
blocks need not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.instructions import HERE

TILE_COLUMNS = 48
"""Columns of one tile of a product: with 8 rows, 24 of the 32 vector registers of AVX-512."""

LEFT = torch.bfloat16 if HERE.left_bytes == 2 else torch.float32
"""The type of a product's left matrix."""

GATE_ROWS = 4 * HERE.tile_rows
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
class Whole:
    """How a weight lies in a tile whose numbers are whole ones: one group of its depth after the other.

    Of a group come the scales of all columns, then their minima if it has them, then the numbers ``[depth / together,
    TILE_COLUMNS, together]``. A weight is scale * number + minimum. What it is multiplied with is made of whole numbers of 16
    bits with a scale for each group too; they are so small that the sum of a group's products is one of 32 bits.
    """

    code: int  # what a task's record calls it; 0 are weights in bf16
    bits: int  # that a number takes in memory
    largest: int  # number, without its sign
    group: int  # numbers of a row that have one scale; the last of a row may be fewer
    scales: torch.dtype  # the type of a scale and of a minimum
    has_minima: bool
    together: int  # numbers of a column that lie together
    turn: int  # numbers of a column that a kernel reads in one turn
    widened_rows: int | None = None  # rows for which a tile's numbers are made ones of 16 bits first, None: they are

    @property
    def left_limit(self) -> int:
        """The largest whole number that one is multiplied with.

        >>> TWELVE_BITS.left_limit, INT8.left_limit, FOUR_BITS.left_limit
        (8194, 32767, 32767)
        """
        return min(2**15 - 1, (2**31 - 1) // (self.group * self.largest))

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

    def left_bytes(self, depth: int) -> int:
        """A row of this depth that one is multiplied with: its numbers, and for each group a scale and a sum."""
        return -(-depth // self.group) * (2 * self.group + 8)

    def tile_bytes(self, depth: int) -> int:
        """A tile of this depth."""
        return depth // self.together * self.row_bytes + -(-depth // self.group) * self.head_bytes


TWELVE_BITS = Whole(
    code=3, bits=16, largest=4095, group=64, scales=torch.bfloat16, has_minima=False, together=2, turn=4
)
"""Weights in bf16, whose numbers have 8 bits: those within a sixteenth of the largest of their group are what they were."""

INT8 = Whole(
    code=1, bits=8, largest=127, group=64, scales=torch.float32, has_minima=False, together=2, turn=4, widened_rows=24
)
"""Weights that are rounded to 8 bits."""

FOUR_BITS = Whole(
    code=2, bits=4, largest=15, group=32, scales=torch.float16, has_minima=True, together=8, turn=8, widened_rows=8
)
"""Weights as GGUF's types Q4_0 and Q4_1 have them."""

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight numbers of 4 bits lies where in its word, from the lowest bits on: so shifts and a mask leave pairs of 16 bits."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight ``[num_columns, depth]`` as bf16 ``[tiles, depth / 2, TILE_COLUMNS, 2]``, zeros where it was padded.

    If it is of whole numbers, ``tiles`` are bytes. With ``num_parts`` 2 the tiles of two weights of the same shape alternate.
    """

    tiles: Tensor
    num_columns: int
    depth: int
    num_parts: int = 1
    whole: Whole | None = None

    @property
    def code(self) -> int:
        """What a task's record calls the way in which it lies."""
        return 0 if self.whole is None else self.whole.code

    @property
    def padded_columns(self) -> int:
        """Columns of each part, padding included."""
        return len(self.tiles) * TILE_COLUMNS // self.num_parts

    @property
    def padded_depth(self) -> int:
        return rounded_up(self.depth, 4)

    def numbers(self) -> Tensor:
        """What a product multiplies with, ``[num_parts, num_columns, depth]`` float32."""
        if self.whole is not None:
            groups = torch.split(self.tiles, self.whole.tile_bytes(self.whole.group), dim=1)
            rows = torch.cat([_numbers_of_group(each, self.whole) for each in groups], dim=1)
        else:
            rows = self.tiles.float().transpose(2, 3).reshape(len(self.tiles), -1, TILE_COLUMNS)
        parts = rows.view(-1, self.num_parts, self.padded_depth, TILE_COLUMNS).permute(1, 0, 3, 2)
        padded = parts.reshape(self.num_parts, self.padded_columns, self.padded_depth)
        return padded[:, : self.num_columns, : self.depth]


def _numbers_of_group(group: Tensor, how: Whole) -> Tensor:
    """Of a group of each tile, as bytes, what is multiplied, ``[tiles, depth, TILE_COLUMNS]`` float32."""
    heads = group[:, : how.head_bytes].contiguous().view(how.scales).float().view(len(group), -1, 1, TILE_COLUMNS)
    cells = group[:, how.head_bytes :].reshape(len(group), -1, TILE_COLUMNS, how.together * how.bits // 8)
    if how.bits == 4:
        cells = torch.stack((cells & 15, cells >> 4 & 15), dim=-1).flatten(3)[..., torch.tensor(ORDER).argsort()]
    elif how.bits == 16:
        cells = cells.contiguous().view(torch.int16)
    numbers = cells.transpose(2, 3).reshape(len(group), -1, TILE_COLUMNS)
    return heads[:, 0] * numbers + (heads[:, 1] if how.has_minima else 0)


def pack_blocks_for_products(key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Plain caches ``[num_blocks, block_size, num_kv_heads, head_size]`` in the order of the vector kernels.

    Of a block and a KV head, keys are ``[head_size / 2, block_size, 2]`` and values ``[block_size / 2, head_size, 2]``. The
    shape stays that of the plain caches, so that a block is a block for whoever copies it.
    """
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    keys = key_cache.reshape(num_blocks, block_size, num_kv_heads, head_size // 2, 2).permute(0, 2, 3, 1, 4)
    values = value_cache.reshape(num_blocks, block_size // 2, 2, num_kv_heads, head_size).permute(0, 3, 1, 4, 2)
    return keys.reshape(key_cache.shape).contiguous(), values.reshape(value_cache.shape).contiguous()
