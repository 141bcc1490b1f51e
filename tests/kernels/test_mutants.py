"""Sabotaged kernels: each small patch of the source is caught by the check that is named beside it."""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import kernels
from kernels import (
    PAD_SLOT,
    attention_kernel,
    attention_launch,
    cache_kernel,
    cache_launch,
    fp8_kernel,
    layer_kernel,
    layer_launch,
    sampling_kernel,
    sampling_launch,
    triton_paged_attention,
    triton_write_kv,
)
from tests.kernels import test_attention, test_attention_bits, test_attention_reads, test_fp8, test_layer, test_sampling
from tests.kernels.batches import Recipe, build, plan_of, pool, small_shapes
from tests.kernels.test_cache import same, storage


def dense_attention(recipe: Recipe, **how) -> None:
    batch = build(recipe)
    plan = plan_of(batch, window=recipe.window, shapes=small_shapes(recipe.group), split=how.pop("split", True))
    test_attention.assert_is_dense(triton_paged_attention, batch, window=recipe.window, plan=plan, **how)


def decode_and_prefill() -> None:
    dense_attention(Recipe((1, 7), (70, 20), group=3))


def window_counts() -> None:
    test_attention.test_k6_a_query_sees_window_keys_itself_included(triton_paged_attention, 16)


def empty_sets() -> None:
    test_attention.test_k3_an_empty_set_gives_zero_and_minus_infinity(triton_paged_attention)


def table_entries() -> None:
    test_attention_reads.test_k2_table_entries_are_read_exactly_where_some_query_sees(test_attention_reads.RECIPES[1])


def cells_read() -> None:
    test_attention_reads.test_k2_cells_are_read_exactly_where_some_query_sees(test_attention_reads.RECIPES[1])


def huge_ids() -> None:
    test_attention_reads.test_k5_blocks_beyond_two_to_the_31_elements_are_found(triton_paged_attention)


def windowed_chunks() -> None:
    test_attention_bits.test_chunks_of_one_shape_do_not_matter(torch.float32, 20)


def split_on_and_off() -> None:
    test_attention_bits.test_k4_splits_of_their_own_are_as_splits_in_a_row(torch.float32, None, 32)


def caps() -> None:
    dense_attention(Recipe((1, 2), (40, 9)), logit_cap=1000.0)


def writes() -> None:
    recipe = Recipe((), (), block_size=3, num_kv_heads=3)
    key_cache, value_cache = pool(recipe, 2)
    key, value = torch.randn(2, 3, 3, 32)
    triton_write_kv(key, value, key_cache, value_cache, torch.tensor([PAD_SLOT, 4, 0]))
    assert torch.equal(torch.stack([key_cache[1, 1], key_cache[0, 0]]), key[1:])
    assert torch.equal(torch.stack([value_cache[1, 1], value_cache[0, 0]]), value[1:])
    assert storage(key_cache).isfinite().sum() == 2 * 2 * 3 * 32


def copies() -> None:
    recipe = Recipe((), (), block_size=3, num_kv_heads=3)
    key_cache, value_cache = pool(recipe, 4)
    key_cache[1:3], value_cache[1:3] = torch.randn(2, 2, 3, 3, 32)
    expected_key, expected_value = key_cache[[0, 1, 2, 2]], value_cache[[0, 1, 2, 2]]
    cache_launch.triton_copy_blocks(key_cache, value_cache, torch.tensor([[2, 3]]))
    assert same(key_cache, expected_key)
    assert same(value_cache, expected_value)
    assert storage(key_cache).isfinite().sum() == 2 * 3 * 3 * 3 * 32


def fp8_attention() -> None:
    test_fp8.check_fp8(triton_paged_attention, Recipe((1, 7), (70, 20), group=3, block_size=5))


def fp8_reads() -> None:
    test_fp8.test_k8_cells_and_scales_are_read_exactly_where_some_query_sees()


def fp8_writes() -> None:
    test_fp8.test_the_kernel_writes_the_bytes_and_scales_of_the_twin(torch.float16)


def fp8_copies() -> None:
    test_fp8.test_a_copy_on_write_takes_the_scales_along_and_then_they_are_apart(kernels.triton_copy_blocks)


