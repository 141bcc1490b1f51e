"""Calls of a paged attention: ragged, shuffled, shared, and poisoned wherever nothing may look."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np

from spec.attention import first_visible
from spec.conformance.kernel_oracle import Array, Call, stored

NUM_GUARDS = 3  # blocks of the pool that no table names
MARGIN = 4096  # poisoned elements before and after the pool
NUM_DEAD_ENTRIES = 2  # entries at the end of each table that no sequence uses


@dataclass(frozen=True, repr=False)
class Case:
    """What the tables of a call look like; the numbers in them follow from the seed."""

    query_lens: tuple[int, ...] = (1,)
    seq_lens: tuple[int, ...] = (5,)
    dtype: str = "float32"
    block_size: int = 4
    group: int = 1  # query heads per KV head
    num_kv_heads: int = 1
    head_size: int = 64
    window: int | None = None
    logit_cap: float | None = None
    num_shared: int = 0  # leading blocks that every sequence with so many has from the first one
    aliases: tuple[int, ...] = ()  # the table entries, counted through, that repeat an earlier one
    is_interleaved: bool = False  # K and V of a block lie side by side, so that a cache is no contiguous array
    magnitude: float = 1.0  # of queries: large ones make sharp weights
    poison: float = np.nan
    seed: int = 0

    def __repr__(self) -> str:
        """Valid Python, with what differs from the defaults only."""
        shown = [f for f in fields(self) if repr(getattr(self, f.name)) != repr(f.default)]
        return f"Case({', '.join(f'{f.name}={_literal(getattr(self, f.name))}' for f in shown)})"

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)

    def needs(self) -> list[int]:
        """The blocks of each sequence."""
        return [-(-length // self.block_size) for length in self.seq_lens]


def _literal(value: object) -> str:
    return f"float({str(value)!r})" if isinstance(value, float) and not np.isfinite(value) else repr(value)


def tables(case: Case) -> tuple[Array, int]:
    """The block tables [num_seqs, max_blocks_per_seq] and the size of the pool. The blocks are shuffled; entries that
    nobody uses name guard blocks, which are poison."""
    needs = case.needs()
    num_blocks = sum(needs) + NUM_GUARDS
    ids = [int(each) for each in np.random.default_rng(case.seed).permutation(num_blocks)]
    guards, free = ids[:NUM_GUARDS], ids[NUM_GUARDS:]
    made = np.full((len(needs), max(needs, default=0) + NUM_DEAD_ENTRIES), guards[0], np.int32)
    named: list[int] = []
    for seq, need in enumerate(needs):
        for column in range(need):
            if seq > 0 and column < min(case.num_shared, needs[0]):
                block = int(made[0, column])
            elif len(named) in case.aliases and named:
                block = named[(len(named) * 7 + case.seed) % len(named)]
            else:
                block = free.pop()
            named.append(block)
            made[seq, column] = block
    return made, num_blocks


def pool(case: Case, num_blocks: int, fill: float) -> tuple[Array, Array]:
    """Both caches [num_blocks, block_size, num_kv_heads, head_size], full of one number, as views into the middle of one
    array."""
    shape = (case.block_size, case.num_kv_heads, case.head_size)
    cells = num_blocks * int(np.prod(shape))
    whole = stored(np.full(2 * MARGIN + 2 * cells, fill, np.float32), case.dtype)
    inside = whole[MARGIN : MARGIN + 2 * cells]
    if case.is_interleaved:
        both = inside.reshape(num_blocks, 2, *shape)
        return both[:, 0], both[:, 1]
    both = inside.reshape(2, num_blocks, *shape)
    return both[0], both[1]


def live_positions(case: Case) -> Iterator[tuple[int, range]]:
    """For each sequence that has queries the positions that some query of it sees."""
    for seq, (num_queries, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        if num_queries > 0:
            yield seq, range(min(length, first_visible(length - num_queries, case.window)), length)


def call_of(case: Case) -> Call:
    """The arguments: random numbers in the live cells, poison in all others."""
    block_tables, num_blocks = tables(case)
    key_cache, value_cache = pool(case, num_blocks, case.poison)
    random = np.random.default_rng(case.seed + 1)
    for seq, positions in live_positions(case):
        at = np.array(positions, dtype=np.int64)
        where = block_tables[seq][at // case.block_size], at % case.block_size
        shape = (len(at), case.num_kv_heads, case.head_size)
        key_cache[where] = stored(random.standard_normal(shape), case.dtype)
        value_cache[where] = stored(random.standard_normal(shape), case.dtype)
    heads = (case.num_kv_heads * case.group, case.head_size)
    query = stored(random.standard_normal((sum(case.query_lens), *heads)) * case.magnitude, case.dtype)
    return Call(
        query,
        key_cache,
        value_cache,
        block_tables,
        np.array(case.seq_lens, np.int32),
        np.array([0, *accumulate(case.query_lens)], np.int32),
        case.scale,
        case.dtype,
        case.window,
        case.logit_cap,
    )


def with_numbers_for_poison(call: Call, case: Case, *, is_guard: bool) -> Call:
    """The call with ones in place of the poison: in the blocks that no table uses and around the pool, or in the cells
    of used blocks that no query sees."""
    clean = call_of(replace(case, poison=1.0))
    used = np.zeros(len(call.key_cache), bool)
    for seq, need in enumerate(case.needs()):
        used[call.block_tables[seq, :need]] = True
    kept = np.flatnonzero(used if is_guard else ~used)
    clean.key_cache[kept], clean.value_cache[kept] = call.key_cache[kept], call.value_cache[kept]
    return clean


def renamed(call: Call, seed: int) -> Call:
    """The same tables with every block under another id."""
    order = np.random.default_rng(seed).permutation(len(call.key_cache))
    new_id = np.argsort(order).astype(np.int32)
    return replace(
        call,
        key_cache=call.key_cache[order],
        value_cache=call.value_cache[order],
        block_tables=new_id[call.block_tables],
    )


def picked(call: Call, seqs: Sequence[int]) -> Call:
    """The call for these sequences only, in this order."""
    starts = call.query_start.tolist()
    lens = [starts[seq + 1] - starts[seq] for seq in seqs]
    return replace(
        call,
        query=np.concatenate([call.query[starts[seq] : starts[seq + 1]] for seq in seqs]),
        block_tables=call.block_tables[list(seqs)],
        seq_lens=call.seq_lens[list(seqs)],
        query_start=np.array([0, *accumulate(lens)], np.int32),
    )
