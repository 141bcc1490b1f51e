"""AVX-512 for numba: vector instructions as LLVM IR, on raw addresses, without a compiler beside numba's own.

An address is an int64. A bf16 number is a uint16 that holds its bits. Functions that start with ``emit`` write
instructions into a function that is being built; the others are called from compiled code.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic


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
PAIRS, NARROW = ir.VectorType(BFloat(), 2 * LANES), ir.VectorType(BFloat(), LANES)
ADDRESS = types.int64
LOWEST = -3.4028234663852886e38  # where the search for the largest score begins: no finite one is below
LOG2_E = 1.4426950408889634


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


def emit_constant(value):
    return ir.Constant(FLOATS, [value] * LANES)


def emit_narrow(builder, floats):
    """bf16 of 16 numbers, to the nearest; NaN stays NaN."""
    return emit_call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", NARROW, floats)


def emit_exp2(builder, x):
    """``2**x`` of 16 numbers with a relative error of about 4e-6: a polynomial, scaled by the whole part. NaN stays NaN."""
    x = builder.select(builder.fcmp_ordered("<", x, emit_constant(LOWEST)), emit_constant(LOWEST), x)  # not -inf - -inf
    whole = emit_call(builder, "llvm.rint.v16f32", FLOATS, x)
    rest, poly = builder.fsub(x, whole), emit_constant(0.0096181291)
    for factor in (0.0555041087, 0.2402265069, 0.6931471806, 1.0):
        poly = emit_call(builder, "llvm.fma.v16f32", FLOATS, poly, rest, emit_constant(factor))
    every, rounding = I16(-1), I32(4)
    return emit_call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, poly, whole, poly, every, rounding)


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


@intrinsic
def silu_mul(context, gate, up, out):
    """``out`` (bf16) = silu(gate) * up, 16 float32 numbers."""

    def codegen(context, builder, signature, arguments):
        gate, up, out = arguments
        g, u = emit_load(builder, gate, FLOATS), emit_load(builder, up, FLOATS)
        power = emit_exp2(builder, builder.fmul(g, emit_constant(-LOG2_E)))
        value = builder.fmul(builder.fdiv(g, builder.fadd(power, emit_constant(1.0))), u)
        emit_store(builder, emit_narrow(builder, value), out)
        return context.get_dummy_value()

    return types.void(ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def scale_narrow(context, floats, factor, out):
    """``out`` (bf16) = 16 float32 numbers times a factor."""

    def codegen(context, builder, signature, arguments):
        floats, factor, out = arguments
        value = builder.fmul(emit_load(builder, floats, FLOATS), emit_splat(builder, factor, FLOATS))
        emit_store(builder, emit_narrow(builder, value), out)
        return context.get_dummy_value()

    return types.void(ADDRESS, types.float32, ADDRESS), codegen


@intrinsic
def softmax(context, scores, weights, first, stop, vectors, scale):
    """``weights`` (bf16) = exp(scale * (score - largest)) of the scores ``first`` to ``stop``, 0 of the others.

    There are ``16 * vectors`` of each. Returns 1 / sum. Lanes are added up in one order, whatever the batch.
    """

    def codegen(context, builder, signature, arguments):
        scores, weights, first, stop, vectors, scale = arguments
        begin, end = (emit_splat(builder, builder.trunc(each, I32), INTS) for each in (first, stop))
        factor = emit_splat(builder, builder.fmul(scale, ir.Constant(F32, LOG2_E)), FLOATS)
        lanes = ir.Constant(INTS, list(range(LANES)))

        def scaled(i):
            place = builder.add(emit_splat(builder, builder.trunc(builder.shl(i, I64(4)), I32), INTS), lanes)
            seen = builder.and_(builder.icmp_signed(">=", place, begin), builder.icmp_signed("<", place, end))
            score = builder.fmul(emit_load(builder, builder.add(scores, builder.shl(i, I64(6))), FLOATS), factor)
            return seen, builder.select(seen, score, emit_constant(LOWEST))

        def larger(i, held):
            return [emit_call(builder, "llvm.maxnum.v16f32", FLOATS, held[0], scaled(i)[1])]

        [largest] = emit_loop(builder, vectors, [emit_constant(LOWEST)], larger)
        largest = emit_splat(builder, emit_call(builder, "llvm.vector.reduce.fmax.v16f32", F32, largest), FLOATS)

        def exponentials(i, held):
            seen, score = scaled(i)
            power = emit_exp2(builder, builder.fsub(score, largest))
            power = builder.select(seen, power, emit_constant(0.0))
            emit_store(builder, emit_narrow(builder, power), builder.add(weights, builder.shl(i, I64(5))))
            return [builder.fadd(held[0], power)]

        [sums] = emit_loop(builder, vectors, [emit_constant(0.0)], exponentials)
        total = builder.extract_element(sums, I32(0))
        for lane in range(1, LANES):
            total = builder.fadd(total, builder.extract_element(sums, I32(lane)))
        return builder.fdiv(F32(1.0), total)

    return types.float32(ADDRESS, ADDRESS, types.int64, types.int64, types.int64, types.float32), codegen


@intrinsic
def largest(context, floats, vectors):
    """The largest of ``16 * vectors`` float32 numbers; NaN if there is one among them."""

    def codegen(context, builder, signature, arguments):
        floats, vectors = arguments

        def turn(i, held):
            x = emit_load(builder, builder.add(floats, builder.shl(i, I64(6))), FLOATS)
            larger = emit_call(builder, "llvm.maxnum.v16f32", FLOATS, held[0], x)
            return [larger, builder.or_(held[1], builder.fcmp_unordered("uno", x, x))]

        start = [emit_constant(float("-inf")), ir.Constant(MASK, [0] * LANES)]
        top, is_nan = emit_loop(builder, vectors, start, turn)
        top = emit_call(builder, "llvm.vector.reduce.fmax.v16f32", F32, top)
        is_nan = emit_call(builder, "llvm.vector.reduce.or.v16i1", ir.IntType(1), is_nan)
        return builder.select(is_nan, ir.Constant(F32, float("nan")), top)

    return types.float32(ADDRESS, types.int64), codegen


@intrinsic
def float_bits(context, x):
    return types.int32(types.float32), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], I32)


@intrinsic
def bits_float(context, x):
    return types.float32(types.int32), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], F32)


@njit(inline="always")
def narrow(x):
    """The bits of the bf16 number nearest to a float32; NaN stays NaN."""
    bits = types.uint32(float_bits(x))
    rounded = (bits + types.uint32(0x7FFF) + ((bits >> types.uint32(16)) & types.uint32(1))) >> types.uint32(16)
    return types.uint16(rounded) if not np.isnan(x) else types.uint16(0x7FC0)


@njit(inline="always")
def widen(bits):
    """The float32 of a bf16 number's bits."""
    return bits_float(types.int32(types.uint32(bits) << types.uint32(16)))


