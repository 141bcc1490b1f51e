"""Moves into, within and out of the paged cache, by the device of its tensors."""

from torch import Tensor


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """The K and V of a step's tokens go into their slots.

    ``key`` and ``value`` are [num_tokens, num_kv_heads, head_size], the caches
    [num_blocks, block_size, num_kv_heads, head_size], ``slot_mapping`` [num_tokens] int64 with
    ``block_id * block_size + offset``. ``PAD_SLOT`` marks a token that is padding: nothing is written for it. With
    checks off, any slot outside the cache is such a token, so that it can not hit a cell by wrapping around.

    Into an fp8 cache (``torch.float8_e4m3fn``) each token and head goes with a scale of its own, which is written into
    ``kv_scales`` [num_blocks, block_size, num_kv_heads, 2] bfloat16: K's and V's. Those of other tokens stay as they are.
    """
    if key_cache.is_cuda:
        from kernels.cache_launch import triton_write_kv as write
    else:
        from kernels.cache_twin import cpu_write_kv as write
    write(key, value, key_cache, value_cache, slot_mapping, kv_scales)


def copy_blocks(key_cache: Tensor, value_cache: Tensor, block_copies: Tensor, kv_scales: Tensor | None = None) -> None:
    """Whole blocks are copied, with their scales, ``block_copies`` [num_copies, 2] int64 names (source, target) pairs.

    All copies of a call happen as if at once: a target that is also a source, or named twice, is refused. With checks
    off such a call leaves one of the possible orders.
    """
    if key_cache.is_cuda:
        from kernels.cache_launch import triton_copy_blocks as copy
    else:
        from kernels.cache_twin import cpu_copy_blocks as copy
    copy(key_cache, value_cache, block_copies, kv_scales)


def pack_blocks(key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, kv_scales: Tensor | None = None) -> Tensor:
    """The blocks ``block_ids`` [num_packed] int64, one after the other, ready to leave the device in one transfer.

    [num_packed, 2, block_size, num_kv_heads, head_size]: the K and then the V of each block. Of an fp8 cache it is
    [num_packed, num_bytes] uint8: K, V, and then the scales.
    """
    if key_cache.is_cuda:
        from kernels.cache_launch import triton_pack_blocks as pack
    else:
        from kernels.cache_twin import cpu_pack_blocks as pack
    return pack(key_cache, value_cache, block_ids, kv_scales)


def unpack_blocks(
    packed: Tensor, key_cache: Tensor, value_cache: Tensor, block_ids: Tensor, kv_scales: Tensor | None = None
) -> None:
    """What ``pack_blocks`` made goes back into blocks, these or others; each is named once."""
    if key_cache.is_cuda:
        from kernels.cache_launch import triton_unpack_blocks as unpack
    else:
        from kernels.cache_twin import cpu_unpack_blocks as unpack
    unpack(packed, key_cache, value_cache, block_ids, kv_scales)
