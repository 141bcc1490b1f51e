"""Forks and copy-on-write: several sequences hold one block, and nobody sees what another one writes."""

from collections import Counter
from collections.abc import Iterable

from spec.allocator import blocks_needed, give_back, take
from spec.block_table import room
from spec.choices import Publication
from spec.rules import step_rule
from spec.vocabulary import (
    BlockId,
    Copy,
    Flight,
    Fork,
    Prefix,
    RequestId,
    Rollback,
    SeqId,
    Slide,
    Slot,
    State,
    Write,
    open_step,
    replace,
)


def num_entries(s: State, block: BlockId) -> int:
    """How many block tables name the block."""
    return sum(table.count(block) for table in s.block_tables.values())


def num_unborn(s: State, request_id: RequestId) -> int:
    """How many sequences of the request are still to be forked, once its prompt is computed."""
    request = s.requests[request_id]
    first = s.seqs.get(request.seq_ids[0])
    if first is None or first.num_output_tokens > 0:
        return 0
    return sum(1 for i in request.seq_ids if i not in s.seqs)


def seq_ids_in_use(s: State) -> set[SeqId]:
    """The ids of live sequences, those promised to sequences that are still to be forked, and those that a step in
    flight computes, also for a sequence that is gone."""
    unborn = (i for request_id in s.requests if num_unborn(s, request_id) for i in s.requests[request_id].seq_ids)
    computed = (i for flight in s.flights.values() for i in flight.scheduled)
    return {*s.seqs, *unborn, *computed}


def must_copy(s: State, block: BlockId) -> bool:
    """A block that stands in more than one table, or that the prefix cache may hand to anybody, is not written."""
    return num_entries(s, block) > 1 or block in s.cached


def is_promised(s: State, event: Write, block: BlockId) -> bool:
    """Whether the block was published at the schedule, before it is written, for just what is written now: whoever
    names it waits for that."""
    table, seq = s.block_tables[event.seq], s.seqs[event.seq]
    if s.choices.publication is not Publication.AT_SCHEDULE or block not in s.cached or block not in table:
        return False
    num_tokens = (seq.num_dropped_blocks + table.index(block) + 1) * s.config.block_size
    return s.cached[block].tokens == seq.tokens[:num_tokens] and s.cells.keys().isdisjoint(event.slots)


