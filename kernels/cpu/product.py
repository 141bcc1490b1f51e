"""Products of bf16 matrices with float32 sums: one microkernel, generated for each number of rows and columns.

As much of a tile of C as they hold stays in vector registers. A is read two numbers at a time, which meet a row of pairs
of B; how the two are multiplied is the instruction set's. B lies in the order in which it is read, ``[depth / 2, columns, 2]``. A row's sum runs over the depth in one order, whatever rows
stand beside it, so a row has the same bits in every batch. B may be narrow too, in int8 or in 4 bits: then the sum of each group along the
depth is multiplied by the group's scale once.
"""

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from kernels.cpu.emit import (
    ADDRESS,
    BYTES,
    F32,
    FLOATS,
    HALVES,
    I64,
    INTS,
    LANES,
    emit_call,
    emit_constant,
    emit_load,
    emit_loop,
    emit_splat,
    emit_store,
)
from kernels.cpu.instructions import HERE, why_not_four_bits, why_not_int8
from kernels.cpu.layout import FOUR_BITS, GATE_ROWS, INT8, TILE_COLUMNS
from kernels.cpu.memory import LINE
from kernels.cpu.rows import readied_bytes, ready_rows
from kernels.cpu.vectors import LEFT_BYTES, LEFT_SHIFT, claim, float32_at, silu_mul, wait_for

UNROLL = 2  # steps of two numbers in one turn of the loop
UNIT_ROWS = 128  # rows that one thread claims at once


def emit_tile(builder, acc, a_rows, b, ldb, pairs):
    """``acc[row][column vector]`` plus A @ B over so many pairs of the depth."""
    rows, columns = len(acc), len(acc[0])

    def turn(i, held):
        values = [held[row * columns : (row + 1) * columns] for row in range(rows)]
        for step in range(UNROLL):
            pair = builder.add(builder.mul(i, I64(UNROLL)), I64(step))
            b_row = builder.add(b, builder.mul(pair, ldb))
            vectors = [HERE.emit_right(builder, builder.add(b_row, I64(64 * column))) for column in range(columns)]
            for row in range(rows):
                both = HERE.emit_left(builder, builder.add(a_rows[row], builder.shl(pair, I64(LEFT_SHIFT + 1))))
                values[row] = [
                    HERE.emit_dot(builder, value, both, vector)
                    for value, vector in zip(values[row], vectors, strict=True)
                ]
        return [value for row in values for value in row]

    flat = emit_loop(builder, builder.sdiv(pairs, I64(UNROLL)), [value for row in acc for value in row], turn)
    return [flat[row * columns : (row + 1) * columns] for row in range(rows)]


