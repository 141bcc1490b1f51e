"""One key for all states that differ only in the names of blocks, sequences, steps and tokens."""

from collections.abc import Mapping
from itertools import permutations
from typing import TypeAlias

from spec.vocabulary import BlockId, CacheKey, HostBlockId, Prefix, SeqId, State, Token

Key: TypeAlias = tuple[object, ...]


class Names:
    """New names in order of first use: for blocks, for host blocks, and for the tokens that follow each prefix."""

    def __init__(self) -> None:
        self.blocks: dict[BlockId, int] = {}
        self.host_blocks: dict[HostBlockId, int] = {}
        self.nodes: dict[tuple[int, Token], int] = {}

    def block(self, block: BlockId) -> int:
        return self.blocks.setdefault(block, len(self.blocks))

    def host_block(self, block: HostBlockId) -> int:
        return self.host_blocks.setdefault(block, len(self.host_blocks))

    def prefix(self, tokens: Prefix) -> tuple[int, ...]:
        """The names of all prefixes of these tokens. A slot depends only on which prefix it holds, so the tokens that
        may follow one are interchangeable."""
        nodes, node, named = self.nodes, 0, []
        for token in tokens:
            node = nodes.setdefault((node, token), len(nodes) + 1)
            named.append(node)
        return tuple(named)


def canonical(s: State) -> Key:
    """The least of the keys of all orders of the sequences; an order of first use names everything else."""
    orders = _orders(s)
    return _key(s, orders[0]) if len(orders) == 1 else min(_key(s, order) for order in orders)


def _orders(s: State) -> list[tuple[SeqId, ...]]:
    """The orders of the sequences that a cheap signature leaves open."""
    if len(s.seqs) < 2:
        return [tuple(s.seqs)]
    groups: dict[tuple[tuple[int, ...], ...], list[SeqId]] = {}
    for i, seq in s.seqs.items():
        table = s.block_tables.get(i)
        lengths = (table is None, seq.num_tokens, seq.num_computed_tokens, seq.num_dropped_blocks)
        blocks = tuple([2 * s.ref_count[b] + (b in s.cached) for b in table]) if table else ()
        groups.setdefault((lengths, blocks), []).append(i)
    orders: list[tuple[SeqId, ...]] = [()]
    for _, group in sorted(groups.items()):
        ways = permutations(group) if len(group) > 1 else [tuple(group)]
        orders = [(*order, *way) for way in ways for order in orders]
    return orders


def _key(s: State, order: tuple[SeqId, ...]) -> Key:
    names = Names()
    seqs = tuple(
        [
            (
                names.prefix(s.seqs[i].tokens),
                s.seqs[i].num_computed_tokens,
                s.seqs[i].num_dropped_blocks,
                i in s.block_tables,
                tuple(map(names.block, s.block_tables.get(i, ()))),
                tuple(map(names.host_block, s.host_tables.get(i, ()))),
            )
            for i in order
        ]
    )
    flights = [flight for _, flight in sorted(s.flights.items())]
    holds = tuple([tuple(map(names.block, flight.holds)) for flight in flights])
    free = tuple(map(names.block, s.free))
    # Every block that the rest is about has a name by now: it is in a table, held by a step, or free.
    touched = tuple([tuple(sorted(map(names.block, flight.blocks))) for flight in flights])
    return seqs, holds, free, touched, _cached(s.cached, names) if s.cached else (), len(s.host_free)


def _cached(cached: Mapping[BlockId, CacheKey], names: Names) -> Key:
    """What the prefix cache names, in the order of the new names."""
    by_name = sorted((names.block(block), key.tokens) for block, key in cached.items())
    return tuple([(block, names.prefix(tokens)) for block, tokens in by_name])
