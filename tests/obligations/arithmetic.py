"""How many blocks, how many bytes, and which positions are seen: the small sums that everybody does for himself."""

import optimized.capacity
import optimized.pool
import reference.admission
import reference.device
import reference.pool
from spec.allocator import blocks_needed, kv_bytes_per_token, wasted_slots
from spec.attention import first_visible
from spec.block_table import budget_left
from spec.scheduler import most_tokens_stored
from spec.vocabulary import Config, Flight, Request, initial_state


def the_blocks_needed_suffice(num_tokens: int, block_size: int) -> bool:
    """
    pre: 0 <= num_tokens <= 1000 and 1 <= block_size <= 8
    post: _
    """
    return blocks_needed(num_tokens, block_size) * block_size >= num_tokens


def one_block_less_would_not_do(num_tokens: int, block_size: int) -> bool:
    """
    pre: 1 <= num_tokens <= 1000 and 1 <= block_size <= 8
    post: _
    """
    return (blocks_needed(num_tokens, block_size) - 1) * block_size < num_tokens


def less_than_a_block_is_wasted(num_tokens: int, block_size: int) -> bool:
    """
    pre: 0 <= num_tokens <= 1000 and 1 <= block_size <= 8
    post: _
    """
    return 0 <= wasted_slots(num_tokens, block_size) < block_size


def the_engines_need_as_many_blocks(num_tokens: int, block_size: int) -> bool:
    """
    pre: 0 <= num_tokens <= 1000 and 1 <= block_size <= 8
    post: _
    """
    needed = blocks_needed(num_tokens, block_size)
    return (
        reference.pool.blocks_needed(num_tokens, block_size)
        == needed
        == optimized.pool.blocks_needed(num_tokens, block_size)
    )


def a_block_has_the_bytes_of_its_tokens(block_size: int, num_layers: int, num_kv_heads: int, dtype_bytes: int) -> bool:
    """
    pre: 1 <= block_size <= 4 and 1 <= num_layers <= 4 and 1 <= num_kv_heads <= 4 and 1 <= dtype_bytes <= 4
    post: _
    """
    ours = optimized.capacity.bytes_per_block(block_size, num_layers, num_kv_heads, 64, dtype_bytes)
    return ours == block_size * kv_bytes_per_token(num_layers, num_kv_heads, 64, dtype_bytes)


def the_reference_sees_as_far(position: int, window: int) -> bool:
    """
    pre: 0 <= position <= 1000 and 0 <= window <= 1000
    post: _
    """
    width = window or None
    return first_visible(position, width) == reference.device.first_visible(position, width)


def a_window_holds_as_many_tokens_as_it_says(position: int, window: int) -> bool:
    """
    pre: 0 <= position <= 1000 and 1 <= window <= 1000
    post: _
    """
    return position - first_visible(position, window) + 1 == min(window, position + 1)


def the_reference_stores_as_many_tokens(num_prompt_tokens: int, max_tokens: int) -> bool:
    """
    pre: 1 <= num_prompt_tokens <= 4 and 1 <= max_tokens <= 1000
    post: _
    """
    request = Request(0, (7,) * num_prompt_tokens, max_tokens, (0,))
    return most_tokens_stored(request) == reference.admission.most_tokens_stored(request)


def what_is_clamped_keeps_the_budget(budget: int, scheduled: int, wanted: int) -> bool:
    """
    pre: 1 <= budget <= 1000 and 0 <= scheduled <= budget and 0 <= wanted <= 1000
    post: _
    """
    state = initial_state(Config(num_blocks=1, max_num_batched_tokens=budget))
    count = min(wanted, budget_left(state, Flight({0: scheduled})))
    return 0 <= count and budget_left(state, Flight({0: scheduled, 1: count})) >= 0
