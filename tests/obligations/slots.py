"""Where a token lies: the slot mapping of the specification, and those of the engines."""

import optimized.plan
import reference.pool
from spec.block_table import slot, slot_mapping


def the_optimized_slots_are_the_same(table: tuple[int, ...], start: int, stop: int) -> bool:
    """
    pre: len(table) <= 2 and 0 <= start <= stop <= len(table) * 3
    post: _
    """
    return list(slot_mapping(table, start, stop, 3)) == optimized.plan.slots_of(table, start, stop, 3)


def the_slots_of_a_table_are_the_same(table: tuple[int, ...], num_tokens: int) -> bool:
    """
    pre: len(table) <= 2 and 0 <= num_tokens <= len(table) * 3
    post: _
    """
    return slot_mapping(table, 0, num_tokens, 3) == optimized.plan.slots_of_table(table, num_tokens, 3)


def the_reference_slots_are_the_same(table: tuple[int, ...], num_dropped: int, start: int, stop: int) -> bool:
    """
    pre: len(table) <= 2 and 0 <= num_dropped <= 2 and num_dropped * 3 <= start <= stop <= (num_dropped + len(table)) * 3
    post: _
    """
    first = num_dropped * 3
    ours = slot_mapping(table, start - first, stop - first, 3)
    return ours == reference.pool.slots_of(table, first, start, stop, 3)


def positions_have_slots_of_their_own(first_block: int, second_block: int, position: int, other: int) -> bool:
    """
    pre: 0 <= first_block <= 100 and 0 <= second_block <= 100 and first_block != second_block
    pre: 0 <= position < 8 and 0 <= other < 8 and position != other
    post: _
    """
    table = (first_block, second_block)
    return slot(table, position, 4) != slot(table, other, 4)
