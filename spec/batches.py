"""Batches: lines of a log that stand for many events of one kind, a column a field.

A step of an engine that serves many sequences is four events a sequence, most of them one number. As a batch it costs an
engine less than a microsecond a sequence to write down, and nothing is left out: the block tables that attention reads are
written when they change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias, runtime_checkable

from spec.engine import Observer
from spec.vocabulary import Allocate, Append, BlockId, Config, Event, Read, SeqId, Slot, Token, Write

Change: TypeAlias = tuple[SeqId, int, list[BlockId]]
"""A table that is new: the sequence, how many entries are those of the table before, and the entries after them."""


class BadColumn(ValueError):
    """A column of a batch makes no sense."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem


class Tables:
    """The sequences and the block tables of the last step, of which the next batch names the changes only."""

    def __init__(self) -> None:
        self.last: Mapping[SeqId, tuple[BlockId, ...]] = {}
        self.seqs: Sequence[SeqId] = ()

    def seen(self, step: "Computed") -> list[Change]:
        """What has changed. A table that is the same object has not: an engine that shows tables does not edit them."""
        tables, self.seqs = step.tables, step.seqs
        last, self.last = self.last, tables
        changed = [(seq, table) for seq, table in tables.items() if last.get(seq) is not table]
        return [(seq, kept := _num_same(last.get(seq, ()), table), list(table[kept:])) for seq, table in changed]

    def column(self, seqs: Sequence[SeqId]) -> str:
        """These sequences, or null for those of the last step: a step is often about the same ones again."""
        return "null" if seqs == self.seqs else str(list(seqs))

    def follow(self, seqs: Sequence[SeqId], changes: object) -> None:
        """The tables of the next batch, which is about these sequences."""
        tables = {seq: self.last.get(seq, ()) for seq in seqs}
        if not isinstance(changes, list):
            raise BadColumn("tables", "must be a list")
        for i, change in enumerate(changes):
            if not isinstance(change, list) or len(change) != 3:
                raise BadColumn(f"tables[{i}]", "must be a sequence, a number of entries, and the entries after them")
            [seq, kept], blocks = _numbers(change[:2], f"tables[{i}]"), _numbers(change[2], f"tables[{i}][2]")
            if seq not in tables or not 0 <= kept <= len(tables[seq]):
                raise BadColumn(f"tables[{i}]", f"keeps {kept} entries of a table of sequence {seq} that is not there")
            tables[seq] = (*tables[seq][:kept], *blocks)
        self.seqs, self.last = seqs, tables


def _num_same(old: tuple[BlockId, ...], new: tuple[BlockId, ...]) -> int:
    """How many entries two tables have in common at their beginning; a table that has grown is the usual case."""
    if new[: len(old)] == old:
        return len(old)
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def allocated_line(seqs: Sequence[SeqId]) -> str:
    return f'{{"events": "Allocate", "seqs": {list(seqs)}}}\n'


def appended_line(seqs: str, tokens: Sequence[Token]) -> str:
    return f'{{"events": "Append", "seqs": {seqs}, "tokens": {list(tokens)}}}\n'


def computed_line(seqs: str, step: "Computed", changes: Sequence[Change]) -> str:
    one_each = len(step.slots) == len(step.seqs)
    columns = f'"starts": {list(step.starts)}, "slots": {list(step.slots)}, "seq_lens": {list(step.seq_lens)}'
    query_start = "null" if one_each else list(step.query_start)
    tables = [list(each) for each in changes]
    dropped = list(step.num_dropped_blocks) if step.num_dropped_blocks else "null"
    more = f'"query_start": {query_start}, "num_dropped_blocks": {dropped}, "tables": {tables}'
    return f'{{"events": "Compute", "seqs": {seqs}, {columns}, {more}}}\n'


@dataclass(frozen=True)
class Allocated:
    """Each of these sequences got room for a token, none of them a block."""

    seqs: Sequence[SeqId]

    def events(self, block_size: int) -> list[Event]:
        return [Allocate(seq, 1, ()) for seq in self.seqs]

    def __len__(self) -> int:
        return len(self.seqs)


