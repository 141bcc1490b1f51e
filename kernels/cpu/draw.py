"""Which tokens can win a draw: all others have too small a logit for the luck that they have.

The winner is the largest of logit / temperature + noise, and a token's noise follows from a key and its id by the hash of
``kernels.sampling_kernel``, which rises with it. So who is known to reach some score gives every logit a least hash, and
whoever stays below it has lost. Only the few that are left need logarithms, and whoever asked computes those.
"""

import numpy as np
from numba import carray, njit, types

from kernels.cpu.layout import CONTENDERS
from kernels.cpu.memory import LINE
from kernels.cpu.vectors import claim, float32_at, float64_at, int64_at, uint64_at, wait_for

STEPS = 64  # distances from the largest logit, in temperatures, that have a least hash of their own
NEAR = 8  # steps within which a token's luck needs no great share
LUCKY = 2**52 - 2**46  # the hash of one token in 64: those are compared first
LOOKED_AT = 64  # tokens that are passed over at once
GOLDEN, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@njit(inline="always")
def hashed(key, token):
    """52 bits of the token's luck: the larger, the luckier."""
    z = key + (types.uint64(token) + types.uint64(1)) * GOLDEN
    z = (z ^ (z >> types.uint64(30))) * FIRST
    z = (z ^ (z >> types.uint64(27))) * SECOND
    return (z ^ (z >> types.uint64(31))) >> types.uint64(12)


@njit(error_model="numpy")
def score(logit, temperature, bits):
    return np.float64(logit) / temperature - np.log(-np.log((np.float64(bits) + 0.5) / 2.0**52))


@njit(error_model="numpy")
def num_lucky(begin, stop, key):
    count = 0
    for token in range(begin, stop):
        count += hashed(key, token) >= types.uint64(LUCKY)
    return count


@njit(error_model="numpy")
def num_hopeful(logits, begin, stop, key, low, least_near, least_far):
    count = 0
    for token in range(begin, stop):
        bits = hashed(key, token)
        count += ((bits >= least_near) & (logits[token] >= low)) | (bits >= least_far)
    return count


@njit(error_model="numpy")
def contend(logits, size, top, key, temperature, found):
    """Into ``found`` go the tokens that can win, rising; returns how many they are, -1 if they are too many.

    ``top`` is where the largest logit is.
    """
    largest = logits[top]
    reached = score(largest, temperature, hashed(key, top))
    for begin in range(0, size, LOOKED_AT):
        stop = min(size, begin + LOOKED_AT)
        if num_lucky(begin, stop, key):
            for token in range(begin, stop):
                bits = hashed(key, token)
                if bits >= types.uint64(LUCKY):
                    reached = max(reached, score(logits[token], temperature, bits))
    least = np.empty(STEPS, np.uint64)
    for step in range(STEPS):
        # A thousandth, and 8 of 2**52, are more than what rounding does to a distance and to a score.
        noise = reached - np.float64(largest) / temperature + step - 1e-3
        least[step] = types.uint64(max(0.0, np.exp(-np.exp(-noise)) * 2.0**52 - 8.0))
    low, count = np.float32(np.float64(largest) - (NEAR + 1) * temperature), 0
    for begin in range(0, size, LOOKED_AT):
        stop = min(size, begin + LOOKED_AT)
        if num_hopeful(logits, begin, stop, key, low, least[0], least[NEAR]):
            for token in range(begin, stop):
                distance = (np.float64(largest) - np.float64(logits[token])) / temperature
                step = int(distance) if distance < STEPS - 1 else STEPS - 1
                if hashed(key, token) >= least[step]:
                    if count == CONTENDERS:
                        return -1
                    found[count] = token
                    count += 1
    return count


@njit(error_model="numpy")
def contend_rows(counters, g):
    """A phase: for each draw its contenders, and how many they are."""
    rows, keys = carray(int64_at(g.drawn_rows), g.rows), carray(uint64_at(g.keys), g.rows)
    temperatures, counts = carray(float64_at(g.temperatures), g.rows), carray(int64_at(g.counts), g.rows)
    likeliest = carray(int64_at(g.likeliest), g.capacity)
    while True:
        draw = claim(counters)
        if draw >= g.rows:
            break
        row = rows[draw]
        logits = carray(float32_at(g.logits + row * g.vocab_columns * 4), g.vocab_size)
        found = carray(int64_at(g.contenders + draw * CONTENDERS * 8), CONTENDERS)
        counts[draw] = -1
        if likeliest[row] >= 0:
            counts[draw] = contend(logits, g.vocab_size, likeliest[row], keys[draw], temperatures[draw], found)
        claim(counters + 8)
    wait_for(counters + 8, g.rows)
    return counters + LINE
