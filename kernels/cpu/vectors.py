"""Vector functions that compiled code calls: exponentials and what is made of them, the largest number, counters, pointers."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.emit import (
    ADDRESS,
    F32,
    FIRST_CACHE,
    FLOATS,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    MASK,
    SHORTS,
    emit_call,
    emit_constant,
    emit_fetch,
    emit_fma,
    emit_load,
    emit_loop,
    emit_splat,
    emit_store,
)
from kernels.cpu.instructions import HERE

LEFT_BYTES = HERE.left_bytes  # of a number of a left matrix
LEFT_SHIFT = LEFT_BYTES.bit_length() - 1
LOWEST = -3.4028234663852886e38  # where the search for the largest score begins: no finite one is below
LOG2_E = 1.4426950408889634


def emit_exp2(builder, x):
    """``2**x`` of 16 numbers with a relative error of about 4e-6: a polynomial, scaled by the whole part. NaN stays NaN."""
    x = builder.select(builder.fcmp_ordered("<", x, emit_constant(LOWEST)), emit_constant(LOWEST), x)  # not -inf - -inf
    whole = emit_call(builder, "llvm.rint.v16f32", FLOATS, x)
    rest, poly = builder.fsub(x, whole), emit_constant(0.0096181291)
    for factor in (0.0555041087, 0.2402265069, 0.6931471806, 1.0):
        poly = emit_fma(builder, poly, rest, emit_constant(factor))
    return HERE.emit_scale(builder, poly, whole)


@intrinsic
def silu_mul(context, gate, up, out):
    """``out`` (left) = silu(gate) * up, 16 float32 numbers."""

    def codegen(context, builder, signature, arguments):
        gate, up, out = arguments
        g, u = emit_load(builder, gate, FLOATS), emit_load(builder, up, FLOATS)
        power = emit_exp2(builder, builder.fmul(g, emit_constant(-LOG2_E)))
        value = builder.fmul(builder.fdiv(g, builder.fadd(power, emit_constant(1.0))), u)
        emit_store(builder, HERE.emit_to_left(builder, value), out)
        return context.get_dummy_value()

    return types.void(ADDRESS, ADDRESS, ADDRESS), codegen


@intrinsic
def scale_left(context, floats, factor, out):
    """``out`` (left) = 16 float32 numbers times a factor."""

    def codegen(context, builder, signature, arguments):
        floats, factor, out = arguments
        value = builder.fmul(emit_load(builder, floats, FLOATS), emit_splat(builder, factor, FLOATS))
        emit_store(builder, HERE.emit_to_left(builder, value), out)
        return context.get_dummy_value()

    return types.void(ADDRESS, types.float32, ADDRESS), codegen


@intrinsic
def softmax(context, scores, weights, first, stop, vectors, scale):
    """``weights`` (left) = exp(scale * (score - largest)) of the scores ``first`` to ``stop``, 0 of the others.

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

        def either(i, whole, part):
            """``whole(i)`` where all 16 scores are seen, which needs no mask, or ``part(i)``, which is the same."""
            begins = builder.shl(i, I64(4))
            after = builder.icmp_signed(">=", begins, first)
            before = builder.icmp_signed("<=", builder.add(begins, I64(LANES)), stop)
            with builder.if_else(builder.and_(after, before)) as (then, otherwise):
                with then:
                    one, one_block = whole(i), builder.block
                with otherwise:
                    other, other_block = part(i), builder.block
            value = builder.phi(FLOATS)
            value.add_incoming(one, one_block)
            value.add_incoming(other, other_block)
            return value

        def unmasked(i):
            return builder.fmul(emit_load(builder, builder.add(scores, builder.shl(i, I64(6))), FLOATS), factor)

        def larger(i, held):
            score = either(i, unmasked, lambda i: scaled(i)[1])
            return [builder.select(builder.fcmp_ordered(">", score, held[0]), score, held[0])]

        [largest] = emit_loop(builder, vectors, [emit_constant(LOWEST)], larger)
        largest = emit_splat(builder, emit_call(builder, "llvm.vector.reduce.fmax.v16f32", F32, largest), FLOATS)

        def masked_power(i):
            seen, score = scaled(i)
            return builder.select(seen, emit_exp2(builder, builder.fsub(score, largest)), emit_constant(0.0))

        def exponentials(i, held):
            power = either(i, lambda i: emit_exp2(builder, builder.fsub(unmasked(i), largest)), masked_power)
            emit_store(
                builder, HERE.emit_to_left(builder, power), builder.add(weights, builder.shl(i, I64(LEFT_SHIFT + 4)))
            )
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
def all_finite(context, numbers, vectors):
    """Whether ``32 * vectors`` bf16 numbers are all finite: the exponent of none has only ones."""

    def codegen(context, builder, signature, arguments):
        numbers, vectors = arguments
        kind = ir.VectorType(I16, 2 * LANES)
        ones = ir.Constant(kind, [0x7F80] * (2 * LANES))

        def turn(i, held):
            bits = emit_load(builder, builder.add(numbers, builder.shl(i, I64(6))), kind, 2)
            return [builder.or_(held[0], builder.icmp_signed("==", builder.and_(bits, ones), ones))]

        [found] = emit_loop(
            builder, vectors, [ir.Constant(ir.VectorType(ir.IntType(1), 2 * LANES), [0] * 2 * LANES)], turn
        )
        return builder.not_(emit_call(builder, "llvm.vector.reduce.or.v32i1", ir.IntType(1), found))

    return types.boolean(ADDRESS, types.int64), codegen


