"""A token for each row of logits: the largest, or the largest of logits / temperature + Gumbel noise over what is left.

The noise is counter-based: a row's ``key`` and a token id give it, nothing else, so that neither the batch nor the order
of work can change a token. With all arithmetic modulo 2^64,

    mix(z)     = z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^ (z >> 31)
    uniform(t) = ((mix(key + (t + 1) * 0x9E3779B97F4A7C15) >> 12) + 0.5) / 2^52        in float64
    gumbel(t)  = -log(-log(uniform(t)))                                                in float64

What is left, with x = logits / temperature: first the tokens with x >= max(x) + log_min_p; of these, in the order of
falling x and of equal ones of rising id, the first top_k; of these the ones before which less than top_p of the weight
lies. A weight is floor(2^40 * exp(x - max(x))), an integer: its sums are exact, so that no order of addition moves the
border. A row is not sorted for that. What is looked for is the rank of the last token that stays: its logit, found four
bits at a time, and how many of the tokens with this logit stay.
"""

import triton
import triton.language as tl

FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def gumbel(key, ids):
    z = key + (ids + 1).to(tl.uint64) * GOLDEN
    z = (z ^ (z >> 30)) * FIRST_FACTOR
    z = (z ^ (z >> 27)) * SECOND_FACTOR
    z = z ^ (z >> 31)
    uniform = ((z >> 12).to(tl.float64) + 0.5) * (1.0 / 4503599627370496.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def rank(logit):
    """32 bits that are ordered as the numbers are, in an int64. Both zeros are one."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)


@triton.jit
def candidates(row_ptr, ids, vocab_size, divisor, largest, least):
    """Rank and weight of some tokens, and which of them ``min_p`` leaves."""
    logit = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    scaled = logit.to(tl.float64) / divisor
    is_left = (ids < vocab_size) & (scaled >= least)
    weight = tl.exp(scaled - largest) * 1099511627776.0
    return rank(logit), tl.where(is_left, weight, 0.0).to(tl.int64), is_left


@triton.jit
def least_rank(row_ptr, vocab_size, divisor, largest, least, limit, IS_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """The least rank such that the tokens above it are fewer than ``limit``, or weigh less."""
    found = tl.full([], 0, tl.int64)
    digits = tl.arange(0, 16).to(tl.int64)
    for turn in range(8):
        shift = 28 - 4 * turn
        ends = found + ((digits + 1) << shift) - 1  # the last rank with each digit
        above = tl.zeros([16], tl.int64)
        for start in range(0, vocab_size, TILE):
            ranks, weight, is_left = candidates(
                row_ptr, start + tl.arange(0, TILE), vocab_size, divisor, largest, least
            )
            measure = weight if IS_WEIGHT else is_left.to(tl.int64)
            above += tl.sum(tl.where(ranks[:, None] > ends[None, :], measure[:, None], 0), 0)
        found += tl.min(tl.where(above < limit, digits, 15), 0) << shift
    return found


@triton.jit
def around(row_ptr, vocab_size, divisor, largest, least, border, TILE: tl.constexpr):
    """Number and weight of the tokens above a rank, number of those at it, and what each of these weighs."""
    count_above = tl.full([], 0, tl.int64)
    weight_above = tl.full([], 0, tl.int64)
    count_at = tl.full([], 0, tl.int64)
    weight_at = tl.full([], 0, tl.int64)
    for start in range(0, vocab_size, TILE):
        ranks, weight, is_left = candidates(row_ptr, start + tl.arange(0, TILE), vocab_size, divisor, largest, least)
        is_above = is_left & (ranks > border)
        is_at = is_left & (ranks == border)
        count_above += tl.sum(is_above.to(tl.int64), 0)
        weight_above += tl.sum(tl.where(is_above, weight, 0), 0)
        count_at += tl.sum(is_at.to(tl.int64), 0)
        weight_at = tl.maximum(weight_at, tl.max(tl.where(is_at, weight, 0), 0))
    return count_above, weight_above, count_at, weight_at


@triton.jit
def lowest_left(row_ptr, vocab_size, divisor, largest, least, border, TILE: tl.constexpr):
    """The lowest rank from ``border`` on that a token has."""
    lowest = tl.full([], 0xFFFFFFFF, tl.int64)
    for start in range(0, vocab_size, TILE):
        ranks, _, is_left = candidates(row_ptr, start + tl.arange(0, TILE), vocab_size, divisor, largest, least)
        lowest = tl.minimum(lowest, tl.min(tl.where(is_left & (ranks >= border), ranks, 0xFFFFFFFF), 0))
    return lowest


@triton.jit
def draw_tokens_kernel(
    out_ptr,  # [num_samples] int64: the token, or -1 where the row has a NaN or its largest number is infinite
    logits_ptr,  # [num_samples, vocab_size] float32
    temperatures_ptr,  # [num_samples] float64; 0: the largest logit
    log_min_ps_ptr,  # [num_samples] float64: how far below the largest, after the temperature, a token may lie
    top_ks_ptr,  # [num_samples] int64: so many tokens stay; 0: all
    top_ps_ptr,  # [num_samples] float64: so much of the weight stays; 1: all
    keys_ptr,  # [num_samples] int64, taken for 64 bits
    logits_stride: tl.int64,
    vocab_size,
    TILE: tl.constexpr,  # tokens per loop turn
    SEARCH_TILE: tl.constexpr,  # tokens per loop turn that looks for the last token to stay
):
    """One program draws for one row. Of equal tokens the lowest id wins."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    key = tl.load(keys_ptr + row).to(tl.uint64, bitcast=True)
    row_ptr = logits_ptr + row * logits_stride
    offsets = tl.arange(0, TILE)

    largest = float("-inf")
    num_nan = 0
    for start in range(0, vocab_size, TILE):
        ids = start + offsets
        logit = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        is_nan = logit != logit  # noqa: PLR0124
        num_nan += tl.sum(is_nan.to(tl.int32), 0)
        largest = tl.maximum(largest, tl.max(tl.where(is_nan, float("-inf"), logit), 0))

    is_greedy = temperature == 0.0
    divisor = tl.where(is_greedy, 1.0, temperature)
    top = largest.to(tl.float64) / divisor
    least = top + tl.load(log_min_ps_ptr + row)

    border = tl.full([], -1, tl.int64)  # every rank is above: all stay
    num_ties = tl.full([], 0, tl.int64)  # of the tokens at the border so many stay, the lowest ids
    top_k = tl.load(top_ks_ptr + row)
    top_p = tl.load(top_ps_ptr + row)
    if (top_k > 0) & (top_k < vocab_size) & (temperature > 0.0):
        border = least_rank(row_ptr, vocab_size, divisor, top, least, top_k, False, SEARCH_TILE)
        count_above, weight_above, count_at, weight_at = around(
            row_ptr, vocab_size, divisor, top, least, border, SEARCH_TILE
        )
        num_ties = top_k - count_above
    if (top_p < 1.0) & (temperature > 0.0):
        count_above, weight_above, count_at, weight_at = around(
            row_ptr, vocab_size, divisor, top, least, border, SEARCH_TILE
        )
        total = weight_above + tl.minimum(count_at, num_ties) * weight_at
        limit = tl.maximum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), 1)
        start_rank = least_rank(row_ptr, vocab_size, divisor, top, least, limit, True, SEARCH_TILE)
        last = lowest_left(row_ptr, vocab_size, divisor, top, least, start_rank, SEARCH_TILE)
        count_above, weight_above, count_at, weight_at = around(
            row_ptr, vocab_size, divisor, top, least, last, SEARCH_TILE
        )
        stays = (limit - weight_above + weight_at - 1) // tl.maximum(
            weight_at, 1
        )  # j ties before weigh less: j * w < rest
        stays = tl.where(weight_at > 0, stays, count_at)
        num_ties = tl.where(last == border, tl.minimum(num_ties, stays), stays)
        border = last

    best = tl.full([], float("-inf"), tl.float64)
    best_id = tl.full([], 0, tl.int64)
    num_seen = tl.full([], 0, tl.int64)  # tokens at the border
    for start in range(0, vocab_size, TILE):
        ids = (start + offsets).to(tl.int64)
        logit = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        scaled = logit.to(tl.float64) / divisor
        ranks = rank(logit)
        is_at = (ranks == border) & (ids < vocab_size)
        place = num_seen + tl.cumsum(is_at.to(tl.int64), 0)  # counted from 1
        num_seen += tl.sum(is_at.to(tl.int64), 0)
        stays = (scaled >= least) & ((ranks > border) | (is_at & (place <= num_ties)))
        score = scaled + tl.where(is_greedy, 0.0, gumbel(key, ids))
        score = tl.where(stays, score, float("-inf"))
        tile_best = tl.max(score, 0)
        tile_id = tl.min(tl.where(score == tile_best, ids, vocab_size), 0)
        is_better = tile_best > best
        best = tl.where(is_better, tile_best, best)
        best_id = tl.where(is_better, tile_id, best_id)

    is_good = (num_nan == 0) & (tl.abs(largest) != float("inf"))
    tl.store(out_ptr + row, tl.where(is_good, best_id, -1))
