"""An fp8 cache: what is written is near, its scales go where it goes, and attention over it is attention over what it holds."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import kernels
from kernels import (
    PAD_SLOT,
    BadArgument,
    attention_launch,
    cpu_copy_blocks,
    cpu_pack_blocks,
    cpu_paged_attention,
    cpu_rotate_write,
    cpu_unpack_blocks,
    cpu_write_kv,
    triton_copy_blocks,
    triton_pack_blocks,
    triton_paged_attention,
    triton_rotate_write,
    triton_unpack_blocks,
    triton_write_kv,
)
from kernels.fp8 import FP8, dequantized, largest_for, new_scales, quantized
from tests.kernels.batches import DTYPES, Recipe, build, plan_of, small_shapes
from tests.kernels.dense import Batch, dense, kernel_bound, lse_bound, max_error
from tests.kernels.interpreter import Watch
from tests.kernels.test_attention_reads import sparse_pool

WRITES = pytest.mark.parametrize("write", [cpu_write_kv, triton_write_kv], ids=["twin", "triton"])
COPIES = pytest.mark.parametrize("copy", [cpu_copy_blocks, triton_copy_blocks], ids=["twin", "triton"])
BOTH = pytest.mark.parametrize("attend", [cpu_paged_attention, triton_paged_attention], ids=["twin", "triton"])
PACKS = pytest.mark.parametrize(
    ("pack", "unpack"),
    [(cpu_pack_blocks, cpu_unpack_blocks), (triton_pack_blocks, triton_unpack_blocks)],
    ids=["twin", "triton"],
)
POISON_BYTE = 0x7F  # a NaN


@dataclass(frozen=True)
class Pool:
    """The three tensors of an fp8 cache."""

    key_cache: Tensor
    value_cache: Tensor
    kv_scales: Tensor

    def __iter__(self):
        return iter((self.key_cache, self.value_cache, self.kv_scales))

    def bits(self) -> list[Tensor]:
        return [self.key_cache.view(torch.uint8), self.value_cache.view(torch.uint8), self.kv_scales.view(torch.int32)]

    def numbers(self) -> tuple[Tensor, Tensor]:
        caches = enumerate((self.key_cache, self.value_cache))
        key, value = (dequantized(cache, self.kv_scales[..., which]) for which, cache in caches)
        return key, value


def poisoned(num_blocks: int, block_size: int, num_kv_heads: int = 2, head_size: int = 32) -> Pool:
    caches = torch.full((2, num_blocks, block_size, num_kv_heads, head_size), POISON_BYTE, dtype=torch.uint8).view(FP8)
    return Pool(*caches, new_scales(caches[0]).fill_(float("nan")))


def same_bits(one: Pool, other: Pool) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.bits(), other.bits(), strict=True))


def rows(dtype: torch.dtype) -> Tensor:
    """Heads of every size that a type has, borders of scales and of bytes, and some that are no numbers."""
    random = torch.Generator().manual_seed(0)
    info = torch.finfo(dtype)
    bound = {torch.float16: 14}.get(dtype, 120)
    made = [torch.randn(16, generator=random) * 2.0**k for k in range(-bound, bound, 40)]
    steps = [
        2.0**-9,
        2.0**-10,
        1.5 * 2.0**-9,
        2.5 * 2.0**-9,
        2.0**-6,
        0.99 * 2.0**-6,
        17.0,
        18.0,
        19.0,
        26.0,
        247.0,
        249.0,
    ]
    made += [torch.tensor([top, *steps, -0.0, 0.0, -1.0]) for top in (448.0, 449.0, 447.0, 480.0, 256.0)]
    made += [torch.zeros(16), torch.full((16,), info.max), torch.full((16,), info.tiny), torch.full((16,), -info.max)]
    made += [torch.full((16,), float(x)) for x in ("nan", "inf", "-inf")]
    made += [torch.cat([torch.tensor([float("nan")]), torch.ones(15)])]
    return torch.stack(made).to(dtype)[:, None].repeat(1, 2, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_within_half_a_step_and_what_fits_is_exact(dtype):
    numbers = rows(dtype)
    cells, scales = quantized(numbers)
    found, exact = dequantized(cells, scales), numbers.float()
    good = exact.isfinite().all(-1)
    assert found[~good].isnan().all()
    error, step = (found - exact)[good].abs(), scales.float()[good].unsqueeze(-1) * 2.0**-10
    assert (error <= (exact[good].abs() * 2.0**-4).maximum(step)).all()
    assert (found[good].abs() <= largest_for(dtype)).all()
    assert (
        (scales.float()[good] <= exact[good].abs().amax(-1) / 224).logical_or(scales.float()[good] <= 2.0**-126).all()
    )
    again, same = quantized(found[good].to(dtype))
    assert torch.equal(dequantized(again, same), found[good].to(dtype).float())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_writes_the_bytes_and_scales_of_the_twin(dtype):
    numbers = rows(dtype)
    pools = [poisoned(len(numbers) // 3 + 1, 3, 2, 16) for _ in range(2)]
    slots = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(1))
    for pool, write in zip(pools, (cpu_write_kv, triton_write_kv), strict=True):
        write(numbers, numbers.flip(0).contiguous(), pool.key_cache, pool.value_cache, slots, pool.kv_scales)
    assert same_bits(*pools)


@WRITES
def test_a_write_leaves_other_cells_and_scales_and_padding_leaves_all(write):
    pool, before = poisoned(3, 4), poisoned(3, 4)
    tokens = torch.randn(3, 2, 32)
    write(tokens, -tokens, pool.key_cache, pool.value_cache, torch.tensor([7, PAD_SLOT, 2]), pool.kv_scales)
    written = torch.zeros(12, dtype=torch.bool)
    written[[7, 2]] = True
    for now, then in zip(pool.bits(), before.bits(), strict=True):
        changed = (now != then).flatten(0, 1).flatten(1).any(1)
        assert torch.equal(changed, written)


@pytest.mark.slow
@WRITES
@pytest.mark.parametrize("chunks", [(1,) * 7, (3, 4), (2, 1, 4)])
def test_how_a_prompt_is_cut_into_steps_does_not_matter(write, chunks):
    """Each token after the first is sixteen times larger: a scale for the block would have to change under those before."""
    tokens = torch.randn(7, 2, 32, generator=torch.Generator().manual_seed(0)) * 16.0 ** torch.arange(7)[:, None, None]
    whole, cut = poisoned(2, 4), poisoned(2, 4)
    cpu_write_kv(tokens, tokens, whole.key_cache, whole.value_cache, torch.arange(7), whole.kv_scales)
    done = 0
    for count in chunks:
        part = slice(done, done + count)
        write(tokens[part], tokens[part], cut.key_cache, cut.value_cache, torch.arange(7)[part], cut.kv_scales)
        done += count
    assert same_bits(whole, cut)
    off = (whole.numbers()[0].flatten(0, 1)[:7] - tokens).abs()
    assert (off <= tokens.abs().amax(-1, keepdim=True) / 16).all()


@COPIES
def test_a_copy_on_write_takes_the_scales_along_and_then_they_are_apart(copy):
    pool = poisoned(3, 4)
    tokens = torch.randn(3, 2, 32)
    cpu_write_kv(tokens, tokens, pool.key_cache, pool.value_cache, torch.tensor([4, 5, 6]), pool.kv_scales)
    copy(pool.key_cache, pool.value_cache, torch.tensor([[1, 2]]), pool.kv_scales)
    for each in pool.bits():
        assert torch.equal(each[1], each[2])  # a partial block, with the poison behind its end
        assert torch.equal(
            each[0], poisoned(3, 4).bits()[0][0].expand_as(each[0]) if each.dtype == torch.uint8 else each[0]
        )
    before = [each[1].clone() for each in pool.bits()]
    louder = 100 * torch.randn(1, 2, 32)
    cpu_write_kv(louder, louder, pool.key_cache, pool.value_cache, torch.tensor([11]), pool.kv_scales)
    assert all(torch.equal(each[1], then) for each, then in zip(pool.bits(), before, strict=True))


@PACKS
@pytest.mark.parametrize("head_size", [1, 32, 80])
def test_blocks_that_leave_come_back_with_their_scales(pack, unpack, head_size):
    pool = poisoned(6, 3, 3, head_size)
    tokens = torch.randn(6, 3, head_size) * 2.0 ** torch.arange(6)[:, None, None]
    cpu_write_kv(tokens, tokens.flip(0), pool.key_cache, pool.value_cache, torch.arange(6), pool.kv_scales)
    packed = pack(pool.key_cache, pool.value_cache, torch.tensor([1, 0]), pool.kv_scales)
    assert packed.shape == (2, 3 * 3 * (2 * head_size + 4))
    assert packed.dtype == torch.uint8
    unpack(packed, pool.key_cache, pool.value_cache, torch.tensor([4, 5]), pool.kv_scales)
    for each, empty in zip(pool.bits(), poisoned(6, 3, 3, head_size).bits(), strict=True):
        assert torch.equal(each[[4, 5]], each[[1, 0]])
        assert torch.equal(each[[2, 3]], empty[[2, 3]])


# Attention


def fp8_batch(recipe: Recipe) -> tuple[Batch, Batch, Tensor]:
    """A batch over an fp8 pool, the same over the numbers it holds, and the scales; poison wherever nobody may look."""
    batch = build(recipe)
    shape = batch.key_cache.shape
    whole = torch.full((shape[0], 2, *shape[1:]), POISON_BYTE, dtype=torch.uint8)
    caches = (whole[:, 0], whole[:, 1]) if recipe.is_interleaved else whole.transpose(0, 1).contiguous().unbind(0)
    scales, held = new_scales(batch.key_cache), []
    for which, (cache, numbers) in enumerate(zip(caches, (batch.key_cache, batch.value_cache), strict=True)):
        cells, scales[..., which] = quantized(numbers)
        live = numbers.isfinite().all(-1)
        cache[live] = cells.view(torch.uint8)[live]
        exact = dequantized(cells, scales[..., which])
        held.append(exact.to(recipe.dtype))
        assert torch.equal(held[-1][live].float(), exact[live])
    key_cache, value_cache = (cache.view(FP8) for cache in caches)
    fp8 = replace(batch, key_cache=key_cache, value_cache=value_cache)
    return fp8, replace(batch, key_cache=held[0], value_cache=held[1]), scales


RECIPES = [
    Recipe((1, 7, 1), (70, 20, 0), block_size=5, group=3, magnitude=5.0),
    Recipe((1, 20), (33, 45), torch.bfloat16, block_size=16, head_size=80, window=9, is_interleaved=True),
    Recipe((1, 20), (40, 45), torch.float16, block_size=8, head_size=64, num_kv_heads=1, aliases=(2, 5)),
]


def check_fp8(attend, recipe: Recipe, **how) -> None:
    batch, held, scales = fp8_batch(recipe)
    how = {"scale": recipe.head_size**-0.5, "window": recipe.window, **how}
    exact, own = dense(held, **how), dense(held, **how, dtype=recipe.dtype)
    plan = plan_of(batch, window=recipe.window, shapes=small_shapes(recipe.group), split=True)
    out = torch.full_like(batch.query, float("nan"))
    _, lse = attend(*batch, **how, return_lse=True, out=out, plan=plan, kv_scales=scales)
    assert max_error(out, exact.out) <= kernel_bound(exact, own, recipe.dtype)
    assert max_error(lse, exact.lse) <= lse_bound(exact, own)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("recipe", RECIPES, ids=["float32", "bfloat16", "float16"])
def test_k8_attention_is_dense_attention_over_what_the_cache_holds(attend, recipe):
    check_fp8(attend, recipe)


@pytest.mark.slow
def test_k8_a_capped_score_is_of_the_scaled_key():
    check_fp8(triton_paged_attention, replace(RECIPES[0], magnitude=1.0), logit_cap=2.0)


def test_an_instruction_and_the_bits_decode_alike(monkeypatch):
    batch, _, scales = fp8_batch(RECIPES[1])
    how = {"scale": 0.1, "window": 9, "kv_scales": scales}
    by_bits = triton_paged_attention(*batch, **how)
    monkeypatch.setattr(attention_launch, "NATIVE", ("sm_80",))
    assert torch.equal(triton_paged_attention(*batch, **how), by_bits)


def quantization_bound(batch: Batch, scale: float) -> float:
    """The most that rounding K and V to e4m3 can move an output, in exact arithmetic.

    Rounding moves a number x by at most r(x) = max(2^-4 |x|, 2^-10 s), and the scale s is at most max|x| / 224. So a score
    moves by at most d = scale * max(|q| @ r(K)), each weight by a factor between e^-2d and e^2d, and the output by
    (e^2d - 1) * max(P @ |V|) + e^2d * max(P @ r(V)).
    """
    worst = 0.0
    starts = batch.query_start.tolist()
    for seq, length in enumerate(batch.seq_lens.tolist()):
        positions = torch.arange(length)
        where = (
            batch.block_tables[seq].long()[positions // batch.key_cache.shape[1]],
            positions % batch.key_cache.shape[1],
        )
        query = batch.query[starts[seq] : starts[seq + 1]].double().transpose(0, 1)
        group = query.shape[0] // batch.key_cache.shape[2]
        key, value = (
            cache[where].double().transpose(0, 1).repeat_interleave(group, 0)
            for cache in (batch.key_cache, batch.value_cache)
        )
        moved_key, moved_value = (
            (each.abs() * 2.0**-4).maximum(each.abs().amax(-1, keepdim=True) / 224 * 2.0**-10) for each in (key, value)
        )
        hidden = positions > torch.arange(length - query.shape[1], length)[:, None]
        weights = (query @ key.mT * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        d = scale * (query.abs() @ moved_key.mT).masked_fill(hidden, 0.0).amax(-1, keepdim=True)
        grown = (2 * d).exp()
        moved = (grown - 1) * (weights @ value.abs()) + grown * (weights @ moved_value)
        worst = max(worst, float(moved.max()))
    return worst


@BOTH
def test_k8_it_is_as_near_to_attention_without_fp8_as_its_rounding_allows(attend):
    recipe = Recipe((1, 4), (30, 9), magnitude=0.5)
    (batch, _, scales), plain = fp8_batch(recipe), build(recipe)
    exact, own = dense(plain, scale=0.1), dense(plain, scale=0.1, dtype=torch.float32)
    error = max_error(attend(*batch, scale=0.1, kv_scales=scales), exact.out)
    rounding = quantization_bound(plain, 0.1)
    assert error <= rounding + kernel_bound(exact, own, torch.float32)
    assert kernel_bound(exact, own, torch.float32) < error  # it is no 16-bit cache in disguise
    assert rounding < 0.5  # and the bound says something


def test_k8_cells_and_scales_are_read_exactly_where_some_query_sees():
    recipe = replace(RECIPES[0], window=9)
    batch, held, scales = fp8_batch(recipe)
    plan = plan_of(batch, window=9, shapes=small_shapes(3), split=True)
    with Watch() as watch:
        triton_paged_attention(*batch, scale=0.1, window=9, plan=plan, kv_scales=scales)
    pairs = scales.view(torch.int32)
    live = held.key_cache.isfinite().all(-1)
    assert set(watch.read(pairs).tolist()) == set(live.flatten().nonzero().flatten().tolist())
    assert len(watch.written(pairs)) == 0
    cells = set(live.flatten().repeat_interleave(recipe.head_size).nonzero().flatten().tolist())
    assert set(watch.read(batch.key_cache).tolist()) == cells | {
        each + live.numel() * recipe.head_size for each in cells
    }


@BOTH
def test_k8_a_token_that_is_no_number_shows(attend):
    pool = poisoned(2, 4)
    tokens = torch.randn(5, 2, 32)
    tokens[3, 1, 7] = float("inf")
    cpu_write_kv(tokens, tokens, pool.key_cache, pool.value_cache, torch.arange(5), pool.kv_scales)
    out = attend(
        torch.randn(1, 2, 32),
        pool.key_cache,
        pool.value_cache,
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        scale=0.1,
        kv_scales=pool.kv_scales,
    )
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()


@BOTH
def test_k8_neither_neighbours_nor_block_ids_change_a_bit(attend):
    batch, _, scales = fp8_batch(RECIPES[0])
    together = attend(*batch, scale=0.1, kv_scales=scales)
    order = torch.randperm(len(batch.key_cache), generator=torch.Generator().manual_seed(1))
    renamed = torch.argsort(order).int()
    key_cache, value_cache = (each.view(torch.uint8)[order].view(FP8) for each in (batch.key_cache, batch.value_cache))
    tables = renamed[batch.block_tables[:1].clamp(0, len(order) - 1).long()]
    index = torch.tensor([0, 1], dtype=torch.int32)
    alone = attend(
        batch.query[:1], key_cache, value_cache, tables, batch.seq_lens[:1], index, scale=0.1, kv_scales=scales[order]
    )
    assert torch.equal(alone, together[:1])


def test_k8_the_highest_bytes_and_their_scales_are_found():
    num_blocks = (5 << 30) // (16 * 2 * 64)
    cache = sparse_pool(5 << 29).view(torch.uint8).view(FP8).view(num_blocks, 16, 2, 64)
    scales, tokens = new_scales(cache), torch.randn(1, 2, 64)
    triton_write_kv(tokens, tokens, cache, cache, torch.tensor([num_blocks * 16 - 16]), scales)
    tables = torch.tensor([[num_blocks - 1]], dtype=torch.int32)
    index = torch.tensor([0, 1], dtype=torch.int32)
    out = triton_paged_attention(tokens, cache, cache, tables, index[1:], index, scale=0.1, kv_scales=scales)
    assert torch.equal(out, dequantized(*quantized(tokens)))


@pytest.mark.parametrize("rotate", [cpu_rotate_write, triton_rotate_write], ids=["twin", "triton"])
@pytest.mark.parametrize("rotary_size", [32, 16])
def test_a_rotated_key_is_written_as_any_other(rotate, rotary_size):
    random = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(3, heads, 32, generator=random).bfloat16() for heads in (4, 2, 2))
    rotation, positions = torch.randn(9, 2, rotary_size // 2, generator=random), torch.tensor([4, 0, 8])
    slots = torch.tensor([5, PAD_SLOT, 0])
    plain = torch.zeros(2, 2, 4, 2, 32, dtype=torch.bfloat16)
    pool, expected = poisoned(2, 4), poisoned(2, 4)
    rotate(query.clone(), key, value, *plain, positions, slots, rotation)
    rotate(query, key, value, pool.key_cache, pool.value_cache, positions, slots, rotation, kv_scales=pool.kv_scales)
    turned, values = (cache.flatten(0, 1)[[5, 0]] for cache in plain)
    cpu_write_kv(turned, values, expected.key_cache, expected.value_cache, torch.tensor([5, 0]), expected.kv_scales)
    assert same_bits(pool, expected)


@pytest.mark.parametrize(
    ("scales", "quality"),
    [
        (lambda right: None, "value"),
        (lambda right: right[:1], "shape"),
        (lambda right: right.float(), "dtype"),
        (lambda right: right.expand(2, 4, 2, 2).transpose(0, 1).contiguous().transpose(0, 1), "contiguity"),
        (lambda right: torch.zeros(33, dtype=torch.bfloat16)[1:].view(2, 4, 2, 2), "address"),
    ],
    ids=["none", "shape", "dtype", "contiguity", "address"],
)
def test_an_fp8_cache_is_refused_without_its_scales(scales, quality):
    pool = poisoned(2, 4)
    wrong, tokens = scales(pool.kv_scales), torch.zeros(1, 2, 32)
    ids, rotation = torch.tensor([0]), torch.zeros(1, 2, 16)
    index = torch.tensor([0, 1], dtype=torch.int32)
    caches = (pool.key_cache, pool.value_cache)
    packed = kernels.pack_blocks(*caches, ids, pool.kv_scales)
    for launch in (
        lambda: kernels.paged_attention(tokens, *caches, index[None], index[1:], index, scale=0.1, kv_scales=wrong),
        lambda: triton_paged_attention(tokens, *caches, index[None], index[1:], index, scale=0.1, kv_scales=wrong),
        lambda: kernels.write_kv(tokens, tokens, *caches, ids, wrong),
        lambda: triton_write_kv(tokens, tokens, *caches, ids, wrong),
        lambda: kernels.copy_blocks(*caches, torch.tensor([[0, 1]]), wrong),
        lambda: triton_copy_blocks(*caches, torch.tensor([[0, 1]]), wrong),
        lambda: kernels.pack_blocks(*caches, ids, wrong),
        lambda: triton_unpack_blocks(packed, *caches, ids, wrong),
        lambda: kernels.rotate_write(tokens, tokens, tokens, *caches, ids, ids, rotation, kv_scales=wrong),
    ):
        with pytest.raises(BadArgument) as raised:
            launch()
        assert (raised.value.argument, raised.value.quality) == ("kv_scales", quality)
    assert same_bits(pool, poisoned(2, 4))


def test_scales_beside_another_cache_and_numbers_of_fp8_are_refused():
    pool, plain = poisoned(2, 4), torch.zeros(2, 2, 4, 2, 32)
    tokens, ids = torch.zeros(1, 2, 32), torch.tensor([0])
    with pytest.raises(BadArgument, match="kv_scales has value a tensor, needs None"):
        kernels.write_kv(tokens, tokens, *plain, ids, pool.kv_scales)
    with pytest.raises(BadArgument, match="key has dtype torch.float8_e4m3fn"):
        kernels.write_kv(tokens.to(FP8), tokens.to(FP8), pool.key_cache, pool.value_cache, ids, pool.kv_scales)
    with pytest.raises(BadArgument, match="value has dtype torch.float16, needs torch.float32"):
        kernels.write_kv(tokens, tokens.half(), pool.key_cache, pool.value_cache, ids, pool.kv_scales)
    with pytest.raises(BadArgument, match="packed has dtype torch.float8_e4m3fn, needs torch.uint8"):
        kernels.unpack_blocks(torch.zeros(1, 544).to(FP8), pool.key_cache, pool.value_cache, ids, pool.kv_scales)
