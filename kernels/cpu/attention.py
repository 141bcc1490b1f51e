"""Attention over a paged cache whose blocks lie in the order of the products (``kernels.cpu.layout``).

A unit of work is a chunk, some consecutive tokens of one sequence, for one KV head: all queries that read the same keys
are rows of one matrix. Scores, softmax and values of a row are summed in an order that its own position decides.
"""

from numba import carray, njit

from kernels.cpu.instructions import AVX2, HERE
from kernels.cpu.layout import CHUNK_ROWS
from kernels.cpu.memory import LINE
from kernels.cpu.product import product_kernel, scattered_kernel
from kernels.cpu.vectors import (
    LEFT_BYTES,
    all_finite,
    claim,
    fetch,
    float32_at,
    int32_at,
    int64_at,
    scale_left,
    softmax,
    uint16_at,
    wait_for,
)

FETCHES = HERE is AVX2
"""Whether blocks are asked for before they are read: they lie anywhere, which no processor foresees. Tried with AVX2 only."""

score_all, score_8, score_4, score_3, score_2, score_1 = (
    product_kernel(rows, 1) for rows in (CHUNK_ROWS, 8, 4, 3, 2, 1)
)


@njit(error_model="numpy")
def scores_tile(a, lda, rows, b, ldb, pairs, c, ldc):
    """The scores of any number of queries against 16 keys."""
    m = 0
    if rows == CHUNK_ROWS:
        score_all(a, lda, b, ldb, pairs, c, ldc)
        return
    while m + 8 <= rows:
        score_8(a + m * lda, lda, b, ldb, pairs, c + m * ldc, ldc)
        m += 8
    if m + 4 <= rows:
        score_4(a + m * lda, lda, b, ldb, pairs, c + m * ldc, ldc)
        m += 4
    a, c, rows = a + m * lda, c + m * ldc, rows - m
    if rows == 3:
        score_3(a, lda, b, ldb, pairs, c, ldc)
    elif rows == 2:
        score_2(a, lda, b, ldb, pairs, c, ldc)
    elif rows == 1:
        score_1(a, lda, b, ldb, pairs, c, ldc)


def _values(columns):
    """16 times so many columns of the weighted sum of values, for any number of queries."""
    sixes = HERE.num_sums >= 6 * columns
    six, four, three, two, one = (scattered_kernel(rows, columns) for rows in (6, 4, 3, 2, 1))

    @njit(error_model="numpy")
    def values(a, lda, rows, parts, count, offset, ldb, pairs, c, ldc):
        m = 0
        while sixes and rows % 6 == 0 and m < rows:
            six(a + m * lda, lda, parts, count, offset, ldb, pairs, c + m * ldc, ldc)
            m += 6
        while m + 4 <= rows:
            four(a + m * lda, lda, parts, count, offset, ldb, pairs, c + m * ldc, ldc)
            m += 4
        a, c, rows = a + m * lda, c + m * ldc, rows - m
        if rows == 3:
            three(a, lda, parts, count, offset, ldb, pairs, c, ldc)
        elif rows == 2:
            two(a, lda, parts, count, offset, ldb, pairs, c, ldc)
        elif rows == 1:
            one(a, lda, parts, count, offset, ldb, pairs, c, ldc)

    return values


wide_values, thin_values = _values(4), _values(1)


@njit(error_model="numpy")
def values_tile(a, lda, rows, parts, count, size, pairs, c, ldc):
    """The weighted sum of the values of so many blocks, ``[rows, size]`` float32."""
    column = 0
    while column + 64 <= size:
        wide_values(a, lda, rows, parts, count, column * 4, size * 4, pairs, c + column * 4, ldc)
        column += 64
    while column < size:
        thin_values(a, lda, rows, parts, count, column * 4, size * 4, pairs, c + column * 4, ldc)
        column += 16