def fp8_packs() -> None:
    pack, unpack = kernels.triton_pack_blocks, kernels.triton_unpack_blocks
    test_fp8.test_blocks_that_leave_come_back_with_their_scales(pack, unpack, 32)


def norms() -> None:
    test_layer.test_a_norm_is_its_formula(kernels.triton_rms_norm, torch.float32, 48)
    test_layer.test_a_residual_is_added_first_and_its_rounded_sum_is_normed(kernels.triton_add_rms_norm, torch.bfloat16)


def gates() -> None:
    test_layer.test_a_gate_is_its_formula(kernels.triton_silu_mul, torch.float32, 5)


def rotations() -> None:
    for is_interleaved in (False, True):
        test_layer.test_queries_turn_and_keys_turn_on_their_way_into_the_cache(
            kernels.triton_rotate_write, torch.float32, is_interleaved, 80, 64, has_norm=True
        )


def draws() -> None:
    for check in (
        test_sampling.test_of_equal_logits_the_lowest_id_is_taken,
        test_sampling.test_rows_without_a_token_say_so_and_others_are_as_alone,
    ):
        check(kernels.triton_draw_tokens)
    test_sampling.test_a_row_gets_the_token_of_the_definition(kernels.triton_draw_tokens, 5000)


def filters() -> None:
    test_sampling.test_a_border_is_between_tokens_whatever_the_others_do(kernels.triton_draw_tokens)
    test_sampling.test_equals_are_counted_over_all_turns(kernels.triton_draw_tokens)
    for num_levels in (2, 4):
        test_sampling.test_of_equal_logits_at_the_border_the_lowest_ids_stay(kernels.triton_draw_tokens, num_levels)


@dataclass(frozen=True)
class Mutant:
    """The source with ``old``, which is there once, replaced by ``new``; the check that must fail. ``row`` is the bug of
    ``spec.bugs`` that it is like."""

    name: str
    check: Callable[[], None]
    old: str
    new: str
    row: str = ""


