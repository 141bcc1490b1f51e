"""Situations: claims about a state in a few words, so that one can ask whether a state like that is ever reached.

>>> from spec.vocabulary import Config, initial_state
>>> situation("ref_count>=2 and not swapped")(initial_state(Config(num_blocks=1)))
False
"""

import re
from collections.abc import Callable, Mapping
from operator import eq, ge, gt, le, lt

from spec.engine import InvalidField
from spec.sharing import num_entries
from spec.vocabulary import State, all_blocks

Situation = Callable[[State], bool]


def ref_count(s: State) -> int:
    """The most holders that a block has."""
    return max(s.ref_count)


def shared_block(s: State) -> int:
    """How many blocks stand in more than one block table."""
    return sum(num_entries(s, block) > 1 for block in all_blocks(s))


def cached_block(s: State) -> int:
    """How many blocks the prefix cache names."""
    return len(s.cached)


def cached_free_block(s: State) -> int:
    """How many blocks the prefix cache names that nobody holds."""
    return sum(s.ref_count[block] == 0 for block in s.cached)


def cached_shared_block(s: State) -> int:
    """How many blocks the prefix cache names that stand in more than one block table."""
    return sum(num_entries(s, block) > 1 for block in s.cached)


def cached_tail(s: State) -> int:
    """How many sequences would write their next token into a block that the prefix cache names."""
    size = s.config.block_size
    tails = (table[-1] for i, table in s.block_tables.items() if table and s.seqs[i].num_computed_tokens % size)
    return sum(block in s.cached for block in tails)


def free(s: State) -> int:
    """How many blocks are free."""
    return len(s.free)


def held_by_steps_only(s: State) -> int:
    """How many blocks only steps in flight keep from being free."""
    held = {block for flight in s.flights.values() for block in flight.holds}
    return sum(num_entries(s, block) == 0 for block in held)


def in_flight(s: State) -> int:
    """How many steps are in flight."""
    return len(s.flights)


def sequence(s: State) -> int:
    """How many sequences are alive."""
    return len(s.seqs)


def running(s: State) -> int:
    """How many sequences have a block table."""
    return len(s.block_tables)


def swapped(s: State) -> int:
    """How many sequences are in host memory."""
    return len(s.host_tables)


def dropped_block(s: State) -> int:
    """The most blocks that have left the front of a table."""
    return max((seq.num_dropped_blocks for seq in s.seqs.values()), default=0)


def empty_table(s: State) -> int:
    """How many sequences have tokens and an empty table."""
    return sum(not table for table in s.block_tables.values())


def equal_blocks(s: State) -> int:
    """How many blocks in use hold what another block in use holds too."""
    size = s.config.block_size
    held = [tuple(s.cells.get(b * size + i) for i in range(size)) for b in all_blocks(s) if s.ref_count[b]]
    return sum(held.count(each) > 1 for each in held)


QUANTITIES: Mapping[str, Callable[[State], int]] = {
    quantity.__name__: quantity
    for quantity in (
        ref_count,
        shared_block,
        cached_block,
        cached_free_block,
        cached_shared_block,
        cached_tail,
        free,
        held_by_steps_only,
        in_flight,
        sequence,
        running,
        swapped,
        dropped_block,
        empty_table,
        equal_blocks,
    )
}
"""What can be counted in a state."""

_COMPARE = {">=": ge, "<=": le, "==": eq, ">": gt, "<": lt}
_CLAIM = re.compile(r"\s*(not\s+)?([a-z_]+)\s*(?:(>=|<=|==|>|<)\s*(\d{1,9}))?\s*")


def situation(text: str) -> Situation:
    """The predicate that a text names: claims joined by ``and``, each a quantity with a bound, by itself at least 1, or
    ``not`` that. Raises ``InvalidField`` for anything else."""
    claims = [_claim(part) for part in re.split(r"\band\b", text)]
    return lambda s: all(claim(s) for claim in claims)


def _claim(text: str) -> Situation:
    found = _CLAIM.fullmatch(text)
    if found is None or found[2] not in QUANTITIES:
        known = ", ".join(QUANTITIES)
        raise InvalidField("reach", text.strip(), f"a quantity, as in 'ref_count>=3 and not swapped': {known}")
    quantity, compare, bound = QUANTITIES[found[2]], _COMPARE[found[3] or ">="], int(found[4] or 1)
    wanted = found[1] is None
    return lambda s: compare(quantity(s), bound) is wanted
