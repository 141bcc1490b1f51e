"""Weights in int8: how they are rounded and packed, and products with them against NumPy around a tile and around a group."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.team import Team, why_not
from tests.kernels.test_vectors import exact_and_bound

NO_INT8 = why_not()
if NO_INT8 is None:
    from kernels.cpu.instructions import why_not_int8

    NO_INT8 = why_not_int8()
needs_int8 = pytest.mark.skipif(NO_INT8 is not None, reason=f"no weights in int8: {NO_INT8}")

ROWS = (1, 2, 3, 4, 7, 8, 15, 23, 24, 31, 129)  # each number of rows of a kernel, and where tiles are widened
SHAPES = ((1, 1), (47, 63), (48, 64), (49, 65), (96, 128), (131, 130), (50, 191))  # columns and depth


def drawn(rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows * columns + depth)
    # Groups whose scales differ by much.
    sizes = torch.exp2(torch.arange(depth) // 64 * 3.0 - 4.0)
    x, weight = (torch.randn(size, depth, generator=random) for size in (rows, columns))
    return x.bfloat16(), (weight * sizes).bfloat16()


def rounded(weight: Tensor) -> np.ndarray:
    """What int8 makes of a weight, written down once more: float32, group by group."""
    numbers = weight.float().numpy().copy()
    for start in range(0, numbers.shape[1], 64):
        group = numbers[:, start : start + 64]
        scale = np.abs(group).max(1, keepdims=True) / np.float32(127)
        group[:] = np.where(scale > 0, np.rint(group / np.where(scale > 0, scale, 1)) * scale, 0)
    return numbers


@needs_int8
def test_a_packed_weight_holds_each_number_to_half_a_scale() -> None:
    from kernels.cpu.packing import in_int8, pack_int8_weight

    for columns, depth in SHAPES:
        one, two = drawn(columns, columns, depth)[1], drawn(7, columns, depth)[1]
        packed = pack_int8_weight(one, two)
        assert (packed.padded_depth, packed.padded_columns) == ((depth + 3) // 4 * 4, (columns + 47) // 48 * 48)
        for weight, found in zip((one, two), packed.numbers(), strict=True):
            assert np.array_equal(found.numpy(), rounded(weight))
            scales = in_int8(weight)[1].repeat_interleave(64, 1)[:, :depth]
            assert ((found.double() - weight.double()).abs() <= scales.double() * (0.5 + 2.0**-16)).all()
        assert torch.equal(pack_int8_weight(one, two).tiles, packed.tiles)


@needs_int8
def test_a_group_of_zeros_is_zeros_and_one_with_a_number_that_is_not_finite_has_none_that_is() -> None:
    from kernels.cpu.packing import pack_int8_weight

    weight = drawn(3, 3, 192)[1]
    weight[0, :64], weight[1, 70], weight[2, 130] = 0.0, torch.nan, torch.inf
    found = pack_int8_weight(weight).numbers()[0]
    assert not found[0, :64].any()
    assert not found[1, 64:128].isfinite().any()
    assert not found[2, 128:].isfinite().any()
    assert found[:, :64].isfinite().all()
    assert found[0].isfinite().all()


@pytest.mark.slow
@needs_int8
def test_a_product_is_numpys_for_every_number_of_rows() -> None:
    from kernels.cpu.alone import linear
    from kernels.cpu.packing import pack_int8_weight

    team, eps = Team(2), np.finfo(np.float32).eps
    for rows, (columns, depth) in product(ROWS, SHAPES):
        x, weight = drawn(rows, columns, depth)
        packed = pack_int8_weight(weight)
        exact, bound = exact_and_bound(x, torch.from_numpy(rounded(weight)), packed.whole)
        found = linear(x, packed, team).double().numpy()
        assert found.shape == exact.shape
        assert (np.abs(found - exact) <= bound).all(), (rows, columns, depth)
        added = linear(x, packed, team, out=torch.full(found.shape, 2.0)).double().numpy()
        assert (np.abs(added - exact - 2.0) <= bound + eps * (2.0 + np.abs(exact))).all()


@needs_int8
def test_a_gated_product_is_numpys_for_every_number_of_rows() -> None:
    from kernels.cpu.alone import gated
    from kernels.cpu.packing import pack_int8_weight

    for rows, (columns, depth) in product(ROWS, SHAPES):
        x, gate = drawn(rows, columns, depth)
        up = drawn(rows + 1, columns, depth)[1]
        packed = pack_int8_weight(gate, up)
        (a, a_bound), (b, b_bound) = (
            exact_and_bound(x, torch.from_numpy(rounded(each)), packed.whole) for each in (gate, up)
        )
        a = np.clip(a, -80.0, None)
        exact = a / (1 + np.exp(-a)) * b
        # silu changes no faster than its argument times 1.1; the exponential is exact to 4e-6.
        bound = 1.1 * a_bound * (np.abs(b) + b_bound) + np.abs(a) * b_bound + np.abs(exact) * 1e-5 + 1e-30
        found = gated(x, packed, Team(2)).double().numpy()
        assert (np.abs(found - exact) <= bound).all(), (rows, columns, depth)


@needs_int8
def test_a_row_has_the_same_bits_in_every_batch_and_for_any_number_of_threads() -> None:
    from kernels.cpu.alone import gated, linear
    from kernels.cpu.packing import pack_int8_weight

    x, weight = drawn(157, 100, 600)
    packed, pair = pack_int8_weight(weight), pack_int8_weight(weight, weight.flip(0))
    together, both = linear(x, packed, Team(2)), gated(x, pair, Team(2))
    assert torch.equal(linear(x, packed, Team(1)), together)
    assert torch.equal(gated(x, pair, Team(1)), both)
    for first, stop in ((0, 1), (3, 10), (20, 43), (127, 157)):  # 23 rows are not widened, 30 are
        assert torch.equal(linear(x[first:stop], packed, Team(2)), together[first:stop])
        assert torch.equal(gated(x[first:stop], pair, Team(2)), both[first:stop])


@needs_int8
def test_nan_in_a_row_stays_in_that_row() -> None:
    from kernels.cpu.alone import linear
    from kernels.cpu.packing import pack_int8_weight

    for rows in (9, 33):
        x, weight = drawn(rows, 50, 70)
        x[4, 2] = torch.nan
        found = linear(x, pack_int8_weight(weight), Team(2))
        assert found[4].isnan().all()
        assert found[[row for row in range(rows) if row != 4]].isfinite().all()


def test_an_instruction_set_without_such_a_product_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions, packing = (pytest.importorskip(f"kernels.cpu.{name}") for name in ("instructions", "packing"))
    monkeypatch.setattr(instructions, "HERE", instructions.AVX512)
    said = (
        "the kernels for AVX-512 for bf16 have no product in int8, "
        "those of NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c have"
    )
    assert instructions.why_not_int8() == said
    with pytest.raises(NotImplementedError, match="no product in int8"):
        packing.pack_int8_weight(torch.ones(1, 1))
    monkeypatch.setattr(instructions, "HERE", instructions.AVX2)
    assert instructions.why_not_int8() is None
