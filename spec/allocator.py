"""Blocks: how many are needed, who holds them, how they are taken and given back."""

from collections import Counter
from collections.abc import Iterable, Mapping

from spec.rules import state_rule, step_rule
from spec.vocabulary import Allocate, BlockId, Copy, Event, State, SwapIn, all_blocks, replace


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """The number of blocks that hold ``num_tokens`` tokens.

    >>> [blocks_needed(n, 16) for n in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-num_tokens // block_size)


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_size: int, dtype_bytes: int) -> int:
    """The bytes of K and V that one token takes in all layers (Kwon et al. 2023, section 3).

    Llama-2-13B in fp16 has 40 layers, 40 heads of size 128:

    >>> kv_bytes_per_token(num_layers=40, num_kv_heads=40, head_size=128, dtype_bytes=2)
    819200
    """
    return 2 * num_layers * num_kv_heads * head_size * dtype_bytes


def blocks_in(num_bytes: int, block_size: int, bytes_per_token: int) -> int:
    """The number of whole blocks that fit into ``num_bytes``.

    >>> blocks_in(2**30, block_size=16, bytes_per_token=819_200)
    81
    """
    return num_bytes // (block_size * bytes_per_token)


def wasted_slots(num_tokens: int, block_size: int) -> int:
    """The slots of the last block that hold nothing: always fewer than a block has.

    >>> [wasted_slots(n, 16) for n in (0, 1, 16, 17)]
    [0, 15, 0, 15]
    """
    return blocks_needed(num_tokens, block_size) * block_size - num_tokens


def holders(s: State) -> Mapping[BlockId, int]:
    """For each block, how many holders it has: table entries, and the holds of steps and copies in flight."""
    entries = Counter(block for table in s.block_tables.values() for block in table)
    entries.update(block for flight in s.flights.values() for block in flight.holds)
    return entries


def take(s: State, blocks: Iterable[BlockId]) -> State:
    """Every one of these blocks gets one more holder; a block that was free forgets what it held."""
    free, ref_count, cached, cells = list(s.free), list(s.ref_count), dict(s.cached), dict(s.cells)
    for block in blocks:
        if block in free:
            free.remove(block)
            cached.pop(block, None)
            for slot in range(block * s.config.block_size, (block + 1) * s.config.block_size):
                cells.pop(slot, None)
        if 0 <= block < len(ref_count):
            ref_count[block] += 1
    return replace(s, free=tuple(free), ref_count=tuple(ref_count), cached=cached, cells=cells)


def give_back(s: State, blocks: Iterable[BlockId]) -> State:
    """Every one of these blocks loses one holder, the last of them first; one that has none left is free.

    A block that a submitted step may touch does not become free: the step is its holder until it is over.
    """
    free, ref_count, cells, flights = list(s.free), list(s.ref_count), dict(s.cells), dict(s.flights)
    for block in reversed(tuple(blocks)):
        if not 0 <= block < len(ref_count):
            continue
        step = max((i for i, f in flights.items() if f.submitted and block in f.blocks), default=None)
        if ref_count[block] == 1 and step is not None:
            flights[step] = replace(flights[step], holds=(*flights[step].holds, block))
            continue
        ref_count[block] -= 1
        if ref_count[block] == 0:
            free.append(block)
            if block not in s.cached:
                for slot in range(block * s.config.block_size, (block + 1) * s.config.block_size):
                    cells.pop(slot, None)
    return replace(s, free=tuple(free), ref_count=tuple(ref_count), cells=cells, flights=flights)


def blocks_taken(event: Event) -> tuple[BlockId, ...]:
    """The blocks that an event takes out of the free list, to be written."""
    match event:
        case Allocate(blocks=blocks) | SwapIn(blocks=blocks):
            return blocks
        case Copy(target=target):
            return (target,)
    return ()


@state_rule("ALLOC-1", corpus="A3")
def free_list_has_no_repeats(s: State) -> bool:
    """The free list names blocks that a sequence may be given, each at most once.

    A block that is free twice is handed out twice: two sequences then write over each other.
    """
    return len(set(s.free)) == len(s.free) and all(b in all_blocks(s) for b in s.free)


@state_rule("ALLOC-2", corpus="A2 C3")
def count_is_holders(s: State) -> bool:
    """A block's reference count is the number of its holders.

    Holders are the entries of block tables, and the holds of steps and copies in flight. The count is what an engine
    keeps; the holders are counted here from scratch.
    """
    held = holders(s)
    return all(s.ref_count[b] == held.get(b, 0) for b in all_blocks(s))


@state_rule("ALLOC-3", corpus="A1 A4 A5")
def free_means_unreferenced(s: State) -> bool:
    """A block is free exactly when its reference count is zero.

    So free and referenced blocks together are the whole pool, and nothing leaks.
    """
    free = set(s.free)
    return all((b in free) == (s.ref_count[b] == 0) for b in all_blocks(s))


@step_rule("ALLOC-4", corpus="A3 A10")
def only_free_blocks_are_taken(before: State, event: Allocate | Copy | SwapIn, after: State) -> bool:
    """A block that is handed out was free, and is handed out once."""
    taken = blocks_taken(event)
    return len(set(taken)) == len(taken) and set(taken) <= set(before.free)


@state_rule("ALLOC-5", corpus="A9")
def blocks_in_flight_stay_referenced(s: State) -> bool:
    """A block that a submitted step may read or write is not free.

    Otherwise somebody else could get it, and the step would read or overwrite foreign tokens.
    """
    return all(b not in s.free for flight in s.flights.values() if flight.submitted for b in flight.blocks)


@state_rule("ALLOC-6", corpus="A3")
def reserved_blocks_are_nobodys(s: State) -> bool:
    """A block that the engine keeps for itself stands in no block table, and the prefix cache does not name it.

    Padding is written there, or nothing at all. It is never free either (ALLOC-1), so that nobody is given it, and nothing
    is copied to it (ALLOC-4); nor is anything written there that a sequence reads (TABLE-2).
    """
    named = {*s.cached, *(b for table in s.block_tables.values() for b in table)}
    return named.isdisjoint(range(s.choices.num_reserved_blocks))
