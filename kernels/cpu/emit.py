"""Vector instructions for numba as LLVM's own, on raw addresses: what is the same for every processor.

An address is an int64. A bf16 number is a uint16 that holds its bits. A vector is 16 numbers of 32 bits: one register of
AVX-512, two of AVX2, of which LLVM makes what there is. Functions that start with ``emit`` write instructions into a
function that is being built.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils


class BFloat(ir.Type):
    """LLVM's bfloat, for which llvmlite has no class."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash("bfloat")


LANES = 16
F32, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOATS, INTS, MASK = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(ir.IntType(1), LANES)
BYTES, HALVES = ir.VectorType(ir.IntType(8), 2 * LANES), ir.VectorType(ir.HalfType(), LANES)
SHORTS = ir.VectorType(I16, LANES)
PAIRS_OF_SHORTS = ir.VectorType(I16, 2 * LANES)
PAIRS, NARROW = ir.VectorType(BFloat(), 2 * LANES), ir.VectorType(BFloat(), LANES)
ADDRESS = types.int64


def emit_call(builder, name, result, *arguments):
    kind = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def emit_load(builder, address, kind, align=4):
    value = builder.load(builder.inttoptr(address, ir.PointerType(kind)))
    value.align = align
    return value


def emit_store(builder, value, address, align=2):
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type))).align = align


def emit_splat(builder, scalar, kind):
    """All lanes with one value."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, scalar, I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(INTS, [0] * LANES))


FIRST_CACHE, SECOND_CACHE = 3, 2


def emit_fetch(builder, address, into):
    """Asks for the cache line at an address, into this cache; nothing waits for it, and the address may be any."""
    line = builder.inttoptr(address, ir.PointerType(ir.IntType(8)))
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), line, I32(0), I32(into), I32(1))


def emit_constant(value):
    return ir.Constant(FLOATS, [value] * LANES)


def emit_loop(builder, count, start, body):
    """``for i in range(count)`` with at least one turn: ``body(i, values)`` gives the next values, which start as ``start``."""
    entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    i = builder.phi(I64)
    i.add_incoming(I64(0), entry)
    held = [builder.phi(value.type) for value in start]
    for phi, value in zip(held, start, strict=True):
        phi.add_incoming(value, entry)
    after = body(i, held)
    following = builder.add(i, I64(1))
    i.add_incoming(following, builder.block)
    for phi, value in zip(held, after, strict=True):
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return after


def emit_fma(builder, one, other, sums):
    return emit_call(builder, "llvm.fma.v16f32", FLOATS, one, other, sums)


def parts(rows, columns, num_sums):
    """Parts of a matrix of which so many registers hold the sums: ``(rows, columns)``, each a range; columns of 16."""
    num_parts = -(-rows // num_sums)
    height = -(-rows // num_parts)
    width = num_sums // height
    for column in range(0, columns, width):
        for row in range(0, rows, height):
            yield range(row, min(row + height, rows)), range(column, min(column + width, columns))


def emit_store_tile(builder, acc, rows, columns, c, ldc, accumulates):
    for row, values in zip(rows, acc, strict=True):
        c_row = builder.add(c, builder.mul(ldc, I64(row)))
        for column, value in zip(columns, values, strict=True):
            address = builder.add(c_row, I64(64 * column))
            if accumulates:
                value = builder.fadd(emit_load(builder, address, FLOATS), value)
            emit_store(builder, value, address, 4)
