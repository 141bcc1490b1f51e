"""A paged attention in plain numpy: tiles of keys, a running maximum and sum, splits that are folded. It is there to be
sabotaged."""

import numpy as np

TILE_TOKENS = 8
SPLIT_TOKENS = 24


def attend(
    query,
    key_cache,
    value_cache,
    block_tables,
    seq_lens,
    query_start,
    scale,
    window=None,
    logit_cap=None,
    kv_scales=None,
):
    """[num_tokens, num_query_heads, head_size] and its log-sum-exp, in float32."""
    if kv_scales is not None:
        key_cache, value_cache = widened(key_cache, kv_scales[..., 0]), widened(value_cache, kv_scales[..., 1])
    out = np.zeros(query.shape, np.float32)
    lse = np.zeros(query.shape[:2], np.float32)
    num_kv_heads = key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    for seq, length in enumerate(seq_lens.tolist()):
        begin, end = query_start[seq : seq + 2].tolist()
        table = block_tables[seq]
        for row in range(begin, end):
            position = length - (end - row)
            for head in range(query.shape[1]):
                q = query[row, head].astype(np.float32)
                total = (-np.inf, 0.0, np.zeros(query.shape[2], np.float32))
                for split in range(position // SPLIT_TOKENS + 1):
                    part = (-np.inf, 0.0, np.zeros(query.shape[2], np.float32))
                    for start in range(split * SPLIT_TOKENS, (split + 1) * SPLIT_TOKENS, TILE_TOKENS):
                        tokens = np.arange(start, start + TILE_TOKENS)
                        seen = tokens <= position
                        if window is not None:
                            seen &= tokens > position - window
                        tokens = tokens[seen]
                        keys = gather(key_cache, table, tokens, head // group)
                        values = gather(value_cache, table, tokens, head // group)
                        score = keys @ q * np.float32(scale)
                        if logit_cap is not None:
                            score = np.float32(logit_cap) * np.tanh(score / np.float32(logit_cap))
                        most = score.max(initial=part[0])
                        weights = np.exp(score - most) if len(score) else score
                        part = fold(part, (most, weights.sum(), weights @ values))
                    total = fold(total, part)
                out[row, head] = total[2] / (total[1] if total[1] else 1.0)
                lse[row, head] = total[0] + np.log(total[1]) if total[1] else -np.inf
    return out, lse


def gather(cache, table, tokens, head):
    """[num_keys, head_size] of one head."""
    block_size = cache.shape[1]
    return cache[table[tokens // block_size], tokens % block_size, head].astype(np.float32)


def fold(a, b):
    """The maximum, the sum and the product of both."""
    most = max(a[0], b[0])
    if most == -np.inf:
        return a
    fade, weight = np.exp(a[0] - most), np.exp(b[0] - most)
    return most, a[1] * fade + b[1] * weight, a[2] * fade + b[2] * weight


def widened(cache, scales):
    """Bytes of e4m3 and the bits of their scales, as numbers."""
    exponent, mantissa = (cache >> 3 & 15).astype(np.int32), (cache & 7).astype(np.float32)
    normal, small = np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9)
    size = np.where(cache & 127 == 127, np.float32(np.nan), np.where(exponent == 0, small, normal))
    factors = (scales.astype(np.uint32) << 16).view(np.float32)
    return np.where(cache & 128, -size, size) * factors[..., None]


def copy_blocks(key_cache, value_cache, block_copies, kv_scales=None):
    """Whole blocks, [num_copies, 2] of sources and targets."""
    sources, targets = block_copies.T
    for cells in (key_cache, value_cache) if kv_scales is None else (key_cache, value_cache, kv_scales):
        cells[targets] = cells[sources]
