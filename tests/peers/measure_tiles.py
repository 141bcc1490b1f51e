"""Tiles of AVX2's products beside each other and torch's float32 products: bf16 weights in float32, and whole numbers of 12 bits.

    OMP_NUM_THREADS=1 python -m tests.peers.measure_tiles

Seconds are those of the processor, and all candidates take turns in one process: on a busy machine only the ratios mean something.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from numba import njit

from kernels.cpu.instructions import AVX2, HERE
from kernels.cpu.layout import TILE_COLUMNS, TWELVE_BITS
from kernels.cpu.packing import pack_weight
from kernels.cpu.product import product_kernel
from kernels.cpu.whole import whole_kernel

SHAPES = ((3072, 576), (576, 1536))  # columns and depth: gate and up, and down, of SmolLM2-135M
ROWS, TURNS = 240, 15
TILES = {"float32": (8, 4), "whole numbers": (8, 6, 4, 2)}
"""Rows of a kernel; the first is what all are compared with."""


def product(rows: int, is_whole: bool) -> Any:
    """C = A @ B, or plus what C was, for ``ROWS`` rows, by kernels of so many."""
    columns = TILE_COLUMNS // 16
    kernel: Any = whole_kernel(TWELVE_BITS, rows, columns) if is_whole else product_kernel(rows, columns)

    @njit(error_model="numpy")
    def by_floats(a, lda, b, size, depth, num_columns, c):
        for tile in range(num_columns // TILE_COLUMNS):
            for m in range(0, ROWS, rows):
                out = c + m * num_columns * 4 + tile * TILE_COLUMNS * 4
                kernel(a + m * lda, lda, b + tile * size, TILE_COLUMNS * 4, depth // 2, out, num_columns * 4)

    @njit(error_model="numpy")
    def by_whole_numbers(a, lda, b, size, depth, num_columns, c):
        for tile in range(num_columns // TILE_COLUMNS):
            for m in range(0, ROWS, rows):
                out = c + m * num_columns * 4 + tile * TILE_COLUMNS * 4
                kernel(a + m * lda, lda, b + tile * size, 0, depth, out, num_columns * 4, b + tile * size)

    return by_whole_numbers if is_whole else by_floats


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as a product of whole numbers takes them: numbers, scales, and sums, which weights of 12 bits do not read."""
    groups = x.view(len(x), -1, TWELVE_BITS.group)
    scales = groups.abs().amax(-1, keepdim=True) / TWELVE_BITS.left_limit
    numbers = (groups / scales).round().to(torch.int16).view(len(x), -1).view(torch.int8)
    heads = scales.squeeze(-1).contiguous().view(torch.int8)
    return torch.cat((numbers, heads, torch.zeros_like(heads)), dim=1)


def seconds(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    if HERE is not AVX2:
        raise SystemExit(f"the kernels here are those for {HERE.name}")
    torch.set_num_threads(1)
    runs = {
        f"{kind}, {rows} rows": (product(rows, kind != "float32"), kind) for kind, of in TILES.items() for rows in of
    }
    for num_columns, depth in SHAPES:
        x, weight = torch.randn(ROWS, depth), torch.randn(num_columns, depth).bfloat16()
        wide, out = weight.float(), torch.zeros(ROWS, num_columns)
        pairs = weight.view(-1, TILE_COLUMNS, depth // 2, 2).transpose(1, 2).contiguous()
        packed, left = pack_weight(weight).tiles, rounded(x)
        candidates: dict[str, Callable[[], object]] = {}
        for name, (run, kind) in runs.items():
            a, b = (x, pairs) if kind == "float32" else (left, packed)
            places = a.data_ptr(), a[0].nbytes, b.data_ptr(), b[0].nbytes, depth, num_columns, out.data_ptr()
            candidates[name] = lambda run=run, places=places: run(*places)
            out.zero_()
            candidates[name]()
            torch.testing.assert_close(out, x @ wide.T, rtol=1e-3, atol=4e-2)
        candidates["torch's F.linear, float32"] = lambda: torch.nn.functional.linear(x, wide)  # noqa: B023
        turns = [{name: seconds(run) for name, run in candidates.items()} for _ in range(TURNS)]
        for name in candidates:
            ratios = sorted(turn[name] / turn[next(iter(candidates))] for turn in turns)
            print(
                f"{num_columns} x {depth}: {name:25} takes {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
