"""Weights as the vector kernels multiply with them: packed once, when they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.instructions import HERE, why_not_four_bits, why_not_int8
from kernels.cpu.layout import FOUR_BITS, INT8, ORDER, TILE_COLUMNS, TWELVE_BITS, PackedWeight, Whole, rounded_up
from kernels.cpu.memory import Arena
from kernels.cpu.team import Team
from kernels.cpu.workspace import Workspace


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
    packed = _whole_tiles(INT8, num_columns, depth, len(parts), arena)
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
    packed = _whole_tiles(FOUR_BITS, num_columns, depth, len(parts), arena)
    for index, part in enumerate(parts):
        ordered = part.numbers.view(num_columns, -1, len(ORDER))[..., ORDER].flatten(1)
        bytes_of = (ordered[:, ::2] | ordered[:, 1::2] << 4).view(torch.int8)
        _fill(packed[:, index], FOUR_BITS, bytes_of, torch.stack((part.scales, part.minima), dim=2))
    return PackedWeight(packed.flatten(0, 1), num_columns, depth, len(parts), FOUR_BITS)


def _whole_tiles(how: Whole, num_columns: int, depth: int, num_parts: int, arena: Arena | None) -> Tensor:
    """Zero bytes ``[tiles, num_parts, bytes of a tile]``."""
    num_tiles = rounded_up(num_columns, TILE_COLUMNS) // TILE_COLUMNS
    shape = (num_tiles, num_parts, how.tile_bytes(rounded_up(depth, 4)))
    return (arena or Arena()).zeros(shape, torch.int8)


def _fill(tiles: Tensor, how: Whole, numbers: Tensor, heads: Tensor) -> None:
    """Numbers ``[num_columns, bytes of the depth]`` and what stands before them, ``[num_columns, groups, 1 or 2]``, go to their tiles."""
    units = UNITS[how.together * how.bits // 8]  # numbers that lie together move as one
    cells = _in_tiles(numbers.view(units))
    before = _in_tiles(heads.to(how.scales).flatten(1)).transpose(1, 2).contiguous().view(torch.int8)
    before = before.view(len(tiles), -1, how.head_bytes)
    size, each = how.group // how.together, how.tile_bytes(how.group)
    for index in range(before.shape[1]):
        group = tiles[:, index * each : (index + 1) * each]
        group[:, : how.head_bytes] = before[:, index]
        source = cells[:, :, index * size : (index + 1) * size]
        group[:, how.head_bytes :].view(units).view(len(tiles), -1, TILE_COLUMNS).copy_(source.transpose(1, 2))


UNITS = {2: torch.int16, 4: torch.int32}


def _in_tiles(rows: Tensor) -> Tensor:
    """Rows ``[num_columns, ...]`` as ``[tiles, TILE_COLUMNS, ...]``, zeros where there are none."""
    num_tiles = rounded_up(len(rows), TILE_COLUMNS) // TILE_COLUMNS
    if len(rows) < num_tiles * TILE_COLUMNS:
        rows = torch.cat((rows, rows.new_zeros(num_tiles * TILE_COLUMNS - len(rows), *rows.shape[1:])))
    return rows.view(num_tiles, TILE_COLUMNS, -1)


def pack_weight(*parts: Tensor, arena: Arena | None = None) -> PackedWeight:
    """Weights ``[num_columns, depth]`` of one shape in bf16 as one packed weight, in this arena's memory.

    Where products are those of whole numbers, they have 12 bits. A scale is a power of two then, so what it multiplies are a
    number's own bits, but for those below the last of 12. A group with a number that is not finite has none that is.
    """
    num_columns, depth = parts[0].shape
    padded_depth = rounded_up(depth, 4)
    if HERE.emit_whole_dot is not None:
        packed = _whole_tiles(TWELVE_BITS, num_columns, depth, len(parts), arena)
        work = Workspace(Team(torch.get_num_threads()))
        work.set(vocab_size=num_columns, hidden_size=depth, hidden_depth=padded_depth)
        work.set(vocab_columns=len(packed) * TILE_COLUMNS, tile_stride=packed.stride(0))
        for index, part in enumerate(parts):
            work.hold("embedding", part.to(torch.bfloat16).contiguous())
            work.hold("head", packed[:, index])
            work.run("pack")
        return PackedWeight(packed.flatten(0, 1), num_columns, depth, len(parts), TWELVE_BITS)
    shape = (rounded_up(num_columns, TILE_COLUMNS), padded_depth)
    packed_shape = (shape[0] // TILE_COLUMNS, len(parts), padded_depth // 2, TILE_COLUMNS)
    packed = (arena or Arena()).zeros(packed_shape, torch.int32)
    for index, part in enumerate(parts):
        wide = part.to(torch.bfloat16)
        if part.shape != shape:
            wide = torch.zeros(shape, dtype=torch.bfloat16)
            wide[:num_columns, :depth] = part
        # Pairs move as one number each, which takes half the time.
        packed[:, index] = wide.contiguous().view(torch.int32).view(-1, TILE_COLUMNS, padded_depth // 2).transpose(1, 2)
    tiles = packed.view(torch.bfloat16).view(-1, padded_depth // 2, TILE_COLUMNS, 2)
    return PackedWeight(tiles, num_columns, depth, len(parts))
