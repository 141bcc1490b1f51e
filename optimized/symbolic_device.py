"""A device that computes nothing: the K and V of a token are the tokens that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from optimized.plan import Plan, read_of
from spec.engine import DeviceEvent, TokenSource
from spec.vocabulary import Copy, Prefix, SeqId, Slot, SwapIn, SwapOut, Token, Write

TellPrefix: TypeAlias = Callable[[SeqId, int], Prefix]
"""The first tokens of a sequence, so many of them."""


class SymbolicDevice:
    """Each slot holds the token prefix that it stands for, found by reading what the plan says is read.

    A token's K and V depend on what its attention reads: the cell of the position before it, as the block table
    names it. So a wrong slot, table or copy shows as a wrong prefix, here and in everything computed from it. A cell
    that nobody wrote stands for the empty prefix.

    With a window of one token nothing before a token is read, and it may be gone: that prefix is told.
    """

    def __init__(
        self,
        block_size: int,
        token_source: TokenSource,
        window: int | None = None,
        tell_prefix: TellPrefix = lambda seq_id, num_tokens: (),
    ) -> None:
        self.token_source = token_source
        self.cells: dict[Slot, Prefix] = {}
        self.host_cells: dict[Slot, Prefix] = {}
        self.events: tuple[DeviceEvent, ...] = ()
        """What the last plan did, in the order in which it was done."""
        self._block_size = block_size
        self._window = window
        self._tell_prefix = tell_prefix

    def run(self, plan: Plan) -> Sequence[Token]:
        events: list[DeviceEvent] = []
        for swap in plan.swaps:
            if swap.out:
                self._move(self.cells, self.host_cells, swap.blocks, swap.host_blocks)
                events.append(SwapOut(swap.seq_id, swap.host_blocks))
            else:
                self._move(self.host_cells, self.cells, swap.host_blocks, swap.blocks)
                events.append(SwapIn(swap.seq_id, swap.blocks))
        sources, targets = [copy.source for copy in plan.copies], [copy.target for copy in plan.copies]
        self._move(self.cells, self.cells, sources, targets)
        events += [Copy(*copy) for copy in plan.copies]
        for index in range(len(plan.seq_ids)):
            events.append(self._write(plan, index))
        events += [read_of(plan, index, self._block_size, self._window) for index in range(len(plan.seq_ids))]
        self.events = tuple(events)
        return self._sample(plan)

    def _move(
        self, source: dict[Slot, Prefix], target: dict[Slot, Prefix], sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """Whole blocks, all at once, as the kernel does it."""
        size = self._block_size
        moved = {
            b * size + offset: source.get(a * size + offset, ())
            for a, b in zip(sources, targets, strict=True)
            for offset in range(size)
        }
        target.update(moved)

    def _write(self, plan: Plan, index: int) -> Write:
        start, stop = plan.query_start[index], plan.query_start[index + 1]
        for row in range(start, stop):
            position = plan.positions[row]
            if self._window == 1:
                before = self._tell_prefix(plan.seq_ids[index], position)
            else:
                before = self._at(plan, index, position - 1) if position else ()
            self.cells[plan.slot_mapping[row]] = (*before, plan.token_ids[row])
        return Write(plan.seq_ids[index], plan.positions[start], plan.slot_mapping[start:stop])

    def _at(self, plan: Plan, index: int, position: int) -> Prefix:
        """What the attention of sequence ``index`` finds at a position."""
        dropped = plan.num_dropped_blocks[index] if plan.num_dropped_blocks else 0
        block = plan.block_tables[index][position // self._block_size - dropped]
        return self.cells.get(block * self._block_size + position % self._block_size, ())

    def _sample(self, plan: Plan) -> list[Token]:
        index_of = {row: i for i in range(len(plan.seq_ids)) for row in (plan.query_start[i + 1] - 1,)}
        tokens = []
        for row, seq_id in zip(plan.sample_rows, plan.sample_seq_ids, strict=True):
            index = index_of[row]
            tokens.append(self.token_source(seq_id, self._at(plan, index, plan.seq_lens[index] - 1)))
        return tokens
