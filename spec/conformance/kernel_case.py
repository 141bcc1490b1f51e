"""Calls of a paged attention: ragged, shuffled, shared, and poisoned wherever nothing may look."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np

from spec.attention import first_visible
from spec.conformance.kernel_oracle import E4M3, Array, Call, e4m3_bytes, stored

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
    fp8: bool = False  # the caches hold bytes of e4m3, with a scale for each token and head of K and of V

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
    numbers = np.full(2 * MARGIN + 2 * cells, fill, np.float32)
    whole = e4m3_bytes(numbers) if case.fp8 else stored(numbers, case.dtype)
    inside = whole[MARGIN : MARGIN + 2 * cells]
    if case.is_interleaved:
        both = inside.reshape(num_blocks, 2, *shape)
        return both[:, 0], both[:, 1]
    both = inside.reshape(2, num_blocks, *shape)
    return both[0], both[1]


def scales(case: Case, num_blocks: int, fill: float) -> Array | None:
    """The scales [num_blocks, block_size, num_kv_heads, 2] of an fp8 cache, as they lie beside it: all one number."""
    shape = (num_blocks, case.block_size, case.num_kv_heads, 2)
    return stored(np.full(shape, fill, np.float32), "bfloat16") if case.fp8 else None


def live_positions(case: Case) -> Iterator[tuple[int, range]]:
    """For each sequence that has queries the positions that some query of it sees."""
    for seq, (num_queries, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        if num_queries > 0:
            yield seq, range(min(length, first_visible(length - num_queries, case.window)), length)


def call_of(case: Case) -> Call:
    """The arguments: random numbers in the live cells, poison in all others."""
    block_tables, num_blocks = tables(case)
    key_cache, value_cache = pool(case, num_blocks, case.poison)
    kv_scales = scales(case, num_blocks, case.poison)
    random = np.random.default_rng(case.seed + 1)
    for seq, positions in live_positions(case):
        at = np.array(positions, dtype=np.int64)
        where = block_tables[seq][at // case.block_size], at % case.block_size
        shape = (len(at), case.num_kv_heads, case.head_size)
        for which, cache in enumerate((key_cache, value_cache)):
            numbers = random.standard_normal(shape)
            if kv_scales is None:
                cache[where] = stored(numbers, case.dtype)
                continue
            powers = 2.0 ** random.integers(-5, 2, shape[:2])  # unlike those of its neighbours, mostly
            cache[where] = e4m3_bytes(numbers / powers[..., None])
            kv_scales[(*where, slice(None), which)] = stored(powers, "bfloat16")
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
        kv_scales,
    )


def names_of_slots(case: Case, num_blocks: int) -> tuple[Array, Array, Array | None]:
    """Values that are a name for each slot: as a cache holds them, as numbers, and the scales they have there."""
    random = np.random.default_rng(case.seed)
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    if not case.fp8:
        names = random.integers(1, 200, shape).astype(np.float32)
        return stored(names, case.dtype), names, None
    whole = np.flatnonzero(E4M3[:127] % 1 == 0)[1:]  # bytes of whole numbers above 0
    cells, powers = (
        random.choice(whole[E4M3[whole] < 200], shape).astype(np.uint8),
        2.0 ** random.integers(0, 3, (*shape[:3], 2)),
    )
    return cells, E4M3[cells] * powers[..., 1:].astype(np.float32), stored(powers, "bfloat16")


def with_numbers_for_poison(call: Call, case: Case, *, is_guard: bool) -> Call:
    """The call with ones in place of the poison: in the blocks that no table uses and around the pool, or in the cells
    of used blocks that no query sees."""
    clean = call_of(replace(case, poison=1.0))
    used = np.zeros(len(call.key_cache), bool)
    for seq, need in enumerate(case.needs()):
        used[call.block_tables[seq, :need]] = True
    kept = np.flatnonzero(used if is_guard else ~used)
    clean.key_cache[kept], clean.value_cache[kept] = call.key_cache[kept], call.value_cache[kept]
    if clean.kv_scales is not None and call.kv_scales is not None:
        clean.kv_scales[kept] = call.kv_scales[kept]
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
        kv_scales=None if call.kv_scales is None else call.kv_scales[order],
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
