"""The float64 attention against the plain Python of ``spec.attention``, the rung of the ladder below it."""

import math

import numpy as np
import pytest

from reference.attention import Floats, dense_attention, paged_attention, visible
from spec.attention import Vector, attention, first_visible

EPS = float(np.finfo(np.float64).eps)
Shape = tuple[int, int, int, int, int]
SHAPES: list[Shape] = [(1, 1, 1, 1, 2), (3, 5, 2, 1, 4), (4, 4, 4, 2, 3), (2, 9, 6, 2, 8), (5, 7, 3, 3, 1)]
"""Queries, keys, query heads, KV heads, head size; the queries are the last positions."""


def draw(shape: Shape, seed: int) -> tuple[Floats, Floats, Floats]:
    num_queries, num_keys, num_query_heads, num_kv_heads, head_size = shape
    rng = np.random.Generator(np.random.PCG64(seed))
    query = rng.standard_normal((num_queries, num_query_heads, head_size))
    keys, values = (rng.standard_normal((num_keys, num_kv_heads, head_size)) for _ in range(2))
    return query, keys, values


def vectors(rows: Floats) -> list[Vector]:
    return [tuple(row) for row in rows.tolist()]


def bound(query: Vector, keys: list[Vector], values: list[Vector], scale: float) -> float:
    """The kernel bound in float64, with 1 for the attention weights' sum."""
    largest = max((math.fsum(abs(x * y) for x, y in zip(query, key, strict=True)) for key in keys), default=0.0)
    largest_value = max((abs(x) for value in values for x in value), default=0.0)
    return 4 * len(query) * EPS * largest_value * (1.0 + scale * largest)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_attention_is_what_the_specification_says(shape: Shape, window: int | None) -> None:
    num_queries, num_keys, num_query_heads, num_kv_heads, head_size = shape
    query, keys, values = draw(shape, seed=1)
    positions = range(num_keys - num_queries, num_keys)
    scale = head_size**-0.5
    out, lse = dense_attention(query, keys, values, visible(positions, range(num_keys), window), scale)
    for i, position in enumerate(positions):
        seen = slice(first_visible(position, window), position + 1)
        for head in range(num_query_heads):
            kv_head = head // (num_query_heads // num_kv_heads)
            own_keys, own_values = vectors(keys[seen, kv_head]), vectors(values[seen, kv_head])
            exact, exact_lse = attention(tuple(query[i, head].tolist()), own_keys, own_values, scale)
            within = bound(tuple(query[i, head].tolist()), own_keys, own_values, scale)
            assert np.abs(out[i, head] - np.array(exact)).max() <= within, f"query {i}, head {head}"
            of_scores = bound(tuple(query[i, head].tolist()), own_keys, [(1.0,)], scale)
            assert lse[i, head] == pytest.approx(exact_lse, rel=0.0, abs=of_scores), f"query {i}, head {head}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_attention_is_dense_attention_wherever_the_slots_lie(shape: Shape) -> None:
    num_queries, num_keys, _, _, head_size = shape
    query, keys, values = draw(shape, seed=2)
    slots = np.random.Generator(np.random.PCG64(3)).permutation(3 * num_keys)[:num_keys]
    key_cache = np.full((3 * num_keys, *keys.shape[1:]), np.nan)
    value_cache = np.full_like(key_cache, np.nan)
    key_cache[slots], value_cache[slots] = keys, values
    sees = visible(range(num_keys - num_queries, num_keys), range(num_keys), None)
    paged, paged_lse = paged_attention(query, key_cache, value_cache, slots.tolist(), sees, head_size**-0.5)
    dense, dense_lse = dense_attention(query, keys, values, sees, head_size**-0.5)
    assert np.array_equal(paged, dense)
    assert np.array_equal(paged_lse, dense_lse)


def test_a_query_that_sees_nothing_gets_zero() -> None:
    query, keys, values = draw((2, 3, 2, 1, 4), seed=4)
    out, lse = dense_attention(query, keys, values, np.zeros((2, 3), dtype=bool), 1.0)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_what_is_not_seen_has_no_part() -> None:
    query, keys, values = draw((1, 4, 2, 1, 4), seed=5)
    keys[3], values[3] = np.nan, np.nan
    out, _ = dense_attention(query, keys, values, visible([2], range(4), None), 0.5)
    assert np.isfinite(out).all()
