"""Norm, gate and rotation are what their formulas say in float64, up to the rounding of float32 and of the result."""

import numpy as np
import pytest
import torch

import kernels
from kernels import PAD_SLOT, BadArgument, QKNorm
from tests.kernels.batches import DTYPES, NAN, Recipe, pool
from tests.kernels.dense import half_ulp, largest, max_error
from tests.kernels.test_cache import storage

EPS = torch.finfo(torch.float32).eps
TYPES = pytest.mark.parametrize("dtype", DTYPES)


def both(name: str):
    functions = [getattr(kernels, f"cpu_{name}"), getattr(kernels, f"triton_{name}")]
    return pytest.mark.parametrize(name, functions, ids=["twin", "triton"])


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_bound(exact: torch.Tensor, size: int, dtype: torch.dtype) -> float:
    """A sum of ``size`` squares is off by at most size * eps / 2 relative, its root by half; three roundings follow."""
    return largest(exact) * EPS * (size / 4 + 3) + half_ulp(dtype, largest(exact))


def normed(numbers: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    numbers = numbers.double()
    return numbers / torch.sqrt(numbers.square().mean(-1, keepdim=True) + eps) * weight.double()


@both("rms_norm")
@TYPES
@pytest.mark.parametrize("hidden_size", [1, 48, 576])
def test_a_norm_is_its_formula(rms_norm, dtype, hidden_size):
    hidden = randn(3, 2, hidden_size, dtype=dtype)[:, 1]  # rows of a wider tensor
    weight = randn(hidden_size, seed=1)
    exact = normed(hidden, weight, 1e-5)
    out = rms_norm(hidden, weight, eps=1e-5)
    assert out.dtype == dtype
    assert max_error(out, exact) <= norm_bound(exact, hidden_size, dtype)


@both("add_rms_norm")
@TYPES
def test_a_residual_is_added_first_and_its_rounded_sum_is_normed(add_rms_norm, dtype):
    hidden, residual, weight = randn(3, 80, dtype=dtype), randn(3, 80, dtype=dtype, seed=1), randn(80, seed=2)
    out, total = add_rms_norm(hidden, residual, weight, eps=1e-5)
    assert torch.equal(total, hidden + residual)
    exact = normed(total, weight, 1e-5)
    assert max_error(out, exact) <= norm_bound(exact, 80, dtype)
    plain = kernels.cpu_rms_norm if add_rms_norm is kernels.cpu_add_rms_norm else kernels.triton_rms_norm
    assert torch.equal(out, plain(total, weight, eps=1e-5))


@both("rms_norm")
def test_a_row_of_zeros_stays_zero(rms_norm):
    out = rms_norm(torch.zeros(1, 64), torch.ones(64), eps=1e-6)
    assert torch.equal(out, torch.zeros(1, 64))


@both("rms_norm")
def test_a_norm_does_not_depend_on_other_rows(rms_norm):
    hidden, weight = randn(5, 100), randn(100, seed=1)
    together = rms_norm(hidden, weight, eps=1e-5)
    for row in range(5):
        assert torch.equal(rms_norm(hidden[row : row + 1], weight, eps=1e-5)[0], together[row])


@both("silu_mul")
@TYPES
@pytest.mark.parametrize("size", [5, 1536])
def test_a_gate_is_its_formula(silu_mul, dtype, size):
    fused = randn(3, 2 * size, dtype=dtype) * 8
    gate, up = fused[:, :size], fused[:, size:]
    exact = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    bound = largest(exact) * EPS * (largest(gate) + 6) + half_ulp(dtype, largest(exact))  # e^x carries |x| roundings
    assert max_error(silu_mul(gate, up), exact) <= bound


@both("silu_mul")
def test_gates_far_out_are_zero_and_the_identity(silu_mul):
    gate = torch.tensor([[-200.0, -100.0, 0.0, 100.0]])
    with np.errstate(over="ignore"):  # e^200, in the interpreter
        out = silu_mul(gate, torch.ones(1, 4))
    assert torch.equal(out.abs(), torch.tensor([[0.0, 0.0, 0.0, 100.0]]))


def rotation_of(max_position: int, rotary_size: int) -> torch.Tensor:
    angles = torch.arange(max_position)[:, None] * 10_000.0 ** (-torch.arange(0, rotary_size, 2) / rotary_size)
    return torch.stack([angles.cos(), angles.sin()], 1)


def rotated(heads: torch.Tensor, turns: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Each pair as a complex number, times e^(i angle)."""
    half = turns.shape[2]
    pairs = heads[..., : 2 * half].double()
    pairs = pairs.unflatten(-1, (half, 2)) if is_interleaved else pairs.unflatten(-1, (2, half)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(*turns.double().unbind(1))[:, None]
    turned = torch.view_as_real(turned)
    turned = turned.flatten(-2) if is_interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat([turned, heads[..., 2 * half :].double()], -1)


@both("rotate_write")
@TYPES
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize(("head_size", "rotary_size"), [(32, 32), (80, 64)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_queries_turn_and_keys_turn_on_their_way_into_the_cache(
    rotate_write, dtype, is_interleaved, head_size, rotary_size, has_norm
):
    recipe = Recipe((), (), dtype=dtype, block_size=3, num_kv_heads=3, head_size=head_size)
    key_cache, value_cache = pool(recipe, 2)
    fused = randn(4, 12, head_size, dtype=dtype)  # 6 query heads, 3 key heads, 3 value heads
    before = fused.clone()
    positions, slots = torch.tensor([7, 0, 30, 2]), torch.tensor([4, PAD_SLOT, 0, 5])
    rotation = rotation_of(31, rotary_size)
    norm = QKNorm(randn(head_size, seed=1), randn(head_size, seed=2), 1e-6) if has_norm else None
    rotate_write(
        fused[:, :6], fused[:, 6:9], fused[:, 9:], key_cache, value_cache, positions, slots, rotation,
        is_interleaved=is_interleaved, norm=norm,
    )  # fmt: skip
    query, key, value = before[:, :6], before[:, 6:9], before[:, 9:]
    if norm is not None:
        query, key = normed(query, norm.query_weight, 1e-6), normed(key, norm.key_weight, 1e-6)
    exact_query, exact_key = (rotated(each, rotation[positions], is_interleaved) for each in (query, key))
    assert max_error(fused[:, :6], exact_query) <= 2 * norm_bound(exact_query, head_size * has_norm, dtype)
    assert torch.equal(fused[:, 6:], before[:, 6:])
    for token, slot in enumerate(slots.tolist()):
        if slot != PAD_SLOT:
            found = key_cache[slot // 3, slot % 3]
            bound = 2 * norm_bound(exact_key[token], head_size * has_norm, dtype)
            assert max_error(found, exact_key[token]) <= bound
            assert torch.equal(value_cache[slot // 3, slot % 3], value[token])
    assert storage(key_cache).isfinite().sum() == 3 * 2 * 3 * head_size


def test_cpu_tensors_take_the_twins():
    hidden, weight = randn(2, 64), randn(64, seed=1)
    assert torch.equal(kernels.rms_norm(hidden, weight, eps=1e-5), kernels.cpu_rms_norm(hidden, weight, eps=1e-5))
    ours, total = kernels.add_rms_norm(hidden, hidden, weight, eps=1e-5)
    assert torch.equal(total, 2 * hidden)
    assert torch.equal(ours, kernels.cpu_rms_norm(total, weight, eps=1e-5))
    assert torch.equal(kernels.silu_mul(hidden, hidden), kernels.cpu_silu_mul(hidden, hidden))
    caches = torch.full((2, 1, 2, 1, 64), NAN)
    query, key = randn(1, 2, 64), randn(1, 1, 64)
    turned = query.clone()
    where = torch.tensor([3]), torch.tensor([1])
    kernels.rotate_write(turned, key, key, caches[0], caches[1], *where, rotation_of(4, 64))
    assert not torch.equal(turned, query)
    assert torch.equal(caches[1, 0, 1], key[0])


@both("rms_norm")
@pytest.mark.parametrize(
    ("argument", "hidden", "weight", "found", "needed"),
    [
        ("hidden", torch.zeros(64), torch.zeros(64), 1, 2),
        ("hidden", torch.zeros(2, 64, dtype=torch.float64), torch.zeros(64), "float64", "float32"),
        ("hidden", torch.zeros(64, 2).T, torch.zeros(64), 2, 1),
        ("hidden", torch.zeros(1, 1).expand(1, 40_000).contiguous(), torch.zeros(40_000), 40_000, 32768),
        ("weight", torch.zeros(2, 64), torch.zeros(63), 63, 64),
        ("weight", torch.zeros(2, 64), torch.zeros(64, device="meta"), "meta", "cpu"),
        ("weight", torch.zeros(2, 64), torch.zeros(64, dtype=torch.int64), "int64", "float32"),
    ],
)
def test_a_bad_norm_is_refused(rms_norm, argument, hidden, weight, found, needed):
    with pytest.raises(BadArgument) as raised:
        rms_norm(hidden, weight, eps=1e-5)
    assert raised.value.argument == argument
    assert str(found) in str(raised.value)
    assert str(needed) in str(raised.value)


@both("add_rms_norm")
def test_a_residual_of_another_shape_is_refused(add_rms_norm):
    with pytest.raises(BadArgument, match=r"residual has shape \(1, 64\), needs \(2, 64\)"):
        add_rms_norm(torch.zeros(2, 64), torch.zeros(1, 64), torch.zeros(64), eps=1e-5)


@both("silu_mul")
def test_a_gate_of_another_type_is_refused(silu_mul):
    with pytest.raises(BadArgument, match=r"up has dtype torch.float16, needs torch.float32"):
        silu_mul(torch.zeros(2, 64), torch.zeros(2, 64).half())


@both("rotate_write")
@pytest.mark.parametrize(
    ("argument", "change", "found", "needed"),
    [
        ("query", {"query": torch.zeros(1, 2, 32)}, 1, 2),
        ("query", {"query": torch.zeros(2, 2, 32).half()}, "float16", "float32"),
        ("positions", {"positions": torch.tensor([0, 4])}, 4, "0 to 3"),
        ("positions", {"positions": torch.tensor([0, -1])}, -1, "0 to 3"),
        ("positions", {"positions": torch.tensor([0, 1], dtype=torch.int32)}, "int32", "int64"),
        ("rotation", {"rotation": torch.zeros(4, 2, 17)}, 34, 32),
        ("rotation", {"rotation": torch.zeros(4, 2, 16).half()}, "float16", "float32"),
        ("slot_mapping", {"slot_mapping": torch.tensor([0, 4])}, 4, "0 to 3"),
        ("norm.key_weight", {"norm": QKNorm(torch.zeros(32), torch.zeros(31), 1e-6)}, 31, 32),
    ],
)
def test_a_bad_rotation_is_refused(rotate_write, argument, change, found, needed):
    arguments = {
        "query": torch.ones(2, 2, 32),
        "key": torch.ones(2, 1, 32),
        "value": torch.ones(2, 1, 32),
        "key_cache": torch.zeros(2, 2, 1, 32),
        "value_cache": torch.zeros(2, 2, 1, 32),
        "positions": torch.tensor([0, 1]),
        "slot_mapping": torch.tensor([0, 1]),
        "rotation": rotation_of(4, 32),
    } | change
    query = arguments["query"].clone()
    with pytest.raises(BadArgument) as raised:
        rotate_write(**arguments)
    assert raised.value.argument == argument
    assert str(found) in str(raised.value)
    assert str(needed) in str(raised.value)
    assert torch.equal(arguments["query"], query)
    assert torch.equal(arguments["key_cache"], torch.zeros(2, 2, 1, 32))
