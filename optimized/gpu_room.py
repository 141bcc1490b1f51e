"""For how many blocks a GPU has room, found by running the widest step that the limits allow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from optimized.capacity import num_blocks_for
from optimized.plan import Plan
from optimized.pool import blocks_needed
from spec.vocabulary import Config, InvalidConfig

if TYPE_CHECKING:
    from optimized.llama import LlamaModel
    from optimized.model_core import EngineArgs


def num_blocks_on_gpu(args: EngineArgs, limits: Config, model: LlamaModel, block_bytes: int) -> int:
    """The blocks for which the GPU has room beside the weights, what others use, and the activations of a full step."""
    import torch

    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    if args.kv_cache_memory_bytes is not None:
        return args.num_blocks_in_memory(limits, block_bytes, 0)
    peak = activation_peak(model, limits)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    used, fraction = total - free, args.gpu_memory_utilization
    num_blocks = num_blocks_for(total, fraction, used, activation_peak=peak, bytes_per_block=block_bytes)
    if num_blocks < 1:
        limit = f"enough: of {total:,} bytes {used:,} are in use, a step needs {peak:,} and one block {block_bytes:,}"
        raise InvalidConfig("gpu_memory_utilization", fraction, limit)
    return num_blocks


def activation_peak(model: LlamaModel, limits: Config) -> int:
    """The most bytes that one step takes beside weights and cache: a full step is run, and measured."""
    import torch

    from optimized.torch_device import TorchDevice

    plan = widest_plan(limits)
    device = TorchDevice(model, replace(limits, num_blocks=sum(len(table) for table in plan.block_tables)))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    device.run(plan)
    return torch.cuda.max_memory_allocated() - before


def widest_plan(limits: Config) -> Plan:
    """A step with as many tokens, and as many sequences that sample, as the limits allow."""
    count = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    each = min(limits.max_num_batched_tokens // count, limits.max_model_len)
    size = blocks_needed(each, limits.block_size)
    rows = range(count)
    return Plan(
        step_id=0,
        seq_ids=tuple(rows),
        query_start=tuple(range(0, count * each + 1, each)),
        token_ids=(0,) * (count * each),
        positions=tuple(range(each)) * count,
        slot_mapping=tuple(row * size * limits.block_size + place for row in rows for place in range(each)),
        block_tables=tuple(tuple(range(row * size, (row + 1) * size)) for row in rows),
        seq_lens=(each,) * count,
        sample_rows=tuple(range(each - 1, count * each, each)),
        sample_seq_ids=tuple(rows),
    )
