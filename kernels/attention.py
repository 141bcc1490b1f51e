"""Paged attention, by the device of its tensors."""

from torch import Tensor

from kernels.attention_plan import AttentionPlan
from kernels.attention_signature import signed


@signed
def paged_attention(
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
    """Causal attention of each sequence's new queries over all its keys, which lie where its block table says.

    ============  =================================================  ===========================================
    query         [num_tokens, num_query_heads, head_size]           the queries of all sequences in a row
    key_cache     [num_blocks, block_size, num_kv_heads, head_size]  and ``value_cache`` likewise
    block_tables  [num_seqs, max_blocks_per_seq] int32               entries past a sequence's end, and before its
                                                                     window, may hold anything
    seq_lens      [num_seqs] int32                                   keys, including this step's
    query_start   [num_seqs + 1] int32                               sequence i has the queries from
                                                                     ``query_start[i]`` to ``query_start[i + 1]``
    ============  =================================================  ===========================================

    The last query of a sequence sits at position ``seq_lens - 1``; a query sees the keys up to its own position, with
    ``window`` only that many of them, itself included. Query head h reads KV head
    ``h // (num_query_heads // num_kv_heads)``. ``logit_cap`` turns a score s into ``cap * tanh(s / cap)``. A query
    that sees no key gets 0, and -inf as its log-sum-exp (``return_lse``: [num_tokens, num_query_heads] float32,
    natural logarithm). Rows of query past ``query_start[-1]`` are padding: 0 in a new output, left alone in ``out``.

    A ``plan`` made by ``plan_attention`` for these lengths spares a GPU launcher the look at the lengths.

    An fp8 cache (``torch.float8_e4m3fn``) has ``kv_scales``, [num_blocks, block_size, num_kv_heads, 2] bfloat16, which
    ``write_kv`` writes beside it; the query has any type then, and what is read is exact in it.
    """
    if query.is_cuda:
        from kernels.attention_launch import triton_paged_attention as attend
    else:
        from kernels.attention_twin import cpu_paged_attention as attend
    tensors = (query, key_cache, value_cache, block_tables, seq_lens, query_start)
    if return_lse:
        return attend(
            *tensors,
            scale=scale,
            window=window,
            logit_cap=logit_cap,
            return_lse=True,
            out=out,
            plan=plan,
            kv_scales=kv_scales,
        )
    return attend(*tensors, scale=scale, window=window, logit_cap=logit_cap, out=out, plan=plan, kv_scales=kv_scales)
