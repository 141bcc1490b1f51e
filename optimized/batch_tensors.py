"""The tensors of a step's batch, which outlive it: what a step has in common with the one before it is moved or counted on.

Nothing that is kept is trusted. Tuples are compared, which costs less than reading their numbers into an array: where
the plan says that the rows before go on by one token, in the tables that they had, one is added; everything else is read from the
plan. So whatever became of the sequences meanwhile, the tensors are those that the plan would give alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import is_not, ne
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from optimized.plan import Plan
from optimized.poison import NOBODY
from spec.vocabulary import BlockId, SeqId, Token


class StepTensors(NamedTuple):
    """What a model is told of a step. On a CPU these are good until the next step's are made."""

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64
    block_tables: Tensor  # [num_seqs, longest table] int32; what stands past a table's end is never read
    seq_lens: Tensor  # [num_seqs] int32
    query_start: Tensor  # [num_seqs + 1] int32
    sample_rows: Tensor | None  # [num_samples] int64; None if one is sampled after every token, in their order


@dataclass(frozen=True, slots=True)
class _Held:
    """Whose the rows are, as the last plan said it."""

    seq_ids: tuple[SeqId, ...] = ()
    seq_lens: tuple[int, ...] = ()
    tables: tuple[tuple[BlockId, ...], ...] = ()