def blocks_written(s: State, event: Write) -> frozenset[BlockId]:
    """The blocks into which a write goes."""
    return frozenset(slot // s.config.block_size for slot in event.slots)


def move_cells(s: State, moves: Iterable[tuple[BlockId, BlockId]]) -> dict[Slot, Prefix]:
    """The contents of each source block as the contents of its target."""
    size = s.config.block_size
    return {
        target * size + offset: s.cells[source * size + offset]
        for source, target in moves
        for offset in range(size)
        if source * size + offset in s.cells
    }


def copies_owed(s: State, seq_ids: Iterable[SeqId]) -> int:
    """How many copies these sequences need before each can write its next token. The last of several holders of a
    block writes in place, unless the block is cached."""
    tails = Counter(
        s.block_tables[i][room(s.seqs[i]) // s.config.block_size - s.seqs[i].num_dropped_blocks]
        for i in seq_ids
        if s.block_tables.get(i) and room(s.seqs[i]) % s.config.block_size
    )
    return sum(
        writers if block in s.cached else min(writers, num_entries(s, block) - 1) for block, writers in tails.items()
    )


def growth(s: State, seq_id: SeqId, num_tokens: int) -> int:
    """How many blocks the sequence's table lacks for ``num_tokens`` tokens."""
    held = len(s.block_tables.get(seq_id, ())) + s.seqs[seq_id].num_dropped_blocks
    return max(0, blocks_needed(num_tokens, s.config.block_size) - held)


def blocks_lacking(s: State, seq_ids: Iterable[SeqId]) -> int:
    """How many blocks these sequences need for all the tokens they have, copies included."""
    behind = [i for i in seq_ids if room(s.seqs[i]) < s.seqs[i].num_tokens]
    return copies_owed(s, behind) + sum(growth(s, i, s.seqs[i].num_tokens) for i in behind)


def fork(s: State, event: Fork) -> State:
    """The child gets the parent's table and tokens; each block gets one more holder."""
    table = s.block_tables[event.parent]
    s = take(s, table)
    return replace(
        s,
        seqs={**s.seqs, event.child: s.seqs[event.parent]},
        block_tables={**s.block_tables, event.child: table},
    )


def copy(s: State, event: Copy) -> State:
    """The table names the target; the source keeps its holder, which is now the step being scheduled."""
    cells = move_cells(s, [(event.source, event.target)])
    s = take(s, (event.target,))
    table = s.block_tables[event.seq]
    table = table[: event.index] + (event.target,) + table[event.index + 1 :]
    s = replace(s, block_tables={**s.block_tables, event.seq: table}, cells={**s.cells, **cells})
    newest = open_step(s)
    if newest is None:
        return give_back(s, (event.source,))
    flight = s.flights[newest]
    flight = replace(flight, holds=(*flight.holds, event.source), num_copies=flight.num_copies + 1)
    return replace(s, flights={**s.flights, newest: flight})


def rollback(s: State, event: Rollback) -> State:
    """The last tokens are gone, and with them the blocks that nothing else is in."""
    seq = s.seqs[event.seq]
    computed = min(seq.num_computed_tokens, event.num_tokens)
    kept = blocks_needed(computed, s.config.block_size) - seq.num_dropped_blocks
    table = s.block_tables[event.seq]
    s = replace(s, block_tables={**s.block_tables, event.seq: table[:kept]})
    seq = replace(seq, tokens=seq.tokens[: event.num_tokens], num_computed_tokens=computed)
    return give_back(replace(s, seqs={**s.seqs, event.seq: seq}), table[kept:])


def slide(s: State, event: Slide) -> State:
    """The front of the table is given back."""
    table, seq = s.block_tables[event.seq], s.seqs[event.seq]
    seq = replace(seq, num_dropped_blocks=seq.num_dropped_blocks + event.num_blocks)
    s = replace(
        s,
        block_tables={**s.block_tables, event.seq: table[event.num_blocks :]},
        seqs={**s.seqs, event.seq: seq},
    )
    return give_back(s, table[: event.num_blocks])


@step_rule("COW-2", corpus="C1 C2")
def shared_blocks_are_never_written(before: State, event: Write, after: State) -> bool:
    """A write goes only into a block that stands in one block table and that the prefix cache does not name, or that
    was published at the schedule for what is written."""
    shared = (b for b in blocks_written(before, event) if must_copy(before, b))
    return all(is_promised(before, event, b) for b in shared)


@step_rule("COW-3", corpus="C4")
def only_shared_blocks_are_copied(before: State, event: Copy, after: State) -> bool:
    """A block is copied only when it must not be written."""
    return must_copy(before, event.source)


@step_rule("COW-4", corpus="C4")
def copies_come_before_writes(before: State, event: Copy, after: State) -> bool:
    """A step makes its copies before it writes to their source or target."""
    newest = before.flights[max(before.flights)] if before.flights else Flight()
    written = {slot // before.config.block_size for slot in newest.written}
    return written.isdisjoint((event.source, event.target))


@step_rule("COW-5", corpus="C4")
def a_copy_replaces_its_source(before: State, event: Copy, after: State) -> bool:
    """A copy puts its target where the table had its source."""
    table = before.block_tables[event.seq]
    return table[event.index] == event.source and after.block_tables[event.seq][event.index] == event.target


@step_rule("COW-6", corpus="C5")
def a_fork_is_a_new_sequence(before: State, event: Fork, after: State) -> bool:
    """A fork's child has an id that no live sequence has, and that is promised to nobody else's."""
    request = before.requests.get(before.seqs[event.parent].request_id)
    own = request is not None and event.child in request.seq_ids
    return event.child not in before.seqs and (own or event.child not in seq_ids_in_use(before))


@step_rule("COW-7", corpus="C2")
def rollback_takes_back_the_end(before: State, event: Rollback, after: State) -> bool:
    """A rollback takes back tokens from the end only, and leaves at least one."""
    tokens = before.seqs[event.seq].tokens
    return 0 < event.num_tokens < len(tokens) and after.seqs[event.seq].tokens == tokens[: event.num_tokens]


@step_rule("COW-8", corpus="K6")
def rollback_keeps_what_is_still_seen(before: State, event: Rollback, after: State) -> bool:
    """A rollback leaves in the table every position that the next token sees."""
    kept = before.seqs[event.seq].num_dropped_blocks * before.config.block_size
    return before.config.window is None or max(0, event.num_tokens - before.config.window + 1) >= kept
