"""Other people's attention on a case that is measured: PyTorch's, and FlashInfer's where it is installed."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.bench_case import Case, Inputs

WORKSPACE_BYTES = 256 << 20  # what FlashInfer wants for its partial results


def torch_launch(case: Case, inputs: Inputs) -> Callable[[], Tensor] | None:
    """One call of PyTorch's attention on gathered, contiguous K and V.

    There is one for sequences of one length that are all decodes or all whole prompts.
    """
    num_queries, seq_len = case.query_lens[0], case.seq_lens[0]
    is_uniform = len(set(case.query_lens)) == len(set(case.seq_lens)) == 1 and num_queries in (1, seq_len)
    if not is_uniform or case.window is not None:
        return None
    pairs = [inputs.gathered(seq) for seq in range(len(case.seq_lens))]
    key, value = (torch.stack(each).contiguous() for each in zip(*pairs, strict=True))
    query = inputs.query.view(len(case.seq_lens), num_queries, *inputs.query.shape[1:]).transpose(1, 2).contiguous()
    is_causal = num_queries > 1
    return lambda: scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=case.scale, enable_gqa=True
    )


def flashinfer_launch(case: Case, inputs: Inputs) -> Callable[[], Tensor] | None:
    """One call of FlashInfer's kernel for paged K and V, planned; None where it is not installed or has no such cache.

    It reads our pool as it is: its pages are our blocks.
    """
    if inputs.kv_scales is not None or case.dtype == torch.float32 or 0 in case.seq_lens:
        return None
    try:
        flashinfer: Any = import_module("flashinfer")  # Any: it is no dependency, and may not be there
    except ImportError:
        return None
    device = inputs.query.device
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    needs = [-(-length // case.block_size) for length in case.seq_lens]
    ids = torch.cat([inputs.block_tables[seq, :need] for seq, need in enumerate(needs)])
    page_starts = torch.tensor((0, *needs), device=device).cumsum(0).int()
    last_lens = torch.tensor([(n - 1) % case.block_size + 1 for n in case.seq_lens], dtype=torch.int32, device=device)
    heads = (case.heads.num_query_heads, case.heads.num_kv_heads, case.heads.head_size, case.block_size)
    options = {
        "sm_scale": case.scale,
        "window_left": -1 if case.window is None else case.window - 1,  # it counts the keys before the query
        "q_data_type": case.dtype,
        "kv_data_type": case.dtype,
    }
    if set(case.query_lens) == {1}:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=case.heads.group > 1)
        wrapper.plan(page_starts, ids, last_lens, *heads, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(inputs.query_start, page_starts, ids, last_lens, *heads, causal=True, **options)
    return lambda: wrapper.run(inputs.query, (inputs.key_cache, inputs.value_cache))
