"""Batches for attention: ragged, shuffled, aliased, and poisoned wherever nothing may look."""

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from kernels import AttentionPlan, TileShape, TileShapes, plan_attention
from kernels.tile_shape import power_of_two
from tests.kernels.dense import Batch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")
POISON_IDS = [2**31 - 1, -1, -(2**31), 10_000]


@dataclass(frozen=True)
class Recipe:
    """What a batch looks like; the numbers in it follow from the seed."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    group: int = 2
    num_kv_heads: int = 2
    head_size: int = 32
    window: int | None = None
    aliases: tuple[int, ...] = ()  # the table entries, counted through, that repeat an earlier one
    is_interleaved: bool = False  # K and V of a block lie side by side, so that a cache is no contiguous tensor
    magnitude: float = 1.0  # of queries: large ones make sharp weights
    poison: float = NAN
    seed: int = 0


def build(recipe: Recipe) -> Batch:
    """The tensors; dead cells, guard blocks, a margin around the pool and dead table entries hold poison."""
    random = torch.Generator().manual_seed(recipe.seed)
    needs = [-(-length // recipe.block_size) for length in recipe.seq_lens]
    num_blocks = sum(needs) + 3
    free = torch.randperm(num_blocks, generator=random).tolist()
    tables = torch.tensor(POISON_IDS, dtype=torch.int32).repeat(len(needs), max(needs, default=0) + 2)
    tables = tables[:, : max(needs, default=0) + 2].contiguous()
    named: list[int] = []
    for seq, need in enumerate(needs):
        for column in range(need):
            is_alias = len(named) in recipe.aliases and named
            named.append(named[(len(named) * 7 + recipe.seed) % len(named)] if is_alias else free.pop())
            tables[seq, column] = named[-1]

    key_cache, value_cache = pool(recipe, num_blocks)
    for seq, (num_queries, length) in enumerate(zip(recipe.query_lens, recipe.seq_lens, strict=True)):
        first = 0 if recipe.window is None else max(0, length - num_queries - recipe.window + 1)
        if num_queries == 0:
            first = length
        positions = torch.arange(first, max(first, length))
        where = tables[seq].long()[positions // recipe.block_size], positions % recipe.block_size
        cell = (len(positions), recipe.num_kv_heads, recipe.head_size)
        key_cache[where] = torch.randn(cell, generator=random).to(recipe.dtype)
        value_cache[where] = torch.randn(cell, generator=random).to(recipe.dtype)
    for seq, (num_queries, length) in enumerate(zip(recipe.query_lens, recipe.seq_lens, strict=True)):
        if recipe.window is not None:  # whole blocks before the window belong to others by now
            gone = max(0, length - num_queries - recipe.window + 1) // recipe.block_size
            tables[seq, :gone] = POISON_IDS[seq % len(POISON_IDS)]
    shape = (sum(recipe.query_lens), recipe.num_kv_heads * recipe.group, recipe.head_size)
    query = (torch.randn(shape, generator=random) * recipe.magnitude).to(recipe.dtype)
    starts = torch.tensor((0, *recipe.query_lens), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Batch(query, key_cache, value_cache, tables, torch.tensor(recipe.seq_lens, dtype=torch.int32), starts)


def pool(recipe: Recipe, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both caches, full of poison, as views into the middle of one poisoned storage."""
    cells = recipe.block_size * recipe.num_kv_heads * recipe.head_size
    margin = 4096  # more than any sabotaged copy of a small block oversteps
    whole = torch.full((2 * margin + 2 * num_blocks * cells,), recipe.poison, dtype=recipe.dtype)
    inside = whole[margin : margin + 2 * num_blocks * cells]
    last = (recipe.block_size, recipe.num_kv_heads, recipe.head_size)
    if recipe.is_interleaved:
        both = inside.view(num_blocks, 2, *last)
        return both[:, 0], both[:, 1]
    both = inside.view(2, num_blocks, *last)
    return both[0], both[1]


def small_shapes(group: int, *, rows: int = 16, tile_tokens: int = 16, split_tokens: int = 32) -> TileShapes:
    """Shapes that make many tiles and splits out of few keys."""
    decode = TileShape(max(16, power_of_two(group)), tile_tokens, split_tokens, 4, 2)
    return TileShapes(decode, replace(decode, rows=max(rows, power_of_two(group)), split_tokens=0))


def plan_of(batch: Batch, *, window: int | None = None, **options) -> AttentionPlan:
    return plan_attention(
        batch.query_lens,
        batch.seq_lens.tolist(),
        num_query_heads=batch.query.shape[1],
        num_kv_heads=batch.key_cache.shape[2],
        head_size=batch.query.shape[2],
        dtype=batch.query.dtype,
        device=batch.query.device,
        window=window,
        **options,
    )


@st.composite
def recipes(draw) -> Recipe:
    sizes = draw(st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 2, 5, 20])), min_size=1, max_size=4))
    return Recipe(
        query_lens=tuple(num_queries for _, num_queries in sizes),
        seq_lens=tuple(length for length, _ in sizes),
        dtype=draw(st.sampled_from(DTYPES)),
        block_size=draw(st.sampled_from([1, 2, 3, 5, 8, 12, 16, 17, 32, 48, 64])),
        group=draw(st.sampled_from([1, 2, 3, 4, 7, 8])),
        num_kv_heads=draw(st.integers(1, 2)),
        head_size=draw(st.sampled_from([32, 64, 80, 96, 112, 128, 256])),
        window=draw(st.sampled_from([None, None, 1, 7, 40])),
        aliases=tuple(draw(st.lists(st.integers(1, 12), max_size=6))),
        is_interleaved=draw(st.booleans()),
        magnitude=draw(st.sampled_from([1.0, 1.0, 20.0])),
        poison=draw(st.sampled_from([NAN, float("inf")])),
        seed=draw(st.integers(0, 2**16)),
    )
