"""The vector kernels of a CPU: products against NumPy for every shape of a tile, attention against dense attention."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kernels.cpu.team import Team, _quota, usable_cores, why_not
from spec.conformance.adapters.kernels_attention import vectors
from spec.conformance.kernel import judge_numbers
from spec.conformance.kernel_checks import BITS, NUMBERS, READS, Check, cases

NO_VECTORS = why_not()
needs_vectors = pytest.mark.skipif(NO_VECTORS is not None, reason=f"no vector kernels: {NO_VECTORS}")

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 31, 33, 127, 129, 200)  # each remainder of 8, and units of 128
JUDGED = {"reads": READS, "numbers": NUMBERS, "bits": BITS}
SHAPES = ((1, 1), (47, 2), (48, 3), (49, 5), (96, 64), (131, 130))  # columns and depth: odd, and around a tile's 48


def drawn(rows: int, columns: int, depth: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows * columns + depth)
    return (
        torch.randn(rows, depth, generator=random).bfloat16(),
        torch.randn(columns, depth, generator=random).bfloat16(),
    )


def exact_and_bound(x: Tensor, weight: Tensor, whole: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far a float32 sum of exact products may be from it, in any order.

    Where the kernels multiply whole numbers (``layout.Whole``), each of ``x`` may be half of its group's scale off.
    """
    a, b = x.double().numpy(), np.abs(weight.double().numpy())
    eps = np.finfo(np.float32).eps
    bound = (a.shape[1] + 1) * eps * (np.abs(a) @ b.T)
    for first in range(0, a.shape[1], whole.group) if whole is not None else ():
        part = slice(first, first + whole.group)
        half = np.abs(a[:, part]).max(1) / whole.left_limit * (0.5 + 2.0**-10) + 2.0**-126
        bound += half[:, None] * b[:, part].sum(1)
    return a @ weight.double().numpy().T, bound


@needs_vectors
def test_a_product_is_numpys_for_every_number_of_rows() -> None:
    from kernels.cpu.alone import linear
    from kernels.cpu.packing import pack_weight

    team = Team(2)
    for rows, (columns, depth) in product(ROWS, SHAPES):
        x, weight = drawn(rows, columns, depth)
        packed = pack_weight(weight)
        exact, bound = exact_and_bound(x, packed.numbers()[0], packed.whole)
        found = linear(x, packed, team).double().numpy()
        assert found.shape == exact.shape
        assert (np.abs(found - exact) <= bound).all(), (rows, columns, depth)
        added = linear(x, packed, team, out=torch.full(found.shape, 2.0)).double().numpy()
        assert (np.abs(added - exact - 2.0) <= bound + np.finfo(np.float32).eps * (2.0 + np.abs(exact))).all()


@needs_vectors
def test_a_gated_product_is_numpys_for_every_number_of_rows() -> None:
    from kernels.cpu.alone import gated
    from kernels.cpu.packing import pack_weight

    for rows, (columns, depth) in product(ROWS, SHAPES):
        x, gate = drawn(rows, columns, depth)
        up = drawn(rows + 1, columns, depth)[1]
        packed = pack_weight(gate, up)
        (a, a_bound), (b, b_bound) = (exact_and_bound(x, each, packed.whole) for each in packed.numbers())
        a = np.clip(a, -80.0, None)
        exact = a / (1 + np.exp(-a)) * b
        # silu changes no faster than its argument times 1.1; the exponential is exact to 4e-6, bf16 to a part in 256.
        bound = 1.1 * a_bound * (np.abs(b) + b_bound) + np.abs(a) * b_bound + np.abs(exact) * (2.0**-8 + 1e-5) + 1e-30
        found = gated(x, packed, Team(2)).double().numpy()
        assert (np.abs(found - exact) <= bound).all(), (rows, columns, depth)


@needs_vectors
def test_a_gate_far_from_zero_neither_overflows_nor_vanishes() -> None:
    from kernels.cpu.alone import gated
    from kernels.cpu.layout import LEFT
    from kernels.cpu.packing import pack_weight

    one = pack_weight(torch.ones(1, 1), torch.ones(1, 1))
    x = torch.tensor([[-300.0], [-1e30], [300.0], [0.0], [torch.nan]])
    found = gated(x, one, Team(1)).flatten().tolist()
    assert [found[0], found[1], found[3]] == [0.0, 0.0, 0.0]
    assert found[2] == pytest.approx(float(torch.tensor(300.0**2).to(LEFT)), rel=1e-6)
    assert found[4] != found[4]


