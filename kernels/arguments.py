"""What the launchers demand of their arguments, all of it before anything is launched or written.

Shapes, types, devices and strides are always checked: that costs no look into device memory. The *values* of tables,
lengths and slots are checked too, unless ``KVPROOF_UNCHECKED_KERNELS=1``: on a GPU that look waits for the device.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.fp8 import FP8, SCALE, SCALE_BYTES

PAD_SLOT = -1  # in a slot mapping: this token is padding, nothing is written for it
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CACHE_DTYPES = (*DTYPES, FP8)
MAX_HEAD_SIZE = 256
MAX_GROUP = 64  # query heads per KV head; they share one tile's rows
WIDE_LOAD = 16  # bytes of an address, elements of a stride: what it takes to load 16 bytes at once


class BadArgument(ValueError):
    """A launcher refuses an argument; nothing was launched and nothing was written."""

    def __init__(self, argument: str, quality: str, found: object, needed: object) -> None:
        super().__init__(f"{argument} has {quality} {found}, needs {needed}")
        self.argument = argument
        self.quality = quality
        self.found = found
        self.needed = needed


def demand(argument: str, quality: str, found: object, needed: object) -> None:
    if found != needed:
        raise BadArgument(argument, quality, found, needed)


def values_are_checked() -> bool:
    return os.environ.get("KVPROOF_UNCHECKED_KERNELS") != "1"


def check_places(argument: str, written: Tensor) -> None:
    """Each element of what is written has a place of its own: an expanded tensor has not."""
    if any(stride == 0 and size > 1 for stride, size in zip(written.stride(), written.shape, strict=True)):
        raise BadArgument(argument, "strides", written.stride(), "none of 0, since it is written")


def check_caches(key_cache: Tensor, value_cache: Tensor, kv_scales: Tensor | None = None) -> None:
    """Both caches are ``[num_blocks, block_size, num_kv_heads, head_size]`` of one type on one device.

    An fp8 cache has kv_scales, ``[num_blocks, block_size, num_kv_heads, 2]``, and no other has.
    """
    demand("key_cache", "rank", key_cache.dim(), 4)
    if 0 in key_cache.shape[1:]:
        raise BadArgument("key_cache", "shape", tuple(key_cache.shape), "no empty axis but num_blocks")
    if key_cache.dtype not in CACHE_DTYPES:
        raise BadArgument("key_cache", "dtype", key_cache.dtype, f"one of {CACHE_DTYPES}")
    demand("key_cache", "last stride", key_cache.stride(3), 1)
    demand("value_cache", "shape", tuple(value_cache.shape), tuple(key_cache.shape))
    demand("value_cache", "dtype", value_cache.dtype, key_cache.dtype)
    demand("value_cache", "device", value_cache.device, key_cache.device)
    demand("value_cache", "last stride", value_cache.stride(3), 1)
    if kv_scales is None:
        if key_cache.dtype == FP8:
            raise BadArgument("kv_scales", "value", None, f"the scales of a cache of {FP8}")
        return
    if key_cache.dtype != FP8:
        raise BadArgument("kv_scales", "value", "a tensor", f"None for a cache of {key_cache.dtype}")
    demand("kv_scales", "shape", tuple(kv_scales.shape), (*key_cache.shape[:3], 2))
    demand("kv_scales", "dtype", kv_scales.dtype, SCALE)
    demand("kv_scales", "device", kv_scales.device, key_cache.device)
    demand("kv_scales", "contiguity", kv_scales.is_contiguous(), True)
    demand(
        "kv_scales", "address", f"{kv_scales.data_ptr() % SCALE_BYTES} modulo {SCALE_BYTES}", f"0 modulo {SCALE_BYTES}"
    )


def check_written_caches(key_cache: Tensor, value_cache: Tensor, kv_scales: Tensor | None) -> None:
    check_caches(key_cache, value_cache, kv_scales)
    check_places("key_cache", key_cache)
    check_places("value_cache", value_cache)


def check_numbers(argument: str, numbers: Tensor, key_cache: Tensor) -> None:
    """What is written into a cache, or scores its keys, has its type; beside an fp8 cache, any type that is computed in."""
    if key_cache.dtype == FP8 and numbers.dtype not in DTYPES:
        raise BadArgument(argument, "dtype", numbers.dtype, f"one of {DTYPES}")
    if key_cache.dtype != FP8:
        demand(argument, "dtype", numbers.dtype, key_cache.dtype)


def check_index(argument: str, index: Tensor, rank: int, dtype: torch.dtype, device: torch.device) -> None:
    demand(argument, "rank", index.dim(), rank)
    demand(argument, "dtype", index.dtype, dtype)
    demand(argument, "device", index.device, device)
    if index.numel() > 0:
        demand(argument, "last stride", index.stride(-1), 1)


def check_wide_loads(key_cache: Tensor, value_cache: Tensor) -> None:
    """What only the Triton attention kernel needs: 16-byte loads of K and V, and one offset that serves both."""
    head_size = key_cache.shape[3]
    if not 32 <= head_size <= MAX_HEAD_SIZE or head_size % WIDE_LOAD:
        raise BadArgument("key_cache", "head_size", head_size, f"a multiple of {WIDE_LOAD} from 32 to {MAX_HEAD_SIZE}")
    demand("value_cache", "strides", value_cache.stride(), key_cache.stride())
    for argument, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if any(stride % WIDE_LOAD for stride in cache.stride()[:3]):
            raise BadArgument(argument, "strides", cache.stride(), f"multiples of {WIDE_LOAD} elements before the last")
        if cache.data_ptr() % WIDE_LOAD:
            raise BadArgument(
                argument, "address", f"{cache.data_ptr() % WIDE_LOAD} modulo {WIDE_LOAD}", f"0 modulo {WIDE_LOAD}"
            )


def check_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float,
    window: int | None,
    logit_cap: float | None,
    out: Tensor | None,
    kv_scales: Tensor | None,
) -> None:
    check_caches(key_cache, value_cache, kv_scales)
    num_kv_heads, head_size = key_cache.shape[2:]
    demand("query", "rank", query.dim(), 3)
    demand("query", "head_size", query.shape[2], head_size)
    check_numbers("query", query, key_cache)
    demand("query", "device", query.device, key_cache.device)
    demand("query", "last stride", query.stride(2), 1)
    num_query_heads = query.shape[1]
    if num_query_heads == 0 or num_query_heads % num_kv_heads:
        raise BadArgument("query", "num_query_heads", num_query_heads, f"a multiple of num_kv_heads {num_kv_heads}")
    if num_query_heads // num_kv_heads > MAX_GROUP:
        raise BadArgument("query", "heads per KV head", num_query_heads // num_kv_heads, f"at most {MAX_GROUP}")
    check_index("block_tables", block_tables, 2, torch.int32, query.device)
    check_index("seq_lens", seq_lens, 1, torch.int32, query.device)
    check_index("query_start", query_start, 1, torch.int32, query.device)
    demand("block_tables", "rows", block_tables.shape[0], seq_lens.shape[0])
    demand("query_start", "length", query_start.shape[0], seq_lens.shape[0] + 1)
    if not 0 < scale < math.inf:
        raise BadArgument("scale", "value", scale, "a finite number above 0")
    if window is not None and window < 1:
        raise BadArgument("window", "value", window, "at least 1")
    if logit_cap is not None and not logit_cap > 0:
        raise BadArgument("logit_cap", "value", logit_cap, "more than 0")
    if out is not None:
        demand("out", "shape", tuple(out.shape), tuple(query.shape))
        demand("out", "dtype", out.dtype, query.dtype)
        demand("out", "device", out.device, query.device)
        demand("out", "last stride", out.stride(2), 1)
        check_places("out", out)


def check_lengths(
    query_lens: Sequence[int], seq_lens: Sequence[int], *, num_tokens: int, table_width: int, block_size: int
) -> None:
    """The table has room for every sequence, the queries are there."""
    if sum(query_lens) > num_tokens:
        raise BadArgument("query_start", "end", sum(query_lens), f"at most the {num_tokens} tokens of query")
    if seq_lens and max(seq_lens) > table_width * block_size:
        longest = max(seq_lens)
        raise BadArgument(
            "block_tables",
            "width",
            table_width,
            f"{-(-longest // block_size)} for {longest} keys in blocks of {block_size}",
        )


def check_lengths_values(query_start: Sequence[int], seq_lens: Sequence[int]) -> None:
    if query_start[0] != 0:
        raise BadArgument("query_start", "first entry", query_start[0], 0)
    for seq, (begin, end) in enumerate(pairwise(query_start)):
        if end < begin:
            raise BadArgument("query_start", f"entry {seq + 1}", end, f"at least entry {seq}, {begin}")
    if seq_lens and min(seq_lens) < 0:
        raise BadArgument("seq_lens", "smallest entry", min(seq_lens), "at least 0")


def check_table_values(
    block_tables: Tensor,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    block_size: int,
    num_blocks: int,
    window: int | None,
) -> None:
    """Every entry that will be used names a block; the others may hold anything."""
    if not seq_lens or _are_blocks(block_tables, num_blocks):  # mostly even the others do, and that is seen at once
        return
    device = block_tables.device
    columns = torch.arange(block_tables.shape[1], device=device)
    ends = torch.tensor([-(-length // block_size) for length in seq_lens], device=device)
    used = columns < ends[:, None]
    if window is not None:
        begins = [
            first_key(num_queries, length, window) // block_size
            for num_queries, length in zip(query_lens, seq_lens, strict=True)
        ]
        used &= columns >= torch.tensor(begins, device=device)[:, None]
    ids = block_tables[used & torch.tensor([n > 0 for n in query_lens], device=device)[:, None]]
    if not _are_blocks(ids, num_blocks):
        lowest, highest = (int(bound) for bound in ids.aminmax())
        found = lowest if lowest < 0 else highest
        raise BadArgument("block_tables", "block id", found, f"0 to {num_blocks - 1}")


def _are_blocks(ids: Tensor, num_blocks: int) -> bool:
    if ids.numel() == 0:
        return True
    lowest, highest = ids.aminmax()
    return 0 <= int(lowest) and int(highest) < num_blocks


def first_key(num_queries: int, seq_len: int, window: int | None) -> int:
    """The first position that some query of the sequence sees."""
    return 0 if window is None else max(seq_len - num_queries - window + 1, 0)


def check_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None
) -> None:
    check_written_caches(key_cache, value_cache, kv_scales)
    demand("key", "rank", key.dim(), 3)
    demand("key", "shape after num_tokens", tuple(key.shape[1:]), tuple(key_cache.shape[2:]))
    demand("value", "shape", tuple(value.shape), tuple(key.shape))
    for argument, tensor in (("key", key), ("value", value)):
        check_numbers(argument, tensor, key_cache)
        demand(argument, "device", tensor.device, key_cache.device)
        demand(argument, "last stride", tensor.stride(2), 1)
    demand("value", "dtype", value.dtype, key.dtype)
    check_index("slot_mapping", slot_mapping, 1, torch.int64, key_cache.device)
    demand("slot_mapping", "length", slot_mapping.shape[0], key.shape[0])


def check_slot_values(slot_mapping: Tensor, num_slots: int) -> None:
    """A slot is ``PAD_SLOT`` or names one cell of the cache that no other token of the call is written to."""
    if slot_mapping.numel() == 0:
        return
    ordered = slot_mapping.sort().values
    lowest, highest = int(ordered[0]), int(ordered[-1])
    if lowest < PAD_SLOT or highest >= num_slots:
        found = lowest if lowest < PAD_SLOT else highest
        raise BadArgument("slot_mapping", "slot", found, f"0 to {num_slots - 1}, or {PAD_SLOT} for padding")
    twice = ordered[1:][(ordered[1:] == ordered[:-1]) & (ordered[1:] != PAD_SLOT)]
    if twice.numel() > 0:
        raise BadArgument("slot_mapping", "slot", int(twice[0]), "each slot at most once, it is there 2 times or more")


def check_copy(key_cache: Tensor, value_cache: Tensor, block_copies: Tensor, kv_scales: Tensor | None) -> None:
    check_written_caches(key_cache, value_cache, kv_scales)
    check_index("block_copies", block_copies, 2, torch.int64, key_cache.device)
    demand("block_copies", "columns", block_copies.shape[1], 2)


def check_copy_values(block_copies: Tensor, num_blocks: int) -> None:
    """Ids exist, a target is written once, and no source is a target: then the order of the copies does not matter."""
    pairs = block_copies.tolist()
    for block in (block for pair in pairs for block in pair):
        if not 0 <= block < num_blocks:
            raise BadArgument("block_copies", "block id", block, f"0 to {num_blocks - 1}")
    sources = {source for source, _ in pairs}
    targets = set()
    for _, target in pairs:
        if target in targets:
            raise BadArgument("block_copies", "target", target, "each target at most once, it is there 2 times or more")
        if target in sources:
            raise BadArgument("block_copies", "target", target, f"a block that is no source, {target} is both")
        targets.add(target)


def new_packed(key_cache: Tensor, block_ids: Tensor) -> Tensor:
    """Room for these blocks, packed: ``[num_packed, 2, block_size, num_kv_heads, head_size]``, or, of an fp8 cache, bytes.

    ``[num_packed, 2 * block_size * num_kv_heads * head_size + scale bytes]`` uint8: K, V, and then the kv_scales.
    """
    demand("key_cache", "rank", key_cache.dim(), 4)
    demand("block_ids", "rank", block_ids.dim(), 1)
    num_packed = len(block_ids)
    if key_cache.dtype != FP8:
        return key_cache.new_empty((num_packed, 2, *key_cache.shape[1:]))
    _, block_size, num_kv_heads, head_size = key_cache.shape
    num_bytes = block_size * num_kv_heads * (2 * head_size + SCALE_BYTES)
    return torch.empty((num_packed, num_bytes), dtype=torch.uint8, device=key_cache.device)


def check_pack(
    packed: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, kv_scales: Tensor | None
) -> None:
    check_written_caches(key_cache, value_cache, kv_scales)
    check_index("block_ids", block_ids, 1, torch.int64, key_cache.device)
    like = new_packed(key_cache[:0], block_ids[:0])
    demand("packed", "shape", tuple(packed.shape), (len(block_ids), *like.shape[1:]))
    demand("packed", "dtype", packed.dtype, like.dtype)
    demand("packed", "device", packed.device, key_cache.device)
    demand("packed", "contiguity", packed.is_contiguous(), True)


def check_pack_values(block_ids: Tensor, num_blocks: int) -> None:
    ids = block_ids.tolist()
    for block in ids:
        if not 0 <= block < num_blocks:
            raise BadArgument("block_ids", "block id", block, f"0 to {num_blocks - 1}")
    for block, times in Counter(ids).items():
        if times > 1:
            raise BadArgument("block_ids", "block id", block, f"each id once, it is there {times} times")