@intrinsic
def round_group(context, floats, count, vectors, most, numbers, scale, total):
    """Rounds ``count`` float32 numbers to whole ones of 16 bits, of which the largest is ``most``, and fills up with zeros to ``16 * vectors``.

    Stores at ``scale`` what one stands for, and at ``total`` the sum of all, times that. Where a number is not finite, neither is the scale.
    """

    def codegen(context, builder, signature, arguments):
        floats, count, vectors, most, numbers, scale, total = arguments
        end = emit_splat(builder, builder.trunc(count, I32), INTS)
        lanes = ir.Constant(INTS, list(range(LANES)))

        def load(i):
            place = builder.add(emit_splat(builder, builder.trunc(builder.shl(i, I64(4)), I32), INTS), lanes)
            there = builder.icmp_signed("<", place, end)
            at = builder.inttoptr(builder.add(floats, builder.shl(i, I64(6))), ir.PointerType(FLOATS))
            return emit_call(builder, "llvm.masked.load.v16f32.p0", FLOATS, at, I32(4), there, emit_constant(0.0))

        def largest(i, held):
            """As bits, in whose order NaN is above infinity."""
            bits = builder.and_(builder.bitcast(load(i), INTS), ir.Constant(INTS, [0x7FFFFFFF] * LANES))
            return [builder.select(builder.icmp_signed(">", bits, held[0]), bits, held[0])]

        [top] = emit_loop(builder, vectors, [ir.Constant(INTS, [0] * LANES)], largest)
        top = builder.bitcast(emit_call(builder, "llvm.vector.reduce.smax.v16i32", I32, top), F32)
        least = builder.fmul(most, F32(2.0**-126))  # of smaller ones the factor would be infinite
        top = builder.select(builder.fcmp_ordered("<", top, least), least, top)
        one = builder.fdiv(top, most)
        factor = emit_splat(builder, builder.fdiv(most, top), FLOATS)

        def rounded(i, held):
            x = emit_call(builder, "llvm.rint.v16f32", FLOATS, builder.fmul(load(i), factor))
            x = builder.select(builder.fcmp_ordered("ord", x, x), x, emit_constant(0.0))
            whole = builder.fptosi(x, INTS)
            emit_store(builder, builder.trunc(whole, SHORTS), builder.add(numbers, builder.shl(i, I64(5))))
            return [builder.add(held[0], whole)]

        [sums] = emit_loop(builder, vectors, [ir.Constant(INTS, [0] * LANES)], rounded)
        whole = builder.sitofp(emit_call(builder, "llvm.vector.reduce.add.v16i32", I32, sums), F32)
        emit_store(builder, one, scale, 4)
        emit_store(builder, builder.fmul(whole, one), total, 4)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(ADDRESS, i64, i64, types.float32, ADDRESS, ADDRESS, ADDRESS), codegen


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


@intrinsic
def fetch(context, address, num_bytes):
    """Asks for so many bytes, which will be read soon; nothing waits for them."""

    def codegen(context, builder, signature, arguments):
        address, num_bytes = arguments

        def turn(i, held):
            emit_fetch(builder, builder.add(address, builder.shl(i, I64(6))), FIRST_CACHE)
            return []

        emit_loop(builder, builder.lshr(num_bytes, I64(6)), [], turn)
        return context.get_dummy_value()

    return types.void(ADDRESS, types.int64), codegen


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

if LEFT_BYTES == 2:
    left_at, to_left = uint16_at, narrow
else:
    left_at = float32_at

    @njit(inline="always")
    def to_left(x):
        """A float32 as a number of a left matrix."""
        return x