ATTENTION = [
    Mutant("causal one too few", decode_and_prefill, "<= positions[:, None]\n", "< positions[:, None]\n", "B-139"),
    Mutant(
        "causal one too many", decode_and_prefill, "<= positions[:, None]\n", "<= positions[:, None] + 1\n", "B-190"
    ),
    Mutant(
        "window one too many", window_counts, "> positions[:, None] - window", ">= positions[:, None] - window", "B-205"
    ),
    Mutant(
        "window one too few",
        window_counts,
        "> positions[:, None] - window",
        "> positions[:, None] - window + 1",
        "B-205",
    ),
    Mutant(
        "key not masked",
        cells_read,
        "key_head_ptr + cells, mask=live_cells",
        "key_head_ptr + cells, mask=live_dims[None, :]",
        "B-189",
    ),
    Mutant(
        "value not masked",
        cells_read,
        "value_head_ptr + cells, mask=live_cells",
        "value_head_ptr + cells, mask=live_dims[None, :]",
        "B-185",
    ),
    Mutant("cells before the window", cells_read, "live_tokens = live_tokens & (tokens >= begin)", "pass", "B-206"),
    Mutant(
        "entries before the window", table_entries, "table_mask = table_mask & (first_tokens >= begin)", "pass", "B-034"
    ),
    Mutant(
        "entries past the end",
        table_entries,
        "mask=coming < split_end",
        "mask=coming < split_end + TILE_TOKENS",
        "B-033",
    ),
    Mutant(
        "group interleaved",
        decode_and_prefill,
        "kv_head * group + rows % group",
        "kv_head + rows % group * tl.num_programs(1)",
        "B-200",
    ),
    Mutant(
        "group for rows",
        decode_and_prefill,
        "first_query + rows // group",
        "first_query + rows // (ROWS // group)",
        "B-208",
    ),
    Mutant(
        "32-bit addresses",
        huge_ids,
        "blocks * cache_stride_block",
        "blocks.to(tl.int32) * cache_stride_block.to(tl.int32)",
        "B-192",
    ),
    Mutant(
        "place not wrapped",
        decode_and_prefill,
        "places = tokens % block_size",
        "places = tokens % (block_size - 1)",
        "B-031",
    ),
    Mutant("ids one turn late", decode_and_prefill, "coming = tokens + TILE_TOKENS", "coming = tokens"),
    Mutant(
        "begin not rounded",
        windowed_chunks,
        "split_begin = begin // TILE_TOKENS * TILE_TOKENS",
        "split_begin = begin",
        "B-204",
    ),
    Mutant(
        "one tile too many without a mask",
        decode_and_prefill,
        "num_queries + first_query + 1, 0) // TILE_TOKENS",
        "num_queries + first_query + TILE_TOKENS, 0) // TILE_TOKENS",
        "B-139",
    ),
    Mutant("fold forgets to fade", decode_and_prefill, "tl.fma(part_l, weight, l * fade)", "tl.fma(part_l, weight, l)"),
    Mutant("fold without weight", decode_and_prefill, "tl.broadcast_to(weight[:, None], acc.shape)", "1.0", "B-190"),
    Mutant(
        "merge last to first",
        split_on_and_off,
        "(first.to(tl.int64) + index)",
        "(first.to(tl.int64) + count - 1 - index)",
        "B-196",
    ),
    Mutant(
        "merge one too few",
        split_on_and_off,
        "tl.range(count, num_stages=8)",
        "tl.range(count - 1, num_stages=8)",
        "B-198",
    ),
    Mutant(
        "splits overlap",
        decode_and_prefill,
        "(each_split + 1) * SPLIT_TOKENS",
        "(each_split + 1) * SPLIT_TOKENS + 1",
        "B-197",
    ),
    Mutant(
        "log-sum-exp in base 2",
        decode_and_prefill,
        "(total_m + tl.log2(divisor)) * LN_2",
        "(total_m + tl.log2(divisor))",
        "B-203",
    ),
    Mutant(
        "merged log-sum-exp in base 2",
        decode_and_prefill,
        "(m + tl.log2(divisor)) * LN_2",
        "(m + tl.log2(divisor))",
        "B-203",
    ),
    Mutant("empty rows divide by zero", empty_sets, "tl.where(total_l == 0.0, 1.0, total_l)", "total_l", "B-201"),
    Mutant(
        "inf - inf in a tile",
        empty_sets,
        'tl.where(new_m == float("-inf"), 0.0, new_m)  # a row',
        "new_m  # a row",
        "B-204",
    ),
    Mutant("scales of K left out", fp8_attention, " * key_scale[:, None]", "", "B-213"),
    Mutant(
        "scales in decodes only",
        fp8_attention,
        "decoded(value, IS_NATIVE) * value_scale[:, None]",
        "decoded(value, IS_NATIVE) * tl.where(SPLIT_TOKENS > 0, value_scale, 1.0)[:, None]",
        "B-216",
    ),
    Mutant(
        "scale of the block's first token",
        fp8_attention,
        "(blocks * block_size + places) * tl.num_programs(1)",
        "(blocks * block_size + places * 0) * tl.num_programs(1)",
        "B-215",
    ),
    Mutant("scale of another head", fp8_attention, "tl.num_programs(1) + kv_head\n", "tl.num_programs(1)\n", "B-214"),
    Mutant(
        "scales not masked",
        fp8_reads,
        "tl.load(kv_scales_ptr + pairs, mask=live_tokens",
        "tl.load(kv_scales_ptr + pairs, mask=tokens >= 0",
    ),
    Mutant("tanh cancels", caps, "tl.where(x < 0.3, series,", "tl.where(x < 0.0, series,"),
    Mutant("cap before scale", caps, "soft_cap(score * scale, logit_cap)", "soft_cap(score, logit_cap) * scale"),
]

