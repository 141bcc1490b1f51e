"""Instruction sets: all of the vector kernels that depends on the processor, as one record, and which one is taken here.

Keys and values are bf16 everywhere, which memory must bring. What meets them, small and read again for each tile of columns, is
bf16 where the processor multiplies such pairs itself, and float32 where it would have to be widened each time. Weights are bf16
where it does; where it does not, they are whole numbers (``kernels.cpu.whole``): one instruction multiplies and adds twice as
many pairs of 16 bits as numbers of float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config

from kernels.cpu.emit import (
    F32,
    FLOATS,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    NARROW,
    PAIRS,
    SHORTS,
    emit_call,
    emit_constant,
    emit_fma,
    emit_load,
    emit_splat,
)


@dataclass(frozen=True)
class InstructionSet:
    """One processor's way to multiply bf16 numbers by others and to add that to float32 sums.

    With ``emit_whole_dot`` weights are whole numbers, and only keys and values bf16.
    """

    name: str
    features: frozenset[str]  # LLVM's names of what the processor must have
    num_sums: int  # vectors of sums that registers hold, beside what is multiplied
    tile_rows: int  # rows of a large tile of a product with weights
    left_bytes: int  # of a number of the left matrix: 2 for bf16, 4 for float32
    emit_right: Callable  # (builder, address): a row of pairs of the right matrix, 16 columns
    emit_left: Callable  # (builder, address): two numbers of the left matrix, in all lanes
    emit_dot: Callable  # (builder, sums, left, right): the sums plus both products
    emit_to_left: Callable  # (builder, floats): 16 numbers as those of a left matrix, to the nearest, NaN stays NaN
    emit_scale: Callable  # (builder, x, whole): x * 2**whole, for whole numbers from -127 to 128 and those beyond
    emit_whole_dot: Callable | None  # (builder, sums, left, right): int32 sums plus products of pairs of int16


# AVX-512 for bf16: one instruction multiplies two numbers by two and adds both, in 16 lanes.


def _pairs(builder, address):
    return builder.bitcast(emit_load(builder, address, INTS), PAIRS)


def _pair_in_all_lanes(builder, address):
    return builder.bitcast(emit_splat(builder, emit_load(builder, address, I32), INTS), PAIRS)


def _dot_of_pairs(builder, sums, left, right):
    return emit_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, left, right)


def _narrowed(builder, floats):
    return emit_call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", NARROW, floats)


def _scaled(builder, x, whole):
    return emit_call(builder, "llvm.x86.avx512.mask.scalef.ps.512", FLOATS, x, whole, x, I16(-1), I32(4))


AVX512 = InstructionSet(
    name="AVX-512 for bf16",
    features=frozenset({"avx512bf16"}),
    num_sums=24,
    tile_rows=8,
    left_bytes=2,
    emit_right=_pairs,
    emit_left=_pair_in_all_lanes,
    emit_dot=_dot_of_pairs,
    emit_to_left=_narrowed,
    emit_scale=_scaled,
    emit_whole_dot=None,
)


# AVX2 with FMA: a bf16 number is the upper half of a float32; two multiplications of those, one after the other.


def _widened(builder, address):
    pairs = emit_load(builder, address, INTS)
    first = builder.shl(pairs, ir.Constant(INTS, [16] * LANES))
    second = builder.and_(pairs, ir.Constant(INTS, [-(1 << 16)] * LANES))
    return builder.bitcast(first, FLOATS), builder.bitcast(second, FLOATS)


def _both_in_all_lanes(builder, address):
    numbers = (emit_load(builder, builder.add(address, I64(4 * which)), F32) for which in range(2))
    return [emit_splat(builder, number, FLOATS) for number in numbers]


def _dot_of_floats(builder, sums, left, right):
    for a, b in zip(left, right, strict=True):
        sums = emit_fma(builder, a, b, sums)
    return sums


def _as_they_are(builder, floats):
    return floats


HALF = ir.VectorType(I32, LANES // 2)


def _dot_of_whole_numbers(builder, sums, left, right):
    """In two registers, as LLVM has no such instruction for vectors that it cuts in two."""
    found = []
    for first in (0, LANES // 2):
        lanes = ir.Constant(HALF, list(range(first, first + LANES // 2)))
        pairs = (builder.shuffle_vector(each, each, lanes) for each in (left, right))
        found.append(
            emit_call(builder, "llvm.x86.avx2.pmadd.wd", HALF, *(builder.bitcast(each, SHORTS) for each in pairs))
        )
    return builder.add(sums, builder.shuffle_vector(*found, ir.Constant(INTS, list(range(LANES)))))


def _scaled_by_exponent(builder, x, whole):
    """The power of two is made of its exponent: 0 is 0, 255 infinity. Added to 1.5 * 2**23, the last bits of a sum are its other part."""
    for limit, beyond in ((-127.0, "<"), (128.0, ">")):
        whole = builder.select(builder.fcmp_ordered(beyond, whole, emit_constant(limit)), emit_constant(limit), whole)
    bits = builder.bitcast(builder.fadd(whole, emit_constant(1.5 * 2.0**23)), INTS)
    exponent = builder.add(bits, ir.Constant(INTS, [127] * LANES))
    return builder.fmul(x, builder.bitcast(builder.shl(exponent, ir.Constant(INTS, [23] * LANES)), FLOATS))


AVX2 = InstructionSet(
    name="AVX2 with FMA",
    features=frozenset({"avx2", "fma"}),
    num_sums=5,  # with 6, LLVM puts some of them on the stack in every turn
    tile_rows=6,
    left_bytes=4,
    emit_right=_widened,
    emit_left=_both_in_all_lanes,
    emit_dot=_dot_of_floats,
    emit_to_left=_as_they_are,
    emit_scale=_scaled_by_exponent,
    emit_whole_dot=_dot_of_whole_numbers,
)


def host_features() -> frozenset[str]:
    """What this processor has."""
    return frozenset(name for name, has in get_host_cpu_features().items() if has)


def target_features() -> frozenset[str]:
    """What numba compiles for: this processor, unless ``NUMBA_CPU_FEATURES`` says something else."""
    if config.CPU_FEATURES is None:
        return host_features()
    return frozenset(each[1:] for each in config.CPU_FEATURES.split(",") if each.startswith("+"))


SETS = (AVX512, AVX2)
HERE = next((each for each in SETS if each.features <= target_features()), AVX2)
"""The best one that numba compiles for; ``why_not`` says whether this processor has it."""


def reason() -> str:
    """Which instruction set it is and what it makes of weights in bf16, and why."""
    missing = [each.name for each in SETS[: SETS.index(HERE)]]
    why = f"this processor has no {', '.join(missing)}" if missing else "this processor has it"
    if config.CPU_FEATURES is not None:
        why = "NUMBA_CPU_FEATURES asks for it"
    weights = "" if HERE.emit_whole_dot is None else ", weights as whole numbers of 12 bits"
    return f"{HERE.name}{weights}, {why}"


def why_not() -> str | None:
    """Why this processor can not run it, or None if it can."""
    return None if HERE.features <= host_features() else f"this processor has no {HERE.name}"


def why_not_int8() -> str | None:
    """Why there are no weights in int8 with it, or None if there are."""
    return None if HERE.emit_whole_dot is not None else _no_product("int8")


def why_not_four_bits() -> str | None:
    """Why there are no weights in groups of 4 bits with it, or None if there are."""
    return None if HERE.emit_whole_dot is not None and "f16c" in target_features() else _no_product("4 bits")


def _no_product(what: str) -> str:
    variables = "NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c"
    return f"the kernels for {HERE.name} have no product in {what}, those of {variables} have"
