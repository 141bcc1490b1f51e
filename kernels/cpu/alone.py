"""Each vector kernel alone, as a function of tensors: for tests, for measurements, and for whoever wants just one."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.layout import LEFT, PackedWeight, rounded_up
from kernels.cpu.team import Team
from kernels.cpu.workspace import Workspace, chunks_of, layer_records


def linear(x: Tensor, weight: PackedWeight, team: Team, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T``, ``[rows, num_columns]`` float32, of ``x`` ``[rows, depth]``; added to ``out`` if that is given."""
    work = Workspace(team)
    rows = len(x)
    work.weight_room(rows, weight)[:, : weight.depth] = x
    work.set(vocab_columns=weight.padded_columns)
    found = work.room("logits", (rows, weight.padded_columns), torch.float32)
    if out is not None:
        found[:, : weight.num_columns] = out
    work.run("product" if out is None else "product_add")
    return found[:, : weight.num_columns]


def gated(x: Tensor, weight: PackedWeight, team: Team) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``, as a left matrix, for a packed pair of weights."""
    work = Workspace(team)
    work.weight_room(len(x), weight)[:, : weight.depth] = x
    work.set(gate_columns=weight.padded_columns)
    work.gate_room()
    found = work.room("gated", (len(x), weight.padded_columns), LEFT)
    work.run("gate_up")
    return found[:, : weight.num_columns]


def packed_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    *,
    team: Team,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """``kernels.paged_attention`` in bf16, over caches that ``pack_blocks_for_products`` has ordered."""
    rows, num_query_heads, head_size = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_query_heads // num_kv_heads
    tables, work = block_tables.contiguous(), Workspace(team)
    chunks = torch.from_numpy(chunks_of(query_start.numpy(), seq_lens.numpy(), group))
    longest = int(seq_lens.max()) if len(seq_lens) else 0
    work.attention_room(group, max(block_size, rounded_up(longest, block_size)), block_size, head_size)
    work.set(rows=rows, capacity=rows, num_chunks=len(chunks), table_stride=tables.shape[1], scale=scale)
    work.set(num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, window=window or 0)
    by_head = query.view(rows, num_kv_heads, group, head_size).transpose(0, 1).to(LEFT).contiguous()
    for name, tensor in {"query": by_head, "block_tables": tables, "chunks": chunks}.items():
        work.hold(name, tensor)
    found = work.room("mixed", (rows, num_query_heads, head_size), LEFT)
    records = layer_records([{"key_cache": key_cache, "value_cache": value_cache}])
    work.set(layers=records.ctypes.data)
    work.run("attention")
    return found
