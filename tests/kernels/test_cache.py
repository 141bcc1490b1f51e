"""Writes and copies put the right bytes into the right cells and leave all others as they were."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import (
    PAD_SLOT,
    BadArgument,
    copy_blocks,
    cpu_copy_blocks,
    cpu_pack_blocks,
    cpu_unpack_blocks,
    cpu_write_kv,
    pack_blocks,
    triton_copy_blocks,
    triton_pack_blocks,
    triton_unpack_blocks,
    triton_write_kv,
    unpack_blocks,
    write_kv,
)
from tests.kernels.batches import DTYPES, NAN, Recipe, pool
from tests.kernels.interpreter import Watch
from tests.kernels.test_attention_reads import sparse_pool

WRITES = pytest.mark.parametrize("write", [cpu_write_kv, triton_write_kv], ids=["twin", "triton"])
COPIES = pytest.mark.parametrize("copy", [cpu_copy_blocks, triton_copy_blocks], ids=["twin", "triton"])
quick = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def layouts(draw) -> Recipe:
    return Recipe(
        (),
        (),
        dtype=draw(st.sampled_from(DTYPES)),
        block_size=draw(st.sampled_from([1, 3, 8, 17])),
        num_kv_heads=draw(st.sampled_from([1, 2, 3, 5])),
        head_size=draw(st.sampled_from([8, 32, 80])),
        is_interleaved=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def storage(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.nan_to_num(12345.0), expected.nan_to_num(12345.0))


@WRITES
@quick
@given(recipe=layouts(), slots=st.lists(st.integers(0, 11), unique=True, max_size=8), padding=st.integers(0, 3))
def test_a_token_goes_to_its_slot_and_padding_nowhere(write, recipe, slots, padding):
    num_blocks = -(-12 // recipe.block_size)
    key_cache, value_cache = pool(recipe, num_blocks)
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    mapping = torch.tensor([*slots, *[PAD_SLOT] * padding], dtype=torch.int64)
    mapping = mapping[torch.randperm(len(mapping), generator=torch.Generator().manual_seed(recipe.seed))]
    fused = torch.randn(len(mapping), 3, recipe.num_kv_heads, recipe.head_size).to(recipe.dtype)
    key, value = fused[:, 1], fused[:, 2]  # as they come out of a fused projection
    write(key, value, key_cache, value_cache, mapping)
    for token, slot in enumerate(mapping.tolist()):
        if slot != PAD_SLOT:
            expected_key[slot // recipe.block_size, slot % recipe.block_size] = key[token]
            expected_value[slot // recipe.block_size, slot % recipe.block_size] = value[token]
    assert same(key_cache, expected_key)
    assert same(value_cache, expected_value)
    live = len(slots) * recipe.num_kv_heads * recipe.head_size
    assert storage(key_cache).isfinite().sum() == 2 * live  # nothing outside the caches either


@WRITES
def test_a_padding_slot_does_not_reach_the_last_cell(write):
    caches = torch.full((2, 3, 4, 1, 32), 5.0)
    tokens = torch.zeros(2, 1, 32)
    write(tokens, tokens, caches[0], caches[1], torch.tensor([PAD_SLOT, PAD_SLOT]))
    assert torch.equal(caches, torch.full_like(caches, 5.0))


@WRITES
def test_unchecked_slots_outside_the_cache_are_padding(write, monkeypatch):
    monkeypatch.setenv("KVPROOF_UNCHECKED_KERNELS", "1")
    caches = torch.full((2, 3, 4, 1, 32), 5.0)
    tokens = torch.zeros(4, 1, 32)
    write(tokens, tokens, caches[0], caches[1], torch.tensor([-2, -12, 12, 2**40]))
    assert torch.equal(caches, torch.full_like(caches, 5.0))


@WRITES
def test_a_step_without_tokens_writes_nothing(write):
    caches = torch.full((2, 3, 4, 1, 32), 5.0)
    write(torch.zeros(0, 1, 32), torch.zeros(0, 1, 32), caches[0], caches[1], torch.zeros(0, dtype=torch.int64))
    assert torch.equal(caches, torch.full_like(caches, 5.0))


@WRITES
def test_bits_of_nan_survive_a_write(write):
    """Quantized bytes or poison: a write moves and never computes."""
    bits = torch.tensor([0x7FC1, 0x7F81, 0xFFFF, 0x8000], dtype=torch.uint16).repeat(8).view(1, 1, 32)
    caches = torch.zeros(2, 1, 2, 1, 32, dtype=torch.bfloat16)
    write(bits.view(torch.bfloat16), bits.view(torch.bfloat16), caches[0], caches[1], torch.tensor([1]))
    assert torch.equal(caches[0, 0, 1].view(torch.uint16), bits[0])
    assert torch.equal(caches[1, 0, 1].view(torch.uint16), bits[0])


@COPIES
@quick
@given(recipe=layouts(), count=st.integers(0, 4))
def test_targets_get_what_sources_hold(copy, recipe, count):
    key_cache, value_cache = pool(recipe, 9)
    random = torch.Generator().manual_seed(recipe.seed)
    order = torch.randperm(9, generator=random)
    sources, targets = order[:4][torch.randint(4, (count,), generator=random)], order[4 : 4 + count]  # sources repeat
    for cache in (key_cache, value_cache):
        cache[order[:4]] = torch.randn(cache[:4].shape, generator=random).to(cache.dtype)
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    expected_key[targets], expected_value[targets] = key_cache[sources], value_cache[sources]
    copy(key_cache, value_cache, torch.stack([sources, targets], 1))
    assert same(key_cache, expected_key)
    assert same(value_cache, expected_value)
    assert storage(key_cache).isfinite().sum() == 2 * (4 + count) * key_cache[0].numel()


PACKS = pytest.mark.parametrize(
    ("pack", "unpack"),
    [(cpu_pack_blocks, cpu_unpack_blocks), (triton_pack_blocks, triton_unpack_blocks)],
    ids=["twin", "triton"],
)


@PACKS
@quick
@given(recipe=layouts(), count=st.integers(0, 3))
def test_blocks_that_leave_come_back_elsewhere_as_they_were(pack, unpack, recipe, count):
    key_cache, value_cache = pool(recipe, 6)
    random = torch.Generator().manual_seed(recipe.seed)
    order = torch.randperm(6, generator=random)
    here, there = order[:count], order[3 : 3 + count]
    for cache in (key_cache, value_cache):
        cache[here] = torch.randn(cache[here].shape, generator=random).to(cache.dtype)
    expected_key, expected_value = key_cache.clone(), value_cache.clone()
    expected_key[there], expected_value[there] = key_cache[here], value_cache[here]
    packed = pack(key_cache, value_cache, here)
    assert torch.equal(packed, torch.stack([key_cache[here], value_cache[here]], 1))
    unpack(packed, key_cache, value_cache, there)
    assert same(key_cache, expected_key)
    assert same(value_cache, expected_value)
    assert storage(key_cache).isfinite().sum() == 4 * count * key_cache[0].numel()


@PACKS
@pytest.mark.parametrize(
    ("argument", "ids", "shape", "found", "needed"),
    [
        ("block_ids", torch.tensor([4]), (1, 2, 2, 1, 32), 4, "0 to 3"),
        ("block_ids", torch.tensor([-1]), (1, 2, 2, 1, 32), -1, "0 to 3"),
        ("block_ids", torch.tensor([1, 1]), (2, 2, 2, 1, 32), 1, "each id once"),
        ("block_ids", torch.tensor([1], dtype=torch.int32), (1, 2, 2, 1, 32), "int32", "int64"),
        ("packed", torch.tensor([1]), (2, 2, 2, 1, 32), (2, 2, 2, 1, 32), (1, 2, 2, 1, 32)),
    ],
)
def test_a_bad_pack_is_refused(pack, unpack, argument, ids, shape, found, needed):
    caches = torch.full((2, 4, 2, 1, 32), 5.0)
    with pytest.raises(BadArgument) as raised:
        unpack(torch.zeros(shape), caches[0], caches[1], ids)
    assert raised.value.argument == argument
    assert str(found) in str(raised.value)
    assert str(needed) in str(raised.value)
    assert torch.equal(caches, torch.full_like(caches, 5.0))
    if argument == "block_ids":
        with pytest.raises(BadArgument, match="block_ids"):
            pack(caches[0], caches[1], ids)


@COPIES
def test_columns_of_a_wider_list_are_accepted(copy):
    caches = torch.randn(2, 4, 2, 1, 32)
    before = caches.clone()
    wide = torch.tensor([[0, 3, 99], [1, 2, 99]])
    copy(caches[0], caches[1], wide[:, :2])
    assert torch.equal(caches, before[:, [0, 1, 1, 0]])


def test_k10_the_kernels_touch_only_what_they_move():
    recipe = Recipe((), (), block_size=3, num_kv_heads=3, head_size=80)
    key_cache, value_cache = pool(recipe, 4)
    tokens = torch.randn(2, 3, 80)
    with Watch() as watch:
        triton_write_kv(tokens, tokens, key_cache, value_cache, torch.tensor([PAD_SLOT, 7]))
    assert len(watch.written(key_cache)) == 2 * 3 * 80  # both caches share their storage
    with Watch() as watch:
        triton_copy_blocks(key_cache, value_cache, torch.tensor([[2, 0]]))
    assert len(watch.written(key_cache)) == len(watch.read(key_cache)) == 2 * 3 * 3 * 80


@WRITES
def test_k5_a_slot_beyond_two_to_the_31_elements_is_found(write):
    num_blocks = (5 << 30) // (16 * 2 * 64)
    cache = sparse_pool(5 << 30).view(num_blocks, 16, 2, 64)
    tokens = torch.randn(1, 2, 64).bfloat16()
    write(tokens, tokens, cache, cache, torch.tensor([num_blocks * 16 - 1]))
    assert torch.equal(cache[-1, -1], tokens[0])


def test_cpu_tensors_take_the_twins():
    caches = torch.full((2, 2, 2, 1, 8), NAN)
    write_kv(torch.ones(2, 1, 8), torch.ones(2, 1, 8), caches[0], caches[1], torch.tensor([0, 1]))
    copy_blocks(caches[0], caches[1], torch.tensor([[0, 1]]))
    unpack_blocks(pack_blocks(caches[0], caches[1], torch.tensor([1])), caches[0], caches[1], torch.tensor([0]))
    assert torch.equal(caches, torch.ones_like(caches))
