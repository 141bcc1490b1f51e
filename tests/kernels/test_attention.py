"""Attention through any table is dense attention, for the CPU twin and for the Triton kernels in the interpreter."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import cpu_paged_attention, paged_attention, triton_paged_attention
from tests.kernels.batches import DTYPES, NAN, Recipe, build, plan_of, recipes, small_shapes
from tests.kernels.dense import dense, kernel_bound, lse_bound, max_error

BOTH = pytest.mark.parametrize("attend", [cpu_paged_attention, triton_paged_attention], ids=["twin", "triton"])
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
EXAMPLES = settings.default.max_examples  # of the tier
caps = st.sampled_from([None, None, 2.0, 50.0])


def assert_is_dense(attend, batch, *, scale=None, window=None, logit_cap=None, plan=None):
    """Output and log-sum-exp keep the kernel bound; the output starts as NaN."""
    how = {"scale": batch.query.shape[2] ** -0.5 if scale is None else scale, "window": window, "logit_cap": logit_cap}
    exact, own = dense(batch, **how), dense(batch, **how, dtype=batch.query.dtype)
    out = torch.full_like(batch.query, NAN)
    returned, lse = attend(*batch, **how, return_lse=True, out=out, plan=plan)
    assert returned is out
    assert max_error(out, exact.out) <= kernel_bound(exact, own, batch.query.dtype)
    assert max_error(lse, exact.lse) <= lse_bound(exact, own)


@settings(relaxed, max_examples=EXAMPLES)
@given(recipes(), caps)
def test_the_twin_gives_dense_attention_for_any_table(recipe, logit_cap):
    assert_is_dense(cpu_paged_attention, build(recipe), window=recipe.window, logit_cap=logit_cap)


def check_triton(recipe, logit_cap, rows, tile_tokens, split_tokens, split):
    batch = build(recipe)
    shapes = small_shapes(recipe.group, rows=rows, tile_tokens=tile_tokens, split_tokens=split_tokens)
    plan = plan_of(batch, window=recipe.window, shapes=shapes, split=split)
    assert_is_dense(triton_paged_attention, batch, window=recipe.window, logit_cap=logit_cap, plan=plan)


launches = (st.sampled_from([16, 64]), st.sampled_from([16, 32]), st.sampled_from([0, 32, 64]), st.booleans())


@settings(relaxed, max_examples=EXAMPLES // 10)
@given(recipes(), caps, *launches)
def test_the_kernel_gives_dense_attention_for_any_table(recipe, logit_cap, rows, tile_tokens, split_tokens, split):
    check_triton(recipe, logit_cap, rows, tile_tokens, split_tokens, split)


@pytest.mark.slow
@settings(relaxed, max_examples=EXAMPLES)
@given(recipes(), caps, *launches)
def test_the_kernel_gives_dense_attention_for_many_tables(recipe, logit_cap, rows, tile_tokens, split_tokens, split):
    check_triton(recipe, logit_cap, rows, tile_tokens, split_tokens, split)


@BOTH
@pytest.mark.parametrize("block_size", [1, 7, 100, 256])
def test_block_sizes_from_1_to_256(attend, block_size):
    assert_is_dense(attend, build(Recipe((1, 3), (260, 40), block_size=block_size, num_kv_heads=1)))


@BOTH
@pytest.mark.parametrize("group", [1, 3, 7, 16, 32, 64])
def test_groups_from_1_to_64(attend, group):
    assert_is_dense(attend, build(Recipe((1, 3), (30, 20), group=group, num_kv_heads=1)))


@BOTH
@pytest.mark.parametrize("head_size", [32, 48, 80, 96, 112, 192, 256])
def test_head_sizes_that_are_no_power_of_two(attend, head_size):
    assert_is_dense(attend, build(Recipe((1, 3), (30, 20), head_size=head_size, dtype=torch.bfloat16)))


@BOTH
def test_k3_an_empty_set_gives_zero_and_minus_infinity(attend):
    batch = build(Recipe((1, 1, 4), (0, 20, 2)))  # nothing; something; four queries and two keys
    out, lse = attend(*batch, scale=0.1, return_lse=True, out=torch.full_like(batch.query, NAN))
    for token in (0, 2, 3):
        assert torch.equal(out[token], torch.zeros_like(out[token]))
        assert torch.equal(lse[token], torch.full_like(lse[token], -math.inf))
    assert lse[1].isfinite().all()
    assert lse[4:].isfinite().all()


@BOTH
def test_k3_a_batch_of_no_sequence_is_an_empty_output(attend):
    batch = build(Recipe((), ()))
    assert attend(*batch, scale=0.1).shape == (0, 4, 32)


@BOTH
def test_a_sequence_without_queries_is_left_out(attend):
    assert_is_dense(attend, build(Recipe((1, 0, 2), (9, 12, 5))))


@BOTH
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17])
def test_k6_a_query_sees_window_keys_itself_included(attend, window):
    recipe = Recipe((1, 4), (40, 33), window=window, head_size=32, num_kv_heads=1)
    batch = build(recipe)
    batch.query.zero_()  # then all weights are equal, and the log-sum-exp counts the keys
    _, lse = attend(*batch, scale=1.0, window=window, return_lse=True)
    assert lse.exp().round().unique().tolist() == [window]
    assert_is_dense(attend, build(recipe), window=window)


@BOTH
@pytest.mark.parametrize("logit_cap", [0.5, 30.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logit_caps_small_and_large(attend, logit_cap, dtype):
    assert_is_dense(attend, build(Recipe((1, 2), (40, 9), dtype=dtype, magnitude=10.0)), logit_cap=logit_cap)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beyond_the_range_of_exp(attend, dtype):
    assert_is_dense(attend, build(Recipe((1, 2), (40, 9), dtype=dtype, magnitude=100.0)), scale=1.0)


@BOTH
def test_rows_past_the_last_sequence_are_padding(attend):
    batch = build(Recipe((1, 2), (20, 5)))
    padded = torch.cat([batch.query, torch.full_like(batch.query[:2], NAN)])
    tensors = (padded, *list(batch)[1:])
    fresh, lse = attend(*tensors, scale=0.1, return_lse=True)
    assert torch.equal(fresh[3:], torch.zeros_like(fresh[3:]))
    assert torch.equal(lse[3:], torch.full_like(lse[3:], -math.inf))
    mine = torch.full_like(padded, 7.0)
    attend(*tensors, scale=0.1, out=mine)
    assert torch.equal(mine[3:], torch.full_like(mine[3:], 7.0))
    assert torch.equal(mine[:3], fresh[:3])


@BOTH
def test_k9_queries_and_output_may_be_strided_views(attend):
    batch = build(Recipe((1, 3), (20, 9)))
    fused = torch.full((4, 8, 32), NAN)  # queries in the middle of a fused projection's output
    fused[:, 2:6] = batch.query
    whole = torch.full((4, 2, 4, 32), NAN)
    attend(fused[:, 2:6], *list(batch)[1:], scale=0.1, out=whole[:, 1])
    assert torch.equal(whole[:, 1], attend(*batch, scale=0.1))
    assert whole[:, 0].isnan().all()


@BOTH
def test_the_caches_are_only_read(attend):
    batch = build(Recipe((1, 3), (20, 9)))
    before = batch.key_cache.clone(), batch.value_cache.clone()
    attend(*batch, scale=0.1)
    torch.testing.assert_close((batch.key_cache, batch.value_cache), before, rtol=0, atol=0, equal_nan=True)


def test_a_cpu_tensor_takes_the_twin():
    batch = build(Recipe((1, 3), (20, 9)))
    out, lse = paged_attention(*batch, scale=0.1, return_lse=True)
    twin, twin_lse = cpu_paged_attention(*batch, scale=0.1, return_lse=True)
    assert torch.equal(out, twin)
    assert torch.equal(lse, twin_lse)
    assert torch.equal(paged_attention(*batch, scale=0.1), twin)


@pytest.mark.parametrize("head_size", [1, 8, 24, 120])
def test_the_twin_takes_any_head_size(head_size):
    assert_is_dense(cpu_paged_attention, build(Recipe((1, 3), (20, 9), head_size=head_size)))


def test_the_twin_walks_long_sequences_in_tiles_of_keys_and_of_queries():
    recipe = Recipe((1, 300, 1), (700, 400, 256), group=3, num_kv_heads=1)
    assert_is_dense(cpu_paged_attention, build(recipe))
    windowed = Recipe((1, 300, 1), (700, 400, 256), group=3, num_kv_heads=1, window=260)
    assert_is_dense(cpu_paged_attention, build(windowed), window=260)
