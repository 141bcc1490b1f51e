"""Paged attention: softmax(scale * Q K^T) V, where K and V lie in blocks that a table names.

A program owns one tile: up to ``ROWS`` rows (query, head of the group) of one sequence and one KV head, so that the
query heads that share keys read them once. It walks the keys in tiles of ``TILE_TOKENS``, counted from position 0 of
the sequence, and keeps for each row the running maximum m, the running sum l and the running product acc:

    m' = max(m, max(s))    p = 2^(s - m')    l' = l * 2^(m - m') + sum(p)    acc' = acc * 2^(m - m') + p V

Scores are kept in base 2. A tile in which a row sees nothing leaves that row's three values exactly as they were. Masking a
tile that all rows see whole changes nothing, so a prefill does not: bit for bit the same.

Keys are cut into splits of ``SPLIT_TOKENS``, counted from position 0 too, so that the cut depends on the sequence
alone. A split starts from nothing and is folded into the total, first to last. Whether one program walks all splits, or
each has its own and ``merge_splits_kernel`` folds, is scheduling: the arithmetic is the same, bit for bit.

    cache   [num_blocks, block_size, num_kv_heads, head_size]     any strides, the last one is 1
    scales  [num_blocks, block_size, num_kv_heads]     of an fp8 cache, see kernels.fp8_kernel
    row r of a tile is query ``first_query + r // group`` and query head ``kv_head * group + r % group``

Nothing computes in bfloat16 but ``tl.dot``: Triton's interpreter takes its bits for integers.
"""

import triton
import triton.language as tl

from kernels.fp8_kernel import decoded, scale_pair

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def soft_cap(score, cap):
    """cap * tanh(score / cap), exact to rounding near zero too, from 2^x alone: the interpreter has no libdevice."""
    x = tl.abs(score) / cap
    y = x * x
    series = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0)))))
    shrunk = tl.exp2(x * (-2.0 * LOG2_E))
    capped = cap * tl.where(x < 0.3, series, (1.0 - shrunk) / (1.0 + shrunk))
    return tl.where(score < 0, -capped, capped)


@triton.jit
def fold(m, l, acc, part_m, part_l, part_acc):
    """Adds a split to the total. Both kernels do this very arithmetic, fma spelled out, so their bits agree."""
    new_m = tl.maximum(m, part_m)
    base = tl.where(new_m == float("-inf"), 0.0, new_m)  # both are empty: no inf - inf
    fade = tl.exp2(m - base)
    weight = tl.exp2(part_m - base)
    l = tl.fma(part_l, weight, l * fade)
    acc = tl.fma(part_acc, tl.broadcast_to(weight[:, None], acc.shape), acc * fade[:, None])
    return new_m, l, acc


