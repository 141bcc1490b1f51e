"""Products of bf16 matrices with float32 sums: one microkernel, generated for each number of rows and columns.

As much of a tile of C as they hold stays in vector registers. A is read two numbers at a time, which meet a row of pairs
of B; how the two are multiplied is the instruction set's. B lies in the order in which it is read, ``[depth / 2, columns, 2]``. A row's sum runs over the depth in one order, whatever rows
stand beside it, so a row has the same bits in every batch. B may be in int8 too: then the sum of each group of 64 along the
depth is multiplied by the group's scale once.
"""

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.emit import (
    ADDRESS,
    BYTES,
    F32,
    FLOATS,
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
from kernels.cpu.instructions import HERE
from kernels.cpu.layout import GATE_ROWS, GROUP, SCALE_BYTES, TILE_COLUMNS
from kernels.cpu.memory import LINE
from kernels.cpu.vectors import LEFT_BYTES, LEFT_SHIFT, claim, silu_mul, wait_for

UNROLL = 2  # steps of two numbers in one turn of the loop
INT8_UNROLL = 4  # numbers in one turn, where B is in int8
WIDENED_ROWS = 24  # rows for which a tile in int8 is made one in bf16 first
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


def int8_kernel(num_rows, num_columns, accumulates=False, is_widened=False):
    """C[num_rows, 16 * num_columns] = A @ B of float32 A and a tile B in int8, or plus what C was. ``depth`` is a multiple of 4.

    ``wide`` is where the tile's numbers stand in bf16, if it is widened. The bits of C are the same.
    """

    @intrinsic
    def kernel(context, a, lda, b, wide, depth, c, ldc):
        def codegen(context, builder, signature, arguments):
            a, lda, b, wide, depth, c, ldc = arguments
            num_groups = builder.sdiv(builder.add(depth, I64(GROUP - 1)), I64(GROUP))

            def emit_part(rows, columns):
                zeros = [[emit_constant(0.0)] * len(columns) for _ in rows]

                def group(i, held):
                    scales, first, count = emit_group(builder, b, i, depth)
                    start = builder.add(a, builder.shl(first, I64(2)))
                    a_rows = [builder.add(start, builder.mul(lda, I64(row))) for row in rows]
                    if is_widened:
                        part = builder.add(wide, builder.mul(first, I64(2 * TILE_COLUMNS)))
                        part = builder.add(part, I64(64 * columns.start))
                        pairs = builder.lshr(count, I64(1))
                        acc = emit_tile(builder, zeros, a_rows, part, I64(4 * TILE_COLUMNS), pairs)
                    else:
                        part = builder.add(scales, I64(SCALE_BYTES + 16 * columns.start))
                        acc = emit_int8_tile(builder, zeros, a_rows, part, count)
                    factors = [emit_load(builder, builder.add(scales, I64(64 * column)), FLOATS) for column in columns]
                    sums = [value for row in acc for value in row]
                    return [
                        emit_call(builder, "llvm.fma.v16f32", FLOATS, value, factor, old)
                        for value, factor, old in zip(sums, factors * len(rows), held, strict=True)
                    ]

                flat = emit_loop(builder, num_groups, [value for row in zeros for value in row], group)
                acc = [flat[i * len(columns) : (i + 1) * len(columns)] for i in range(len(rows))]
                _emit_store_tile(builder, acc, rows, columns, c, ldc, accumulates)

            for rows, columns in parts(num_rows, num_columns):
                emit_part(rows, columns)
            return context.get_dummy_value()

        return types.void(*[ADDRESS] * 7), codegen

    return kernel


def emit_group(builder, b, i, depth):
    """Of a tile in int8, where the scales of group ``i`` stand, before its numbers, which number is its first, and how many it has."""
    first = builder.mul(i, I64(GROUP))
    left = builder.sub(depth, first)
    count = builder.select(builder.icmp_signed("<", left, I64(GROUP)), left, I64(GROUP))
    return builder.add(b, builder.mul(i, I64(SCALE_BYTES + GROUP * TILE_COLUMNS))), first, count


def emit_int8_tile(builder, acc, a_rows, b, count):
    """``acc[row][column vector]`` plus A @ B over so many numbers of the depth, where B is in int8."""
    columns = len(acc[0])

    def turn(i, held):
        for step in range(INT8_UNROLL):
            place = builder.add(builder.mul(i, I64(INT8_UNROLL)), I64(step))
            b_row = builder.add(b, builder.mul(place, I64(TILE_COLUMNS)))
            vectors = [emit_int8(builder, builder.add(b_row, I64(16 * column))) for column in range(columns)]
            found = []
            for row, a_row in enumerate(a_rows):
                number = emit_load(builder, builder.add(a_row, builder.shl(place, I64(2))), F32)
                both = emit_splat(builder, number, FLOATS)
                found += [
                    emit_call(builder, "llvm.fma.v16f32", FLOATS, both, vector, value)
                    for vector, value in zip(vectors, held[row * columns : (row + 1) * columns], strict=True)
                ]
            held = found
        return held

    flat = emit_loop(builder, builder.sdiv(count, I64(INT8_UNROLL)), [value for row in acc for value in row], turn)
    return [flat[row * columns : (row + 1) * columns] for row in range(len(acc))]


@intrinsic
def widen_tile(context, b, depth, wide):
    """The numbers of a tile in int8 as bf16, ``[depth / 2, TILE_COLUMNS, 2]`` without their scales: each has 7 bits, so none is rounded."""

    def codegen(context, builder, signature, arguments):
        b, depth, wide = arguments
        num_groups = builder.sdiv(builder.add(depth, I64(GROUP - 1)), I64(GROUP))
        upper = ir.Constant(INTS, [-(1 << 16)] * LANES)

        def group(i, held):
            scales, first, count = emit_group(builder, b, i, depth)

            def pair(j, held):
                place = builder.shl(j, I64(1))
                source = builder.add(scales, builder.add(I64(SCALE_BYTES), builder.mul(place, I64(TILE_COLUMNS))))
                target = builder.add(wide, builder.mul(builder.add(first, place), I64(2 * TILE_COLUMNS)))
                for column in range(0, TILE_COLUMNS, 16):
                    one, two = (
                        builder.bitcast(emit_int8(builder, builder.add(source, I64(column + row))), INTS)
                        for row in (0, TILE_COLUMNS)
                    )
                    low = builder.lshr(one, ir.Constant(INTS, [16] * LANES))
                    emit_store(
                        builder, builder.or_(low, builder.and_(two, upper)), builder.add(target, I64(4 * column))
                    )
                return []

            emit_loop(builder, builder.lshr(count, I64(1)), [], pair)
            return []

        emit_loop(builder, num_groups, [], group)
        return context.get_dummy_value()

    return types.void(*[ADDRESS] * 3), codegen


def emit_int8(builder, address):
    """16 numbers in int8 as float32."""
    return builder.sitofp(builder.sext(emit_load(builder, address, BYTES, 1), INTS), FLOATS)


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


def _int8_tile(accumulates):
    """The same of a tile in int8, which has been widened if there are many rows.

    Nothing where there is no such product: nobody gets a weight in int8 there.
    """
    if not HERE.has_int8:
        return njit(lambda a, lda, rows, b, wide, depth, c, ldc: None)
    columns = TILE_COLUMNS // 16
    climb = _ladder([int8_kernel(rows, columns, accumulates) for rows in (8, 4, 2, 1)])
    widened = int8_kernel(8, columns, accumulates, is_widened=True)

    @njit(error_model="numpy")
    def tile(a, lda, rows, b, wide, depth, c, ldc):
        m = 0
        while wide != 0 and m + 8 <= rows:
            widened(a + m * lda, lda, b, wide, depth, c + m * ldc, ldc)
            m += 8
        climb(a + m * lda, lda, rows - m, b, wide, depth, c + m * ldc, ldc)

    return tile


store_tile, add_tile = _tile(False), _tile(True)
store_int8_tile, add_int8_tile = _int8_tile(False), _int8_tile(True)


@njit(error_model="numpy")
def tile_bytes(depth, in_int8):
    """The size of a packed weight's tile."""
    if in_int8:
        return depth * TILE_COLUMNS + (depth + GROUP - 1) // GROUP * SCALE_BYTES
    return depth * TILE_COLUMNS * 2


@njit(error_model="numpy")
def widened_if_many(rows, b, depth, wide):
    """``wide``, where the tile's numbers stand in bf16 now, or 0 if there are too few rows for that to pay."""
    if rows < WIDENED_ROWS:
        return 0
    widen_tile(b, depth, wide)
    return wide


@njit(error_model="numpy")
def product(counters, a, lda, rows, weight, wide, depth, columns, c, ldc, accumulates):
    """A phase: C = A @ W, or plus what C was, of packed ``weight`` with so many (padded) columns and this depth.

    ``wide`` is this thread's, for two tiles in bf16, if the weight is in int8, and else 0.
    """
    in_int8 = wide != 0
    size = tile_bytes(depth, in_int8)
    row_blocks = (rows + UNIT_ROWS - 1) // UNIT_ROWS
    units = row_blocks * (columns // TILE_COLUMNS)
    while True:
        unit = claim(counters)
        if unit >= units:
            break
        tile, first = unit // row_blocks, (unit % row_blocks) * UNIT_ROWS
        count = min(UNIT_ROWS, rows - first)
        b, out = weight + tile * size, c + first * ldc + tile * TILE_COLUMNS * 4
        if in_int8:
            whole = widened_if_many(count, b, depth, wide)
            if accumulates:
                add_int8_tile(a + first * lda, lda, count, b, whole, depth, out, ldc)
            else:
                store_int8_tile(a + first * lda, lda, count, b, whole, depth, out, ldc)
        elif accumulates:
            add_tile(a + first * lda, lda, count, b, depth // 2, out, ldc)
        else:
            store_tile(a + first * lda, lda, count, b, depth // 2, out, ldc)
        claim(counters + 8)
    wait_for(counters + 8, units)
    return counters + LINE


@njit(error_model="numpy")
def gate_up(counters, a, lda, rows, weight, wide, depth, columns, scratch, out, ldo):
    """A phase: ``out`` (left) = silu(A @ gate) * (A @ up), of so many (padded) columns; the tiles of the two alternate.

    ``scratch`` is this thread's, ``[GATE_ROWS, 2 * TILE_COLUMNS]`` float32, and so is ``wide``, as for ``product``.
    """
    in_int8 = wide != 0
    row_blocks = (rows + UNIT_ROWS - 1) // UNIT_ROWS
    units = row_blocks * (columns // TILE_COLUMNS)
    row_bytes, size = 8 * TILE_COLUMNS, tile_bytes(depth, in_int8)
    while True:
        unit = claim(counters)
        if unit >= units:
            break
        tile, first = unit // row_blocks, (unit % row_blocks) * UNIT_ROWS
        stop = min(rows, first + UNIT_ROWS)
        gates, ups = weight + 2 * tile * size, weight + (2 * tile + 1) * size
        wide_gates = wide_ups = 0
        if in_int8:
            wide_gates = widened_if_many(stop - first, gates, depth, wide)
            wide_ups = widened_if_many(stop - first, ups, depth, wide + tile_bytes(depth, False))
        for m in range(first, stop, GATE_ROWS):
            count, up = min(GATE_ROWS, stop - m), scratch + 4 * TILE_COLUMNS
            if in_int8:
                store_int8_tile(a + m * lda, lda, count, gates, wide_gates, depth, scratch, row_bytes)
                store_int8_tile(a + m * lda, lda, count, ups, wide_ups, depth, up, row_bytes)
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
