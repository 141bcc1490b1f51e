"""What attention must give: softmax(scale * q K^T) V in float64 over gathered keys, and how far off a kernel may be.

It shares no line with what it judges. In float64 it is the truth; in the kernel's own type it is the yardstick of the
kernel bound.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from spec.attention import first_visible

Array: TypeAlias = npt.NDArray[Any]  # Any: numpy's own word for an array of any type
Floats: TypeAlias = npt.NDArray[np.floating[Any]]

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}
"""The smallest normal number of each type."""
ACCUMULATOR_EPS = EPS["float32"]


def bfloat16_bits(numbers: Array) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of each float32, ties to even: numpy has no such type.

    >>> [hex(each) for each in bfloat16_bits(np.array([1.0, -2.0, np.inf]))]
    ['0x3f80', '0xc000', '0x7f80']
    """
    singles = np.ascontiguousarray(numbers, np.float32)
    bits = singles.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(singles), np.uint16(0x7FC0), nearest)


def stored(numbers: Array, dtype: str) -> Array:
    """The numbers as arrays of this type are kept here: bfloat16 as its bits, in uint16."""
    return bfloat16_bits(numbers) if dtype == "bfloat16" else np.asarray(numbers).astype(dtype)


def numbers_of(kept: Array, dtype: str) -> Array:
    """What ``stored`` has kept, in float32."""
    if dtype == "bfloat16":
        return (kept.astype(np.uint32) << 16).view(np.float32)
    return kept.astype(np.float32)


def rounded(numbers: Array, dtype: str) -> Array:
    """The numbers after an operation in this type: computed in float32 (or float64), its result rounded."""
    return numbers if dtype in ("float64", "float32") else numbers_of(stored(numbers, dtype), dtype)


def _e4m3() -> Floats:
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7  # 4 bits with a bias of 7, and 3
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(byte & 127 == 127, np.nan, np.where(byte & 128, -size, size)).astype(np.float32)


E4M3 = _e4m3()
"""The number that each byte of e4m3 stands for."""


def e4m3_bytes(numbers: Array) -> npt.NDArray[np.uint8]:
    """The nearest e4m3 of each number, up to 448: numpy has no such type.

    >>> [hex(each) for each in e4m3_bytes(np.array([1.0, -448.0, 2.0**-9, np.nan]))]
    ['0x38', '0xfe', '0x1', '0x7f']
    """
    between = (E4M3[:126] + E4M3[1:127]) / 2
    size = np.searchsorted(between, np.abs(numbers)).astype(np.uint8)
    return np.where(np.isnan(numbers), np.uint8(0x7F), size | np.where(np.signbit(numbers), 128, 0)).astype(np.uint8)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a paged attention, as numpy keeps them.

    ============  =================================================  =================================================
    query         [num_tokens, num_query_heads, head_size]           the queries of all sequences in a row
    key_cache     [num_blocks, block_size, num_kv_heads, head_size]  and ``value_cache`` likewise
    block_tables  [num_seqs, max_blocks_per_seq] int32               entries past a sequence's end may hold anything
    seq_lens      [num_seqs] int32                                   keys, including this step's
    query_start   [num_seqs + 1] int32                               prefix sums of the numbers of queries
    kv_scales     [num_blocks, block_size, num_kv_heads, 2]          of K and of V, the bits of bfloat16: then the caches
                                                                     hold bytes of e4m3
    ============  =================================================  =================================================
    """

    query: Array
    key_cache: Array
    value_cache: Array
    block_tables: Array
    seq_lens: Array
    query_start: Array
    scale: float
    dtype: str = "float32"
    window: int | None = None
    logit_cap: float | None = None
    kv_scales: Array | None = None

    @property
    def block_size(self) -> int:
        return int(self.key_cache.shape[1])

    @property
    def group(self) -> int:
        return int(self.query.shape[1] // self.key_cache.shape[2])

    @property
    def query_lens(self) -> list[int]:
        return np.diff(self.query_start).tolist()  # type: ignore[no-any-return]  # numpy's tolist has no type

    def held(self, which: int, where: tuple[Array, Array]) -> Array:
        """The keys (0) or the values (1) [num_places, num_kv_heads, head_size] at these places, in float32."""
        cells = (self.key_cache, self.value_cache)[which][where]
        if self.kv_scales is None:
            return numbers_of(cells, self.dtype)
        return E4M3[cells] * numbers_of(self.kv_scales[where][..., which, None], "bfloat16")

    def slots(self, seq: int, first: int, stop: int) -> list[int]:
        """Where the positions from ``first`` to ``stop`` of a sequence lie."""
        size, table = self.block_size, self.block_tables[seq]
        return [int(table[at // size]) * size + at % size for at in range(first, stop)]

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """For each query its row, its sequence and its position, which is negative where there are too few keys."""
        for seq, (begin, end) in enumerate(pairwise(self.query_start.tolist())):
            for row in range(begin, end):
                yield row, seq, int(self.seq_lens[seq]) - (end - row)


@dataclass(frozen=True)
class Exact:
    """Attention written out, and the two sizes that an accumulator's error grows with."""

    out: Array  # [num_tokens, num_query_heads, head_size]
    lse: Array  # [num_tokens, num_query_heads], natural logarithm
    spread: float  # max(P @ |V|)
    reach: float  # scale * max(|q| @ |k|)


