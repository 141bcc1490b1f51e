"""A token for each row of logits: the largest, or the largest of logits / temperature + Gumbel noise.

The noise is counter-based: a row's ``key`` and a token id give it, nothing else, so that neither the batch nor the order
of work can change a token. With all arithmetic modulo 2^64,

    mix(z)     = z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^ (z >> 31)
    uniform(t) = ((mix(key + (t + 1) * 0x9E3779B97F4A7C15) >> 12) + 0.5) / 2^52        in float64
    gumbel(t)  = -log(-log(uniform(t)))                                                in float64
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
def draw_tokens_kernel(
    out_ptr,  # [num_samples] int64: the token, or -1 where the row has a NaN or its largest number is infinite
    logits_ptr,  # [num_samples, vocab_size] float32
    temperatures_ptr,  # [num_samples] float64; 0: the largest logit
    log_min_ps_ptr,  # [num_samples] float64: how far below the largest, after the temperature, a token may lie
    keys_ptr,  # [num_samples] int64, taken for 64 bits
    logits_stride: tl.int64,
    vocab_size,
    TILE: tl.constexpr,  # tokens per loop turn
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
    least = largest.to(tl.float64) / divisor + tl.load(log_min_ps_ptr + row)
    best = tl.full([], float("-inf"), tl.float64)
    best_id = tl.full([], 0, tl.int64)
    for start in range(0, vocab_size, TILE):
        ids = (start + offsets).to(tl.int64)
        logit = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        scaled = logit.to(tl.float64) / divisor
        score = scaled + tl.where(is_greedy, 0.0, gumbel(key, ids))
        score = tl.where(scaled >= least, score, float("-inf"))
        tile_best = tl.max(score, 0)
        tile_id = tl.min(tl.where(score == tile_best, ids, vocab_size), 0)
        is_better = tile_best > best
        best = tl.where(is_better, tile_best, best)
        best_id = tl.where(is_better, tile_id, best_id)

    is_good = (num_nan == 0) & (tl.abs(largest) != float("inf"))
    tl.store(out_ptr + row, tl.where(is_good, best_id, -1))
