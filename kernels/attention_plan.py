"""The plan of an attention launch: which program works on which queries and keys of which sequence.

The host makes it from lengths it knows anyway, so the kernel searches nothing and nobody waits for the device. One plan
serves all layers of a step that have the same heads and window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.arguments import BadArgument, first_key
from kernels.tile_shape import TileShape, TileShapes, architecture_of, tile_shapes

# Below this many programs a decode leaves multiprocessors idle (132 of them hold about four each), and splits help.
ENOUGH_PROGRAMS = 512


@dataclass(frozen=True)
class Launch:
    """One launch of the kernel: a shape, and a program for each tile and KV head."""

    shape: TileShape
    tiles: Tensor  # [num_tiles, 4] int32: seq (-1: nothing to do), first query, split, partial (-1: write the output)


@dataclass(frozen=True)
class AttentionPlan:
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    group: int
    window: int | None
    launches: tuple[Launch, ...]
    merges: Tensor  # [num_merges, 3] int32: token (-1: nothing to do), first partial, number of partials
    num_partials: int
    partial_rows: int


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
    is_fp8: bool = False,
    shapes: TileShapes | None = None,
    split: bool | None = None,
    num_padding_tiles: int = 0,
) -> AttentionPlan:
    """A plan for these lengths, queries of ``dtype``, and a cache of the same type or of fp8.

    ``split`` gives the splits of long decodes their own programs; the result has the same bits, and None decides by
    how many programs there are without. ``shapes`` are for tests and measurements. Padding tiles keep the grid of a
    captured graph: their programs do nothing.
    """
    group = num_query_heads // num_kv_heads
    if shapes is None:
        shapes = tile_shapes(architecture_of(device), head_size=head_size, group=group, dtype=dtype, is_fp8=is_fp8)
    if split is None:
        split = sum(num_queries == 1 for num_queries in query_lens) * num_kv_heads < ENOUGH_PROGRAMS
    decode_tiles: list[tuple[int, int, int, int]] = []
    prefill_tiles: list[tuple[int, int, int, int]] = []
    merges: list[tuple[int, int, int]] = []
    num_partials = 0
    token = 0
    for seq, (num_queries, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if num_queries == 1:
            splits = (
                splits_of(seq_len, first_key(1, seq_len, window), shapes.decode.split_tokens) if split else range(1)
            )
            if len(splits) > 1:
                merges.append((token, num_partials, len(splits)))
                decode_tiles += [(seq, 0, each, num_partials + i) for i, each in enumerate(splits)]
                num_partials += len(splits)
            else:
                decode_tiles.append((seq, 0, 0, -1))
        else:
            step = shapes.prefill.rows // group
            prefill_tiles += [(seq, first, 0, -1) for first in range(0, num_queries, step)]
        token += num_queries
    if num_padding_tiles:
        decode_tiles += [(-1, 0, 0, -1)] * num_padding_tiles
        merges += [(-1, 0, 0)] * num_padding_tiles
    launches = [
        Launch(shape, _int32(tiles, 4, device))
        for shape, tiles in ((shapes.decode, decode_tiles), (shapes.prefill, prefill_tiles))
        if tiles
    ]
    return AttentionPlan(
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        group=group,
        window=window,
        launches=tuple(launches),
        merges=_int32(merges, 3, device),
        num_partials=num_partials,
        partial_rows=shapes.decode.rows,
    )


def check_plan(plan: AttentionPlan | None, group: int, window: int | None, device: torch.device) -> None:
    """A plan that is given was made for these heads, this window and this device."""
    if plan is not None and plan.merges.device != device:
        raise BadArgument("plan", "device", plan.merges.device, f"{device} of query")
    if plan is not None and plan.group != group:
        raise BadArgument("plan", "group", plan.group, f"{group} of query")
    if plan is not None and plan.window != window:
        raise BadArgument("plan", "window", plan.window, window)


def check_plan_lengths(plan: AttentionPlan | None, query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
    """It was made for this step."""
    if plan is None:
        return
    if plan.query_lens != tuple(query_lens):
        raise BadArgument("plan", "query_lens", plan.query_lens, f"{tuple(query_lens)} of query_start")
    if plan.seq_lens != tuple(seq_lens):
        raise BadArgument("plan", "seq_lens", plan.seq_lens, f"{tuple(seq_lens)} of seq_lens")


def splits_of(seq_len: int, first: int, split_tokens: int) -> range:
    """The splits that hold a key from position ``first`` on; one if there is no cut."""
    if split_tokens == 0 or seq_len == 0:
        return range(1)
    return range(first // split_tokens, -(-seq_len // split_tokens))


def _int32(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> Tensor:
    table = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width)
    if device.type == "cpu":
        return table
    return table.pin_memory().to(device, non_blocking=True)