@intrinsic
def claim(context, address):
    """Adds one to the counter at the address, at once for all threads, and returns what it was."""

    def codegen(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.PointerType(I64))
        return builder.atomic_rmw("add", counter, I64(1), "seq_cst")

    return types.int64(ADDRESS), codegen


SPINS = 4000  # turns of waiting, some 100 microseconds, before a thread gives its core to others


@intrinsic
def wait_for(context, address, count):
    """Waits until the counter at the address has reached the count."""

    def codegen(context, builder, signature, arguments):
        counter = builder.inttoptr(arguments[0], ir.PointerType(I64))
        entry = builder.block
        loop, spin, give, again, done = map(builder.append_basic_block, ("loop", "spin", "give", "again", "done"))
        builder.branch(loop)
        builder.position_at_end(loop)
        i = builder.phi(I64)
        i.add_incoming(I64(0), entry)
        reached = builder.icmp_signed(">=", builder.load_atomic(counter, "acquire", 8), arguments[1])
        builder.cbranch(reached, done, spin)
        builder.position_at_end(spin)
        emit_call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        builder.cbranch(builder.icmp_signed(">", i, I64(SPINS)), give, again)
        builder.position_at_end(give)
        emit_call(builder, "sched_yield", I32)
        builder.branch(again)
        builder.position_at_end(again)
        i.add_incoming(builder.add(i, I64(1)), again)
        builder.branch(loop)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(ADDRESS, types.int64), codegen


@intrinsic
def cycles(context):
    """The processor's counter of cycles."""

    def codegen(context, builder, signature, arguments):
        return emit_call(builder, "llvm.readcyclecounter", I64)

    return types.int64(), codegen


def pointer_to(kind):
    """A function that makes a pointer out of an address."""

    @intrinsic
    def pointer(context, address):
        def codegen(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(ADDRESS), codegen

    return pointer


float32_at, float64_at, uint16_at, int32_at, int64_at, uint64_at = map(
    pointer_to, (types.float32, types.float64, types.uint16, types.int32, types.int64, types.uint64)
)