CACHE = [
    Mutant("padding written", writes, "(slot < 0) | (slot >= num_slots)", "slot >= num_slots", "B-038"),
    Mutant(
        "value over key",
        writes,
        "tl.store(value_cache_ptr + value_cells + dims, v",
        "tl.store(key_cache_ptr + value_cells + dims, v",
        "B-069",
    ),
    Mutant("padded heads written", writes, "(heads < num_kv_heads) & (dims", "(heads < HEADS) & (dims", "B-207"),
    Mutant("wrong block of a slot", writes, "block = slot // block_size", "block = slot // (block_size + 3)", "B-030"),
    Mutant("source for target", copies, "copies_stride + 1)", "copies_stride)", "B-069"),
    Mutant(
        "copy past the block", copies, "elements < block_size * num_kv_heads * head_size", "elements < TILE", "B-198"
    ),
    Mutant(
        "scales stay",
        fp8_copies,
        "kv_scales_ptr + target * SCALE_BYTES",
        "kv_scales_ptr + source * SCALE_BYTES",
        "B-069",
    ),
    Mutant(
        "packed without scales",
        fp8_packs,
        "tl.store(scale_ptrs, scales, mask=elements < SCALE_BYTES)",
        "pass",
        "B-110",
    ),
    Mutant(
        "one scale for K and V",
        fp8_writes,
        "scale_bits(key_exponent) | (scale_bits(value_exponent) << 16)",
        "scale_bits(key_exponent) | (scale_bits(key_exponent) << 16)",
        "B-214",
    ),
    Mutant("values stay", copies, "tl.store(value_cache_ptr + target", "tl.store(value_cache_ptr + source", "B-068"),
]

FP8 = [
    Mutant("K's scale is V's", fp8_attention, "(pair << 16).to(", "(pair & -65536).to(", "B-214"),
    Mutant(
        "subnormals lost",
        fp8_writes,
        "tl.where(bits < 0x3C800000, small, normal)",
        "tl.where(bits < 0x3C800000, 0, normal)",
    ),
    Mutant("cut off, not rounded", fp8_writes, "bits + 0x7FFFF + ((bits >> 20) & 1)", "bits"),
    Mutant("ties away from even", fp8_writes, "0x7FFFF + ((bits >> 20) & 1)", "0x80000"),
    Mutant("beyond 448", fp8_writes, "0x1FFFFF", "0x0FFFFF"),
    Mutant("sign lost", fp8_attention, "((wide & 0x80) << 8)", "((wide & 0x00) << 8)"),
    Mutant("not a number written as one", fp8_writes, "tl.where(most < 0x7F800000, exponent, 255)", "exponent"),
]


LAYER = [
    Mutant("mean over padding", norms, "tl.sum(x * x, 0) / hidden_size", "tl.sum(x * x, 0) / HIDDEN"),
    Mutant("norm of the exact sum", norms, "x = rounded.to(tl.float32)", "x = x + 0.0"),
    Mutant("weight of another dimension", norms, "weight_ptr + dims,", "weight_ptr + dims // 2,"),
    Mutant("gate and up exchanged", gates, "gate / (1.0 + tl.exp(-gate)) * up", "up / (1.0 + tl.exp(-up)) * gate"),
    Mutant("tail of a row not written", gates, "live = dims < size", "live = dims < size - 1"),
    Mutant(
        "turned the other way",
        rotations,
        "(first * cosine - second * sine).to(kind), mask=live)\n    tl.store(cells + seconds, (second * cosine + first * sine).to(kind), mask=live)\n    if HAS_NORM",
        "(first * cosine + second * sine).to(kind), mask=live)\n    tl.store(cells + seconds, (second * cosine - first * sine).to(kind), mask=live)\n    if HAS_NORM",
    ),
    Mutant("halves for neighbours", rotations, "firsts = pairs * 2 if IS_INTERLEAVED else pairs", "firsts = pairs"),
    Mutant(
        "position of another token",
        rotations,
        "position = tl.load(positions_ptr + token)",
        "position = tl.load(positions_ptr)",
    ),
    Mutant(
        "unturned dimensions lost",
        rotations,
        "tl.store(cells + rest, other, mask=live_rest)",
        "pass",
    ),
    Mutant("norm without the unturned", rotations, " + tl.sum(other * other, 1)", ""),
    Mutant("padding written", rotations, "(slot < 0) | (slot >= num_slots)", "slot >= num_slots", "B-038"),
]

