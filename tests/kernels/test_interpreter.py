"""The interpreter computes in bfloat16 what a GPU does, once repaired."""

import torch
import triton
import triton.language as tl

from tests.kernels.batches import NAN


@triton.jit
def cast_kernel(out_ptr, numbers_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(numbers_ptr + at).to(tl.bfloat16))


@triton.jit
def product_kernel(out_ptr, a_ptr, b_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def test_a_cast_to_bfloat16_rounds_to_nearest_even():
    ties = torch.tensor([1.00390625, 1.01171875, 0.0, -0.0, float("inf"), -float("inf"), 3.4e38, 1e-40])
    numbers = torch.cat([ties, torch.randn(56, generator=torch.Generator().manual_seed(0))])
    out = torch.empty(64, dtype=torch.bfloat16)
    cast_kernel[(1,)](out, numbers, SIZE=64)
    assert torch.equal(out, numbers.bfloat16())


def test_a_cast_to_bfloat16_keeps_nan():
    out = torch.empty(16, dtype=torch.bfloat16)
    cast_kernel[(1,)](out, torch.full((16,), NAN), SIZE=16)
    assert out.isnan().all()


def test_a_product_of_bfloat16_multiplies_numbers():
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(16, 16)
    product_kernel[(1,)](out, a, b, SIZE=16)
    torch.testing.assert_close(out, a.float() @ b.float())
