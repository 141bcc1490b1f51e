"""Weights in groups of 4 bits: packed without rounding, and products with them against NumPy around a tile and for each number of rows."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.team import Team, why_not
from tests.kernels.test_int8 import ROWS
from tests.kernels.test_vectors import exact_and_bound as of_whole_numbers

NO_FOUR_BITS = why_not()
if NO_FOUR_BITS is None:
    from kernels.cpu.instructions import why_not_four_bits

    NO_FOUR_BITS = why_not_four_bits()
needs_four_bits = pytest.mark.skipif(NO_FOUR_BITS is not None, reason=f"no weights in 4 bits: {NO_FOUR_BITS}")

SHAPES = ((1, 32), (47, 64), (48, 96), (49, 160), (131, 320))  # columns and depth


def drawn(rows: int, columns: int, depth: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """A left matrix, and a weight's numbers, scales and minima; every number occurs, and scales differ by much."""
    random = torch.Generator().manual_seed(rows * columns + depth)
    numbers = torch.randint(0, 16, (columns, depth), generator=random, dtype=torch.uint8)
    scales, minima = (torch.randn(columns, depth // 32, generator=random) for _ in range(2))
    sizes = torch.exp2(torch.arange(depth // 32) % 7 * 2.0 - 9.0)
    x = torch.randn(rows, depth, generator=random)
    return x, (numbers, (scales * sizes).half(), (minima * 8 * sizes).half())


def in_float64(numbers: Tensor, scales: Tensor, minima: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A weight ``[columns, depth]``, and the sizes of both things of which each number is the sum."""
    scale, least = (each.double().numpy().repeat(32, axis=1) for each in (scales, minima))
    product_part = scale * numbers.double().numpy()
    return product_part + least, np.abs(product_part) + np.abs(least)


def exact_and_bound(x: Tensor, weight: tuple[Tensor, Tensor, Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far a sum of scaled whole numbers and one of minima may be from it, in any order."""
    from kernels.cpu.layout import FOUR_BITS

    numbers, sizes = in_float64(*weight)
    both, bound = of_whole_numbers(x.abs(), torch.from_numpy(sizes), FOUR_BITS)
    return x.double().numpy() @ numbers.T, bound + 2 * np.finfo(np.float32).eps * both


@needs_four_bits
def test_a_packed_weight_holds_each_number_as_it_is() -> None:
    from kernels.cpu.packing import FourBits, pack_four_bits

    for columns, depth in SHAPES:
        one, two = drawn(1, columns, depth)[1], drawn(2, columns, depth)[1]
        packed = pack_four_bits(FourBits(*one), FourBits(*two))
        for weight, found in zip((one, two), packed.numbers(), strict=True):
            assert np.array_equal(found.numpy(), in_float64(*weight)[0].astype(np.float32))
        # 4 bits for each number, and 32 for 32 of them.
        assert packed.tiles.nbytes == 2 * -(-columns // 48) * 48 * depth * 5 // 8


@pytest.mark.slow
@needs_four_bits
def test_a_product_is_numpys_for_every_number_of_rows() -> None:
    from kernels.cpu.alone import linear
    from kernels.cpu.packing import FourBits, pack_four_bits

    team, eps = Team(2), np.finfo(np.float32).eps
    for rows, (columns, depth) in product(ROWS, SHAPES):
        x, weight = drawn(rows, columns, depth)
        packed = pack_four_bits(FourBits(*weight))
        exact, bound = exact_and_bound(x, weight)
        found = linear(x, packed, team).double().numpy()
        assert found.shape == exact.shape
        assert (np.abs(found - exact) <= bound).all(), (rows, columns, depth)
        added = linear(x, packed, team, out=torch.full(found.shape, 2.0)).double().numpy()
        assert (np.abs(added - exact - 2.0) <= bound + eps * (2.0 + np.abs(exact))).all()


@pytest.mark.slow
@needs_four_bits
def test_a_gated_product_is_numpys_for_every_number_of_rows() -> None:
    from kernels.cpu.alone import gated
    from kernels.cpu.packing import FourBits, pack_four_bits

    for rows, (columns, depth) in product(ROWS, SHAPES):
        x, gate = drawn(rows, columns, depth)
        up = drawn(rows + 1, columns, depth)[1]
        (a, a_bound), (b, b_bound) = (exact_and_bound(x, each) for each in (gate, up))
        a = np.clip(a, -80.0, None)
        exact = a / (1 + np.exp(-a)) * b
        # silu changes no faster than its argument times 1.1; the exponential is exact to 4e-6.
        bound = 1.1 * a_bound * (np.abs(b) + b_bound) + np.abs(a) * b_bound + np.abs(exact) * 1e-5 + 1e-30
        found = gated(x, pack_four_bits(FourBits(*gate), FourBits(*up)), Team(2)).double().numpy()
        assert (np.abs(found - exact) <= bound).all(), (rows, columns, depth)


@needs_four_bits
def test_a_row_has_the_same_bits_in_every_batch_and_for_any_number_of_threads() -> None:
    from kernels.cpu.alone import gated, linear
    from kernels.cpu.packing import FourBits, pack_four_bits

    x, weight = drawn(157, 100, 608)
    x[:, ::7] *= 1e-38  # what underflows where a product does not shift a weight's bits down
    one, other = FourBits(*weight), FourBits(*drawn(1, 100, 608)[1])
    packed, pair = pack_four_bits(one), pack_four_bits(one, other)
    together, both = linear(x, packed, Team(2)), gated(x, pair, Team(2))
    assert torch.equal(linear(x, packed, Team(1)), together)
    assert torch.equal(gated(x, pair, Team(1)), both)
    for first, stop in ((0, 1), (3, 10), (20, 43), (127, 157)):  # 1 and 7 rows are not widened, 23 and 30 are
        assert torch.equal(linear(x[first:stop], packed, Team(2)), together[first:stop])
        assert torch.equal(gated(x[first:stop], pair, Team(2)), both[first:stop])


@needs_four_bits
def test_nan_stays_in_its_row_and_a_scale_that_is_not_finite_in_its_column() -> None:
    from kernels.cpu.alone import linear
    from kernels.cpu.packing import FourBits, pack_four_bits

    for rows in (9, 33):
        x, (numbers, scales, minima) = drawn(rows, 50, 96)
        x[4, 2], scales[7, 1], minima[9, 2] = torch.nan, torch.inf, torch.nan
        finite = linear(x, pack_four_bits(FourBits(numbers, scales, minima)), Team(2)).isfinite()
        expected = torch.ones(rows, 50, dtype=torch.bool)
        expected[4], expected[:, 7], expected[:, 9] = False, False, False
        assert torch.equal(finite, expected)


def test_an_instruction_set_without_such_a_product_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions, packing = (pytest.importorskip(f"kernels.cpu.{name}") for name in ("instructions", "packing"))
    features = instructions.AVX2.features
    monkeypatch.setattr(instructions, "HERE", instructions.AVX2)
    monkeypatch.setattr(instructions, "target_features", lambda: features | {"f16c"})
    assert instructions.why_not_four_bits() is None
    monkeypatch.setattr(instructions, "target_features", lambda: features)
    said = (
        "the kernels for AVX2 with FMA have no product in 4 bits, "
        "those of NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c have"
    )
    assert instructions.why_not_four_bits() == said
    with pytest.raises(NotImplementedError, match="no product in 4 bits"):
        packing.pack_four_bits(packing.FourBits(torch.zeros(1, 32), torch.zeros(1, 1), torch.zeros(1, 1)))
