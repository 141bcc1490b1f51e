"""Moves into, within and out of the paged cache: a step's K and V, whole blocks onto others, blocks to be swapped.

    cache   [num_blocks, block_size, num_kv_heads, head_size]     any strides, the last one is 1
    slot    block_id * block_size + offset

    scales  [num_blocks, block_size, num_kv_heads]                of an fp8 cache, contiguous, see kernels.fp8_kernel

Elements are moved as they are, never computed with, but for those that are encoded on their way into an fp8 cache.
"""

import triton
import triton.language as tl

from kernels.fp8_kernel import encoded, exponent_of, scale_bits, sizes


@triton.jit
def write_kv_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_size]
    value_ptr,  # like key
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache_ptr,  # like key_cache
    kv_scales_ptr,  # [num_blocks, block_size, num_kv_heads] int32: the scales of K and of V; where IS_FP8
    slot_mapping_ptr,  # [num_tokens] int64; a slot outside the cache: this token is padding
    num_slots,  # int64
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
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    block_size: tl.constexpr,
    HEADS: tl.constexpr,  # num_kv_heads rounded up to a power of two
    HEAD: tl.constexpr,  # head_size rounded up to a power of two
    IS_FP8: tl.constexpr,
    LARGEST: tl.constexpr,  # bits of the largest number, where IS_FP8
):
    """One program moves one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if (slot < 0) | (slot >= num_slots):
        return
    block = slot // block_size
    place = slot % block_size
    heads = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HEAD)[None, :]
    live = (heads < num_kv_heads) & (dims < head_size)

    key = tl.load(key_ptr + token * key_stride_token + heads * key_stride_head + dims, mask=live, other=0.0)
    value = tl.load(value_ptr + token * value_stride_token + heads * value_stride_head + dims, mask=live, other=0.0)
    if IS_FP8:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
        key_exponent = exponent_of(tl.max(sizes(key), 1), LARGEST)
        value_exponent = exponent_of(tl.max(sizes(value), 1), LARGEST)
        pair = scale_bits(key_exponent) | (scale_bits(value_exponent) << 16)
        head = tl.arange(0, HEADS)
        tl.store(kv_scales_ptr + slot * num_kv_heads + head, pair, mask=head < num_kv_heads)
        key = encoded(key, key_exponent[:, None], LARGEST)
        value = encoded(value, value_exponent[:, None], LARGEST)
    key_cells = block * key_cache_stride_block + place * key_cache_stride_token + heads * key_cache_stride_head
    tl.store(key_cache_ptr + key_cells + dims, key, mask=live)
    value_cells = block * value_cache_stride_block + place * value_cache_stride_token + heads * value_cache_stride_head
    tl.store(value_cache_ptr + value_cells + dims, value, mask=live)


@triton.jit
def copy_blocks_kernel(
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache_ptr,  # like key_cache
    kv_scales_ptr,  # [num_blocks, SCALE_BYTES]: those of each block
    block_copies_ptr,  # [num_copies, 2] int64: source, target
    copies_stride: tl.int64,
    key_stride_block: tl.int64,
    key_stride_token: tl.int64,
    key_stride_head: tl.int64,
    value_stride_block: tl.int64,
    value_stride_token: tl.int64,
    value_stride_head: tl.int64,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    SCALE_BYTES: tl.constexpr,  # 0: the cache has no scales
    TILE: tl.constexpr,  # elements per program
):
    """One program copies one piece of one block, of both caches."""
    copy = tl.program_id(0).to(tl.int64)
    source = tl.load(block_copies_ptr + copy * copies_stride)
    target = tl.load(block_copies_ptr + copy * copies_stride + 1)
    elements = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = elements < block_size * num_kv_heads * head_size
    places = elements // (num_kv_heads * head_size)
    heads = elements // head_size % num_kv_heads
    dims = elements % head_size

    key_cells = places * key_stride_token + heads * key_stride_head + dims
    key = tl.load(key_cache_ptr + source * key_stride_block + key_cells, mask=live)
    tl.store(key_cache_ptr + target * key_stride_block + key_cells, key, mask=live)

    value_cells = places * value_stride_token + heads * value_stride_head + dims
    value = tl.load(value_cache_ptr + source * value_stride_block + value_cells, mask=live)
    tl.store(value_cache_ptr + target * value_stride_block + value_cells, value, mask=live)
    if SCALE_BYTES > 0:
        scales = tl.load(kv_scales_ptr + source * SCALE_BYTES + elements, mask=elements < SCALE_BYTES)
        tl.store(kv_scales_ptr + target * SCALE_BYTES + elements, scales, mask=elements < SCALE_BYTES)


@triton.jit
def pack_blocks_kernel(
    packed_ptr,  # [num_packed, 2 * size + SCALE_BYTES], contiguous: K, V, scales
    key_cache_ptr,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache_ptr,  # like key_cache
    kv_scales_ptr,  # [num_blocks, SCALE_BYTES]: those of each block
    block_ids_ptr,  # [num_packed] int64
    key_stride_block: tl.int64,
    key_stride_token: tl.int64,
    key_stride_head: tl.int64,
    value_stride_block: tl.int64,
    value_stride_token: tl.int64,
    value_stride_head: tl.int64,
    block_size: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    SCALE_BYTES: tl.constexpr,  # 0: the cache has no scales
    TILE: tl.constexpr,  # elements per program
    IS_UNPACKING: tl.constexpr,  # from packed into the cache
):
    """One program moves one piece of one block, of both caches."""
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(block_ids_ptr + index)
    elements = tl.program_id(1) * TILE + tl.arange(0, TILE)
    size = block_size * num_kv_heads * head_size
    live = elements < size
    places = elements // (num_kv_heads * head_size)
    heads = elements // head_size % num_kv_heads
    dims = elements % head_size
    key_ptrs = key_cache_ptr + block * key_stride_block + places * key_stride_token + heads * key_stride_head + dims
    value_ptrs = value_cache_ptr + block * value_stride_block
    value_ptrs += places * value_stride_token + heads * value_stride_head + dims
    packed_ptrs = packed_ptr + index * (2 * size + SCALE_BYTES) + elements
    scale_ptrs = kv_scales_ptr + block * SCALE_BYTES + elements
    if IS_UNPACKING:
        tl.store(key_ptrs, tl.load(packed_ptrs, mask=live), mask=live)
        tl.store(value_ptrs, tl.load(packed_ptrs + size, mask=live), mask=live)
        if SCALE_BYTES > 0:
            scales = tl.load(packed_ptrs + 2 * size, mask=elements < SCALE_BYTES)
            tl.store(scale_ptrs, scales, mask=elements < SCALE_BYTES)
    else:
        tl.store(packed_ptrs, tl.load(key_ptrs, mask=live), mask=live)
        tl.store(packed_ptrs + size, tl.load(value_ptrs, mask=live), mask=live)
        if SCALE_BYTES > 0:
            tl.store(
                packed_ptrs + 2 * size, tl.load(scale_ptrs, mask=elements < SCALE_BYTES), mask=elements < SCALE_BYTES
            )
