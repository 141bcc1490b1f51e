"""The memory in which a team works: a task's record, and the tensors to which its addresses lead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cpu.layout import CHUNK_ROWS, GATE_ROWS, LEFT, TILE_COLUMNS, PackedWeight
from kernels.cpu.memory import LINE, zeros
from kernels.cpu.task import COUNTERS_BESIDE, COUNTERS_PER_LAYER, LAYER, OPERATIONS, PHASES, TASK
from kernels.cpu.team import Team


class Workspace:
    """A task that is run again and again; what it holds stays where it is until it has to grow."""

    def __init__(self, team: Team, num_layers: int = 0) -> None:
        self.team = team
        self._task = np.zeros(1, TASK)
        self._held: dict[str, Tensor] = {}
        lines = 1 + COUNTERS_BESIDE + COUNTERS_PER_LAYER * num_layers
        self._counters = self.room("counters", (lines * LINE // 8,), torch.int64)
        self.profile = self.room("profile", (len(PHASES) + 1,), torch.int64)

    def set(self, **values: float) -> None:
        """Numbers of the record."""
        for name, value in values.items():
            self._task[name] = value

    @property
    def capacity(self) -> int:
        """Rows that the buffers have room for."""
        return int(self._task["capacity"][0])

    def held(self, name: str) -> Tensor:
        """The tensor to which an address leads."""
        return self._held[name]

    def hold(self, name: str, tensor: Tensor | None) -> None:
        """The record's address leads to this contiguous tensor, or nowhere."""
        if tensor is None:
            self._held.pop(name, None)
            self._task[name] = 0
        else:
            self._held[name] = tensor
            self._task[name] = tensor.data_ptr()

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape, which starts as zeros and is there again the next time."""
        held = self._held.get(name)
        if held is None or held.shape != torch.Size(shape):
            held = zeros(shape, dtype)
            self.hold(name, held)
        return held

    def attention_room(self, group: int, max_keys: int, block_size: int, head_size: int) -> None:
        """What each thread needs for chunks of sequences of up to so many keys, a multiple of the block size."""
        threads, chunk_rows = self.team.num_threads, tokens_of_chunk(group) * group
        self.set(chunk_rows=chunk_rows, max_keys=max_keys, block_size=block_size, head_size=head_size)
        self.room("scores", (threads, chunk_rows, max_keys), torch.float32)
        self.room("weights", (threads, chunk_rows, max_keys), LEFT)
        self.room("parts", (threads, max_keys), torch.int64)
        self.room("sums", (threads, chunk_rows, head_size), torch.float32)
        self.room("factors", (threads, chunk_rows), torch.float32)
        self.room("masked", (threads, 2, block_size, head_size), torch.bfloat16)

    def gate_room(self) -> None:
        """What each thread needs for its part of the gated product."""
        self.room("gate_scratch", (self.team.num_threads, GATE_ROWS, 2 * TILE_COLUMNS), torch.float32)

    def weight_room(self, rows: int, weight: PackedWeight) -> Tensor:
        """What a product of so many rows with this weight by itself needs but for its result; its left matrix, ``[rows, padded depth]``."""
        self.rounded_room(rows, [weight])
        self.hold("head", weight.tiles)
        self.set(rows=rows, hidden_depth=weight.padded_depth, head_code=weight.code)
        return self.room("normed", (rows, weight.padded_depth), LEFT)

    def rounded_room(self, rows: int, weights: Iterable[PackedWeight]) -> None:
        """What so many rows, and each thread, need for products of those of these weights that are of whole numbers."""
        whole = [(each.whole, each.padded_depth) for each in weights if each.whole is not None]
        if whole:
            self.room("rounded", (rows, max(how.left_bytes(depth) for how, depth in whole)), torch.int8)
        if widened := [depth for how, depth in whole if how.widened_rows is not None]:
            tiles = self.room("widened", (self.team.num_threads, 2, max(widened), TILE_COLUMNS), torch.int16)
            self.set(widened_bytes=tiles[0].nbytes)

    def run(self, operation: str) -> None:
        """Do it, on all threads of the team."""
        self._counters.zero_()
        self._task["operation"] = OPERATIONS.index(operation)
        self.team.run(self._task)


def chunks_of(
    query_start: npt.NDArray[np.integer[Any]], seq_lens: npt.NDArray[np.integer[Any]], group: int
) -> npt.NDArray[np.int64]:
    """The units of attention ``[num_chunks, 4]``: whose, how many tokens, the first one's position and its row.

    >>> chunks_of(np.array([0, 1, 12]), np.array([7, 11]), group=3).tolist()
    [[0, 1, 6, 0], [1, 8, 0, 1], [1, 3, 8, 9]]
    >>> chunks_of(np.array([0, 1, 2]), np.array([7, 11]), group=3).tolist()
    [[0, 1, 6, 0], [1, 1, 10, 1]]
    """
    if (np.diff(query_start) == 1).all() and (seq_lens > 0).all():  # a step of decodes: no list of its length
        rows = np.arange(len(seq_lens))
        return np.stack((rows, np.ones_like(rows), seq_lens - 1, rows), axis=1)
    most, starts = tokens_of_chunk(group), query_start.tolist()
    found = []
    for seq, length in enumerate(seq_lens.tolist()):
        first, stop = starts[seq], starts[seq + 1]
        start = length - (stop - first)
        if length > 0:
            found += [(seq, min(most, stop - row), start + row - first, row) for row in range(first, stop, most)]
    return np.array(found, np.int64).reshape(-1, 4)


def tokens_of_chunk(group: int) -> int:
    """Tokens whose queries for one KV head fill a chunk."""
    return max(1, CHUNK_ROWS // group)


def layer_records(layers: Sequence[Mapping[str, Tensor | None]]) -> npt.NDArray[np.void]:
    """The records of layers whose tensors somebody else holds."""
    records = np.zeros(len(layers), LAYER)
    for index, layer in enumerate(layers):
        for name, tensor in layer.items():
            records[name][index] = 0 if tensor is None else tensor.data_ptr()
    return records
