"""The instruction sets of the vector kernels: what is written for each, also for those that this processor lacks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

TILE = """
from numba import njit, types
from kernels.cpu.instructions import HERE, reason
from kernels.cpu.layout import TWELVE_BITS
from kernels.cpu.product import product_kernel
from kernels.cpu.whole import whole_kernel

kernel = KERNEL


@njit
def tile(a, lda, b, ldb, pairs, c, ldc, ahead):
    kernel(a, lda, b, ldb, pairs, c, ldcMORE)


tile.compile((types.int64,) * 8)
print(HERE.name, reason(), tile.inspect_asm(tile.signatures[0]), sep="\\n")
"""
BF16 = TILE.replace("KERNEL", "product_kernel(8, 3)").replace("MORE", "")
WHOLE = TILE.replace("KERNEL", "whole_kernel(TWELVE_BITS, 6, 3)").replace("MORE", ", ahead")
AVX2 = "+avx,+avx2,+fma,+sse,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx512bf16"


def written(cpu: str, features: str, folder: Path, tile: str = BF16) -> tuple[str, str, str]:
    """The instruction set that is taken for such a processor, why, and the assembly of a tile of a product; nothing of it is run."""
    variables = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(folder)}
    run = subprocess.run(
        [sys.executable, "-c", tile], capture_output=True, text=True, check=True, env={**os.environ, **variables}
    )
    name, why, assembly = run.stdout.split("\n", 2)
    return name, why, assembly


SPILL = re.compile(r"%[xyz]mm\d+, -?\d*\(%rsp\)|-?\d*\(%rsp\), %[xyz]mm\d+")
"""A vector register that goes to the stack or comes from there."""


@pytest.mark.slow
def test_avx_512_multiplies_pairs_of_bf16_and_keeps_a_tile_in_its_registers(tmp_path: Path) -> None:
    name, why, assembly = written("znver4", AVX512, tmp_path)
    assert name == "AVX-512 for bf16"
    assert why == "AVX-512 for bf16, NUMBA_CPU_FEATURES asks for it"
    assert len(set(re.findall(r"vdpbf16ps\b.*(%zmm\d+)", assembly))) == 8 * 3  # each is a sum of 16 columns
    assert "vfmadd" not in assembly
    assert not SPILL.search(assembly)


@pytest.mark.slow
def test_avx2_widens_bf16_and_uses_nothing_that_it_lacks(tmp_path: Path) -> None:
    name, _, assembly = written("haswell", AVX2, tmp_path)
    assert name == "AVX2 with FMA"
    assert len(set(re.findall(r"vfmadd\w+ps\b.*(%ymm\d+)", assembly))) >= 4 * 2  # each is a sum of 8 columns
    assert not re.search(r"%zmm|%k\d|vdpbf16ps", assembly)
    assert not SPILL.search(assembly)


@pytest.mark.slow
def test_avx2_multiplies_twice_as_many_whole_numbers_at_once(tmp_path: Path) -> None:
    _, _, assembly = written("haswell", AVX2, tmp_path, WHOLE)
    assert len(set(re.findall(r"vpmaddwd\b.*(%ymm\d+)", assembly))) >= 4
    assert len(re.findall(r"prefetcht1", assembly)) >= 3  # one for each 16 columns
    assert not re.search(r"%zmm|%k\d|vpdpwssd", assembly)
    # The turn of the loop: of its 12 sums at most one lies in memory.
    loops = [part for part in re.split(r"\.LBB\d+_\d+:", assembly) if "vpmaddwd" in part]
    assert max(len(SPILL.findall(part.split("\tj")[0])) for part in loops) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "more"),
    [
        ("alderlake", ",+avxvnni"),
        ("icelake-server", ",+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx512vnni"),
    ],
    ids=["AVX-VNNI", "AVX-512 VNNI"],
)
def test_where_there_is_vnni_a_multiplication_and_its_addition_are_one(cpu: str, more: str, tmp_path: Path) -> None:
    name, _, assembly = written(cpu, AVX2 + more, tmp_path, WHOLE)
    assert name == "AVX2 with FMA"
    assert "vpdpwssd" in assembly
