"""The bytes and operations of ``kernels.roofline`` are those that the interpreter counts."""

import doctest

import pytest
import torch

import kernels
from kernels import PAD_SLOT, roofline, triton_copy_blocks, triton_paged_attention, triton_write_kv
from kernels.roofline import Heads, Work
from tests.kernels.batches import Recipe, build, plan_of, pool, small_shapes
from tests.kernels.interpreter import Watch

RECIPES = [
    Recipe((1, 9, 1, 1, 0), (33, 20, 100, 0, 7), block_size=5, group=3),
    Recipe((1, 9, 1, 4), (33, 20, 100, 2), block_size=8, group=3, window=9, dtype=torch.bfloat16),
    Recipe((12, 1), (90, 1), block_size=1, group=7, head_size=80),
]


def heads_of(recipe: Recipe) -> Heads:
    num_query_heads = recipe.num_kv_heads * recipe.group
    return Heads(num_query_heads, recipe.num_kv_heads, recipe.head_size, recipe.dtype.itemsize)


def test_the_examples_in_the_documentation_hold():
    assert doctest.testmod(roofline).failed == 0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("split", [True, False])
def test_attention_touches_what_the_floor_counts_and_asks_for_what_the_traffic_counts(recipe, split):
    batch = build(recipe)
    heads = heads_of(recipe)
    plan = plan_of(batch, window=recipe.window, shapes=small_shapes(recipe.group), split=split)
    with Watch() as watch:
        out = triton_paged_attention(*batch, scale=0.1, window=recipe.window, plan=plan)
    floor = roofline.attention_work(
        recipe.query_lens, recipe.seq_lens, heads, block_size=recipe.block_size, window=recipe.window
    )
    touched = sum(
        len(set(watch.read(tensor).tolist())) * tensor.element_size()
        for tensor in (batch.query, batch.key_cache, batch.block_tables)  # both caches share their storage
    )
    touched += len(set(watch.written(out).tolist())) * out.element_size()
    unread = sum(num_queries == 0 for num_queries in recipe.query_lens)
    lengths = (batch.seq_lens.numel() - unread + batch.query_start.numel()) * 4
    assert touched + lengths == floor.bytes - 4 * unread
    traffic = roofline.attention_traffic(plan, heads)
    assert len(watch.read(batch.key_cache)) * recipe.dtype.itemsize == traffic.bytes
    assert 2 * watch.multiplications == traffic.operations