@needs_vectors
def test_the_exponential_of_a_gate_is_exact_from_the_smallest_numbers_to_the_largest() -> None:
    from kernels.cpu.alone import gated
    from kernels.cpu.packing import pack_weight

    x = torch.linspace(-100, 100, 801).bfloat16().unsqueeze(1)
    one = torch.ones(1, 1)
    found, a = gated(x, pack_weight(one, one), Team(1)).double().numpy(), x.double().numpy()
    exact = a * a / (1 + np.exp(-a))
    assert (np.abs(found - exact) <= np.abs(exact) * (2.0**-8 + 1e-5) + 1e-30).all()


@needs_vectors
def test_a_row_has_the_same_bits_in_every_batch() -> None:
    from kernels.cpu.alone import linear
    from kernels.cpu.packing import pack_weight

    x, weight = drawn(140, 100, 576)
    packed, team = pack_weight(weight), Team(2)
    together = linear(x, packed, team)
    for first, stop in ((0, 1), (3, 10), (127, 140)):
        assert torch.equal(linear(x[first:stop], packed, team), together[first:stop])


@needs_vectors
def test_nan_in_a_row_stays_in_that_row() -> None:
    from kernels.cpu.alone import linear
    from kernels.cpu.packing import pack_weight

    x, weight = drawn(9, 50, 7)
    x[4, 2] = torch.nan
    found = linear(x, pack_weight(weight), Team(2))
    assert found[4].isnan().all()
    assert found[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


CHECKS = [(f"{what}-{name}", check) for what, all_of_it in JUDGED.items() for name, check in all_of_it.items()]


@pytest.mark.slow
@needs_vectors
@pytest.mark.parametrize("check", [check for _, check in CHECKS], ids=[name for name, _ in CHECKS])
def test_attention_is_judged_like_every_kernel(check: Check) -> None:
    if (missing := check.missing(vectors)) is None:
        check(vectors)
    else:
        assert not vectors.can(*check.offers), missing


@needs_vectors
@pytest.mark.slow
@settings(max_examples=settings.default.max_examples)
@given(cases(vectors))
def test_attention_is_dense_attention_for_any_table(case: object) -> None:
    judge_numbers(vectors, case)


QUERY_AND_KEYS = (((1, 1, 16), 1e18), ((1, 16, 1, 16), -1e18))
"""Scores of -1.6e37, below every number that could stand for "unseen"."""


@needs_vectors
def test_an_unseen_cell_has_no_weight_however_low_the_scores_are() -> None:
    from kernels.cpu.alone import packed_attention
    from kernels.cpu.layout import pack_blocks_for_products

    query, keys = (torch.full(shape, value, dtype=torch.bfloat16) for shape, value in QUERY_AND_KEYS)
    values = torch.full((1, 16, 1, 16), 7.0, dtype=torch.bfloat16)
    values[0, :3] = 1.0  # of the three tokens that are there
    caches = pack_blocks_for_products(keys, values)
    tables, lens, start = (torch.tensor(each, dtype=torch.int32) for each in ([[0]], [3], [0, 1]))
    found = packed_attention(query, *caches, tables, lens, start, team=Team(1), scale=1.0)
    assert found.flatten().tolist() == [1.0] * 16


def test_cores_are_no_more_than_the_control_group_grants(tmp_path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("150000 100000\n")
    assert _quota(quota) == 2
    quota.write_text("max 100000\n")
    assert _quota(quota) > 1000
    assert _quota(tmp_path / "missing") > 1000
    assert 1 <= usable_cores() <= 4096


def test_an_arena_cuts_tensors_that_do_not_overlap_and_begin_at_cache_lines() -> None:
    from kernels.cpu.memory import CHUNK, Arena

    arena = Arena()
    shapes = [(3, 5), (1,), (CHUNK // 8, 3), (64,)]  # the third is larger than what is left of a chunk
    made = [arena.zeros(shape, torch.float32) for shape in shapes]
    for index, tensor in enumerate(made):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(index + 1.0)
    for _ in range(2):
        found = [(float(tensor.min()), float(tensor.max())) for tensor in made]
        assert found == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0)]
        arena.to_huge_pages()