def dense(call: Call, dtype: str = "float64") -> Exact:
    """Attention of each query over its keys, gathered; every operation is rounded to ``dtype``."""
    num_tokens, num_query_heads, head_size = call.query.shape
    kind = np.float64 if dtype == "float64" else np.float32
    out = np.zeros((num_tokens, num_query_heads, head_size), kind)
    lse = np.full((num_tokens, num_query_heads), -np.inf, kind)
    spread = reach = 0.0
    for seq, (begin, end) in enumerate(pairwise(call.query_start.tolist())):
        length = int(call.seq_lens[seq])
        first = first_visible(length - (end - begin), call.window)
        if end == begin or length <= first:
            continue
        at, positions = np.arange(length - (end - begin), length), np.arange(first, length)
        where = call.block_tables[seq][positions // call.block_size].astype(np.int64), positions % call.block_size
        key, value = (
            np.repeat(call.held(which, where).astype(kind), call.group, axis=1).transpose(1, 0, 2) for which in (0, 1)
        )  # [num_query_heads, num_keys, head_size]
        query = numbers_of(call.query[begin:end], call.dtype).astype(kind).transpose(1, 0, 2)
        score = rounded(rounded(query @ key.transpose(0, 2, 1), dtype) * kind(call.scale), dtype)
        if call.logit_cap is not None:
            capped = rounded(np.tanh(rounded(score / kind(call.logit_cap), dtype)), dtype)
            score = rounded(kind(call.logit_cap) * capped, dtype)
        hidden = positions[None] > at[:, None]
        if call.window is not None:
            hidden |= positions[None] <= at[:, None] - call.window
        score = np.where(hidden[None], -np.inf, score)
        most = np.maximum(score.max(-1, keepdims=True), np.finfo(kind).min)  # a row without keys: no inf - inf
        weights = np.exp(score - most)
        total = weights.sum(-1, keepdims=True)
        weights = rounded(weights / np.where(total == 0.0, kind(1.0), total), dtype)
        out[begin:end] = rounded(weights @ value, dtype).transpose(1, 0, 2)
        with np.errstate(divide="ignore"):
            lse[begin:end] = rounded(most + np.log(total), dtype)[..., 0].T
        spread = max(spread, float((weights @ np.abs(value)).max()))
        reach = max(reach, call.scale * float((np.abs(query) @ np.abs(key).transpose(0, 2, 1)).max()))
    return Exact(out, lse, spread, reach)


def half_ulp(dtype: str, size: float) -> float:
    """Half a unit in the last place of ``dtype`` for numbers up to ``size``.

    >>> half_ulp("float16", 3.0) == 2.0**-10
    True
    """
    return float(2.0 ** math.floor(math.log2(max(size, SMALLEST[dtype])))) * EPS[dtype] / 2


def kernel_bound(exact: Exact, own: Exact, dtype: str) -> float:
    """The largest error of an output that is no bug: twice that of dense attention in the kernel's own type, what an
    accumulator in float32 adds, and half a unit in the last place."""
    accumulated = ACCUMULATOR_EPS * exact.spread * (1 + exact.reach)
    return 2 * max_error(own.out, exact.out) + accumulated + half_ulp(dtype, largest(exact.out))


def lse_bound(exact: Exact, own: Exact) -> float:
    """The same for the log-sum-exp, which is float32 and whose weights sum to one."""
    accumulated = ACCUMULATOR_EPS * (1 + exact.reach)
    return 2 * max_error(own.lse, exact.lse) + accumulated + half_ulp("float32", largest(exact.lse))


def errors(found: Array, exact: Array) -> Array:
    """The difference of each number; equal infinities differ by nothing, and a nan differs by infinity."""
    with np.errstate(invalid="ignore"):
        off = np.where(found == exact, 0.0, np.abs(found.astype(np.float64) - exact.astype(np.float64)))
    return np.nan_to_num(off, nan=math.inf, posinf=math.inf)


def max_error(found: Array, exact: Array) -> float:
    """The largest difference."""
    return float(errors(found, exact).max(initial=0.0))


def largest(numbers: Array) -> float:
    """The largest finite size."""
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0))
