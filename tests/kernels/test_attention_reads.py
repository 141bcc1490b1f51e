"""The attention kernel reads the live cells and table entries of its sequences, and nothing else."""

import mmap

import pytest
import torch

from kernels import cpu_paged_attention, triton_paged_attention
from tests.kernels.batches import Recipe, build, plan_of, small_shapes
from tests.kernels.dense import Batch, dense, kernel_bound, max_error
from tests.kernels.interpreter import Watch

RECIPES = [
    Recipe((1, 7, 1, 1), (33, 20, 100, 0), block_size=5, group=3, head_size=80),
    Recipe((1, 7, 1, 3), (33, 20, 100, 90), block_size=5, group=3, window=9),
    Recipe((1, 7), (33, 20), block_size=8, aliases=(5, 6), is_interleaved=True),
]


def watched(recipe: Recipe) -> tuple[Batch, Watch, torch.Tensor]:
    batch = build(recipe)
    plan = plan_of(batch, window=recipe.window, shapes=small_shapes(recipe.group), split=True)
    with Watch() as watch:
        out = triton_paged_attention(*batch, scale=0.1, window=recipe.window, plan=plan)
    return batch, watch, out


@pytest.mark.parametrize("recipe", RECIPES)
def test_k2_table_entries_are_read_exactly_where_some_query_sees(recipe):
    batch, watch, _ = watched(recipe)
    width = batch.block_tables.shape[1]
    live = set()
    for seq, (num_queries, length) in enumerate(zip(recipe.query_lens, recipe.seq_lens, strict=True)):
        first = 0 if recipe.window is None else max(0, length - num_queries - recipe.window + 1)
        live |= {seq * width + position // recipe.block_size for position in range(first, length)}
    assert set(watch.read(batch.block_tables).tolist()) == live


@pytest.mark.parametrize("recipe", RECIPES)
def test_k2_cells_are_read_exactly_where_some_query_sees(recipe):
    batch, watch, _ = watched(recipe)
    whole = torch.empty(0, dtype=recipe.dtype).set_(batch.key_cache.untyped_storage())  # of both caches
    numbers = set(whole.isfinite().nonzero().flatten().tolist())  # the live cells: the rest is poison
    assert set(watch.read(batch.key_cache).tolist()) == numbers


@pytest.mark.parametrize("recipe", RECIPES)
def test_k10_only_the_output_is_written_and_each_row_once(recipe):
    batch, watch, out = watched(recipe)
    assert sorted(watch.written(out).tolist()) == list(range(out.numel()))
    assert len(watch.written(batch.key_cache)) == 0
    assert len(watch.written(batch.block_tables)) == 0


def sparse_pool(num_elements: int) -> torch.Tensor:
    """bfloat16 zeros that take address space and no memory, far from the ends of a mapping: a wild address finds zeros."""
    size = 2 * num_elements
    memory = mmap.mmap(
        -1, 4 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    )
    return torch.frombuffer(memory, dtype=torch.bfloat16)[num_elements : 2 * num_elements]


@pytest.mark.parametrize("attend", [cpu_paged_attention, triton_paged_attention], ids=["twin", "triton"])
def test_k5_blocks_beyond_two_to_the_31_elements_are_found(attend):
    block_size, num_kv_heads, head_size = 16, 2, 64
    per_block = block_size * num_kv_heads * head_size
    num_blocks = (5 << 30) // per_block
    pool = sparse_pool(num_blocks * per_block).view(num_blocks, block_size, num_kv_heads, head_size)
    edge = (1 << 31) // per_block
    ids = [num_blocks - 1, 3, edge - 1, edge, edge + 1, num_blocks // 2]
    random = torch.Generator().manual_seed(0)
    for block in ids:
        pool[block] = torch.randn(block_size, num_kv_heads, head_size, generator=random).bfloat16()
    batch = Batch(
        torch.randn(2, 4, head_size, generator=random).bfloat16(),
        pool,
        pool,
        torch.tensor([ids[:3], ids[3:]], dtype=torch.int32),
        torch.tensor([41, 48], dtype=torch.int32),
        torch.tensor([0, 1, 2], dtype=torch.int32),
    )
    exact, own = dense(batch, scale=0.125), dense(batch, scale=0.125, dtype=torch.bfloat16)
    out = attend(*batch, scale=0.125)
    assert max_error(out, exact.out) <= kernel_bound(exact, own, torch.bfloat16)
