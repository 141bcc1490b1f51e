"""The plan of a step: what a device is to do, as one immutable value of plain numbers, and how it is built."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from optimized.sequences import LiveSeq
from spec.batches import Computed
from spec.vocabulary import BlockId, HostBlockId, Read, RequestId, SeqId, Slot, StepId, Token


class BlockCopy(NamedTuple):
    """Copy-on-write: entry ``entry`` of the sequence's table is now ``target`` and needs the contents of ``source``."""

    seq_id: SeqId
    entry: int
    source: BlockId
    target: BlockId


class Swap(NamedTuple):
    """A sequence's table moves from device blocks to host blocks (``out``) or back, entry by entry."""

    out: bool
    seq_id: SeqId
    blocks: tuple[BlockId, ...]
    host_blocks: tuple[HostBlockId, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Tokens of all sequences stand in one row, ``query_start`` says whose they are.

    A device does, in this order: the swaps one by one, the copies all at once, the writes of K and V, the reads; then it samples.
    """

    step_id: StepId
    seq_ids: tuple[SeqId, ...] = ()
    query_start: tuple[int, ...] = (0,)  # [num_seqs + 1], prefix sums of tokens per sequence
    token_ids: tuple[Token, ...] = ()  # [num_tokens]
    positions: tuple[int, ...] = ()  # [num_tokens]
    slot_mapping: tuple[Slot, ...] = ()  # [num_tokens]
    block_tables: tuple[tuple[BlockId, ...], ...] = ()  # [num_seqs], each as long as its sequence needs
    seq_lens: tuple[int, ...] = ()  # [num_seqs], keys including this step's
    sample_rows: tuple[int, ...] = ()  # [num_samples], the token after which one is sampled
    sample_seq_ids: tuple[
        SeqId, ...
    ] = ()  # [num_samples], for whom; a sequence about to be forked stands after its parent
    num_dropped_blocks: tuple[
        int, ...
    ] = ()  # [num_seqs] with a sliding window, else empty: how many entries have left the table's front
    copies: tuple[BlockCopy, ...] = ()
    swaps: tuple[Swap, ...] = ()
    preempted: tuple[RequestId, ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return len(self.token_ids)

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        return json.dumps({each.name: getattr(self, each.name) for each in fields(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that ``to_json`` wrote."""
        values: dict[str, Any] = {name: _tuples(value) for name, value in json.loads(text).items()}
        for name, record in (("copies", BlockCopy), ("swaps", Swap)):
            values[name] = tuple(record(*each) for each in values[name])
        return cls(**values)


def _tuples(value: Any) -> Any:  # Any: whatever JSON can hold
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def read_of(plan: Plan, index: int, block_size: int, window: int | None) -> Read:
    """What the attention of one sequence reads: from the first position that a token of this step sees."""
    first_kept = plan.num_dropped_blocks[index] * block_size if plan.num_dropped_blocks else 0
    start = 0 if window is None else max(0, plan.positions[plan.query_start[index]] - window + 1)
    slots = slots_of_table(plan.block_tables[index], plan.seq_lens[index] - first_kept, block_size)
    return Read(plan.seq_ids[index], slots[start - first_kept :], start)


def computed_by(plan: Plan, window: int | None) -> Computed:
    """What a device does to the cache after the copies, as the plan's arrays say: all writes, then all reads."""
    starts, positions = plan.query_start, plan.positions
    return Computed(
        plan.seq_ids,
        positions if len(positions) == len(plan.seq_ids) else [positions[start] for start in starts[:-1]],
        plan.slot_mapping,
        plan.seq_lens,
        starts,
        dict(zip(plan.seq_ids, plan.block_tables, strict=True)),
        plan.num_dropped_blocks,
        window,
    )


def slots_of_table(table: Sequence[BlockId], num_tokens: int, block_size: int) -> tuple[Slot, ...]:
    """The slots of the first ``num_tokens`` positions.

    >>> slots_of_table((7, 2), 5, block_size=4)
    (28, 29, 30, 31, 8)
    """
    return tuple(table[p // block_size] * block_size + p % block_size for p in range(num_tokens))


def live_part(plan: Plan, live: Container[SeqId]) -> tuple[Plan, list[int]]:
    """The plan without sequences that are gone since it was made, and which of its samples are left.

    Nobody would read what it computes for the others. A sample goes with the sequence that it is drawn from.
    """
    kept = [index for index, seq_id in enumerate(plan.seq_ids) if seq_id in live]
    bounds = [(plan.query_start[index], plan.query_start[index + 1]) for index in kept]
    rows = [row for start, stop in bounds for row in range(start, stop)]
    place = {row: index for index, row in enumerate(rows)}
    samples = [index for index, row in enumerate(plan.sample_rows) if row in place]
    part = replace(
        plan,
        seq_ids=tuple([plan.seq_ids[index] for index in kept]),
        query_start=(0, *accumulate([stop - start for start, stop in bounds])),
        token_ids=tuple([plan.token_ids[row] for row in rows]),
        positions=tuple([plan.positions[row] for row in rows]),
        slot_mapping=tuple([plan.slot_mapping[row] for row in rows]),
        block_tables=tuple([plan.block_tables[index] for index in kept]),
        seq_lens=tuple([plan.seq_lens[index] for index in kept]),
        sample_rows=tuple([place[plan.sample_rows[index]] for index in samples]),
        sample_seq_ids=tuple([plan.sample_seq_ids[index] for index in samples]),
        num_dropped_blocks=tuple([plan.num_dropped_blocks[index] for index in kept if plan.num_dropped_blocks]),
        copies=tuple([copy for copy in plan.copies if copy.seq_id in live]),
        swaps=tuple([swap for swap in plan.swaps if swap.seq_id in live]),
    )
    return part, samples


# To map one of these over a batch takes a third of the time of a loop.
_TOKENS: Callable[[LiveSeq], list[Token]] = attrgetter("tokens")
_TABLE: Callable[[LiveSeq], tuple[BlockId, ...]] = attrgetter("table")
_SEQ_ID: Callable[[LiveSeq], SeqId] = attrgetter("seq_id")
_LAST: Callable[[Sequence[int]], int] = itemgetter(-1)


class Batch(NamedTuple):
    """The arrays of a plan that say what is computed and sampled."""

    seq_ids: tuple[SeqId, ...]
    query_start: tuple[int, ...]
    token_ids: tuple[Token, ...]
    positions: tuple[int, ...]
    slot_mapping: tuple[Slot, ...]
    block_tables: tuple[tuple[BlockId, ...], ...]
    seq_lens: tuple[int, ...]
    sample_rows: tuple[int, ...]
    sample_seq_ids: tuple[SeqId, ...]


def batch_of(scheduled: Sequence[LiveSeq], counts: Sequence[int], num_decodes: int, block_size: int) -> Batch:
    """The arrays of a step whose first ``num_decodes`` sequences all compute their last token and are past their prompts."""
    front = decode_batch(scheduled[:num_decodes], block_size)
    if num_decodes == len(scheduled):
        return front
    rest = mixed_batch(scheduled[num_decodes:], counts[num_decodes:], block_size)
    moved = rest._replace(
        query_start=tuple([num_decodes + start for start in rest.query_start[1:]]),
        sample_rows=tuple([num_decodes + row for row in rest.sample_rows]),
    )
    return Batch._make([first + second for first, second in zip(front, moved, strict=True)])


def decode_batch(scheduled: Sequence[LiveSeq], block_size: int) -> Batch:
    """The arrays for sequences that all compute their last token and are past their prompts: one pass an array."""
    lines = tuple(map(_TOKENS, scheduled))
    tables = tuple(map(_TABLE, scheduled))
    seq_ids = tuple(map(_SEQ_ID, scheduled))
    seq_lens = tuple(map(len, lines))
    positions = tuple([length - 1 for length in seq_lens])
    tails = map(_LAST, tables)
    rows = tuple(range(len(scheduled)))
    return Batch(
        seq_ids,
        query_start=(*rows, len(scheduled)),
        token_ids=tuple(map(_LAST, lines)),
        positions=positions,
        # The token goes into the last block: a table has no more than the step needs (TABLE-1).
        slot_mapping=tuple([block * block_size + p % block_size for block, p in zip(tails, positions, strict=True)]),
        block_tables=tables,
        seq_lens=seq_lens,
        sample_rows=rows,
        sample_seq_ids=seq_ids,
    )


def mixed_batch(scheduled: Sequence[LiveSeq], counts: Sequence[int], block_size: int) -> Batch:
    """The arrays for any sequences, and any number of tokens of each.

    O(tokens), with a small constant for the tokens of a prompt.
    """
    token_ids: list[Token] = []
    positions: list[int] = []
    slots: list[Slot] = []
    sample_rows: list[int] = []
    sample_seq_ids: list[SeqId] = []
    seq_lens = [seq.num_computed + seq.num_scheduled for seq in scheduled]
    for seq, count, stop in zip(scheduled, counts, seq_lens, strict=True):
        start = stop - count
        if count == 1:  # by far the most sequences, and the slower way costs them twice the time
            token_ids.append(seq.tokens[start])
            positions.append(start)
            slots.append(seq.table[-1] * block_size + start % block_size)
            if stop == len(seq.tokens) and not seq.request.num_unborn:
                sample_rows.append(len(token_ids) - 1)
                sample_seq_ids.append(seq.seq_id)
                continue
        else:
            token_ids += seq.tokens[start:stop]
            positions += range(start, stop)
            first_kept = seq.num_dropped_blocks * block_size
            slots += slots_of(seq.table, start - first_kept, stop - first_kept, block_size)
        if stop == len(seq.tokens):
            # A request's other sequences are forked from this one, and each draws its own first token.
            sampled = seq.request.request.seq_ids if seq.request.num_unborn else (seq.seq_id,)
            sample_rows += [len(token_ids) - 1] * len(sampled)
            sample_seq_ids += sampled
    return Batch(
        tuple([seq.seq_id for seq in scheduled]),
        query_start=(0, *accumulate(counts)),
        token_ids=tuple(token_ids),
        positions=tuple(positions),
        slot_mapping=tuple(slots),
        block_tables=tuple([seq.table for seq in scheduled]),
        seq_lens=tuple(seq_lens),
        sample_rows=tuple(sample_rows),
        sample_seq_ids=tuple(sample_seq_ids),
    )


def slots_of(table: Sequence[BlockId], start: int, stop: int, block_size: int) -> list[Slot]:
    """The slots of the positions ``start`` to ``stop``: whole blocks as ranges.

    >>> slots_of((7, 2), start=3, stop=6, block_size=4)
    [31, 8, 9]
    """
    slots: list[Slot] = []
    for index in range(start // block_size, -(-stop // block_size)):
        first = table[index] * block_size
        low, high = start - index * block_size, stop - index * block_size
        slots += range(first + max(low, 0), first + min(high, block_size))
    return slots
