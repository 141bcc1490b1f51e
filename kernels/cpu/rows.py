"""What a step does to each row by itself: embedding, norm, rotation, the write into the KV cache, the likeliest token."""

import numpy as np
from numba import carray, njit

from kernels.cpu.memory import LINE
from kernels.cpu.vectors import (
    LEFT_BYTES,
    claim,
    float32_at,
    int64_at,
    largest,
    left_at,
    narrow,
    to_left,
    uint16_at,
    wait_for,
    widen,
)

UNIT = 8  # rows that one thread claims at once
SEARCHED = 1024  # logits of which the largest is found at once
F = np.float32
# Sums in any order, so that they are vectors; NaN and infinity stay what they are.
SUMS = {"reassoc", "contract", "nsz"}


@njit(error_model="numpy")
def embed(counters, rows, token_ids, embedding, size, x, width):
    """A phase: ``x`` is the embedding of each token."""
    tokens, units = carray(int64_at(token_ids), rows), (rows + UNIT - 1) // UNIT
    while True:
        unit = claim(counters)
        if unit >= units:
            break
        for row in range(unit * UNIT, min(rows, (unit + 1) * UNIT)):
            source = carray(uint16_at(embedding + tokens[row] * size * 2), size)
            target = carray(float32_at(x + row * width * 4), size)
            for i in range(size):
                target[i] = widen(source[i])
        claim(counters + 8)
    wait_for(counters + 8, units)
    return counters + LINE


@njit(fastmath=SUMS, error_model="numpy")
def inverse_norm(x, eps):
    total = F(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    return F(1) / F(np.sqrt(total / F(x.shape[0]) + eps))


@njit(fastmath=SUMS, error_model="numpy")
def add(x, bias):
    for i in range(bias.shape[0]):
        x[i] += bias[i]


@njit(fastmath=SUMS, error_model="numpy")
def norm_rows(counters, rows, x, width, bias, weight, size, eps, out, depth):
    """A phase: ``out`` (left) is the RMS norm of each row of ``x``, after the bias is added to it if there is one."""
    weights, units = carray(float32_at(weight), size), (rows + UNIT - 1) // UNIT
    while True:
        unit = claim(counters)
        if unit >= units:
            break
        for row in range(unit * UNIT, min(rows, (unit + 1) * UNIT)):
            source, target = (
                carray(float32_at(x + row * width * 4), size),
                carray(left_at(out + row * depth * LEFT_BYTES), size),
            )
            if bias != 0:
                add(source, carray(float32_at(bias), size))
            factor = inverse_norm(source, eps)
            for i in range(size):
                target[i] = to_left(source[i] * factor * weights[i])
        claim(counters + 8)
    wait_for(counters + 8, units)
    return counters + LINE


@njit(fastmath=SUMS, error_model="numpy")
def scale_head(head, weight, eps):
    factor = inverse_norm(head, eps)
    for i in range(head.shape[0]):
        head[i] = head[i] * factor * weight[i]


@njit(fastmath=SUMS, error_model="numpy")
def turn_head(head, cos, sin):
    """Element ``i`` turns with the element half a head further."""
    half = head.shape[0] // 2
    for i in range(half):
        first, second = head[i], head[half + i]
        head[i] = first * cos[i] - second * sin[i]
        head[half + i] = second * cos[i] + first * sin[i]


@njit(error_model="numpy")
def write_cell(key, value, key_block, value_block, place, block_size):
    """A token's key and value of one head go to their place in the block (``layout.pack_blocks_for_products``)."""
    size = key.shape[0]
    for i in range(0, size, 2):
        key_block[i * block_size + 2 * place] = narrow(key[i])
        key_block[i * block_size + 2 * place + 1] = narrow(key[i + 1])
    base = (place // 2) * size * 2 + place % 2
    for i in range(size):
        value_block[base + 2 * i] = narrow(value[i])


@njit(error_model="numpy")
def place_rows(counters, g, layer):
    """A phase: queries and keys of ``g.qkv`` get bias, norm and rotation; then queries to ``g.query``, keys and values to their slots.

    ``g.query`` is ``[num_kv_heads, capacity, group, head_size]`` (left), so that what reads one key is one matrix.
    """
    rows, size, num_kv_heads, block_size = g.rows, g.head_size, g.num_kv_heads, g.block_size
    group, num_columns = g.num_query_heads // num_kv_heads, (g.num_query_heads + 2 * num_kv_heads) * size
    positions, slots = carray(int64_at(g.positions), rows), carray(int64_at(g.slot_mapping), rows)
    units = (rows + UNIT - 1) // UNIT
    while True:
        unit = claim(counters)
        if unit >= units:
            break
        for row in range(unit * UNIT, min(rows, (unit + 1) * UNIT)):
            start = g.qkv + row * g.qkv_columns * 4
            if layer.qkv_bias != 0:
                add(carray(float32_at(start), num_columns), carray(float32_at(layer.qkv_bias), num_columns))
            cos = carray(float32_at(g.cos + positions[row] * size * 2), size // 2)
            sin = carray(float32_at(g.sin + positions[row] * size * 2), size // 2)
            for h in range(g.num_query_heads + num_kv_heads):
                head = carray(float32_at(start + h * size * 4), size)
                if layer.query_norm != 0:
                    weight = layer.query_norm if h < g.num_query_heads else layer.key_norm
                    scale_head(head, carray(float32_at(weight), size), g.eps)
                turn_head(head, cos, sin)
                if h < g.num_query_heads:
                    place = ((h // group) * g.capacity + row) * group + h % group
                    target = carray(left_at(g.query + place * size * LEFT_BYTES), size)
                    for i in range(size):
                        target[i] = to_left(head[i])
            block, place = slots[row] // block_size, slots[row] % block_size
            for h in range(num_kv_heads):
                offset = (block * num_kv_heads + h) * block_size * size * 2
                write_cell(
                    carray(float32_at(start + (g.num_query_heads + h) * size * 4), size),
                    carray(float32_at(start + (g.num_query_heads + num_kv_heads + h) * size * 4), size),
                    carray(uint16_at(layer.key_cache + offset), block_size * size),
                    carray(uint16_at(layer.value_cache + offset), block_size * size),
                    place,
                    block_size,
                )
        claim(counters + 8)
    wait_for(counters + 8, units)
    return counters + LINE


@njit(error_model="numpy")
def likeliest(row, size):
    """Where the largest of so many logits is first; -1 if it is infinite or there is NaN."""
    top, where = F(-np.inf), -1
    for begin in range(0, size, SEARCHED):
        count = min(SEARCHED, size - begin)
        here = largest(row + begin * 4, count // 16) if count >= 16 else F(-np.inf)
        if np.isnan(here):
            return -1
        rest = carray(float32_at(row + begin * 4), count)
        for i in range(count // 16 * 16, count):
            if np.isnan(rest[i]):
                return -1
            here = max(here, rest[i])
        if here > top:
            top, where = here, begin
    if where < 0 or np.isinf(top):
        return -1
    found = carray(float32_at(row), size)
    while found[where] != top:
        where += 1
    return where


@njit(error_model="numpy")
def likeliest_rows(counters, rows, logits, width, size, out):
    """A phase: the likeliest token of each row of logits, -1 where there is none."""
    tokens = carray(int64_at(out), rows)
    while True:
        row = claim(counters)
        if row >= rows:
            break
        tokens[row] = likeliest(logits + row * width * 4, size)
        claim(counters + 8)
    wait_for(counters + 8, rows)
    return counters + LINE
