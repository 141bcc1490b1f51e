"""How many blocks a memory has room for."""

from __future__ import annotations

import math

from optimized.pool import blocks_needed
from spec.engine import InvalidField
from spec.vocabulary import Config

DEFAULT_CPU_CACHE_BYTES = 1 << 30
"""The size of the KV cache on a CPU, unless it is given."""


FP8_SCALE_BYTES = 2
"""What lies beside K, or V, of each token and head of an fp8 cache."""


def bytes_per_block(
    block_size: int, num_layers: int, num_kv_heads: int, head_size: int, dtype_bytes: int, scale_bytes: int = 0
) -> int:
    """The bytes of K and V of a block, in all layers; ``scale_bytes`` lie beside K, or V, of each token and head.

    SmolLM2-135M in float32, and in fp8:

    >>> bytes_per_block(block_size=16, num_layers=30, num_kv_heads=3, head_size=64, dtype_bytes=4)
    737280
    >>> bytes_per_block(block_size=16, num_layers=30, num_kv_heads=3, head_size=64, dtype_bytes=1, scale_bytes=2)
    190080
    """
    return 2 * block_size * num_layers * num_kv_heads * (head_size * dtype_bytes + scale_bytes)


def num_blocks_for(memory_bytes: int, fraction: float, weights: int, activation_peak: int, bytes_per_block: int) -> int:
    """The whole blocks that fit into a fraction of the memory beside the weights and the activations of a step.

    Sizes are in bytes. 0 if there is no room at all: the caller says so, with these numbers.

    >>> num_blocks_for(1 << 30, fraction=1.0, weights=0, activation_peak=0, bytes_per_block=737280)
    1456
    >>> num_blocks_for(1000, fraction=0.9, weights=500, activation_peak=300, bytes_per_block=30)
    3
    >>> num_blocks_for(1000, fraction=0.9, weights=500, activation_peak=500, bytes_per_block=30)
    0
    """
    if not 0.0 < fraction <= 1.0:  # False for NaN too
        raise InvalidField("fraction", fraction, "more than 0 and at most 1")
    for name, value in (("memory_bytes", memory_bytes), ("weights", weights), ("activation_peak", activation_peak)):
        if value < 0:
            raise InvalidField(name, value, "at least 0")
    if bytes_per_block < 1:
        raise InvalidField("bytes_per_block", bytes_per_block, "at least 1")
    left = math.floor(memory_bytes * fraction) - weights - activation_peak
    return max(0, left) // bytes_per_block


def pool_sentence(name: str, config: Config) -> str:
    """What an engine says of its cache when it starts.

    >>> pool_sentence("tiny", Config(num_blocks=1456, block_size=16, max_model_len=8192))
    'tiny: a KV cache of 1,456 blocks, 23,296 tokens, room for 2 requests of 8,192 tokens'
    """
    num_full = config.num_blocks // blocks_needed(config.max_model_len, config.block_size)
    return (
        f"{name}: a KV cache of {config.num_blocks:,} blocks, {config.num_slots:,} tokens, "
        f"room for {num_full:,} requests of {config.max_model_len:,} tokens"
    )