@triton.jit
def paged_attention_kernel(
    out_ptr,  # [num_tokens, num_query_heads, head_size]; written where a tile has no partial
    lse_ptr,  # [num_tokens, num_query_heads] float32, natural logarithm; where HAS_LSE
    partial_acc_ptr,  # [num_partials, num_kv_heads, ROWS, head_size] float32
    partial_ml_ptr,  # [num_partials, num_kv_heads, ROWS, 2] float32: m, l
    query_ptr,  # [num_tokens, num_query_heads, head_size]
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache_ptr,  # like key_cache, with the same strides
    kv_scales_ptr,  # [num_blocks, block_size, num_kv_heads] int32: the scales of K and of V; where IS_FP8
    block_tables_ptr,  # [num_seqs, max_blocks_per_seq] int32; entries outside what a row sees are never read
    seq_lens_ptr,  # [num_seqs] int32: keys including this step's
    query_start_ptr,  # [num_seqs + 1] int32
    tiles_ptr,  # [num_tiles, 4] int32: seq (-1: nothing to do), first query, split, partial (-1: write the output)
    scale,  # float32
    logit_cap,  # float32, where HAS_CAP
    window,  # int32, where HAS_WINDOW: a query sees this many keys, itself included
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    query_stride_token: tl.int64,
    query_stride_head: tl.int64,
    cache_stride_block: tl.int64,  # of both caches: one offset serves key and value
    cache_stride_token: tl.int64,
    cache_stride_head: tl.int64,
    table_stride_seq: tl.int64,
    group: tl.constexpr,  # query heads per KV head
    head_size: tl.constexpr,
    block_size: tl.constexpr,  # tokens per cache block: a property of the data
    HEAD: tl.constexpr,  # head_size rounded up to a power of two
    ROWS: tl.constexpr,  # rows per program: a property of the launch, like the next two
    TILE_TOKENS: tl.constexpr,  # keys per loop turn
    SPLIT_TOKENS: tl.constexpr,  # keys per split, a multiple of TILE_TOKENS; 0: one split
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_LSE: tl.constexpr,
    IS_FP8: tl.constexpr,  # the caches hold bytes of e4m3
    IS_NATIVE: tl.constexpr,  # which the target has an instruction for
    PRECISION: tl.constexpr,  # of tl.dot; only float32 inputs look at it
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(tiles_ptr + tile * 4)
    if seq < 0:  # a padded launch
        return
    first_query = tl.load(tiles_ptr + tile * 4 + 1)
    split = tl.load(tiles_ptr + tile * 4 + 2)
    partial = tl.load(tiles_ptr + tile * 4 + 3)

    query_begin = tl.load(query_start_ptr + seq)
    num_queries = tl.load(query_start_ptr + seq + 1) - query_begin
    seq_len = tl.load(seq_lens_ptr + seq)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD)
    queries = first_query + rows // group  # within this step
    heads = kv_head * group + rows % group
    live_rows = (rows < (ROWS // group) * group) & (queries < num_queries)
    live_dims = dims < head_size
    positions = seq_len - num_queries + queries  # within the sequence

    query_offsets = (query_begin + queries).to(tl.int64) * query_stride_token + heads * query_stride_head
    query = tl.load(
        query_ptr + query_offsets[:, None] + dims[None, :],
        mask=live_rows[:, None] & live_dims[None, :],
        other=0.0,
    )

    # Some row sees each of the keys [begin, end). Splits and tiles are counted from position 0, whatever begin is.
    last_query = tl.minimum(first_query + ROWS // group, num_queries) - 1
    end = seq_len - num_queries + last_query + 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(seq_len - num_queries + first_query - window + 1, 0)
    first_split = 0
    last_split = 0
    if SPLIT_TOKENS > 0:
        first_split = split if partial >= 0 else begin // SPLIT_TOKENS
        last_split = split if partial >= 0 else (end - 1) // SPLIT_TOKENS

    total_m = tl.full([ROWS], float("-inf"), tl.float32)
    total_l = tl.zeros([ROWS], tl.float32)
    total_acc = tl.zeros([ROWS, HEAD], tl.float32)
    table_ptr = block_tables_ptr + seq * table_stride_seq
    key_head_ptr = key_cache_ptr + kv_head * cache_stride_head
    value_head_ptr = value_cache_ptr + kv_head * cache_stride_head
    offsets = tl.arange(0, TILE_TOKENS)

    for each_split in range(first_split, last_split + 1):
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD], tl.float32)
        split_begin = begin // TILE_TOKENS * TILE_TOKENS
        split_end = end
        if SPLIT_TOKENS > 0:
            split_begin = tl.maximum(split_begin, each_split * SPLIT_TOKENS)
            split_end = tl.minimum(split_end, (each_split + 1) * SPLIT_TOKENS)

        # A turn loads the block ids of the next one. Were they loaded in the turn that needs them, the compiler's
        # pipeline would spend its stages on the table: with num_stages=3 it keeps one key tile in flight, not two.
        first_tokens = split_begin + offsets
        table_mask = first_tokens < split_end
        if HAS_WINDOW:
            table_mask = table_mask & (first_tokens >= begin)
        next_blocks = tl.load(table_ptr + first_tokens // block_size, mask=table_mask, other=0)
        # Whole tiles, which every row sees in full, have a loop of their own that masks nothing; the last loop masks. Only
        # a prefill has it: a decode has one tile to mask, and two copies of a cap have no registers.
        FIRST_LOOP: tl.constexpr = 1 if SPLIT_TOKENS > 0 or HAS_WINDOW or HAS_CAP else 0
        whole_end = split_begin
        if FIRST_LOOP == 0:
            whole_end = tl.maximum(seq_len - num_queries + first_query + 1, 0) // TILE_TOKENS * TILE_TOKENS
        for is_masked in tl.static_range(FIRST_LOOP, 2):
            loop_begin = whole_end if is_masked else split_begin
            loop_end = split_end if is_masked else whole_end
            for start in range(loop_begin, loop_end, TILE_TOKENS):
                tokens = start + offsets
                live_tokens = tokens < split_end if is_masked else offsets < TILE_TOKENS
                if HAS_WINDOW:  # a block before the window may be someone else's by now, and hold NaN
                    live_tokens = live_tokens & (tokens >= begin)
                blocks = next_blocks.to(tl.int64)
                places = tokens % block_size
                coming = tokens + TILE_TOKENS
                next_blocks = tl.load(table_ptr + coming // block_size, mask=coming < split_end, other=0)

                live_cells = live_tokens[:, None] & live_dims[None, :]
                cells = (blocks * cache_stride_block + places * cache_stride_token)[:, None] + dims[None, :]
                key = tl.load(key_head_ptr + cells, mask=live_cells, other=0.0)
                value = tl.load(value_head_ptr + cells, mask=live_cells, other=0.0)
                if IS_FP8:
                    pairs = (blocks * block_size + places) * tl.num_programs(1) + kv_head
                    key_scale, value_scale = scale_pair(tl.load(kv_scales_ptr + pairs, mask=live_tokens, other=0))
                    key = (decoded(key, IS_NATIVE) * key_scale[:, None]).to(query.dtype)
                    value = (decoded(value, IS_NATIVE) * value_scale[:, None]).to(query.dtype)

                score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
                factor = scale * LOG2_E
                if HAS_CAP:
                    score = soft_cap(score * scale, logit_cap)
                    factor = LOG2_E
                if SPLIT_TOKENS > 0:  # a decode that multiplies later spills
                    score = score * factor
                    factor = 1.0
                if is_masked:  # no key past the end either, where dead rows alone could see it
                    seen = tokens[None, :] <= positions[:, None]
                    if HAS_WINDOW:
                        seen = seen & (tokens[None, :] > positions[:, None] - window)
                    score = tl.where(seen, score, float("-inf"))

                # The fma is spelled out: a query's bits must not depend on the loop that its tile is in.
                new_m = tl.maximum(m, tl.max(score, 1) * factor)
                base = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing yet: no inf - inf
                p = tl.exp2(tl.fma(score, tl.zeros_like(score) + factor, tl.broadcast_to(-base[:, None], score.shape)))
                fade = tl.exp2(m - base)
                l = tl.fma(l, fade, tl.sum(p, 1))
                acc = tl.dot(p.to(value.dtype), value, acc * fade[:, None], input_precision=PRECISION)
                m = new_m

        if SPLIT_TOKENS > 0:
            total_m, total_l, total_acc = fold(total_m, total_l, total_acc, m, l, acc)
        else:  # no second accumulator: prefill tiles have no registers for it
            total_m, total_l, total_acc = m, l, acc

    live = live_rows[:, None] & live_dims[None, :]
    if partial >= 0:
        place = (partial.to(tl.int64) * tl.num_programs(1) + kv_head) * ROWS + rows
        tl.store(partial_acc_ptr + place[:, None] * head_size + dims[None, :], total_acc, mask=live)
        tl.store(partial_ml_ptr + place * 2, total_m, mask=live_rows)
        tl.store(partial_ml_ptr + place * 2 + 1, total_l, mask=live_rows)
    else:
        out_rows = (query_begin + queries).to(tl.int64) * out_stride_token + heads * out_stride_head
        divisor = tl.where(total_l == 0.0, 1.0, total_l)  # nothing seen: 0 and, as m is, -inf
        out = total_acc / divisor[:, None]
        tl.store(out_ptr + out_rows[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=live)
        if HAS_LSE:
            num_query_heads = tl.num_programs(1) * group
            lse = (total_m + tl.log2(divisor)) * LN_2
            tl.store(lse_ptr + (query_begin + queries).to(tl.int64) * num_query_heads + heads, lse, mask=live_rows)


@triton.jit
def merge_splits_kernel(
    out_ptr,  # [num_tokens, num_query_heads, head_size]
    lse_ptr,  # [num_tokens, num_query_heads] float32; where HAS_LSE
    partial_acc_ptr,  # [num_partials, num_kv_heads, ROWS, head_size] float32
    partial_ml_ptr,  # [num_partials, num_kv_heads, ROWS, 2] float32
    merges_ptr,  # [num_merges, 3] int32: token (-1: nothing to do), first partial, number of partials
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    group: tl.constexpr,
    head_size: tl.constexpr,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,  # group rounded up to a power of two
    HAS_LSE: tl.constexpr,
):
    """Folds the partials of one decoding sequence and one KV head, from the first split to the last."""
    merge = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    token = tl.load(merges_ptr + merge * 3)
    if token < 0:
        return
    first = tl.load(merges_ptr + merge * 3 + 1)
    count = tl.load(merges_ptr + merge * 3 + 2)

    rows = tl.arange(0, GROUP)
    dims = tl.arange(0, HEAD)
    live_rows = rows < group
    live = live_rows[:, None] & (dims < head_size)[None, :]
    m = tl.full([GROUP], float("-inf"), tl.float32)
    l = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, HEAD], tl.float32)
    for index in tl.range(count, num_stages=8):  # fetches ahead; on a plain range nothing is, as no tl.dot follows
        place = ((first.to(tl.int64) + index) * num_kv_heads + kv_head) * ROWS + rows
        part_m = tl.load(partial_ml_ptr + place * 2, mask=live_rows, other=float("-inf"))
        part_l = tl.load(partial_ml_ptr + place * 2 + 1, mask=live_rows, other=0.0)
        part_acc = tl.load(partial_acc_ptr + place[:, None] * head_size + dims[None, :], mask=live, other=0.0)
        m, l, acc = fold(m, l, acc, part_m, part_l, part_acc)

    heads = kv_head * group + rows
    out_rows = token.to(tl.int64) * out_stride_token + heads * out_stride_head
    divisor = tl.where(l == 0.0, 1.0, l)
    out = acc / divisor[:, None]
    tl.store(out_ptr + out_rows[:, None] + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=live)
    if HAS_LSE:
        lse = (m + tl.log2(divisor)) * LN_2
        tl.store(lse_ptr + token.to(tl.int64) * (num_kv_heads * group) + heads, lse, mask=live_rows)