@dataclass(frozen=True)
class Computed:
    """A step: sequence i writes ``slots[query_start[i]:query_start[i + 1]]`` from position ``starts[i]`` on; after all
    writes it reads, through its table, from the first position that a token of the step sees to position ``seq_lens[i]``.
    With a window ``num_dropped_blocks`` says how many blocks have left the front of each table."""

    seqs: Sequence[SeqId]
    starts: Sequence[int]
    slots: Sequence[Slot]
    seq_lens: Sequence[int]
    query_start: Sequence[int]
    tables: Mapping[SeqId, tuple[BlockId, ...]]
    num_dropped_blocks: Sequence[int] = ()
    window: int | None = None

    def read_start(self, index: int) -> int:
        return 0 if self.window is None else max(0, self.starts[index] - self.window + 1)

    def num_dropped(self, index: int) -> int:
        return self.num_dropped_blocks[index] if self.num_dropped_blocks else 0

    def write(self, index: int) -> Write:
        first, stop = self.query_start[index : index + 2]
        return Write(self.seqs[index], self.starts[index], tuple(self.slots[first:stop]))

    def read(self, index: int, block_size: int) -> Read:
        table, start = self.tables[self.seqs[index]], self.read_start(index)
        first_kept = self.num_dropped(index) * block_size
        places = range(start - first_kept, self.seq_lens[index] - first_kept)
        slots = tuple(table[p // block_size] * block_size + p % block_size for p in places)
        return Read(self.seqs[index], slots, start)

    def events(self, block_size: int) -> list[Event]:
        places = range(len(self.seqs))
        return [*map(self.write, places), *(self.read(index, block_size) for index in places)]

    def __len__(self) -> int:
        """The number of events."""
        return 2 * len(self.seqs)


@dataclass(frozen=True)
class Appended:
    """Each of these sequences was given a token."""

    seqs: Sequence[SeqId]
    tokens: Sequence[Token]

    def events(self, block_size: int) -> list[Event]:
        return [Append(seq, (token,)) for seq, token in zip(self.seqs, self.tokens, strict=True)]

    def __len__(self) -> int:
        return len(self.seqs)


@runtime_checkable
class BatchObserver(Observer, Protocol):
    """An observer that takes what a step does to many sequences at once: the same as one event after the other."""

    def allocated(self, seqs: Sequence[SeqId]) -> None:
        """Room for a token for each of these sequences, none of which needed a block."""
        ...

    def computed(self, step: Computed) -> None:
        """What the device wrote and read."""
        ...

    def appended(self, seqs: Sequence[SeqId], tokens: Sequence[Token]) -> None:
        """A token for each of these sequences."""
        ...


Batch: TypeAlias = Allocated | Computed | Appended
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "Allocate": ("seqs",),
    "Compute": ("seqs", "starts", "slots", "seq_lens", "query_start", "num_dropped_blocks", "tables"),
    "Append": ("seqs", "tokens"),
}
"""The fields of each kind of batch."""


def read_batch(kind: str, columns: Mapping[str, object], config: Config, tables: Tables) -> Batch:
    """The batch that these columns are. Raises ``BadColumn``."""
    seqs = tables.seqs if columns["seqs"] is None else _numbers(columns["seqs"], "seqs")
    if kind == "Allocate":
        return Allocated(seqs)
    if kind == "Append":
        return Appended(seqs, _numbers(columns["tokens"], "tokens", len(seqs)))
    if len(set(seqs)) < len(seqs):
        raise BadColumn("seqs", "names a sequence twice")
    starts = _numbers(columns["starts"], "starts", len(seqs))
    seq_lens = _numbers(columns["seq_lens"], "seq_lens", len(seqs))
    query_start: Sequence[int] = range(len(seqs) + 1)
    if columns["query_start"] is not None:
        query_start = _numbers(columns["query_start"], "query_start", len(seqs) + 1)
        if query_start[0] != 0 or any(a >= b for a, b in pairwise(query_start)):
            raise BadColumn("query_start", "must begin with 0 and grow")
    slots = _numbers(columns["slots"], "slots", query_start[-1])
    dropped: Sequence[int] = ()
    if columns["num_dropped_blocks"] is not None:
        dropped = _numbers(columns["num_dropped_blocks"], "num_dropped_blocks", len(seqs))
    tables.follow(seqs, columns["tables"])
    step = Computed(seqs, starts, slots, seq_lens, query_start, tables.last, dropped, config.window)
    for index, length in enumerate(seq_lens):
        first, count = step.num_dropped(index) * config.block_size, len(tables.last[seqs[index]])
        if not first <= step.read_start(index) <= length <= first + count * config.block_size:
            raise BadColumn("seq_lens", f"has {length} for sequence {seqs[index]}, whose table has {count} blocks")
    return step


_INT = {int}


def _numbers(column: object, field: str, count: int | None = None) -> list[int]:
    """A list of whole numbers, as many as there must be."""
    if not isinstance(column, list) or (column and set(map(type, column)) != _INT):
        raise BadColumn(field, "must be a list of whole numbers")
    if count is not None and len(column) != count:
        raise BadColumn(field, f"has {len(column)} entries, it must have {count}")
    return column
