"""Products of whole numbers, where a processor has no instruction for bf16: twice as many are multiplied at once as in float32.

A weight's numbers have a scale for each group along the depth (``layout.Whole``). A phase before each product rounds each group of a
row of A to whole numbers of 16 bits, which have a scale too. The sum of a group's products is exact, in int32; times both scales
it is added to a sum in float32, group by group. So a row has the same bits in every batch here too.
"""

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from kernels.cpu.emit import (
    ADDRESS,
    BYTES,
    F32,
    FLOATS,
    HALVES,
    I32,
    I64,
    INTS,
    LANES,
    PAIRS_OF_SHORTS,
    SECOND_CACHE,
    SHORTS,
    emit_constant,
    emit_fetch,
    emit_fma,
    emit_load,
    emit_loop,
    emit_splat,
    emit_store,
    emit_store_tile,
    parts,
)
from kernels.cpu.instructions import HERE, why_not_four_bits
from kernels.cpu.layout import FOUR_BITS, INT8, TILE_COLUMNS, TWELVE_BITS, Whole
from kernels.cpu.memory import LINE
from kernels.cpu.rows import UNIT
from kernels.cpu.vectors import bits_float, claim, float32_at, int32_at, round_group, uint16_at, wait_for, widen

NUM_SUMS = 6  # vectors of sums that registers hold, as each pair of A comes from memory
FETCHING_ROWS = 4  # rows of a kernel from which on it asks for what will be read soon: with fewer, memory has no pause
ZERO_SUMS = ir.Constant(INTS, [0] * LANES)


