"""Paged attention on the CPU, in torch: the product path there, and the meaning of the Triton kernel's arguments.

Keys are walked in tiles of ``TILE_TOKENS`` counted from position 0, decodes of all sequences side by side; a prefill
chunk takes its keys at once, ``TILE_QUERIES`` queries at a time. Sums are float32 whatever the cache holds. Each
product has a shape that the sequence alone decides, so its result does not depend on its neighbours.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.arguments import (
    check_attention,
    check_lengths,
    check_lengths_values,
    check_table_values,
    demand,
    first_key,
    values_are_checked,
)
from kernels.attention_plan import AttentionPlan, check_plan, check_plan_lengths
from kernels.attention_signature import signed
from kernels.fp8 import FP8, bytes_of, dequantized

TILE_TOKENS = 256  # keys per turn of a decode: few enough to waste little on a short sequence
TILE_SEQS = 8  # sequences side by side: enough to share the cost of a call, few enough to stay in the CPU's cache
TILE_QUERIES = 128  # queries per turn of a prefill chunk: bounds the memory for scores


@signed
def cpu_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    *,
    scale: float,
    window: int | None = None,
    logit_cap: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    plan: AttentionPlan | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``paged_attention`` for CPU tensors, of any head size and any strides; a plan is only checked."""
    check_attention(
        query, key_cache, value_cache, block_tables, seq_lens, query_start, scale, window, logit_cap, out, kv_scales
    )
    demand("query", "device", query.device.type, "cpu")
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    query_lens = [end - begin for begin, end in pairwise(starts)]
    check_plan(plan, query.shape[1] // key_cache.shape[2], window, query.device)
    check_plan_lengths(plan, query_lens, lengths)
    num_blocks, block_size = key_cache.shape[:2]
    if values_are_checked():
        check_lengths_values(starts, lengths)
    check_lengths(query_lens, lengths, num_tokens=len(query), table_width=block_tables.shape[1], block_size=block_size)
    if values_are_checked():
        check_table_values(
            block_tables, lengths, query_lens, block_size=block_size, num_blocks=num_blocks, window=window
        )

    if out is None:
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = torch.full(query.shape[:2], float("-inf"))
    cache = _Cache(key_cache, value_cache, block_tables, kv_scales)
    score = _Score(scale, window, logit_cap)
    for seq, length in enumerate(lengths):
        if length == 0:
            out[starts[seq] : starts[seq + 1]] = 0.0
    decodes = [seq for seq, num_queries in enumerate(query_lens) if num_queries == 1 and lengths[seq] > 0]
    decodes.sort(key=lengths.__getitem__)
    for begin in range(0, len(decodes), TILE_SEQS):  # neighbours in length, so that little of a tile is empty
        seqs = decodes[begin : begin + TILE_SEQS]
        tokens = torch.tensor([starts[seq] for seq in seqs])
        decoded, lse[tokens] = _decode(query[tokens], cache, seqs, [lengths[seq] for seq in seqs], score)
        out[tokens] = decoded.to(out.dtype)
    for seq, num_queries in enumerate(query_lens):
        if num_queries > 1 and lengths[seq] > 0:
            tokens_of_seq = slice(starts[seq], starts[seq + 1])
            _prefill(query[tokens_of_seq], cache, seq, lengths[seq], score, out[tokens_of_seq], lse[tokens_of_seq])
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Cache:
    """The paged cache, with the tables that say what lies where."""

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    kv_scales: Tensor | None  # of an fp8 cache

    def cells(self, seqs: Tensor, positions: Tensor) -> "_Cells":
        """Of live positions ``[num_seqs, num_keys]``: any other would use a table entry that may hold anything."""
        block_size = self.key_cache.shape[1]
        blocks = self.block_tables[seqs[:, None], positions // block_size].long()
        return _Cells(blocks, positions % block_size)

    def keys(self, cells: "_Cells") -> Tensor:
        """``[num_seqs * num_kv_heads, num_keys, head_size]`` float32."""
        return self._numbers(self.key_cache, cells, 0)

    def values(self, cells: "_Cells") -> Tensor:
        """Like the keys."""
        return self._numbers(self.value_cache, cells, 1)

    def _numbers(self, cache: Tensor, cells: "_Cells", which: int) -> Tensor:
        if self.kv_scales is None:
            return cells.of(cache).float()
        scales = cells.of(self.kv_scales[..., which : which + 1])[..., 0]
        return dequantized(cells.of(bytes_of(cache)).view(FP8), scales)


@dataclass(frozen=True)
class _Cells:
    """Where the keys of sequences lie, found through their block tables."""

    blocks: Tensor  # [num_seqs, num_keys]
    places: Tensor  # like blocks, within the block

    def of(self, cache: Tensor) -> Tensor:
        """Their contents, ``[num_seqs * num_kv_heads, num_keys, head_size]``."""
        _, block_size, num_kv_heads, head_size = cache.shape
        if not cache.is_contiguous():
            return cache[self.blocks, self.places].transpose(1, 2).flatten(0, 1)
        # One index over rows of one head is faster than two, and leaves nothing to transpose.
        slots = self.blocks * block_size + self.places
        rows = slots[:, None] * num_kv_heads + torch.arange(num_kv_heads)[:, None]
        shape = (len(slots) * num_kv_heads, slots.shape[1], head_size)
        return cache.view(-1, head_size).index_select(0, rows.flatten()).view(shape)


@dataclass(frozen=True)
class _Score:
    """How a query scores a key, and which keys it sees."""

    scale: float
    window: int | None
    logit_cap: float | None

    def of(self, query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
        """``[batch, rows, keys]`` from ``[batch, rows, head_size]`` and ``[batch, keys, head_size]``; unseen is -inf."""
        score = torch.bmm(query, key.transpose(1, 2)).mul_(self.scale)
        if self.logit_cap is not None:
            score = score.div_(self.logit_cap).tanh_().mul_(self.logit_cap)
        return score.masked_fill_(~seen, float("-inf"))

    def sees(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        seen = key_positions <= query_positions
        if self.window is not None:
            seen &= key_positions > query_positions - self.window
        return seen


def _exponentials(score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum of each row, ``exp(score - maximum)`` in place, and its sum; a row that sees nothing: -inf, 0s, 0."""
    top = score.amax(-1)
    base = top.masked_fill(top == float("-inf"), 0.0)
    weights = score.sub_(base.unsqueeze(-1)).exp_()
    return top, weights, weights.sum(-1)


def _finished(acc: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; a row that saw nothing gets 0 and -inf."""
    return acc / total.masked_fill(total == 0.0, 1.0).unsqueeze(-1), top + total.log()


def _decode(query: Tensor, cache: _Cache, seqs: list[int], lengths: list[int], score: _Score) -> tuple[Tensor, Tensor]:
    """One query of each sequence, ``[num_seqs, num_query_heads, head_size]``, over all its keys."""
    num_seqs, num_query_heads, head_size = query.shape
    num_kv_heads = cache.key_cache.shape[2]
    shape = (num_seqs * num_kv_heads, num_query_heads // num_kv_heads)
    grouped = query.float().reshape(*shape, head_size)
    acc, total, top = torch.zeros_like(grouped), torch.zeros(shape), torch.full(shape, float("-inf"))
    tables, last = torch.tensor(seqs), torch.tensor(lengths)[:, None] - 1
    firsts = [first_key(1, length, score.window) for length in lengths]
    first = torch.tensor(firsts)[:, None]
    begin = min(firsts) // TILE_TOKENS * TILE_TOKENS
    for start in range(begin, max(lengths), TILE_TOKENS):
        positions = torch.arange(start, start + TILE_TOKENS)
        # Only a sequence's own live cells are read: where its tile has none, one of them is read again and not seen.
        cells = cache.cells(tables, positions.maximum(first).minimum(last))
        seen = score.sees(last, positions).repeat_interleave(num_kv_heads, 0)[:, None]
        part_top, weights, part_total = _exponentials(score.of(grouped, cache.keys(cells), seen))
        part_acc = torch.bmm(weights, cache.values(cells))
        if start == begin:  # the same as adding it to nothing
            top, total, acc = part_top, part_total, part_acc
            continue
        new_top = torch.maximum(top, part_top)
        base = new_top.masked_fill(new_top == float("-inf"), 0.0)
        fade, weight = (top - base).exp(), (part_top - base).exp()
        total = total * fade + part_total * weight
        acc = acc * fade.unsqueeze(-1) + part_acc * weight.unsqueeze(-1)
        top = new_top
    out, lse = _finished(acc, top, total)
    return out.view(query.shape), lse.view(num_seqs, num_query_heads)


def _prefill(query: Tensor, cache: _Cache, seq: int, length: int, score: _Score, out: Tensor, lse: Tensor) -> None:
    """Several queries of one sequence, ``[num_queries, num_query_heads, head_size]``, into ``out`` and ``lse``."""
    num_queries, num_query_heads, head_size = query.shape
    num_kv_heads = cache.key_cache.shape[2]
    group = num_query_heads // num_kv_heads
    first = first_key(num_queries, length, score.window)
    positions = torch.arange(first, length)
    cells = cache.cells(torch.tensor([seq]), positions[None])
    key, value = cache.keys(cells), cache.values(cells)
    for begin in range(0, num_queries, TILE_QUERIES):
        rows = query[begin : begin + TILE_QUERIES].float()
        at = torch.arange(begin, begin + len(rows)) + (length - num_queries)
        stop = max(length - num_queries + begin + len(rows) - first, 0)
        skip = min(first_key(len(rows), first + stop, score.window) - first, stop)
        if skip == stop:  # no key before the last of these queries
            out[begin : begin + len(rows)] = 0.0
            continue
        grouped = rows.view(len(rows), num_kv_heads, group, head_size).permute(1, 2, 0, 3).flatten(1, 2)
        seen = score.sees(at[:, None], positions[skip:stop]).repeat(group, 1)
        top, weights, total = _exponentials(score.of(grouped, key[:, skip:stop], seen))
        done, done_lse = _finished(torch.bmm(weights, value[:, skip:stop]), top, total)
        shape = (num_kv_heads, group, len(rows))
        by_token = done.view(*shape, head_size).permute(2, 0, 1, 3)
        out[begin : begin + len(rows)] = by_token.flatten(1, 2).to(out.dtype)
        lse[begin : begin + len(rows)] = done_lse.view(shape).permute(2, 0, 1).flatten(1, 2)
