"""Shapes of a tile of AVX2's products, and both types of its left matrix, beside each other and torch's float32 products.

    OMP_NUM_THREADS=1 python -m tests.peers.measure_tiles

Seconds are those of the processor, and all candidates take turns in one process: on a busy machine only the ratios mean something.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.emit import ADDRESS, F32, I32, I64, emit_call, emit_load, emit_loop, emit_store
from kernels.cpu.layout import TILE_COLUMNS, pack_weight

SHAPES = ((3072, 576), (576, 1536))  # columns and depth: gate and up, and down, of SmolLM2-135M
ROWS, TURNS, UNROLL, LANES = 240, 15, 2, 8
FLOATS, INTS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
TILES = [(6, 16, "float32"), (4, 16, "float32"), (4, 24, "float32"), (6, 16, "bfloat16"), (4, 16, "bfloat16")]
"""Rows, columns, and the type of the left matrix; the first is what the others are compared with."""


def splat(builder: Any, scalar: Any) -> Any:
    nothing = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(nothing, scalar, I32(0)), nothing, ir.Constant(INTS, [0] * LANES)
    )


def widen(builder: Any, pairs: Any) -> list[Any]:
    halves = (
        builder.shl(pairs, ir.Constant(INTS, [16] * LANES)),
        builder.and_(pairs, ir.Constant(INTS, [-65536] * LANES)),
    )
    return [builder.bitcast(half, FLOATS) for half in halves]


def left(builder: Any, row: Any, pair: Any, dtype: str) -> list[Any]:
    """Two numbers of the left matrix, each in all lanes."""
    if dtype == "bfloat16":
        return widen(builder, splat(builder, emit_load(builder, builder.add(row, builder.shl(pair, I64(2))), I32)))
    at = builder.add(row, builder.shl(pair, I64(3)))
    return [splat(builder, emit_load(builder, builder.add(at, I64(4 * which)), F32)) for which in range(2)]


def tile_kernel(rows: int, columns: int, dtype: str) -> Any:
    width = columns // LANES

    @intrinsic
    def kernel(context, a, lda, b, pairs, c, ldc):
        def codegen(context, builder, signature, arguments):
            a, lda, b, pairs, c, ldc = arguments
            a_rows = [builder.add(a, builder.mul(lda, I64(row))) for row in range(rows)]

            def turn(i: Any, held: list[Any]) -> list[Any]:
                held = list(held)
                for step in range(UNROLL):
                    pair = builder.add(builder.mul(i, I64(UNROLL)), I64(step))
                    b_row = builder.add(b, builder.mul(pair, I64(4 * TILE_COLUMNS)))
                    at = [builder.add(b_row, I64(4 * LANES * column)) for column in range(width)]
                    right = [widen(builder, emit_load(builder, each, INTS)) for each in at]
                    for row in range(rows):
                        both = left(builder, a_rows[row], pair, dtype)
                        for column in range(width):
                            for x, y in zip(both, right[column], strict=True):
                                place = row * width + column
                                held[place] = emit_call(builder, "llvm.fma.v8f32", FLOATS, x, y, held[place])
                return held

            zeros = [ir.Constant(FLOATS, [0.0] * LANES)] * (rows * width)
            flat = emit_loop(builder, builder.sdiv(pairs, I64(UNROLL)), zeros, turn)
            for place, value in enumerate(flat):
                row, column = divmod(place, width)
                to = builder.add(builder.add(c, builder.mul(ldc, I64(row))), I64(4 * LANES * column))
                emit_store(builder, value, to, 4)
            return context.get_dummy_value()

        return types.void(*[ADDRESS] * 6), codegen

    return kernel


def product(rows: int, columns: int, dtype: str) -> Any:
    """C = A @ B for ``ROWS`` rows, by tiles of one shape."""
    kernel, left_bytes = tile_kernel(rows, columns, dtype), 4 if dtype == "float32" else 2

    @njit(error_model="numpy")
    def run(a, b, depth, num_columns, c):
        for first in range(0, num_columns, TILE_COLUMNS):
            for m in range(0, ROWS, rows):
                for column in range(0, TILE_COLUMNS, columns):
                    at = b + first * depth * 2 + column * 4
                    out = c + m * num_columns * 4 + (first + column) * 4
                    kernel(a + m * depth * left_bytes, depth * left_bytes, at, depth // 2, out, num_columns * 4)

    return run


def seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    torch.set_num_threads(1)
    runs = {f"{rows} x {columns}, {dtype}": (product(rows, columns, dtype), dtype) for rows, columns, dtype in TILES}
    for num_columns, depth in SHAPES:
        x, weight = torch.randn(ROWS, depth).bfloat16(), torch.randn(num_columns, depth).bfloat16()
        packed, out = pack_weight(weight).tiles, torch.zeros(ROWS, num_columns)
        wide_x, wide_weight = x.float(), weight.float()
        exact = wide_x @ wide_weight.T
        candidates: dict[str, Callable[[], object]] = {}
        for name, (run, dtype) in runs.items():
            a = x if dtype == "bfloat16" else wide_x
            places = a.data_ptr(), packed.data_ptr(), depth, num_columns, out.data_ptr()
            candidates[name] = lambda run=run, places=places: run(*places)
            candidates[name]()
            torch.testing.assert_close(out, exact, rtol=1e-3, atol=1e-2)
        candidates["torch's F.linear, float32"] = lambda: torch.nn.functional.linear(wide_x, wide_weight)  # noqa: B023
        turns = [{name: seconds(run) for name, run in candidates.items()} for _ in range(TURNS)]
        for name in candidates:
            ratios = sorted(turn[name] / turn[next(iter(candidates))] for turn in turns)
            print(
                f"{num_columns} x {depth}: {name:26} takes {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