def emit_words(builder, address, columns):
    """Two rows of pairs of these columns, one after the other, of numbers of 16 bits."""
    for row in range(TWELVE_BITS.turn // 2):
        at = builder.add(address, I64(4 * TILE_COLUMNS * row))
        yield [emit_load(builder, builder.add(at, I64(64 * column)), INTS) for column in columns]


def emit_bytes(builder, address, columns):
    """The same of numbers in int8."""
    for row in range(INT8.turn // 2):
        at = builder.add(address, I64(2 * TILE_COLUMNS * row))
        cells = [emit_load(builder, builder.add(at, I64(32 * column)), BYTES, 1) for column in columns]
        yield [builder.bitcast(builder.sext(cell, PAIRS_OF_SHORTS), INTS) for cell in cells]


def emit_nibbles(builder, address, columns):
    """Four rows of pairs of numbers in 4 bits: ``layout.ORDER`` has put both of a pair 16 bits apart."""
    words = [emit_load(builder, builder.add(address, I64(64 * column)), INTS) for column in columns]
    mask = ir.Constant(INTS, [0x000F000F] * LANES)
    for place in range(FOUR_BITS.turn // 2):
        by = ir.Constant(INTS, [4 * place] * LANES)
        yield [builder.and_(builder.lshr(word, by) if place else word, mask) for word in words]


EMIT_PAIRS = {TWELVE_BITS: emit_words, INT8: emit_bytes, FOUR_BITS: emit_nibbles}


def emit_heads(builder, how, address, columns):
    """The scales or the minima of these columns, of 16 each, as float32."""
    if how is INT8:
        return [emit_load(builder, builder.add(address, I64(64 * column)), FLOATS) for column in columns]
    places = [builder.add(address, I64(32 * column)) for column in columns]
    if how is FOUR_BITS:
        return [builder.fpext(emit_load(builder, place, HALVES, 2), FLOATS) for place in places]
    upper = [builder.zext(emit_load(builder, place, SHORTS, 2), INTS) for place in places]
    return [builder.bitcast(builder.shl(bits, ir.Constant(INTS, [16] * LANES)), FLOATS) for bits in upper]


def emit_group(builder, how, b, i, depth):
    """Of a tile, where group ``i`` begins, which number of the depth is its first, and how many it has."""
    first = builder.mul(i, I64(how.group))
    left = builder.sub(depth, first)
    count = builder.select(builder.icmp_signed("<", left, I64(how.group)), left, I64(how.group))
    return builder.add(b, builder.mul(i, I64(how.tile_bytes(how.group)))), first, count


def emit_sums(builder, how, a_rows, b, columns, count, ahead):
    """A @ B over so many numbers of the depth, ``[row][column vector]`` one behind the other, in int32.

    Each turn asks for a cache line from ``ahead`` on, if that is not None.
    """
    width = len(columns)

    def turn(i, held):
        at = builder.add(b, builder.mul(i, I64(how.turn_bytes)))
        if ahead is not None:
            emit_fetch(builder, builder.add(ahead, builder.shl(i, I64(6))), SECOND_CACHE)
        for step, vectors in enumerate(EMIT_PAIRS[how](builder, at, columns)):
            place = builder.add(builder.mul(i, I64(2 * how.turn)), I64(4 * step))
            found = []
            for row, a_row in enumerate(a_rows):
                both = emit_splat(builder, emit_load(builder, builder.add(a_row, place), I32), INTS)
                sums = held[row * width : (row + 1) * width]
                found += [
                    HERE.emit_whole_dot(builder, value, both, vector)
                    for value, vector in zip(sums, vectors, strict=True)
                ]
            held = found
        return held

    return emit_loop(builder, builder.sdiv(count, I64(how.turn)), [ZERO_SUMS] * (len(a_rows) * width), turn)


def whole_kernel(how, num_rows, num_columns, is_widened=False):
    """C[num_rows, 16 * num_columns] plus A @ B of a tile B of whole numbers, and rows of A as ``round_rows`` makes them.

    ``wide`` is where the tile's numbers stand in 16 bits, if it is widened. The bits of C are the same. Kernels of many rows ask for
    ``num_columns`` cache lines from ``ahead`` on for each turn, which nobody waits for.
    """
    reads = TWELVE_BITS if is_widened else how

    @intrinsic
    def kernel(context, a, lda, b, wide, depth, c, ldc, ahead):
        def codegen(context, builder, signature, arguments):
            a, lda, b, wide, depth, c, ldc, ahead = arguments
            num_groups = builder.sdiv(builder.add(depth, I64(how.group - 1)), I64(how.group))
            behind = builder.mul(num_groups, I64(2 * how.group))  # the numbers of a row are its scales, then its totals

            def emit_part(rows, columns):
                starts = [builder.add(a, builder.mul(lda, I64(row))) for row in rows]

                def emit_of_rows(offset):
                    """What each row has there, in all lanes."""
                    numbers = [emit_load(builder, builder.add(start, offset), F32) for start in starts]
                    return [emit_splat(builder, number, FLOATS) for number in numbers]

                def group(i, held):
                    heads, first, count = emit_group(builder, how, b, i, depth)
                    a_rows = [builder.add(start, builder.shl(first, I64(1))) for start in starts]
                    part = builder.add(heads, I64(how.head_bytes))
                    if is_widened:
                        part = builder.add(wide, builder.mul(first, I64(2 * TILE_COLUMNS)))
                    lines = None
                    if num_rows >= FETCHING_ROWS:
                        turns = builder.add(builder.mul(depth, I64(columns.start)), first)
                        lines = builder.add(ahead, builder.mul(builder.sdiv(turns, I64(reads.turn)), I64(LINE)))
                    sums = emit_sums(builder, reads, a_rows, part, columns, count, lines)
                    offset = builder.add(behind, builder.shl(i, I64(2)))
                    if how.has_minima:
                        totals = emit_of_rows(builder.add(offset, builder.shl(num_groups, I64(2))))
                        minima = emit_heads(builder, how, builder.add(heads, I64(how.scales_bytes)), columns)
                        added = [(total, minimum) for total in totals for minimum in minima]
                        held = [emit_fma(builder, *both, old) for both, old in zip(added, held, strict=True)]
                    scales = emit_heads(builder, how, heads, columns)
                    factors = [builder.fmul(one, scale) for one in emit_of_rows(offset) for scale in scales]
                    return [
                        emit_fma(builder, builder.sitofp(value, FLOATS), factor, old)
                        for value, factor, old in zip(sums, factors, held, strict=True)
                    ]

                zeros = [emit_constant(0.0)] * (len(rows) * len(columns))
                flat = emit_loop(builder, num_groups, zeros, group)
                acc = [flat[i * len(columns) : (i + 1) * len(columns)] for i in range(len(rows))]
                emit_store_tile(builder, acc, rows, columns, c, ldc, True)

            for rows, columns in parts(num_rows, num_columns, NUM_SUMS):
                emit_part(rows, columns)
            return context.get_dummy_value()

        return types.void(*[ADDRESS] * 8), codegen

    return kernel


def widening(how):
    """What makes the numbers of a tile those of 16 bits, ``[depth / 2, TILE_COLUMNS, 2]`` without what stands before them."""
    columns = range(TILE_COLUMNS // 16)

    @intrinsic
    def widen_tile(context, b, depth, wide):
        def codegen(context, builder, signature, arguments):
            b, depth, wide = arguments
            num_groups = builder.sdiv(builder.add(depth, I64(how.group - 1)), I64(how.group))

            def group(i, held):
                start, first, count = emit_group(builder, how, b, i, depth)

                def turn(j, held):
                    source = builder.add(start, builder.add(I64(how.head_bytes), builder.mul(j, I64(how.turn_bytes))))
                    place = builder.add(first, builder.mul(j, I64(how.turn)))
                    for step, pairs in enumerate(EMIT_PAIRS[how](builder, source, columns)):
                        target = builder.add(
                            wide, builder.mul(builder.add(place, I64(2 * step)), I64(2 * TILE_COLUMNS))
                        )
                        for column in columns:
                            emit_store(builder, pairs[column], builder.add(target, I64(64 * column)))
                    return []

                emit_loop(builder, builder.sdiv(count, I64(how.turn)), [], turn)
                return []

            emit_loop(builder, num_groups, [], group)
            return context.get_dummy_value()

        return types.void(*[ADDRESS] * 3), codegen

    return widen_tile


def _tile(how: Whole):
    """A tile of C of any number of rows, plus what it was, of a tile B, which has been widened if there are many rows.

    Nothing where there is no such product: nobody gets such a weight there.
    """
    if HERE.emit_whole_dot is None or (how is FOUR_BITS and why_not_four_bits() is not None):
        return njit(lambda a, lda, rows, b, wide, depth, c, ldc, ahead, stop: None)
    columns, widens = TILE_COLUMNS // 16, how.widened_rows is not None
    four, two, one = (whole_kernel(how, rows, columns) for rows in (4, 2, 1))
    six, turn = whole_kernel(how, 6, columns, is_widened=widens), TWELVE_BITS.turn

    @njit(error_model="numpy")
    def tile(a, lda, rows, b, wide, depth, c, ldc, ahead, stop):
        m = 0
        while m + 4 <= rows:
            # Eight are twice four: both ask ahead, as two of them would not.
            if m + 6 <= rows and m + 8 != rows and (wide != 0 or not widens):
                six(a + m * lda, lda, b, wide, depth, c + m * ldc, ldc, ahead)
                m += 6
            else:
                four(a + m * lda, lda, b, wide, depth, c + m * ldc, ldc, ahead)
                m += 4
            ahead += depth // turn * columns * LINE
            if ahead >= stop:
                ahead = stop = b  # which is at hand, so asking costs nothing
        if m + 2 <= rows:
            two(a + m * lda, lda, b, wide, depth, c + m * ldc, ldc, 0)
            m += 2
        if m < rows:
            one(a + m * lda, lda, b, wide, depth, c + m * ldc, ldc, 0)

    return tile


add_twelve_bit_tile, add_int8_tile, add_four_bit_tile = _tile(TWELVE_BITS), _tile(INT8), _tile(FOUR_BITS)
widen_int8, widen_four_bits = widening(INT8), widening(FOUR_BITS)
IN_TWELVE_BITS, IN_INT8, IN_FOUR_BITS = TWELVE_BITS.code, INT8.code, FOUR_BITS.code


INT8_GROUP, INT8_ROW, INT8_HEAD = INT8.group, INT8.row_bytes // INT8.together, INT8.head_bytes
FOUR_BIT_GROUP, FOUR_BIT_GROUP_BYTES = FOUR_BITS.group, FOUR_BITS.tile_bytes(FOUR_BITS.group)
TWELVE_BIT_GROUP, TWELVE_BIT_GROUP_BYTES = TWELVE_BITS.group, TWELVE_BITS.tile_bytes(TWELVE_BITS.group)
TWELVE_BIT_ROW, TWELVE_BIT_HEAD = TWELVE_BITS.row_bytes // TWELVE_BITS.together, TWELVE_BITS.head_bytes
INT8_WIDENED_ROWS, FOUR_BIT_WIDENED_ROWS = INT8.widened_rows, FOUR_BITS.widened_rows
TWELVE_BIT_MOST, INT8_MOST, FOUR_BIT_MOST = (np.float32(how.left_limit) for how in (TWELVE_BITS, INT8, FOUR_BITS))


@njit(error_model="numpy")
def group_of(code):
    """Numbers along the depth that have one scale."""
    if code == IN_TWELVE_BITS:
        return TWELVE_BIT_GROUP
    return INT8_GROUP if code == IN_INT8 else FOUR_BIT_GROUP


@njit(error_model="numpy")
def num_groups_of(depth, code):
    group = group_of(code)
    return (depth + group - 1) // group


@njit(error_model="numpy")
def tile_bytes(depth, code):
    """The size of a packed weight's tile."""
    groups = num_groups_of(depth, code)
    if code == IN_TWELVE_BITS:
        return depth * TWELVE_BIT_ROW + groups * TWELVE_BIT_HEAD
    if code == IN_INT8:
        return depth * INT8_ROW + groups * INT8_HEAD
    if code == IN_FOUR_BITS:
        return groups * FOUR_BIT_GROUP_BYTES
    return depth * TILE_COLUMNS * 2


@njit(error_model="numpy")
def whole_tile(code, accumulates, a, lda, rows, b, wide, depth, c, ldc, ahead):
    """A tile of C, of a tile B of whole numbers. ``ahead`` is one that will be read soon, or B itself."""
    if not accumulates:  # no kernels of their own for that: they would take long to compile
        for row in range(rows):
            carray(float32_at(c + row * ldc), TILE_COLUMNS)[:] = 0
    stop = ahead + tile_bytes(depth, code)
    if code == IN_TWELVE_BITS:
        add_twelve_bit_tile(a, lda, rows, b, 0, depth, c, ldc, ahead, stop)
    elif code == IN_INT8:
        add_int8_tile(a, lda, rows, b, wide, depth, c, ldc, ahead, stop)
    else:
        add_four_bit_tile(a, lda, rows, b, wide, depth, c, ldc, ahead, stop)


@njit(error_model="numpy")
def widened_if_many(code, rows, b, depth, wide):
    """``wide``, where the tile's numbers stand in 16 bits now, or 0 if there are too few rows for that to pay."""
    if code == IN_INT8 and rows >= INT8_WIDENED_ROWS:
        widen_int8(b, depth, wide)
        return wide
    if code == IN_FOUR_BITS and rows >= FOUR_BIT_WIDENED_ROWS:
        widen_four_bits(b, depth, wide)
        return wide
    return 0


@njit(error_model="numpy")
def rounded_bytes(depth, code):
    """A row as ``round_rows`` makes it."""
    return num_groups_of(depth, code) * (2 * group_of(code) + 8)


@njit(error_model="numpy")
def round_rows(counters, rows, a, lda, depth, code, out):
    """A phase: ``out`` is the rows of ``a`` in whole numbers, group by group, then each group's scale, then each group's sum in float32."""
    group, ldo, units = group_of(code), rounded_bytes(depth, code), (rows + UNIT - 1) // UNIT
    num_groups, most = num_groups_of(depth, code), FOUR_BIT_MOST
    if code != IN_FOUR_BITS:
        most = TWELVE_BIT_MOST if code == IN_TWELVE_BITS else INT8_MOST
    while True:
        unit = claim(counters)
        if unit >= units:
            break
        for row in range(unit * UNIT, min(rows, (unit + 1) * UNIT)):
            source, target = a + row * lda, out + row * ldo
            heads = target + num_groups * group * 2
            for i in range(num_groups):
                count = min(group, depth - i * group)
                numbers, scale = target + i * group * 2, heads + i * 4
                round_group(source + i * group * 4, count, group // 16, most, numbers, scale, scale + num_groups * 4)
        claim(counters + 8)
    wait_for(counters + 8, units)
    return counters + LINE


@njit(error_model="numpy")
def pack_tiles(counters, g):
    """A phase: the weight ``g.embedding``, ``[vocab_size, hidden_size]`` bf16, goes to the tiles ``g.head`` in 12 bits; these are zeros."""
    num_groups, group = num_groups_of(g.hidden_depth, IN_TWELVE_BITS), TWELVE_BIT_GROUP
    while True:
        tile = claim(counters)
        if tile >= g.vocab_columns // TILE_COLUMNS:
            break
        for column in range(min(TILE_COLUMNS, g.vocab_size - tile * TILE_COLUMNS)):
            weights = g.embedding + (tile * TILE_COLUMNS + column) * g.hidden_size * 2
            for i in range(num_groups):
                start = g.head + tile * g.tile_stride + i * TWELVE_BIT_GROUP_BYTES
                source = carray(uint16_at(weights + i * group * 2), min(group, g.hidden_size - i * group))
                scales = carray(uint16_at(start), TILE_COLUMNS)
                pairs = carray(int32_at(start + TWELVE_BIT_HEAD + column * 4), group // 2 * TILE_COLUMNS)
                scales[column] = pack_group(source, pairs)


@njit(error_model="numpy")
def pack_group(source, pairs):
    """Bf16 numbers as whole ones, of which two lie together in each row of a tile; returns their scale, as bf16."""
    largest = np.uint16(0)
    for bits in source:
        largest = max(largest, np.uint16(bits & np.uint16(0x7FFF)))
    exponent = np.int32(largest >> np.uint16(7))
    if exponent == 255:
        return np.uint16(0x7FC0)  # NaN
    exponent = max(exponent - np.int32(11), np.int32(1))  # of a scale: the largest number is below 2**12 of it
    factor = bits_float(np.int32((np.int32(254) - exponent) << np.int32(23)))
    for i in range(0, source.shape[0] - 1, 2):
        one, two = np.int32(np.rint(widen(source[i]) * factor)), np.int32(np.rint(widen(source[i + 1]) * factor))
        pairs[i // 2 * TILE_COLUMNS] = np.int32((two << np.int32(16)) | (one & np.int32(0xFFFF)))
    if source.shape[0] % 2:
        one = np.int32(np.rint(widen(source[source.shape[0] - 1]) * factor))
        pairs[source.shape[0] // 2 * TILE_COLUMNS] = one & np.int32(0xFFFF)
    return np.uint16(exponent << np.int32(7))
