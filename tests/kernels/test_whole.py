"""Weights in bf16 as whole numbers of 12 bits, and sums of whole numbers at their limits."""

import doctest

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.team import Team, why_not

WHY_NOT = why_not()
if WHY_NOT is None:
    from kernels.cpu.instructions import HERE

    WHY_NOT = None if HERE.emit_whole_dot is not None else f"weights are bf16 with {HERE.name}"
needs_whole_numbers = pytest.mark.skipif(WHY_NOT is not None, reason=f"no products of whole numbers: {WHY_NOT}")

SHAPES = ((1, 1), (47, 63), (48, 64), (49, 65), (96, 128), (131, 190))  # columns and depth


def twelve_bits(weight: Tensor) -> np.ndarray:
    """What 12 bits make of a weight, written down once more: float64, group by group."""
    numbers = weight.double().numpy().copy()
    for start in range(0, numbers.shape[1], 64):
        group = numbers[:, start : start + 64]
        largest = np.abs(group).max(1, keepdims=True)
        _, power = np.frexp(np.where(np.isfinite(largest), largest, 0.0))
        scale = np.exp2(np.maximum(power - 12, -126).astype(np.float64))
        group[:] = np.where(np.isfinite(largest), np.rint(group / scale) * scale, np.nan)
    return numbers


def drawn(columns: int, depth: int) -> Tensor:
    """Numbers of many sizes, groups of which some are far from others, and all that bf16 has besides."""
    random = torch.Generator().manual_seed(columns + depth)
    weight = torch.randn(columns, depth, generator=random) * torch.exp2(
        torch.randint(-9, 3, (columns, depth), generator=random).float()
    )
    weight *= torch.exp2(torch.arange(columns) % 5 * 50.0 - 110.0).unsqueeze(1)
    for place, special in enumerate((torch.nan, torch.inf, -torch.inf, 0.0, 1e-40, 3.3e38)):
        weight[place % columns, place * 13 % depth] = special
    return weight.bfloat16()


@needs_whole_numbers
def test_a_packed_weight_holds_the_first_twelve_bits_of_each_group() -> None:
    from kernels.cpu.packing import pack_weight

    for columns, depth in SHAPES:
        one, two = drawn(columns, depth), drawn(columns, depth).flip(1)
        packed = pack_weight(one, two)
        assert (packed.padded_depth, packed.padded_columns) == ((depth + 3) // 4 * 4, (columns + 47) // 48 * 48)
        for weight, found in zip((one, two), packed.numbers(), strict=True):
            assert np.array_equal(found.double().numpy(), twelve_bits(weight), equal_nan=True), (columns, depth)
        assert torch.equal(pack_weight(one, two).tiles, packed.tiles)


@needs_whole_numbers
def test_a_number_within_a_sixteenth_of_the_largest_is_what_it_was() -> None:
    from kernels.cpu.packing import pack_weight

    weight = torch.rand(50, 200).mul_(15 / 16).add_(1 / 16).bfloat16()
    weight[:, ::3] *= -1
    weight[:, ::64] = 0.998  # as large as any
    assert torch.equal(pack_weight(weight).numbers()[0], weight.float())


@needs_whole_numbers
def test_sums_of_the_largest_numbers_do_not_overflow() -> None:
    from kernels.cpu.alone import linear
    from kernels.cpu.packing import FourBits, pack_four_bits, pack_int8_weight, pack_weight

    team, depth = Team(2), 192
    weight, whole = torch.full((50, depth), 255.0 / 256).bfloat16(), torch.full((50, depth), 15, dtype=torch.uint8)
    scales = torch.ones(50, depth // 32, dtype=torch.float16)
    for packed in (
        pack_weight(weight),
        pack_int8_weight(weight),
        pack_four_bits(FourBits(whole, scales, -scales)),
    ):
        for rows in (1, 2, 4, 6, 24):
            x = torch.full((rows, depth), 3.0)
            x[-1] *= -1
            exact = x.double() @ packed.numbers()[0].double().T
            torch.testing.assert_close(linear(x, packed, team).double(), exact, rtol=1e-6, atol=0.0)


@needs_whole_numbers
def test_rows_of_any_size_are_rounded_by_themselves() -> None:
    from kernels.cpu.alone import linear
    from kernels.cpu.packing import pack_weight

    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 130, generator=random), torch.randn(60, 130, generator=random).bfloat16()
    packed, team = pack_weight(weight), Team(2)
    plain = linear(x, packed, team)
    powers = torch.arange(40) * 5.0 - 100.0
    assert torch.equal(
        linear(x * torch.exp2(powers).unsqueeze(1), packed, team), plain * torch.exp2(powers).unsqueeze(1)
    )
    assert not linear(torch.zeros(3, 130), packed, team).any()
    tiny = linear(torch.full((1, 64), 1e-36), pack_weight(torch.ones(3, 64)), team)  # less than what is divided by
    torch.testing.assert_close(tiny, torch.full((1, 3), 6.4e-35), rtol=1e-2, atol=0.0)
    for special in (torch.nan, torch.inf, -torch.inf):
        x[7, 129] = special
        finite = linear(x, packed, team).isfinite()
        assert not finite[7].any()
        assert finite[[row for row in range(40) if row != 7]].all()


@pytest.mark.parametrize("name", ["layout", "workspace"])
def test_the_examples_in_docstrings_are_true(name: str) -> None:
    found = doctest.testmod(pytest.importorskip(f"kernels.cpu.{name}"))
    assert found.attempted
    assert not found.failed
