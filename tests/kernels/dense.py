"""The oracle: attention over gathered keys, written out in one precision, and the bound that a kernel must keep.

It shares no line with what it judges. In float64 it is the truth; in the kernel's own type it is the yardstick of
DESIGN.md, decision 5.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ACCUMULATOR_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Batch:
    """The tensors of one call of ``paged_attention``."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor

    def __iter__(self):
        return iter((self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens, self.query_start))

    @property
    def query_lens(self) -> list[int]:
        return self.query_start.diff().tolist()


@dataclass(frozen=True)
class Exact:
    """The float64 result, and the two sizes that the accumulator's error grows with."""

    out: Tensor
    lse: Tensor
    spread: float  # max(P @ |V|)
    reach: float  # scale * max(|q| @ |k|)


def dense(batch, *, scale, window=None, logit_cap=None, dtype=torch.float64) -> Exact:
    outs, lses, spread, reach = [], [], 0.0, 0.0
    group = batch.query.shape[1] // batch.key_cache.shape[2]
    block_size = batch.key_cache.shape[1]
    for seq, (first, stop, length) in enumerate(
        zip(batch.query_start.tolist(), batch.query_start.tolist()[1:], batch.seq_lens.tolist(), strict=False)
    ):
        at = torch.arange(length - (stop - first), length)
        begin = 0 if window is None else max(0, length - (stop - first) - window + 1)
        positions = torch.arange(begin, max(length, begin))
        blocks = batch.block_tables[seq].long()[positions // block_size]
        key = batch.key_cache[blocks, positions % block_size].to(dtype).repeat_interleave(group, 1)
        value = batch.value_cache[blocks, positions % block_size].to(dtype).repeat_interleave(group, 1)
        query = batch.query[first:stop].to(dtype)
        score = torch.einsum("qhd,khd->hqk", query, key) * scale
        if logit_cap is not None:
            score = logit_cap * torch.tanh(score / logit_cap)
        hidden = positions[None] > at[:, None]
        if window is not None:
            hidden |= positions[None] <= at[:, None] - window
        score = score.masked_fill(hidden[None], float("-inf"))
        weights = torch.softmax(score, -1).masked_fill(hidden[None], 0.0)  # a row without keys: nan from softmax
        outs.append(torch.einsum("hqk,khd->qhd", weights, value))
        lses.append(torch.logsumexp(score, -1).T)
        if len(positions) and stop > first:
            spread = max(spread, float(torch.einsum("hqk,khd->qhd", weights, value.abs()).max()))
            reach = max(reach, scale * float(torch.einsum("qhd,khd->hqk", query.abs(), key.abs()).max()))
    return Exact(torch.cat(outs), torch.cat(lses), spread, reach)


def half_ulp(dtype: torch.dtype, size: float) -> float:
    """Half a unit in the last place of ``dtype`` for numbers up to ``size``."""
    smallest = torch.finfo(dtype).tiny
    return 2.0 ** math.floor(math.log2(max(size, smallest))) * torch.finfo(dtype).eps / 2


def kernel_bound(exact: Exact, own: Exact, dtype: torch.dtype) -> float:
    """DESIGN.md, decision 5: the largest error of the output that is no bug."""
    accumulated = ACCUMULATOR_EPS * exact.spread * (1 + exact.reach)
    return 2 * max_error(own.out, exact.out) + accumulated + half_ulp(dtype, largest(exact.out))


def lse_bound(exact: Exact, own: Exact) -> float:
    """The same for the log-sum-exp, which is float32 and whose weights sum to one."""
    accumulated = ACCUMULATOR_EPS * (1 + exact.reach)
    return 2 * max_error(own.lse, exact.lse) + accumulated + half_ulp(torch.float32, largest(exact.lse))


def max_error(found: Tensor, exact: Tensor) -> float:
    """The largest difference; equal infinities differ by nothing, and a nan differs by infinity."""
    if found.numel() == 0:
        return 0.0
    error = torch.where(found.double() == exact.double(), 0.0, (found.double() - exact.double()).abs())
    return float(error.nan_to_num(nan=math.inf, posinf=math.inf).max())


def largest(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0
