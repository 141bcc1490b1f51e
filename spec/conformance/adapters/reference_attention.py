"""The paged attention of ``reference``: NumPy in float64, one sequence at a time."""

import numpy as np

from spec.attention import first_visible
from spec.conformance.kernel import AttentionKernel, Offer
from spec.conformance.kernel_oracle import Array


def _attend(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    query_start: Array,
    scale: float,
    window: int | None = None,
    kv_scales: Array | None = None,
) -> tuple[Array, Array]:
    from reference.attention import paged_attention, visible

    if kv_scales is not None:
        key_cache, value_cache = (
            _widened(cache, kv_scales[..., i]) for i, cache in enumerate((key_cache, value_cache))
        )
    size = key_cache.shape[1]
    out, lse = np.zeros(query.shape), np.full(query.shape[:2], -np.inf)
    for seq, length in enumerate(seq_lens.tolist()):
        begin, end = query_start[seq : seq + 2].tolist()
        if begin == end:
            continue
        at = range(length - (end - begin), length)
        seen = range(first_visible(at[0], window), length)
        table = block_tables[seq, : -(-length // size)]
        entries = (
            np.maximum(table, 0) if window is None else np.where(np.arange(len(table)) < seen.start // size, 0, table)
        )
        keys, values = (cache[entries].reshape(-1, *cache.shape[2:]) for cache in (key_cache, value_cache))
        rows, sees = slice(begin, end), visible(at, seen, window)
        out[rows], lse[rows] = paged_attention(query[rows].astype(float), keys, values, seen, sees, scale)
    return out, lse


def _widened(cache: Array, scales: Array) -> Array:
    """Bytes of e4m3 times their scales, whose bits are those of bfloat16, in float64."""
    exponent, mantissa = (cache >> 3 & 15).astype(int), (cache & 7).astype(float)
    size = np.ldexp(mantissa + np.where(exponent > 0, 8, 0), np.maximum(exponent, 1) - 10)
    size[cache & 127 == 127] = np.nan
    factor = (scales.astype(np.uint32) << 16).view(np.float32).astype(float)
    return np.asarray(np.where(cache & 128, -size, size) * factor[..., None])


reference = AttentionKernel(
    "reference.attention.paged_attention",
    _attend,
    offers=frozenset({Offer.LSE, Offer.WINDOW, Offer.BATCH_INVARIANT, Offer.NO_COPY, Offer.FP8}),
    dtypes=("float32", "float16"),
    head_sizes=(32, 64, 80),
    block_sizes=(1, 3, 4, 8, 16),
    groups=(1, 2, 3, 4),
)