def parts(rows, columns):
    """Parts of C whose sums the registers hold: ``(rows, columns)``, each a range; columns of 16."""
    num_parts = -(-rows // HERE.num_sums)
    height = -(-rows // num_parts)
    width = HERE.num_sums // height
    for column in range(0, columns, width):
        for row in range(0, rows, height):
            yield range(row, min(row + height, rows)), range(column, min(column + width, columns))


def product_kernel(num_rows, num_columns, accumulates=False):
    """C[num_rows, 16 * num_columns] = A @ B, or plus what C was. Strides are bytes; ``pairs`` is even, half the depth of A."""

    @intrinsic
    def kernel(context, a, lda, b, ldb, pairs, c, ldc):
        def codegen(context, builder, signature, arguments):
            a, lda, b, ldb, pairs, c, ldc = arguments
            for rows, columns in parts(num_rows, num_columns):
                a_rows = [builder.add(a, builder.mul(lda, I64(row))) for row in rows]
                b_part = builder.add(b, I64(64 * columns.start))
                acc = emit_tile(
                    builder, [[emit_constant(0.0)] * len(columns) for _ in rows], a_rows, b_part, ldb, pairs
                )
                _emit_store_tile(builder, acc, rows, columns, c, ldc, accumulates)
            return context.get_dummy_value()

        return types.void(*[ADDRESS] * 7), codegen

    return kernel


def scattered_kernel(num_rows, num_columns):
    """C[num_rows, 16 * num_columns] = A @ B, where B is ``count`` pieces that lie anywhere, each of so many pairs.

    ``pieces`` is where their addresses stand; ``offset`` bytes are added to each.
    """

    @intrinsic
    def kernel(context, a, lda, pieces, count, offset, ldb, pairs, c, ldc):
        def codegen(context, builder, signature, arguments):
            a, lda, pieces, count, offset, ldb, pairs, c, ldc = arguments

            def emit_part(rows, columns):
                width = len(columns)

                def piece(i, held):
                    start = builder.add(a, builder.mul(i, builder.shl(pairs, I64(LEFT_SHIFT + 1))))
                    a_rows = [builder.add(start, builder.mul(lda, I64(row))) for row in rows]
                    b = builder.add(emit_load(builder, builder.add(pieces, builder.shl(i, I64(3))), I64, 8), offset)
                    b_part = builder.add(b, I64(64 * columns.start))
                    acc = [held[i * width : (i + 1) * width] for i in range(len(rows))]
                    return [value for row in emit_tile(builder, acc, a_rows, b_part, ldb, pairs) for value in row]

                flat = emit_loop(builder, count, [emit_constant(0.0)] * (len(rows) * width), piece)
                acc = [flat[i * width : (i + 1) * width] for i in range(len(rows))]
                _emit_store_tile(builder, acc, rows, columns, c, ldc, False)

            for rows, columns in parts(num_rows, num_columns):
                emit_part(rows, columns)
            return context.get_dummy_value()

        return types.void(*[ADDRESS] * 9), codegen

    return kernel


def narrow_kernel(how, num_rows, num_columns, is_widened=False):
    """C[num_rows, 16 * num_columns] plus A @ B of float32 A and a narrow tile B.

    ``wide`` is where the tile's numbers stand in bf16, if it is widened. The bits of C are the same. With minima, A is as ``rows.ready_rows``
    makes it: the sum of a group's numbers, which meets its minimum, stands behind the row.
    """

    @intrinsic
    def kernel(context, a, lda, b, wide, depth, c, ldc):
        def codegen(context, builder, signature, arguments):
            a, lda, b, wide, depth, c, ldc = arguments
            num_groups = builder.sdiv(builder.add(depth, I64(how.group - 1)), I64(how.group))

            def emit_part(rows, columns):
                zeros = [[emit_constant(0.0)] * len(columns) for _ in rows]

                def group(i, held):
                    scales, first, count = emit_group(builder, how, b, i, depth)
                    start = builder.add(a, builder.shl(first, I64(2)))
                    a_rows = [builder.add(start, builder.mul(lda, I64(row))) for row in rows]
                    if is_widened:
                        part = builder.add(wide, builder.mul(first, I64(2 * TILE_COLUMNS)))
                        part = builder.add(part, I64(64 * columns.start))
                        pairs = builder.lshr(count, I64(1))
                        acc = emit_tile(builder, zeros, a_rows, part, I64(4 * TILE_COLUMNS), pairs)
                    else:
                        part = builder.add(scales, I64(how.head_bytes))
                        acc = emit_narrow_tile(builder, how, zeros, a_rows, part, columns, count)
                    if how.has_minima:
                        sums = builder.add(a, builder.shl(builder.add(depth, i), I64(2)))
                        places = [builder.add(sums, builder.mul(lda, I64(row))) for row in rows]
                        totals = [emit_splat(builder, emit_load(builder, place, F32), FLOATS) for place in places]
                        minima = emit_heads(builder, how, builder.add(scales, I64(how.scales_bytes)), columns)
                        added = [(total, minimum) for total in totals for minimum in minima]
                        held = [emit_fma(builder, *both, old) for both, old in zip(added, held, strict=True)]
                    factors = emit_heads(builder, how, scales, columns)
                    sums = [value for row in acc for value in row]
                    return [
                        emit_fma(builder, value, factor, old)
                        for value, factor, old in zip(sums, factors * len(rows), held, strict=True)
                    ]

                flat = emit_loop(builder, num_groups, [value for row in zeros for value in row], group)
                acc = [flat[i * len(columns) : (i + 1) * len(columns)] for i in range(len(rows))]
                _emit_store_tile(builder, acc, rows, columns, c, ldc, True)

            for rows, columns in parts(num_rows, num_columns):
                emit_part(rows, columns)
            return context.get_dummy_value()

        return types.void(*[ADDRESS] * 7), codegen

    return kernel


def emit_fma(builder, one, other, sums):
    return emit_call(builder, "llvm.fma.v16f32", FLOATS, one, other, sums)


def emit_heads(builder, how, address, columns):
    """The scales or the minima of these columns, of 16 each, as float32."""
    if how is INT8:
        return [emit_load(builder, builder.add(address, I64(64 * column)), FLOATS) for column in columns]
    halves = [emit_load(builder, builder.add(address, I64(32 * column)), HALVES, 2) for column in columns]
    return [builder.fpext(half, FLOATS) for half in halves]


def emit_group(builder, how, b, i, depth):
    """Of a narrow tile, where group ``i`` begins, which number of the depth is its first, and how many it has."""
    first = builder.mul(i, I64(how.group))
    left = builder.sub(depth, first)
    count = builder.select(builder.icmp_signed("<", left, I64(how.group)), left, I64(how.group))
    return builder.add(b, builder.mul(i, I64(how.tile_bytes(how.group)))), first, count


def emit_bytes(builder, address, columns):
    """Four rows of these columns, one after the other, of numbers in int8."""
    for row in range(INT8.turn):
        at = builder.add(address, I64(TILE_COLUMNS * row))
        cells = [emit_load(builder, builder.add(at, I64(16 * column)), BYTES, 1) for column in columns]
        yield [builder.sitofp(builder.sext(cell, INTS), FLOATS) for cell in cells]


def emit_nibbles(builder, address, columns):
    """Eight rows of these columns, one after the other, of numbers in 4 bits: each times 16 to the power of its place among them, but the last.

    So none but the last is shifted. ``rows.ready_rows`` divides what they are multiplied with by as much.
    """
    words = [emit_load(builder, builder.add(address, I64(64 * column)), INTS) for column in columns]
    for place in range(FOUR_BITS.together - 1):
        mask = ir.Constant(INTS, [15 << 4 * place] * LANES)
        yield [builder.sitofp(builder.and_(word, mask), FLOATS) for word in words]
    yield [builder.sitofp(builder.lshr(word, ir.Constant(INTS, [28] * LANES)), FLOATS) for word in words]


EMIT_ROWS = {INT8: emit_bytes, FOUR_BITS: emit_nibbles}


def emit_narrow_tile(builder, how, acc, a_rows, b, columns, count):
    """``acc[row][column vector]`` plus A @ B over so many numbers of the depth, where B is narrow."""
    width = len(columns)

    def turn(i, held):
        at = builder.add(b, builder.mul(i, I64(how.turn_bytes)))
        for step, vectors in enumerate(EMIT_ROWS[how](builder, at, columns)):
            place = builder.add(builder.mul(i, I64(how.turn)), I64(step))
            found = []
            for row, a_row in enumerate(a_rows):
                number = emit_load(builder, builder.add(a_row, builder.shl(place, I64(2))), F32)
                both = emit_splat(builder, number, FLOATS)
                sums = held[row * width : (row + 1) * width]
                found += [emit_fma(builder, both, vector, value) for vector, value in zip(vectors, sums, strict=True)]
            held = found
        return held

    flat = emit_loop(builder, builder.sdiv(count, I64(how.turn)), [value for row in acc for value in row], turn)
    return [flat[row * width : (row + 1) * width] for row in range(len(acc))]


def widening(how):
    """What makes the numbers of a narrow tile bf16, ``[depth / 2, TILE_COLUMNS, 2]`` without what stands before them: none is rounded."""
    columns, upper = range(TILE_COLUMNS // 16), ir.Constant(INTS, [-(1 << 16)] * LANES)

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
                    rows = list(EMIT_ROWS[how](builder, source, columns))
                    for row in range(0, how.turn, 2):
                        target = builder.add(wide, builder.mul(builder.add(place, I64(row)), I64(2 * TILE_COLUMNS)))
                        for column in columns:
                            one, two = (builder.bitcast(rows[row + which][column], INTS) for which in range(2))
                            low = builder.lshr(one, ir.Constant(INTS, [16] * LANES))
                            pair = builder.or_(low, builder.and_(two, upper))
                            emit_store(builder, pair, builder.add(target, I64(64 * column)))
                    return []

                emit_loop(builder, builder.sdiv(count, I64(how.turn)), [], turn)
                return []

            emit_loop(builder, num_groups, [], group)
            return context.get_dummy_value()

        return types.void(*[ADDRESS] * 3), codegen

    return widen_tile


def _emit_store_tile(builder, acc, rows, columns, c, ldc, accumulates):
    for row, values in zip(rows, acc, strict=True):
        c_row = builder.add(c, builder.mul(ldc, I64(row)))
        for column, value in zip(columns, values, strict=True):
            address = builder.add(c_row, I64(64 * column))
            if accumulates:
                value = builder.fadd(emit_load(builder, address, FLOATS), value)
            emit_store(builder, value, address, 4)


def _ladder(kernels):
    """C for any number of rows, of kernels of 8, 4, 2 and 1 of them: as many of 8 rows as fit, then one of each smaller size that
    the rest needs. The kernels know what ``third`` and ``fourth`` are."""
    eight, four, two, one = kernels

    @njit(error_model="numpy", inline="always")
    def climb(a, lda, rows, b, third, fourth, c, ldc):
        m = 0
        while m + 8 <= rows:
            eight(a + m * lda, lda, b, third, fourth, c + m * ldc, ldc)
            m += 8
        if m + 4 <= rows:
            four(a + m * lda, lda, b, third, fourth, c + m * ldc, ldc)
            m += 4
        if m + 2 <= rows:
            two(a + m * lda, lda, b, third, fourth, c + m * ldc, ldc)
            m += 2
        if m < rows:
            one(a + m * lda, lda, b, third, fourth, c + m * ldc, ldc)

    return climb


def _tile(accumulates):
    """A tile of C of any number of rows."""
    climb = _ladder([product_kernel(rows, TILE_COLUMNS // 16, accumulates) for rows in (8, 4, 2, 1)])

    @njit(error_model="numpy")
    def tile(a, lda, rows, b, pairs, c, ldc):
        climb(a, lda, rows, b, TILE_COLUMNS * 4, pairs, c, ldc)

    return tile


def _narrow_tile(how):
    """A tile of C of any number of rows, plus what it was, of a narrow tile, which has been widened if there are many rows.

    Nothing where there is no such product: nobody gets such a weight there.
    """
    if (why_not_int8() if how is INT8 else why_not_four_bits()) is not None:
        return njit(lambda a, lda, rows, b, wide, depth, c, ldc: None)
    columns = TILE_COLUMNS // 16
    four, two, one = (narrow_kernel(how, rows, columns) for rows in (4, 2, 1))
    widened = narrow_kernel(how, 8, columns, is_widened=True)

    @njit(error_model="numpy")
    def tile(a, lda, rows, b, wide, depth, c, ldc):
        m = 0
        while wide != 0 and m + 8 <= rows:
            widened(a + m * lda, lda, b, wide, depth, c + m * ldc, ldc)
            m += 8
        while m + 4 <= rows:
            four(a + m * lda, lda, b, wide, depth, c + m * ldc, ldc)
            m += 4
        if m + 2 <= rows:
            two(a + m * lda, lda, b, wide, depth, c + m * ldc, ldc)
            m += 2
        if m < rows:
            one(a + m * lda, lda, b, wide, depth, c + m * ldc, ldc)

    return tile


store_tile, add_tile = _tile(False), _tile(True)
add_int8_tile, add_four_bit_tile = _narrow_tile(INT8), _narrow_tile(FOUR_BITS)
widen_int8, widen_four_bits = widening(INT8), widening(FOUR_BITS)
IN_INT8, IN_FOUR_BITS = INT8.code, FOUR_BITS.code


@njit(error_model="numpy")
def narrow_tile(code, accumulates, a, lda, rows, b, wide, depth, c, ldc):
    """A tile of C, of a narrow tile B."""
    if not accumulates:  # no kernels of their own for that: they would take long to compile
        for row in range(rows):
            carray(float32_at(c + row * ldc), TILE_COLUMNS)[:] = 0
    if code == IN_INT8:
        add_int8_tile(a, lda, rows, b, wide, depth, c, ldc)
    else:
        add_four_bit_tile(a, lda, rows, b, wide, depth, c, ldc)


INT8_GROUP, INT8_ROW, INT8_HEAD = INT8.group, INT8.row_bytes, INT8.head_bytes
FOUR_BIT_GROUP, FOUR_BIT_GROUP_BYTES = FOUR_BITS.group, FOUR_BITS.tile_bytes(FOUR_BITS.group)
INT8_WIDENED_ROWS, FOUR_BIT_WIDENED_ROWS = INT8.widened_rows, FOUR_BITS.widened_rows


@njit(error_model="numpy")
def tile_bytes(depth, code):
    """The size of a packed weight's tile."""
    if code == IN_INT8:
        return depth * INT8_ROW + (depth + INT8_GROUP - 1) // INT8_GROUP * INT8_HEAD
    if code == IN_FOUR_BITS:
        return depth // FOUR_BIT_GROUP * FOUR_BIT_GROUP_BYTES
    return depth * TILE_COLUMNS * 2


@njit(error_model="numpy")
def widened_if_many(code, rows, b, depth, wide):
    """``wide``, where the tile's numbers stand in bf16 now, or 0 if there are too few rows for that to pay."""
    if code == IN_INT8 and rows >= INT8_WIDENED_ROWS:
        widen_int8(b, depth, wide)
        return wide
    if code == IN_FOUR_BITS and rows >= FOUR_BIT_WIDENED_ROWS:
        widen_four_bits(b, depth, wide)
        return wide
    return 0


@njit(error_model="numpy")
def product(counters, a, lda, rows, weight, code, wide, readied, depth, columns, c, ldc, accumulates):
    """A phase: C = A @ W, or plus what C was, of packed ``weight`` with so many (padded) columns and this depth.

    For a narrow weight, which ``code`` says, ``wide`` is this thread's, for two tiles in bf16; for one in 4 bits A goes to ``readied`` before.
    """
    if code == IN_FOUR_BITS:
        counters = ready_rows(counters, rows, a, lda, depth, readied)
        a, lda = readied, readied_bytes(depth)
    size = tile_bytes(depth, code)
    row_blocks = (rows + UNIT_ROWS - 1) // UNIT_ROWS
    units = row_blocks * (columns // TILE_COLUMNS)
    while True:
        unit = claim(counters)
        if unit >= units:
            break
        tile, first = unit // row_blocks, (unit % row_blocks) * UNIT_ROWS
        count = min(UNIT_ROWS, rows - first)
        b, out = weight + tile * size, c + first * ldc + tile * TILE_COLUMNS * 4
        if code != 0:
            whole = widened_if_many(code, count, b, depth, wide)
            narrow_tile(code, accumulates, a + first * lda, lda, count, b, whole, depth, out, ldc)
        elif accumulates:
            add_tile(a + first * lda, lda, count, b, depth // 2, out, ldc)
        else:
            store_tile(a + first * lda, lda, count, b, depth // 2, out, ldc)
        claim(counters + 8)
    wait_for(counters + 8, units)
    return counters + LINE


@njit(error_model="numpy")
def gate_up(counters, a, lda, rows, weight, code, wide, readied, depth, columns, scratch, out, ldo):
    """A phase: ``out`` (left) = silu(A @ gate) * (A @ up), of so many (padded) columns; the tiles of the two alternate.

    ``scratch`` is this thread's, ``[GATE_ROWS, 2 * TILE_COLUMNS]`` float32; ``wide`` and ``readied`` as for ``product``.
    """
    if code == IN_FOUR_BITS:
        counters = ready_rows(counters, rows, a, lda, depth, readied)
        a, lda = readied, readied_bytes(depth)
    row_blocks = (rows + UNIT_ROWS - 1) // UNIT_ROWS
    units = row_blocks * (columns // TILE_COLUMNS)
    row_bytes, size = 8 * TILE_COLUMNS, tile_bytes(depth, code)
    while True:
        unit = claim(counters)
        if unit >= units:
            break
        tile, first = unit // row_blocks, (unit % row_blocks) * UNIT_ROWS
        stop = min(rows, first + UNIT_ROWS)
        gates, ups = weight + 2 * tile * size, weight + (2 * tile + 1) * size
        wide_gates = wide_ups = 0
        if code != 0:
            wide_gates = widened_if_many(code, stop - first, gates, depth, wide)
            wide_ups = widened_if_many(code, stop - first, ups, depth, wide + tile_bytes(depth, 0))
        for m in range(first, stop, GATE_ROWS):
            count, up = min(GATE_ROWS, stop - m), scratch + 4 * TILE_COLUMNS
            if code != 0:
                narrow_tile(code, False, a + m * lda, lda, count, gates, wide_gates, depth, scratch, row_bytes)
                narrow_tile(code, False, a + m * lda, lda, count, ups, wide_ups, depth, up, row_bytes)
            else:
                store_tile(a + m * lda, lda, count, gates, depth // 2, scratch, row_bytes)
                store_tile(a + m * lda, lda, count, ups, depth // 2, up, row_bytes)
            for row in range(count):
                gate, to = scratch + row * row_bytes, out + (m + row) * ldo + tile * TILE_COLUMNS * LEFT_BYTES
                for column in range(0, TILE_COLUMNS, 16):
                    silu_mul(gate + column * 4, gate + (TILE_COLUMNS + column) * 4, to + column * LEFT_BYTES)
        claim(counters + 8)
    wait_for(counters + 8, units)
    return counters + LINE