@njit(error_model="numpy")
def copy_live(source, target, size, block_size, first, stop):
    """A block of values with zeros for all places but ``first`` to ``stop``."""
    old, new = carray(uint16_at(source), block_size * size), carray(uint16_at(target), block_size * size)
    for place in range(block_size):
        base = (place // 2) * size * 2 + place % 2
        for i in range(size):
            new[base + 2 * i] = old[base + 2 * i] if first <= place < stop else 0


@njit(error_model="numpy")
def first_key(position, window):
    """The first key that the query at a position sees; a window of 0 is none."""
    return max(0, position + 1 - window) if window > 0 else 0


@njit(error_model="numpy")
def attend(g, layer, thread, seq, tokens, start, first_row, kv_head):
    """One unit: the tokens at ``start``, ``start + 1``, ... of a sequence, which are rows from ``first_row`` on, for one KV head."""
    size, block_size, group = g.head_size, g.block_size, g.num_query_heads // g.num_kv_heads
    table = carray(int32_at(g.block_tables + seq * g.table_stride * 4), g.max_keys // block_size)
    scores, weights = (
        g.scores + thread * g.chunk_rows * g.max_keys * 4,
        g.weights + thread * g.chunk_rows * g.max_keys * LEFT_BYTES,
    )
    sums, masked = g.sums + thread * g.chunk_rows * size * 4, g.masked + thread * 2 * block_size * size * 2
    parts = carray(int64_at(g.parts + thread * g.max_keys * 8), g.max_keys)
    query = g.query + (kv_head * g.capacity + first_row) * group * size * LEFT_BYTES
    lds, ldw, block_bytes = g.max_keys * 4, g.max_keys * LEFT_BYTES, block_size * size * 2
    begin, stop = first_key(start, g.window) // block_size, (start + tokens + block_size - 1) // block_size
    # Blocks of which some token of the chunk does not see every place: only they can hold what nobody may read.
    seen_by_all, seen_by_first = first_key(start + tokens - 1, g.window), start + 1
    is_clean = True
    for j in range(begin, stop):
        offset = (table[j] * g.num_kv_heads + kv_head) * block_bytes
        if FETCHES:
            fetch(layer.value_cache + offset, block_bytes)
            if j + 1 < stop:
                fetch(layer.key_cache + (table[j + 1] * g.num_kv_heads + kv_head) * block_bytes, block_bytes)
        for column in range(0, block_size, 16):
            out = scores + ((j - begin) * block_size + column) * 4
            scores_tile(
                query,
                size * LEFT_BYTES,
                tokens * group,
                layer.key_cache + offset + column * 4,
                block_size * 4,
                size // 2,
                out,
                lds,
            )
        parts[j - begin] = layer.value_cache + offset
        if (j + 1) * block_size > seen_by_first or j * block_size < seen_by_all:
            is_clean = is_clean and all_finite(layer.value_cache + offset, block_size * size // 32)
    vectors = (stop - begin) * block_size // 16
    factors = carray(float32_at(g.factors + thread * g.chunk_rows * 4), tokens * group)
    for row in range(tokens * group):
        position = start + row // group
        low, high = first_key(position, g.window) - begin * block_size, position + 1 - begin * block_size
        factors[row] = softmax(scores + row * lds, weights + row * ldw, low, high, vectors, g.scale)
    if is_clean:
        values_tile(
            weights, ldw, tokens * group, parts.ctypes.data, stop - begin, size, block_size // 2, sums, size * 4
        )
    else:
        # Zero times NaN is NaN: where an unseen cell is not finite, each token gets blocks without what it does not see.
        for token in range(tokens):
            low, high = first_key(start + token, g.window), start + token + 1
            first, last = low // block_size, (high - 1) // block_size
            for j in range(first, last + 1):
                source = layer.value_cache + (table[j] * g.num_kv_heads + kv_head) * block_bytes
                parts[j - first] = source
                if j == first or j == last:
                    parts[j - first] = masked + (j - first > 0) * block_bytes
                    copy_live(source, parts[j - first], size, block_size, low - j * block_size, high - j * block_size)
            row = token * group
            values_tile(
                weights + row * ldw + (first - begin) * block_size * LEFT_BYTES,
                ldw,
                group,
                parts.ctypes.data,
                last + 1 - first,
                size,
                block_size // 2,
                sums + row * size * 4,
                size * 4,
            )
    for row in range(tokens * group):
        head = kv_head * group + row % group
        to = g.mixed + ((first_row + row // group) * g.num_query_heads + head) * size * LEFT_BYTES
        for i in range(0, size, 16):
            scale_left(sums + (row * size + i) * 4, factors[row], to + i * LEFT_BYTES)


@njit(error_model="numpy")
def attention(counters, g, layer, thread):
    """A phase: ``g.mixed`` (left, ``[rows, num_query_heads, head_size]``) is what the queries of all chunks find."""
    units = g.num_chunks * g.num_kv_heads
    chunks = carray(int64_at(g.chunks), (g.num_chunks, 4))
    while True:
        unit = claim(counters)
        if unit >= units:
            break
        seq, tokens, start, first_row = chunks[unit // g.num_kv_heads]
        attend(g, layer, thread, seq, tokens, start, first_row, unit % g.num_kv_heads)
        claim(counters + 8)
    wait_for(counters + 8, units)
    return counters + LINE