SAMPLING = [
    Mutant("noise of the next token", draws, "(ids + 1).to(tl.uint64)", "(ids + 2).to(tl.uint64)"),
    Mutant("noise of another row", draws, "tl.load(keys_ptr + row)", "tl.load(keys_ptr)"),
    Mutant("noise in greedy rows", draws, "tl.where(is_greedy, 0.0, gumbel(key, ids))", "gumbel(key, ids)"),
    Mutant("shift too far", draws, "(z ^ (z >> 27))", "(z ^ (z >> 28))"),
    Mutant("min_p before the temperature", draws, "least = top +", "least = largest.to(tl.float64) +"),
    Mutant("last of equals", draws, "is_better = tile_best > best", "is_better = tile_best >= best"),
    Mutant("not a number drawn from", draws, "(num_nan == 0) & ", ""),
    Mutant("one too few stays", filters, "limit - weight_above + weight_at - 1", "limit - weight_above"),
    Mutant("every tie stays", filters, "is_at & (place <= num_ties)", "is_at"),
    Mutant("ties counted from 0", filters, "place <= num_ties", "place < num_ties"),
    Mutant("ties of one turn only", filters, "num_seen += tl.sum(is_at.to(tl.int64), 0)", "num_seen += 0"),
    Mutant("two zeros", filters, "(logit + 0.0).to(tl.int32", "logit.to(tl.int32"),
    Mutant("top_p of all that was there", filters, "tl.minimum(num_ties, stays), stays)", "num_ties, stays)"),
]


def sabotaged(module: ModuleType, mutant: Mutant, folder: Path) -> ModuleType:
    source = inspect.getsource(module)
    assert source.count(mutant.old) == 1, f"{mutant.old!r} is there {source.count(mutant.old)} times"
    path = folder / f"{module.__name__}.py"
    path.write_text(source.replace(mutant.old, mutant.new))
    spec = importlib.util.spec_from_file_location("sabotaged", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def assert_caught(mutant: Mutant) -> None:
    with np.errstate(all="ignore"), pytest.raises(AssertionError):
        mutant.check()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ATTENTION, ids=lambda mutant: mutant.name)
def test_a_sabotaged_attention_is_caught(mutant, monkeypatch, tmp_path):
    made = sabotaged(attention_kernel, mutant, tmp_path)
    monkeypatch.setattr(attention_launch, "paged_attention_kernel", made.paged_attention_kernel)
    monkeypatch.setattr(attention_launch, "merge_splits_kernel", made.merge_splits_kernel)
    assert_caught(mutant)


@pytest.mark.parametrize("mutant", CACHE, ids=lambda mutant: mutant.name)
def test_a_sabotaged_write_is_caught(mutant, monkeypatch, tmp_path):
    made = sabotaged(cache_kernel, mutant, tmp_path)
    monkeypatch.setattr(cache_launch, "write_kv_kernel", made.write_kv_kernel)
    monkeypatch.setattr(cache_launch, "copy_blocks_kernel", made.copy_blocks_kernel)
    monkeypatch.setattr(cache_launch, "pack_blocks_kernel", made.pack_blocks_kernel)
    assert_caught(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", FP8, ids=lambda mutant: mutant.name)
def test_a_sabotaged_fp8_is_caught(mutant, monkeypatch, tmp_path):
    made = sabotaged(fp8_kernel, mutant, tmp_path)
    for name in ("decoded", "scale_pair"):
        monkeypatch.setattr(attention_kernel, name, getattr(made, name))
    for name in ("encoded", "exponent_of", "scale_bits", "sizes"):
        monkeypatch.setattr(cache_kernel, name, getattr(made, name))
    assert_caught(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", LAYER, ids=lambda mutant: mutant.name)
def test_a_sabotaged_layer_is_caught(mutant, monkeypatch, tmp_path):
    made = sabotaged(layer_kernel, mutant, tmp_path)
    for name in ("rms_norm_kernel", "silu_mul_kernel", "rotate_write_kernel"):
        monkeypatch.setattr(layer_launch, name, getattr(made, name))
    assert_caught(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SAMPLING, ids=lambda mutant: mutant.name)
def test_a_sabotaged_draw_is_caught(mutant, monkeypatch, tmp_path):
    made = sabotaged(sampling_kernel, mutant, tmp_path)
    monkeypatch.setattr(sampling_launch, "draw_tokens_kernel", made.draw_tokens_kernel)
    assert_caught(mutant)


CHECKS = {mutant.check.__name__: mutant.check for mutant in ATTENTION + CACHE + FP8 + LAYER + SAMPLING}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "filters" else name for name in CHECKS]
)
def test_the_check_passes_on_the_kernel_itself(name):
    CHECKS[name]()