@pytest.mark.parametrize("window", [None, 1, 7, 30])
@pytest.mark.parametrize(("num_queries", "seq_len"), [(1, 20), (6, 20), (20, 20), (9, 4), (1, 0), (0, 5)])
def test_operations_are_counted_a_visible_key(num_queries, seq_len, window):
    positions = range(seq_len - num_queries, seq_len)
    seen = [{key for key in range(p + 1) if window is None or key > p - window} for p in positions]
    assert roofline.visible_keys(num_queries, seq_len, window) == sum(len(each) for each in seen)
    reachable = set().union(*seen)
    assert roofline.reachable_keys(num_queries, seq_len, window) == len(reachable)
    for block_size in (1, 3, 16):
        blocks = {key // block_size for key in reachable}
        assert roofline.reachable_blocks(num_queries, seq_len, block_size, window) == len(blocks)
    one = Heads(4, 2, 32)
    work = roofline.attention_work([num_queries], [seq_len], one, block_size=16, window=window)
    assert work.operations == 4 * 32 * 4 * roofline.visible_keys(num_queries, seq_len, window)


def test_splits_of_their_own_write_and_read_each_partial_once():
    recipe = RECIPES[0]
    batch = build(recipe)
    heads = heads_of(recipe)
    moved = {}
    for split in (True, False):
        plan = plan_of(batch, shapes=small_shapes(recipe.group), split=split)
        with Watch() as watch:
            out = triton_paged_attention(*batch, scale=0.1, plan=plan)
        others = sum(len(watch.read(each)) * each.element_size() for each in batch if each is not batch.value_cache)
        others += sum(len(watch.read(each.tiles)) * 4 for each in plan.launches) + len(watch.read(plan.merges)) * 4
        others += len(watch.written(out)) * out.element_size()
        moved[split] = watch.bytes_moved() - others
    assert moved[False] == 0
    assert moved[True] == roofline.split_work(plan_of(batch, shapes=small_shapes(3), split=True), heads).bytes


def test_writes_and_copies_move_what_is_counted():
    recipe = Recipe((), (), block_size=7, num_kv_heads=3, head_size=80, dtype=torch.bfloat16)
    key_cache, value_cache = pool(recipe, 4)
    tokens = torch.zeros(3, 3, 80, dtype=torch.bfloat16)
    with Watch() as watch:
        triton_write_kv(tokens, tokens, key_cache, value_cache, torch.tensor([5, PAD_SLOT, 9]))
    assert watch.bytes_moved() == roofline.write_work(2, 1, heads_of(recipe)).bytes
    with Watch() as watch:
        triton_copy_blocks(key_cache, value_cache, torch.tensor([[0, 1], [0, 3]]))
    assert watch.bytes_moved() == roofline.copy_work(2, heads_of(recipe), block_size=7).bytes


def touched(watch: Watch, *tensors: torch.Tensor) -> int:
    """The bytes of these tensors that were loaded or stored, each once."""
    return sum(
        (len(set(watch.read(each).tolist())) + len(set(watch.written(each).tolist()))) * each.element_size()
        for each in tensors
    )


def test_what_a_layer_does_around_attention_touches_what_is_counted():
    heads = Heads(6, 3, 80)
    recipe = Recipe((), (), block_size=7, num_kv_heads=3, head_size=80, dtype=torch.bfloat16)
    key_cache, value_cache = pool(recipe, 4)
    with Watch() as watch:
        packed = kernels.triton_pack_blocks(key_cache, value_cache, torch.tensor([2, 0]))
    assert watch.bytes_moved() == roofline.pack_work(2, heads, block_size=7).bytes
    with Watch() as watch:
        kernels.triton_unpack_blocks(packed, key_cache, value_cache, torch.tensor([1, 3]))
    assert watch.bytes_moved() == roofline.pack_work(2, heads, block_size=7).bytes

    query, key, value = (
        torch.zeros(2, 6, 80).bfloat16(),
        torch.zeros(2, 3, 80).bfloat16(),
        torch.zeros(2, 3, 80).bfloat16(),
    )
    rotation, index = torch.zeros(4, 2, 40), torch.tensor([1, 3])
    with Watch() as watch:
        kernels.triton_rotate_write(query, key, value, key_cache, value_cache, index, index.clone(), rotation)
    assert watch.bytes_moved() == roofline.rotate_write_work(2, heads, rotary_size=80).bytes

    hidden, residual, weight = torch.zeros(2, 100), torch.zeros(2, 100), torch.zeros(100)
    with Watch() as watch:
        out, total = kernels.triton_add_rms_norm(hidden, residual, weight, eps=1e-5)
    floor = roofline.norm_work(2, 100, element_bytes=4, has_residual=True)
    assert touched(watch, hidden, residual, weight, out, total) == floor.bytes
    with Watch() as watch:
        out = kernels.triton_rms_norm(hidden, weight, eps=1e-5)
    floor = roofline.norm_work(2, 100, element_bytes=4, has_residual=False)
    assert touched(watch, hidden, weight, out) == floor.bytes
    with Watch() as watch:
        kernels.triton_silu_mul(hidden, residual)
    assert watch.bytes_moved() == roofline.silu_mul_work(2, 100, element_bytes=4).bytes


def test_a_draw_touches_what_is_counted():
    ones, zeros = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    top_ks, top_ps, keys = torch.tensor([0, 3]), torch.tensor([0.5, 1.0], dtype=torch.float64), torch.arange(2)
    logits = torch.zeros(2, 100)
    with Watch() as watch:
        out = kernels.triton_draw_tokens(logits, ones, zeros, top_ks, top_ps, keys)
    floor = roofline.draw_tokens_work(2, 100).bytes
    assert touched(watch, logits, ones, zeros, top_ks, top_ps, keys, out) == floor


def test_the_floor_is_the_slower_of_the_two_limits():
    work = Work(1000, 10) + Work(0, 10)
    assert work.floor_s(bytes_per_s=100.0, operations_per_s=100.0) == 10.0
    assert work.floor_s(bytes_per_s=1e9, operations_per_s=1.0) == 20.0


def test_the_floor_of_a_known_decode():
    """64 sequences of 4,096 keys in 8 KV heads of 128 in bfloat16: 1.07 GB, 4.3 Gop."""
    work = roofline.attention_work([1] * 64, [4096] * 64, Heads(32, 8, 128), block_size=16)
    assert work.bytes == 64 * 4096 * 8 * 128 * 2 * 2 + 64 * 32 * 128 * 2 * 2 + (64 * 256 + 64 + 65) * 4
    assert work.operations == 64 * 4096 * 32 * 4 * 128
