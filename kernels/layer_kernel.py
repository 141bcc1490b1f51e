"""What a layer does around attention, row by row: RMS norm with the residual, SiLU times gate, rotation of Q and K.

    norm     x / sqrt(mean(x^2) + eps) * weight, where x may first get the residual added
    gate     gate / (1 + e^-gate) * up
    rotate   (a, b) -> (a cos - b sin, b cos + a sin) for the pairs of a head: its two halves, or neighbours

    hidden, residual, gate, up   [num_tokens, size]                                    any stride between rows
    query, key, value            [num_tokens, num_heads, head_size]                    any strides, the last one is 1
    cache                        [num_blocks, block_size, num_kv_heads, head_size]     likewise

Everything is computed in float32 and rounded once. A row's result depends on that row alone.
"""

import triton
import triton.language as tl

from kernels.fp8_kernel import encoded, exponent_of, scale_bits, sizes


@triton.jit
def rms_norm_kernel(
    out_ptr,  # [num_tokens, hidden_size], contiguous
    sum_ptr,  # like out: hidden + residual; where HAS_RESIDUAL
    hidden_ptr,  # [num_tokens, hidden_size]
    residual_ptr,  # like hidden; where HAS_RESIDUAL
    weight_ptr,  # [hidden_size]
    eps,  # float32
    hidden_stride: tl.int64,
    residual_stride: tl.int64,
    hidden_size: tl.constexpr,
    HIDDEN: tl.constexpr,  # hidden_size rounded up to a power of two
    HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HIDDEN)
    live = dims < hidden_size
    x = tl.load(hidden_ptr + token * hidden_stride + dims, mask=live, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + token * residual_stride + dims, mask=live, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + token * hidden_size + dims, rounded, mask=live)
        x = rounded.to(tl.float32)  # the norm is of what the next layer will see as its residual
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / hidden_size + eps)
    weight = tl.load(weight_ptr + dims, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden_size + dims, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def silu_mul_kernel(
    out_ptr,  # [num_tokens, size], contiguous
    gate_ptr,  # [num_tokens, size]
    up_ptr,  # [num_tokens, size]
    gate_stride: tl.int64,
    up_stride: tl.int64,
    size: tl.constexpr,
    TILE: tl.constexpr,  # elements per program
):
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = dims < size
    gate = tl.load(gate_ptr + token * gate_stride + dims, mask=live, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + token * up_stride + dims, mask=live, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * size + dims, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def load_pairs(
    source_ptr,  # a token's [num_heads, head_size]
    stride_head,
    norm_ptr,  # [head_size]; where HAS_NORM
    eps,
    heads,  # [HEADS, 1]
    firsts,  # [1, HALF]: of each pair
    seconds,
    rest,  # [1, REST]: dimensions that are not rotated
    live,
    live_rest,
    head_size: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """The pairs of each head, and its other dimensions, in float32 and normed."""
    first = tl.load(source_ptr + heads * stride_head + firsts, mask=live, other=0.0).to(tl.float32)
    second = tl.load(source_ptr + heads * stride_head + seconds, mask=live, other=0.0).to(tl.float32)
    other = tl.load(source_ptr + heads * stride_head + rest, mask=live_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(other * other, 1)
        scale = (1.0 / tl.sqrt(squares / head_size + eps))[:, None]
        first = first * scale * tl.load(norm_ptr + firsts, mask=live, other=0.0).to(tl.float32)
        second = second * scale * tl.load(norm_ptr + seconds, mask=live, other=0.0).to(tl.float32)
        other = other * scale * tl.load(norm_ptr + rest, mask=live_rest, other=0.0).to(tl.float32)
    return first, second, other


@triton.jit
def rotate_write_kernel(
    query_ptr,  # [num_tokens, num_query_heads, head_size]; rotated in place
    key_ptr,  # [num_tokens, num_kv_heads, head_size]
    value_ptr,  # like key
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache_ptr,  # like key_cache
    kv_scales_ptr,  # [num_blocks, block_size, num_kv_heads] int32: the scales of K and of V; where IS_FP8
    positions_ptr,  # [num_tokens] int64
    slot_mapping_ptr,  # [num_tokens] int64; a slot outside the cache: this token is padding
    rotation_ptr,  # [max_position, 2, rotary_size // 2] float32: cosines, sines
    query_norm_ptr,  # [head_size]; where HAS_NORM
    key_norm_ptr,  # [head_size]; where HAS_NORM
    eps,  # float32
    num_slots,  # int64, of the cache
    query_stride_token: tl.int64,
    query_stride_head: tl.int64,
    key_stride_token: tl.int64,
    key_stride_head: tl.int64,
    value_stride_token: tl.int64,
    value_stride_head: tl.int64,
    key_cache_stride_block: tl.int64,
    key_cache_stride_token: tl.int64,
    key_cache_stride_head: tl.int64,
    value_cache_stride_block: tl.int64,
    value_cache_stride_token: tl.int64,
    value_cache_stride_head: tl.int64,
    num_query_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    rotary_size: tl.constexpr,
    block_size: tl.constexpr,
    QUERY_HEADS: tl.constexpr,  # this and the next four: rounded up to a power of two
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,  # pairs are neighbours, not halves
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    LARGEST: tl.constexpr,  # bits of the largest number, where IS_FP8
):
    """One program takes one token: all its heads."""
    token = tl.program_id(0).to(tl.int64)
    half = rotary_size // 2
    pairs = tl.arange(0, HALF)[None, :]
    firsts = pairs * 2 if IS_INTERLEAVED else pairs
    seconds = pairs * 2 + 1 if IS_INTERLEAVED else pairs + half
    rest = rotary_size + tl.arange(0, REST)[None, :]
    position = tl.load(positions_ptr + token)
    cosine = tl.load(rotation_ptr + position * rotary_size + pairs, mask=pairs < half, other=0.0)
    sine = tl.load(rotation_ptr + position * rotary_size + half + pairs, mask=pairs < half, other=0.0)

    heads = tl.arange(0, QUERY_HEADS)[:, None]
    live = (heads < num_query_heads) & (pairs < half)
    live_rest = (heads < num_query_heads) & (rest < head_size)
    query_row_ptr = query_ptr + token * query_stride_token
    first, second, other = load_pairs(
        query_row_ptr, query_stride_head, query_norm_ptr, eps, heads, firsts, seconds, rest, live, live_rest,
        head_size, HAS_NORM,
    )  # fmt: skip
    kind = query_ptr.dtype.element_ty
    cells = query_row_ptr + heads * query_stride_head
    tl.store(cells + firsts, (first * cosine - second * sine).to(kind), mask=live)
    tl.store(cells + seconds, (second * cosine + first * sine).to(kind), mask=live)
    if HAS_NORM:
        tl.store(cells + rest, other.to(kind), mask=live_rest)

    slot = tl.load(slot_mapping_ptr + token)
    if (slot < 0) | (slot >= num_slots):
        return
    block = slot // block_size
    place = slot % block_size
    heads = tl.arange(0, KV_HEADS)[:, None]
    live = (heads < num_kv_heads) & (pairs < half)
    live_rest = (heads < num_kv_heads) & (rest < head_size)
    first, second, other = load_pairs(
        key_ptr + token * key_stride_token, key_stride_head, key_norm_ptr, eps, heads, firsts, seconds, rest, live,
        live_rest, head_size, HAS_NORM,
    )  # fmt: skip
    turned_a = (first * cosine - second * sine).to(kind)
    turned_b = (second * cosine + first * sine).to(kind)
    other = other.to(kind)
    dims = tl.arange(0, HEAD)[None, :]
    live_value = (heads < num_kv_heads) & (dims < head_size)
    value = tl.load(
        value_ptr + token * value_stride_token + heads * value_stride_head + dims, mask=live_value, other=0.0
    )
    if IS_FP8:
        most = tl.maximum(tl.max(sizes(turned_a.to(tl.float32)), 1), tl.max(sizes(turned_b.to(tl.float32)), 1))
        key_exponent = exponent_of(tl.maximum(most, tl.max(sizes(other.to(tl.float32)), 1)), LARGEST)
        value_exponent = exponent_of(tl.max(sizes(value.to(tl.float32)), 1), LARGEST)
        pair = scale_bits(key_exponent) | (scale_bits(value_exponent) << 16)
        head = tl.arange(0, KV_HEADS)
        tl.store(kv_scales_ptr + slot * num_kv_heads + head, pair, mask=head < num_kv_heads)
        turned_a = encoded(turned_a.to(tl.float32), key_exponent[:, None], LARGEST)
        turned_b = encoded(turned_b.to(tl.float32), key_exponent[:, None], LARGEST)
        other = encoded(other.to(tl.float32), key_exponent[:, None], LARGEST)
        value = encoded(value.to(tl.float32), value_exponent[:, None], LARGEST)

    cells = key_cache_ptr + block * key_cache_stride_block + place * key_cache_stride_token
    cells += heads * key_cache_stride_head
    tl.store(cells + firsts, turned_a, mask=live)
    tl.store(cells + seconds, turned_b, mask=live)
    tl.store(cells + rest, other, mask=live_rest)
    cells = value_cache_ptr + block * value_cache_stride_block + place * value_cache_stride_token
    tl.store(cells + heads * value_cache_stride_head + dims, value, mask=live_value)
