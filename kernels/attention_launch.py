"""The launcher of the Triton attention kernels: checks, plan, then one launch per tile shape and one for merges."""

from itertools import pairwise

import torch
from torch import Tensor

from kernels.arguments import (
    check_attention,
    check_lengths,
    check_lengths_values,
    check_table_values,
    check_wide_loads,
    values_are_checked,
)
from kernels.attention_kernel import merge_splits_kernel, paged_attention_kernel
from kernels.attention_plan import AttentionPlan, check_plan, check_plan_lengths, plan_attention
from kernels.attention_signature import signed
from kernels.fp8 import FP8, NATIVE, bytes_of
from kernels.launching import check_device
from kernels.tile_shape import architecture_of, power_of_two

PRECISION = "ieee"  # of products of float32: the default would round its inputs to 10 bits


@signed
def triton_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    *,
    scale: float,
    window: int | None = None,
    logit_cap: float | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    plan: AttentionPlan | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``paged_attention`` by the Triton kernels; with a plan and unchecked values it never waits for the device."""
    check_attention(
        query, key_cache, value_cache, block_tables, seq_lens, query_start, scale, window, logit_cap, out, kv_scales
    )
    check_wide_loads(key_cache, value_cache)
    check_device("query", query)
    plan = _checked_plan(plan, query, key_cache, block_tables, seq_lens, query_start, window)
    num_tokens, num_query_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if out is None:
        has_padding = sum(plan.query_lens) < num_tokens
        out = (torch.zeros if has_padding else torch.empty)(query.shape, dtype=query.dtype, device=query.device)
    lse_shape = (num_tokens, num_query_heads) if return_lse else (0, 0)
    lse = torch.full(lse_shape, float("-inf"), dtype=torch.float32, device=query.device)
    num_partial_rows = plan.num_partials * num_kv_heads * plan.partial_rows
    partial_acc = torch.empty((num_partial_rows, head_size), dtype=torch.float32, device=query.device)
    partial_ml = torch.empty((num_partial_rows, 2), dtype=torch.float32, device=query.device)
    targets = (out, lse, partial_acc, partial_ml)
    common = {
        "group": plan.group,
        "head_size": head_size,
        "HEAD": power_of_two(head_size),
        "HAS_LSE": return_lse,
        "enable_fp_fusion": True,  # the default is about to change, and it changes bits
    }
    for launch in plan.launches:
        shape = launch.shape
        paged_attention_kernel[(len(launch.tiles), num_kv_heads)](
            *targets,
            query,
            bytes_of(key_cache),
            bytes_of(value_cache),
            query if kv_scales is None else kv_scales.view(torch.int32),
            block_tables,
            seq_lens,
            query_start,
            launch.tiles,
            scale,
            1.0 if logit_cap is None else logit_cap,
            0 if window is None else window,
            *out.stride()[:2],
            *query.stride()[:2],
            *key_cache.stride()[:3],
            block_tables.stride(0),
            block_size=block_size,
            ROWS=shape.rows,
            TILE_TOKENS=shape.tile_tokens,
            SPLIT_TOKENS=shape.split_tokens,
            HAS_CAP=logit_cap is not None,
            HAS_WINDOW=window is not None,
            IS_FP8=kv_scales is not None,
            IS_NATIVE=kv_scales is not None and architecture_of(query.device) in NATIVE,
            PRECISION=PRECISION,
            **shape.options,
            **common,
        )
    if len(plan.merges):
        merge_splits_kernel[(len(plan.merges), num_kv_heads)](
            *targets,
            plan.merges,
            *out.stride()[:2],
            ROWS=plan.partial_rows,
            GROUP=power_of_two(plan.group),
            **common,
        )
    return (out, lse) if return_lse else out


def _checked_plan(
    plan: AttentionPlan | None,
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    window: int | None,
) -> AttentionPlan:
    """The caller's plan or a new one, and no value that it leads to is out of range."""
    num_blocks, block_size, num_kv_heads, head_size = key_cache.shape
    num_query_heads = query.shape[1]
    check_plan(plan, num_query_heads // num_kv_heads, window, query.device)
    if plan is None or values_are_checked():
        starts, lengths = query_start.tolist(), seq_lens.tolist()
        query_lens = [end - begin for begin, end in pairwise(starts)]
        if values_are_checked():
            check_lengths_values(starts, lengths)
        check_plan_lengths(plan, query_lens, lengths)
        plan = plan or plan_attention(
            query_lens,
            lengths,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=query.dtype,
            device=query.device,
            window=window,
            is_fp8=key_cache.dtype == FP8,
        )
    table_width = block_tables.shape[1]
    check_lengths(plan.query_lens, plan.seq_lens, num_tokens=len(query), table_width=table_width, block_size=block_size)
    if values_are_checked():
        check_table_values(
            block_tables, plan.seq_lens, plan.query_lens, block_size=block_size, num_blocks=num_blocks, window=window
        )
    return plan
