"""Attention: the formula, the merge laws with their bound, and what a read must find."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec.attention import Partial, attention, dot, first_visible, merge, paged_attention
from spec.broken import ALICE, ALONE, EMPTY, EQUALS, STEP_1, follow, served, stored
from spec.vocabulary import (
    Add,
    Allocate,
    Append,
    Begin,
    Complete,
    Finish,
    FinishReason,
    Read,
    Sample,
    Slide,
    Start,
    Submit,
    Write,
    initial_state,
)
from tests.spec.states import allows, bites, forbids

EPS = 2.0**-52
numbers = st.floats(-8, 8)
vectors = st.tuples(numbers, numbers)
pairs = st.lists(st.tuples(vectors, vectors), max_size=6)


def attend(query: tuple[float, ...], kv: list[tuple[tuple[float, ...], tuple[float, ...]]]) -> Partial:
    return attention(query, [key for key, _ in kv], [value for _, value in kv], scale=0.5)


def bound(partials: list[Partial], values: float) -> float:
    """How far two orders of merging may lie apart.

    A merge of two partials takes two exponentials, two products, two sums and a division for each output, a
    logarithm and a sum for the LSE. Each is right to one unit in its last place. Outputs are weighted means, so they
    stay within ``values``; an LSE within ``size``, the greatest finite one plus log 6. An error of the LSE by x changes
    a weight by the factor exp(x), hence an output by at most 2 * x * values. Two merges of at most three partials on
    each side: 16 roundings of size ``1 + size`` and each counted at most twice for the output.
    """
    size = max([1.0, *(abs(lse) for _, lse in partials if lse > -math.inf)]) + math.log(6)
    return 32 * EPS * (1 + size) * (1 + 2 * values)


def near(a: Partial, b: Partial, limit: float) -> bool:
    lse = a[1] == b[1] or abs(a[1] - b[1]) <= limit
    return lse and all(abs(x - y) <= limit for x, y in zip(a[0], b[0], strict=True))


def test_dot_is_exact_but_for_one_rounding() -> None:
    assert dot((1e16, 1.0, -1e16), (1.0, 1.0, 1.0)) == 1.0


@given(vectors, pairs.filter(bool))
def test_attention_is_the_weighted_mean_of_the_values(query: tuple[float, ...], kv: list) -> None:
    """Against the formula in exact rationals: only the exponentials themselves are rounded."""
    out, lse = attend(query, kv)
    scores = [0.5 * dot(query, key) for key, _ in kv]
    weights = [Fraction(math.exp(score - max(scores))) for score in scores]
    total = sum(weights)
    for d in range(2):
        exact = sum(w * Fraction(value[d]) for w, (_, value) in zip(weights, kv, strict=True)) / total
        largest = max(abs(value[d]) for _, value in kv)
        # Half a unit each: the products, their sum, the total, the quotient; and whatever lies below normal floats.
        assert abs(Fraction(out[d]) - exact) <= Fraction(3 * EPS * largest) + Fraction(2.0**-1022)
    assert abs(lse - (max(scores) + math.log(total))) <= 4 * EPS * (1 + abs(max(scores)) + math.log(len(kv)))


@given(vectors, pairs.filter(bool), st.permutations(range(6)))
def test_where_a_token_lies_does_not_matter(query: tuple[float, ...], kv: list, order: list[int]) -> None:
    """Paged attention over any placement is attention over contiguous memory, to the bit."""
    slots = order[: len(kv)]
    key_cache, value_cache = [(math.nan, math.nan)] * 6, [(math.nan, math.nan)] * 6
    for at, (key, value) in zip(slots, kv, strict=True):
        key_cache[at], value_cache[at] = key, value
    assert paged_attention(query, key_cache, value_cache, slots, 0.5) == attend(query, kv)


def test_nothing_to_read_gives_nothing() -> None:
    assert attention((1.0, 2.0), [], [], scale=1.0) == ((0.0, 0.0), -math.inf)


def test_large_scores_do_not_overflow() -> None:
    out, lse = attention((1000.0,), [(1000.0,), (0.0,)], [(1.0,), (2.0,)], scale=1.0)
    assert (out, lse) == ((1.0,), 1e6)


NOTHING: Partial = ((0.0, 0.0), -math.inf)


@given(vectors, pairs)
def test_the_empty_set_is_neutral(query: tuple[float, ...], kv: list) -> None:
    partial = attend(query, kv)
    assert merge(partial, NOTHING) == partial == merge(NOTHING, partial)


@given(vectors, pairs, pairs)
def test_merging_commutes(query: tuple[float, ...], left: list, right: list) -> None:
    """To the bit: sums and products of two floats do not depend on the order."""
    assert merge(attend(query, left), attend(query, right)) == merge(attend(query, right), attend(query, left))


@given(vectors, pairs, pairs, pairs)
def test_merging_associates(query: tuple[float, ...], one: list, two: list, three: list) -> None:
    a, b, c = attend(query, one), attend(query, two), attend(query, three)
    assert near(merge(merge(a, b), c), merge(a, merge(b, c)), bound([a, b, c], values=8))


@given(vectors, pairs, pairs)
def test_a_split_does_not_matter(query: tuple[float, ...], left: list, right: list) -> None:
    parts = [attend(query, left), attend(query, right)]
    whole = attend(query, left + right)
    # The scores on both sides are the same floats; the sums of at most twelve weights add 12 roundings.
    assert near(merge(*parts), whole, bound([*parts, whole], values=8) + 12 * EPS * 8)


@pytest.mark.parametrize(
    ("position", "window", "first"), [(9, None, 0), (9, 4, 6), (2, 4, 0), (3, 4, 0), (4, 4, 1), (5, 1, 5)]
)
def test_a_window_counts_the_token_itself(position: int, window: int | None, first: int) -> None:
    assert first_visible(position, window) == first


def test_attn_1_reads_find_their_own_prefix() -> None:
    allows("ATTN-1", STEP_1, Read(0, (0,)))
    bites("ATTN-1")


def test_attn_1_the_prefix_and_not_the_token() -> None:
    state = follow(EMPTY, *stored(0, (5, 6), (0, 1)))
    forbids("ATTN-1", replace(state, cells={0: (5,), 1: (9, 6)}), Read(0, (0, 1)))
    forbids("ATTN-1", state, Read(0, (0, 1), start=1))


def test_attn_2_reads_stay_in_the_table() -> None:
    allows("ATTN-2", EQUALS, Read(0, (0,)))
    bites("ATTN-2")


def test_attn_2_a_dropped_block_is_not_read() -> None:
    start = follow(initial_state(replace(EMPTY.config, window=2)), *stored(0, (5, 6), (0, 1)), Slide(0, 1))
    allows("ATTN-2", start, Read(0, (1,), start=1))
    forbids("ATTN-2", start, Read(0, (0, 1), start=0))


def test_attn_3_up_to_the_last_computed_token() -> None:
    state = follow(EMPTY, *stored(0, (5, 6), (2, 0)))
    allows("ATTN-3", state, Read(0, (2, 0)))
    forbids("ATTN-3", state, Read(0, (2,)))


def test_attn_3_reads_leave_nothing_out() -> None:
    allows("ATTN-3", ALONE, Read(0, (0,)))
    bites("ATTN-3")


def test_attn_3_the_first_token_of_a_step_sees_furthest() -> None:
    start = initial_state(replace(EMPTY.config, window=2))
    both = follow(start, Start(0, (5, 6, 7)), Begin(1), Allocate(0, 2, (0, 1)), Submit(1), Write(0, 0, (0, 1)))
    forbids("ATTN-3", both, Read(0, (1,), start=1))
    last = follow(both, Complete(1), Begin(2), Allocate(0, 1, (2,)), Submit(2), Write(0, 2, (2,)))
    allows("ATTN-3", last, Read(0, (1, 2), start=1))
    forbids("ATTN-3", last, Read(0, (2,), start=2))


def test_attn_4_a_scheduled_sequence_computes() -> None:
    allows("ATTN-4", STEP_1, Append(0, (7,)), Complete(1))
    bites("ATTN-4")


def test_attn_4_the_tokens_are_written() -> None:
    forbids("ATTN-4", EMPTY, Add(ALICE), Begin(1), *served(ALICE, 0), Submit(1), Read(0, ()), Complete(1))


def test_attn_4_an_ended_sequence_owes_nothing() -> None:
    start = follow(EMPTY, Add(ALICE), Begin(1), *served(ALICE, 0), Submit(1), Write(0, 0, (0,)), Append(0, (7,)))
    allows("ATTN-4", start, Finish(0, FinishReason.LENGTH), Complete(1))


def test_sample_1_tokens_are_sampled_from_what_the_sequence_has() -> None:
    allows("SAMPLE-1", ALONE, Sample(0, ALONE.seqs[0].tokens, 7))
    bites("SAMPLE-1")


def test_sample_2_the_drawn_token_is_appended() -> None:
    allows("SAMPLE-2", ALONE, Sample(0, (5,), 7), Append(0, (7,)))
    allows("SAMPLE-2", ALONE, Append(0, (8,)))
    bites("SAMPLE-2")


def test_a_token_that_is_appended_is_owed_no_more() -> None:
    two = replace(follow(EMPTY, *stored(0, (5,), (0,)), *stored(1, (6,), (1,))), drawn={0: 8, 1: 9})
    assert follow(two, Append(0, (8,))).drawn == {1: 9}
    assert follow(replace(two, drawn=None), Append(0, (8,))).drawn is None