class BatchTensors:
    """A row for each sequence of the last step: its last token's position and slot, its length, and its block table.

    A step costs array work, O(tokens) for the sequences that compute several, and O(entries that are new) for the tables.
    With a ``guard`` every entry that belongs to nobody names this block, which costs O(entries) a step.
    """

    def __init__(
        self, num_rows: int, num_columns: int, block_size: int, device: torch.device, guard: BlockId | None = None
    ) -> None:
        self._positions, self._slots, self._tokens = (np.zeros(num_rows, np.int64) for _ in range(3))
        self._seq_lens = np.zeros(num_rows, np.int32)
        self._tables = np.zeros((num_rows, num_columns), np.int32)
        self._starts = np.arange(num_rows + 1, dtype=np.int32)
        self._in_order = tuple(range(num_rows))
        self._block_size = block_size
        self._device = device
        self._guard = guard
        self._held = _Held()
        self._drawn: tuple[Token, ...] = ()
        self._views: tuple[tuple[int, int], StepTensors] | None = None

    def is_next(self, plan: Plan) -> bool:
        """Whether the first sequence of the plan was in the last step, as are then most of the others."""
        return plan.seq_ids[0] in self._held.seq_ids

    def drew(self, tokens: Sequence[Token], array: npt.NDArray[np.int64]) -> None:
        """These are the tokens of the step, and so are those: the next one will have most of them."""
        self._drawn = ()
        if len(tokens) <= len(self._tokens):
            self._tokens[: len(tokens)] = array
            self._drawn = tuple(tokens)

    def filled(self, plan: Plan) -> StepTensors:
        """The tensors of a plan."""
        held, self._held = self._held, _Held()  # whoever is interrupted here knows nothing afterwards
        num_seqs, num_ones = len(plan.seq_ids), num_single_tokens(plan)
        held = self._moved(held, plan.seq_ids)
        self._count_on(plan, held, num_ones)
        self._write_tables(plan, held)
        if self._guard is not None:
            self._guard_the_rest(plan, self._guard)
        if num_ones < num_seqs:
            tensors = self._longer(plan, num_ones)
        else:
            tensors = self._ones(plan)
        self._held = _Held(plan.seq_ids, plan.seq_lens, plan.block_tables)
        return tensors

    def _ones(self, plan: Plan) -> StepTensors:
        """The tensors of a step that computes one token of each: what is kept, and nothing beside it."""
        num_seqs = len(plan.seq_ids)
        drawn, self._drawn = self._drawn, ()
        if plan.token_ids != drawn:
            self._tokens[:num_seqs] = plan.token_ids
        self._drawn = plan.token_ids
        shape = (num_seqs, self._width(num_seqs))
        if self._views is None or self._views[0] != shape or self._device.type == "cuda":
            arrays = (self._tokens, self._positions, self._slots, self._seq_lens)
            token_ids, positions, slots, seq_lens = (self._there(array[:num_seqs]) for array in arrays)
            starts = self._there(self._starts[: num_seqs + 1])
            views = StepTensors(token_ids, positions, slots, self._block_tables(*shape), seq_lens, starts, None)
            self._views = (shape, views)
        tensors = self._views[1]
        if plan.sample_rows != self._in_order[:num_seqs]:
            tensors = tensors._replace(sample_rows=self._there(np.array(plan.sample_rows, np.int64)))
        return tensors

    def _longer(self, plan: Plan, num_ones: int) -> StepTensors:
        """The tensors of a step in which all but the first sequences may compute several tokens, and their rows, from which
        they go on."""
        num_drawn = num_ones if plan.token_ids[:num_ones] == self._drawn[:num_ones] else 0
        slots = _joined(self._slots[:num_ones], plan.slot_mapping)
        query_start = _joined(self._starts[: num_ones + 1], plan.query_start)
        num_seqs, rows = len(plan.seq_ids), slice(num_ones, len(plan.seq_ids))
        self._seq_lens[rows] = plan.seq_lens[num_ones:]
        self._positions[rows] = self._seq_lens[rows] - 1
        self._slots[rows] = slots[query_start[num_ones + 1 :] - 1]
        return StepTensors(
            self._there(_joined(self._tokens[:num_drawn], plan.token_ids)),
            self._there(_joined(self._positions[:num_ones], plan.positions)),
            self._there(slots),
            self._block_tables(num_seqs, self._width(num_seqs)),
            self._there(self._seq_lens[:num_seqs]),
            self._there(query_start),
            self._there(np.array(plan.sample_rows, np.int64)),
        )

    def _moved(self, held: _Held, seq_ids: tuple[SeqId, ...]) -> _Held:
        """Every sequence after the first change comes to its new row; what a new one finds in its own is not what it needs."""
        first = next(compress(range(len(seq_ids)), map(ne, seq_ids, held.seq_ids)), None)
        if first is None:
            return held
        row_of = dict(zip(held.seq_ids[first:], range(first, len(held.seq_ids)), strict=True))
        sources = list(map(row_of.get, seq_ids[first:], repeat(first)))
        rows, width = np.array(sources), self._width(len(held.seq_ids))
        for array in (self._positions, self._slots, self._seq_lens, self._tables[:, :width]):
            array[first : len(seq_ids)] = array[rows]
        seq_lens, tables = map(held.seq_lens.__getitem__, sources), map(held.tables.__getitem__, sources)
        return _Held(seq_ids, (*held.seq_lens[:first], *seq_lens), (*held.tables[:first], *tables))

    def _count_on(self, plan: Plan, held: _Held, num_ones: int) -> None:
        """The next position of each of the first sequences; its slot is the next one, where its table is what it was."""
        if plan.positions[:num_ones] == held.seq_lens[:num_ones]:
            for array in (self._positions, self._slots, self._seq_lens):
                array[:num_ones] += 1
        else:
            self._positions[:num_ones] = plan.positions[:num_ones]
            self._slots[:num_ones] = plan.slot_mapping[:num_ones]
            self._seq_lens[:num_ones] = plan.seq_lens[:num_ones]

    def _write_tables(self, plan: Plan, held: _Held) -> None:
        """The tables that changed, or that a new sequence brings, and the slots of the last tokens in them.

        A table whose first blocks have left it keeps its columns, so that a key's column, and with it the order of
        summation, does not depend on when they left; nothing before the window is read either.
        """
        num_seqs, num_known, dropped = len(plan.seq_ids), len(held.tables), plan.num_dropped_blocks
        changed = compress(range(num_seqs), map(is_not, plan.block_tables, held.tables))
        for row in (*changed, *range(num_known, num_seqs)):
            table, known = plan.block_tables[row], held.tables[row] if row < num_known else ()
            if table[:-1] == known and not dropped:  # by far the most: a block more
                self._tables[row, len(known)] = table[-1]
            else:
                first = dropped[row] if dropped else 0
                self._tables[row, first : first + len(table)] = table
            self._slots[row] = plan.slot_mapping[plan.query_start[row + 1] - 1]

    def _guard_the_rest(self, plan: Plan, guard: BlockId) -> None:
        """Nobody's rows name nobody, and nobody's entries the block ``guard``: past a table's end, and before a window."""
        num_seqs, columns = len(plan.seq_ids), np.arange(self._tables.shape[1])
        for array in (self._tokens, self._positions, self._slots, self._seq_lens):
            array[num_seqs:] = NOBODY
        self._tables[num_seqs:] = guard
        first = np.array(plan.num_dropped_blocks or (0,) * num_seqs)[:, None]
        stop = first + np.array([len(table) for table in plan.block_tables])[:, None]
        self._tables[:num_seqs][(columns < first) | (columns >= stop)] = guard

    def _width(self, num_rows: int) -> int:
        """The columns that the longest of the first rows needs: a table has no more than that (TABLE-1)."""
        return -(-int(self._seq_lens[:num_rows].max()) // self._block_size)

    def _block_tables(self, num_rows: int, width: int) -> Tensor:
        return torch.from_numpy(self._tables[:num_rows, :width]).to(self._device)

    def _there(self, array: npt.NDArray[Any]) -> Tensor:
        """The numbers on the device: on a CPU these themselves, on a GPU a copy for which nobody waits."""
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            return tensor.pin_memory().to(self._device, non_blocking=True)
        return tensor


def num_single_tokens(plan: Plan) -> int:
    """How many sequences there are before the first that computes several tokens. O(log sequences)."""
    starts, num_seqs = plan.query_start, len(plan.seq_ids)
    if starts[-1] == num_seqs:
        return num_seqs
    return bisect_right(range(num_seqs + 1), 0, key=lambda row: starts[row] - row) - 1


def _joined(known: npt.NDArray[Any], values: Sequence[int]) -> npt.NDArray[Any]:
    """The numbers of ``values``, of which the first are known."""
    return np.concatenate((known, np.array(values[len(known) :], known.dtype)))
