"""A sequence's result does not depend on its neighbours, on padding, on block ids or on who walks the splits: bit for bit."""

from dataclasses import replace

import pytest
import torch

from kernels import cpu_paged_attention, triton_paged_attention
from tests.kernels.batches import POISON_IDS, Recipe, build, plan_of, small_shapes
from tests.kernels.dense import Batch

RECIPE = Recipe((1, 9, 1, 3), (75, 40, 129, 66), group=4, num_kv_heads=1)
HOW = {"scale": 0.125, "return_lse": True}
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def attend_triton(batch, *, window=None, shapes=None, **options):
    plan = plan_of(batch, window=window, shapes=shapes or small_shapes(4, tile_tokens=32, split_tokens=64), **options)
    return triton_paged_attention(*batch, **HOW, window=window, plan=plan)


def attend_twin(batch, *, window=None):
    return cpu_paged_attention(*batch, **HOW, window=window)


BOTH = pytest.mark.parametrize("attend", [attend_twin, attend_triton], ids=["twin", "triton"])


def pick(batch: Batch, seqs: list[int]) -> Batch:
    """The batch of these sequences, in this order."""
    starts = batch.query_start.tolist()
    query = torch.cat([batch.query[starts[seq] : starts[seq + 1]] for seq in seqs])
    lens = torch.tensor([0, *(starts[seq + 1] - starts[seq] for seq in seqs)])
    index = torch.tensor(seqs)
    return replace(
        batch,
        query=query,
        block_tables=batch.block_tables[index],
        seq_lens=batch.seq_lens[index],
        query_start=lens.cumsum(0).int(),
    )


def by_seq(batch: Batch, result: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(each.split(batch.query_lens) for each in result), strict=True))


def assert_same_bits(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for each, other in zip(found, expected, strict=True):
        assert torch.equal(each, other)


@pytest.mark.slow
@BOTH
@TYPES
@pytest.mark.parametrize("window", [None, 20])
def test_alone_is_as_in_a_batch(attend, dtype, window):
    batch = build(replace(RECIPE, dtype=dtype, window=window))
    together = by_seq(batch, attend(batch, window=window))
    for seq in range(4):
        assert_same_bits(attend(pick(batch, [seq]), window=window), together[seq])


@BOTH
def test_the_order_of_sequences_does_not_matter(attend):
    batch = build(replace(RECIPE, dtype=torch.bfloat16))
    order = [2, 0, 3, 1]
    shuffled = pick(batch, order)
    together, again = by_seq(batch, attend(batch)), by_seq(shuffled, attend(shuffled))
    for place, seq in enumerate(order):
        assert_same_bits(again[place], together[seq])


@BOTH
def test_block_ids_do_not_matter(attend):
    batch = build(replace(RECIPE, dtype=torch.bfloat16))
    order = torch.randperm(len(batch.key_cache), generator=torch.Generator().manual_seed(1))
    renamed = torch.argsort(order).int()
    live = batch.block_tables.clamp(0, len(order) - 1).long()
    tables = torch.where(batch.block_tables == live, renamed[live], POISON_IDS[0])
    elsewhere = replace(
        batch, key_cache=batch.key_cache[order], value_cache=batch.value_cache[order], block_tables=tables
    )
    assert_same_bits(attend(elsewhere), attend(batch))


@pytest.mark.slow
@BOTH
def test_the_layout_of_the_pool_does_not_matter(attend):
    recipe = replace(RECIPE, dtype=torch.bfloat16, num_kv_heads=2)
    assert_same_bits(attend(build(replace(recipe, is_interleaved=True))), attend(build(recipe)))


@BOTH
def test_a_window_of_the_whole_sequence_is_no_window(attend):
    batch = build(RECIPE)
    assert_same_bits(attend(batch, window=1000), attend(batch))


def test_padding_tiles_do_nothing():
    batch = build(replace(RECIPE, dtype=torch.bfloat16))
    assert_same_bits(attend_triton(batch, num_padding_tiles=3), attend_triton(batch))


@pytest.mark.slow
@TYPES
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("split_tokens", [32, 96])
def test_k4_splits_of_their_own_are_as_splits_in_a_row(dtype, window, split_tokens):
    batch = build(replace(RECIPE, dtype=dtype, window=window, query_lens=(1, 1, 1, 1)))
    shapes = small_shapes(4, tile_tokens=32, split_tokens=split_tokens)
    apart = attend_triton(batch, window=window, shapes=shapes, split=True)
    assert_same_bits(apart, attend_triton(batch, window=window, shapes=shapes, split=False))


@pytest.mark.slow
@TYPES
@pytest.mark.parametrize("window", [None, 20])
def test_chunks_of_one_shape_do_not_matter(dtype, window):
    """Tiles count from position 0 and not from the first key that the window lets through."""
    recipe = replace(RECIPE, dtype=dtype, window=window, query_lens=(12,), seq_lens=(90,))
    batch = build(recipe)
    whole = attend_triton(batch, window=window)
    done = 0
    for num_queries in (3, 2, 4, 3):  # never one: a sequence with one query has a shape of its own
        chunk = replace(
            batch,
            query=batch.query[done : done + num_queries],
            seq_lens=batch.seq_lens - 12 + done + num_queries,
            query_start=torch.tensor([0, num_queries], dtype=torch.int32),
        )
        part = slice(done, done + num_queries)
        assert_same_bits(attend_triton(chunk, window=window), (whole[0][part], whole[1][part]))
        done += num_queries


@TYPES
@pytest.mark.parametrize("window", [None, 300])
def test_the_twin_gives_a_long_sequence_the_same_bits_in_company(dtype, window):
    recipe = Recipe((1, 200, *[1] * 20), (700, 300, *range(1, 801, 40)), dtype, group=3, num_kv_heads=3, window=window)
    batch = build(recipe)
    together = by_seq(batch, attend_twin(batch, window=window))
    for seq in range(len(recipe.seq_lens)):
        assert_same_bits(attend_twin(pick(batch, [seq]), window=window), together[seq])
