"""Products with float32 sums: one microkernel for bf16 matrices, generated for each number of rows and columns, and the phases of weights.

As much of a tile of C as they hold stays in vector registers. A is read two numbers at a time, which meet a row of pairs
of B; how the two are multiplied is the instruction set's. B lies in the order in which it is read, ``[depth / 2, columns, 2]``. A
row's sum runs over the depth in one order, whatever rows stand beside it, so a row has the same bits in every batch. A weight
may be of whole numbers instead (``kernels.cpu.whole``).
"""

from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.emit import (
    ADDRESS,
    I64,
    emit_constant,
    emit_load,
    emit_loop,
    emit_store_tile,
    parts,
)
from kernels.cpu.instructions import HERE
from kernels.cpu.layout import GATE_ROWS, TILE_COLUMNS
from kernels.cpu.memory import LINE
from kernels.cpu.vectors import LEFT_BYTES, LEFT_SHIFT, claim, silu_mul, wait_for
from kernels.cpu.whole import round_rows, rounded_bytes, tile_bytes, whole_tile, widened_if_many

UNROLL = 2  # steps of two numbers in one turn of the loop
UNIT_ROWS = 16 * HERE.tile_rows  # rows that one thread claims at once


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


def product_kernel(num_rows, num_columns, accumulates=False):
    """C[num_rows, 16 * num_columns] = A @ B, or plus what C was. Strides are bytes; ``pairs`` is even, half the depth of A."""

    @intrinsic
    def kernel(context, a, lda, b, ldb, pairs, c, ldc):
        def codegen(context, builder, signature, arguments):
            a, lda, b, ldb, pairs, c, ldc = arguments
            for rows, columns in parts(num_rows, num_columns, HERE.num_sums):
                a_rows = [builder.add(a, builder.mul(lda, I64(row))) for row in rows]
                b_part = builder.add(b, I64(64 * columns.start))
                acc = emit_tile(
                    builder, [[emit_constant(0.0)] * len(columns) for _ in rows], a_rows, b_part, ldb, pairs
                )
                emit_store_tile(builder, acc, rows, columns, c, ldc, accumulates)
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
                emit_store_tile(builder, acc, rows, columns, c, ldc, False)

            for rows, columns in parts(num_rows, num_columns, HERE.num_sums):
                emit_part(rows, columns)
            return context.get_dummy_value()

        return types.void(*[ADDRESS] * 9), codegen

    return kernel


def _tile(accumulates):
    """A tile of C of any number of rows; nothing where no weight is bf16."""
    if HERE.emit_whole_dot is not None:
        return njit(lambda a, lda, rows, b, pairs, c, ldc: None)
    eight, four, two, one = (product_kernel(rows, TILE_COLUMNS // 16, accumulates) for rows in (8, 4, 2, 1))
    ldb = TILE_COLUMNS * 4

    @njit(error_model="numpy")
    def tile(a, lda, rows, b, pairs, c, ldc):
        m = 0
        while m + 8 <= rows:
            eight(a + m * lda, lda, b, ldb, pairs, c + m * ldc, ldc)
            m += 8
        if m + 4 <= rows:
            four(a + m * lda, lda, b, ldb, pairs, c + m * ldc, ldc)
            m += 4
        if m + 2 <= rows:
            two(a + m * lda, lda, b, ldb, pairs, c + m * ldc, ldc)
            m += 2
        if m < rows:
            one(a + m * lda, lda, b, ldb, pairs, c + m * ldc, ldc)

    return tile


store_tile, add_tile = _tile(False), _tile(True)


@njit(error_model="numpy")
def next_tile(unit, last, row_blocks, units):
    """The tile that a thread will read next, if its turn comes as often as before; if there is none, the one of this unit."""
    following = 2 * unit - last
    return (following if following < units else unit) // row_blocks


@njit(error_model="numpy")
def product(counters, a, lda, rows, weight, code, wide, rounded, depth, columns, c, ldc, accumulates):
    """A phase: C = A @ W, or plus what C was, of packed ``weight`` with so many (padded) columns and this depth.

    For one of whole numbers, which ``code`` says, A goes to ``rounded`` before, and ``wide`` is this thread's, for the numbers of two tiles.
    """
    if code != 0:
        counters = round_rows(counters, rows, a, lda, depth, code, rounded)
        a, lda = rounded, rounded_bytes(depth, code)
    size, last = tile_bytes(depth, code), -1
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
            ahead = weight + next_tile(unit, last, row_blocks, units) * size
            whole_tile(code, accumulates, a + first * lda, lda, count, b, whole, depth, out, ldc, ahead)
            last = unit
        elif accumulates:
            add_tile(a + first * lda, lda, count, b, depth // 2, out, ldc)
        else:
            store_tile(a + first * lda, lda, count, b, depth // 2, out, ldc)
        claim(counters + 8)
    wait_for(counters + 8, units)
    return counters + LINE


@njit(error_model="numpy")
def gate_up(counters, a, lda, rows, weight, code, wide, rounded, depth, columns, scratch, out, ldo):
    """A phase: ``out`` (left) = silu(A @ gate) * (A @ up), of so many (padded) columns; the tiles of the two alternate.

    ``scratch`` is this thread's, ``[GATE_ROWS, 2 * TILE_COLUMNS]`` float32; ``wide`` and ``rounded`` as for ``product``.
    """
    if code != 0:
        counters = round_rows(counters, rows, a, lda, depth, code, rounded)
        a, lda = rounded, rounded_bytes(depth, code)
    row_blocks = (rows + UNIT_ROWS - 1) // UNIT_ROWS
    units = row_blocks * (columns // TILE_COLUMNS)
    row_bytes, size, last = 8 * TILE_COLUMNS, tile_bytes(depth, code), -1
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
            wide_ups = widened_if_many(code, stop - first, ups, depth, wide + depth * TILE_COLUMNS * 2)
        for m in range(first, stop, GATE_ROWS):
            count, up = min(GATE_ROWS, stop - m), scratch + 4 * TILE_COLUMNS
            if code != 0:
                ahead = weight + 2 * (next_tile(unit, last, row_blocks, units) if m == first else tile) * size
                whole_tile(code, False, a + m * lda, lda, count, gates, wide_gates, depth, scratch, row_bytes, ahead)
                whole_tile(code, False, a + m * lda, lda, count, ups, wide_ups, depth, up, row_bytes, ahead + size)
            else:
                store_tile(a + m * lda, lda, count, gates, depth // 2, scratch, row_bytes)
                store_tile(a + m * lda, lda, count, ups, depth // 2, up, row_bytes)
            for row in range(count):
                gate, to = scratch + row * row_bytes, out + (m + row) * ldo + tile * TILE_COLUMNS * LEFT_BYTES
                for column in range(0, TILE_COLUMNS, 16):
                    silu_mul(gate + column * 4, gate + (TILE_COLUMNS + column) * 4, to + column * LEFT_BYTES)
        last = unit
        claim(counters + 8)
    wait_for(counters + 8, units)
    return counters + LINE
