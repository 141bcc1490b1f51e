"""Attention in float64: over contiguous keys and values, and over those that a block table leads to.

Both are ``softmax(scale * q K^T) V`` over the positions that a token sees: itself and those before it, with a window only
so many of them. A token that sees nothing gets 0, and minus infinity as the logarithm of its sum of weights (LSE).
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from spec.vocabulary import Slot

Floats: TypeAlias = npt.NDArray[np.float64]


def visible(query_positions: Sequence[int], key_positions: Sequence[int], window: int | None) -> npt.NDArray[np.bool_]:
    """Which keys each query sees ``[num_queries, num_keys]``.

    >>> visible([1, 2], [0, 1, 2], window=2).astype(int).tolist()
    [[1, 1, 0], [0, 1, 1]]
    """
    distance = np.asarray(query_positions, dtype=int)[:, None] - np.asarray(key_positions, dtype=int)[None, :]
    sees: npt.NDArray[np.bool_] = distance >= 0
    if window is not None:
        sees &= distance < window
    return sees


def dense_attention(
    query: Floats, keys: Floats, values: Floats, sees: npt.NDArray[np.bool_], scale: float
) -> tuple[Floats, Floats]:
    """Attention over contiguous keys, and its LSE.

    ``query [num_queries, num_query_heads, head_size]``, ``keys`` and ``values [num_keys, num_kv_heads, head_size]``,
    ``sees [num_queries, num_keys]``; out like ``query``, LSE ``[num_queries, num_query_heads]``. Each group of
    ``num_query_heads / num_kv_heads`` query heads shares one head of keys and values.
    """
    num_queries, num_query_heads = query.shape[:2]
    group_size = num_query_heads // keys.shape[1]
    out = np.zeros((num_queries, num_query_heads, values.shape[2]))
    lse = np.full((num_queries, num_query_heads), -np.inf)
    for head in range(num_query_heads):
        head_keys, head_values = keys[:, head // group_size], values[:, head // group_size]
        for i in range(num_queries):
            if not sees[i].any():
                continue
            scores = scale * (head_keys[sees[i]] @ query[i, head])
            largest = scores.max()
            weights = np.exp(scores - largest)
            out[i, head] = weights @ head_values[sees[i]] / weights.sum()
            lse[i, head] = largest + np.log(weights.sum())
    return out, lse


def paged_attention(
    query: Floats,
    key_cache: Floats,
    value_cache: Floats,
    slots: Sequence[Slot],
    sees: npt.NDArray[np.bool_],
    scale: float,
) -> tuple[Floats, Floats]:
    """Attention over the keys and values that lie in these slots of the cache ``[num_slots, num_kv_heads, head_size]``.

    ``slots`` has one slot a key, in the order of their positions; nothing else in the cache is touched.
    """
    rows = np.asarray(slots, dtype=int)
    return dense_attention(query, key_cache[rows], value_cache[rows], sees, scale)
