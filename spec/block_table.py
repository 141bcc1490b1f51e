"""Block tables: from a position in a sequence to a slot in the cache."""

from collections.abc import Iterable

from spec.allocator import blocks_needed, take
from spec.choices import Publication
from spec.rules import state_rule, step_rule
from spec.vocabulary import (
    Allocate,
    BlockId,
    Complete,
    Config,
    Flight,
    Observe,
    Prefix,
    Seq,
    SeqId,
    Slide,
    Slot,
    Start,
    State,
    Write,
    open_step,
    replace,
    step_of,
)


def slot(table: tuple[BlockId, ...], position: int, block_size: int) -> Slot:
    """The slot of a position: its block's first slot plus its offset in the block.

    >>> slot(table=(7, 2), position=17, block_size=16)
    33
    """
    return table[position // block_size] * block_size + position % block_size


def slot_mapping(table: tuple[BlockId, ...], start: int, stop: int, block_size: int) -> tuple[Slot, ...]:
    """The slots of the positions ``start`` to ``stop``, one a token.

    >>> slot_mapping(table=(7, 2), start=3, stop=6, block_size=4)
    (31, 8, 9)
    """
    return tuple(slot(table, position, block_size) for position in range(start, stop))


def slots_of(s: State, seq: SeqId, start: int, stop: int) -> tuple[Slot, ...]:
    """The slots of these positions of a sequence. A window's dropped blocks are not in the table any more."""
    shift = s.seqs[seq].num_dropped_blocks * s.config.block_size
    return slot_mapping(s.block_tables[seq], start - shift, stop - shift, s.config.block_size)


def first_kept(seq: Seq, block_size: int) -> int:
    """The first position whose block is still in the table."""
    return seq.num_dropped_blocks * block_size


def room(seq: Seq) -> int:
    """The number of tokens that a sequence has or will shortly have in the cache."""
    return seq.num_computed_tokens + seq.num_scheduled_tokens


def is_drawing(s: State, seq_id: SeqId) -> bool:
    """Whether a submitted step is still to give the sequence a token: it computes the last one that there is."""
    last = s.seqs[seq_id].num_tokens
    return any(flight.submitted and flight.stops.get(seq_id) == last for flight in s.flights.values())


def num_tokens_ahead(s: State, seq_id: SeqId) -> int:
    """How many tokens a step can compute for the sequence: those that it has, and the one that is being drawn, if the
    engine schedules ahead and it is not the last one, which needs no slot."""
    seq = s.seqs[seq_id]
    request = s.requests.get(seq.request_id)
    goes_on = request is not None and seq.num_output_tokens + 1 < request.max_tokens
    return seq.num_tokens + (s.choices.schedules_ahead and goes_on and is_drawing(s, seq_id))


def budget_left(s: State, flight: Flight) -> int:
    """The tokens that a step could still compute."""
    return s.config.max_num_batched_tokens - sum(flight.scheduled.values())


def share(config: Config) -> int:
    """The most tokens of one sequence in one step: the whole budget, unless several may be computed in parts.

    Given out in the order of service, no more are than ``max_num_partial_prefills``: each but the last has a whole one.

    >>> share(Config(num_blocks=1, max_num_batched_tokens=512, max_num_partial_prefills=3))
    171
    """
    return -(-config.max_num_batched_tokens // config.max_num_partial_prefills)


def share_left(s: State, flight: Flight, seq_id: SeqId) -> int:
    """The tokens of its share that a step does not compute for the sequence yet."""
    return share(s.config) - flight.scheduled.get(seq_id, 0)


def stands_for(s: State, at: Slot, prefix: Prefix) -> bool:
    """Whether the slot holds the prefix; or, where blocks are published at the schedule, is owed it."""
    return s.cells.get(at) == prefix or (
        s.choices.publication is Publication.AT_SCHEDULE and any(owes(s, i, at, prefix) for i in s.block_tables)
    )


def owes(s: State, seq_id: SeqId, at: Slot, prefix: Prefix) -> bool:
    """Whether the last token of the prefix is scheduled for the sequence, and the slot is the one that it goes to."""
    seq, position = s.seqs[seq_id], len(prefix) - 1
    is_scheduled = seq.num_computed_tokens <= position < room(seq) and seq.tokens[: position + 1] == prefix
    return is_scheduled and slots_of(s, seq_id, position, position + 1) == (at,)


def holds_its_tokens(s: State, seq_id: SeqId) -> bool:
    """The slot of each computed position of the sequence stands for the position's prefix."""
    seq, start = s.seqs[seq_id], first_kept(s.seqs[seq_id], s.config.block_size)
    slots = slots_of(s, seq_id, start, seq.num_computed_tokens)
    return all(stands_for(s, at, seq.tokens[: start + i + 1]) for i, at in enumerate(slots))


def begin_sequence(s: State, event: Start) -> State:
    """The sequence exists, has its tokens, and has computed none of them. Its request is its own."""
    seq = Seq(event.seq, event.tokens, num_prompt_tokens=len(event.tokens))
    return replace(s, seqs={**s.seqs, event.seq: seq}, block_tables={**s.block_tables, event.seq: ()})


def allocate(s: State, event: Allocate) -> State:
    """The blocks come to the end of the table; the tokens count as scheduled, also in the newest step."""
    seq = s.seqs[event.seq]
    s = take(s, event.blocks)
    seq = replace(seq, num_scheduled_tokens=seq.num_scheduled_tokens + event.num_tokens)
    table = s.block_tables.get(event.seq, ()) + event.blocks
    flights = dict(s.flights)
    newest = open_step(s)
    if newest is not None:
        count = flights[newest].scheduled.get(event.seq, 0) + event.num_tokens
        flights[newest] = replace(flights[newest], scheduled={**flights[newest].scheduled, event.seq: count})
        if s.choices.schedules_ahead:
            flights[newest] = replace(flights[newest], stops={**flights[newest].stops, event.seq: room(seq)})
    return replace(
        s,
        seqs={**s.seqs, event.seq: seq},
        block_tables={**s.block_tables, event.seq: table},
        flights=flights,
    )


def write(s: State, event: Write) -> State:
    """Each slot holds the prefix that ends in its token; the tokens are computed."""
    seq = s.seqs[event.seq]
    prefixes: Iterable[Prefix] = (seq.tokens[: event.start + i + 1] for i in range(len(event.slots)))
    cells = {**s.cells, **dict(zip(event.slots, prefixes, strict=True))}
    seq = replace(
        seq,
        num_computed_tokens=seq.num_computed_tokens + len(event.slots),
        num_scheduled_tokens=seq.num_scheduled_tokens - len(event.slots),
    )
    flights = dict(s.flights)
    oldest = step_of(s, event.seq)
    if oldest is not None:
        flights[oldest] = replace(flights[oldest], written=flights[oldest].written | set(event.slots))
    return replace(s, cells=cells, seqs={**s.seqs, event.seq: seq}, flights=flights)


@state_rule("TABLE-1", corpus="T1 T3")
def table_length_is_blocks_needed(s: State) -> bool:
    """A block table has exactly the blocks that the computed and scheduled tokens need.

    So the last block is never empty, and a sequence wastes less than one block.
    """
    return all(
        len(table) + s.seqs[i].num_dropped_blocks == blocks_needed(room(s.seqs[i]), s.config.block_size)
        for i, table in s.block_tables.items()
        if i in s.seqs
    )


@step_rule("TABLE-2", corpus="T2 T6 P14")
def tokens_go_to_their_slots(before: State, event: Write, after: State) -> bool:
    """The token at position p is written to slot table[p // block_size] * block_size + p % block_size."""
    return event.slots == slots_of(before, event.seq, event.start, event.start + len(event.slots))


@step_rule("TABLE-3", corpus="T2 C2")
def a_step_writes_no_slot_twice(before: State, event: Write, after: State) -> bool:
    """The slots that one step writes are pairwise distinct."""
    step_id = step_of(before, event.seq)
    written = before.flights[step_id].written if step_id is not None else frozenset[Slot]()
    return len(set(event.slots)) == len(event.slots) and written.isdisjoint(event.slots)


@state_rule("TABLE-4", corpus="A5 S6")
def only_live_sequences_have_tables(s: State) -> bool:
    """Only a live sequence has a block table or a host table."""
    return s.seqs.keys() >= s.block_tables.keys() | s.host_tables.keys()


@state_rule("TABLE-5", corpus="P1 C2 T5 T7 T8")
def slots_hold_their_prefix(s: State) -> bool:
    """The slot of a computed token holds the K and V of exactly the prefix that ends in it.

    This is the one statement that a block table owes: whoever reads a sequence through its table finds that sequence.
    Where blocks are published at the schedule, a sequence may have hit a block that somebody else is still to write in a
    step in flight: then the slot is owed that prefix, and ATTN-1 sees to it that it is there when it is read.
    """
    return all(holds_its_tokens(s, i) for i in s.block_tables if i in s.seqs)


@state_rule("TABLE-6", corpus="A2 C3")
def no_block_twice_in_a_table(s: State) -> bool:
    """A block stands at most once in a block table."""
    return all(len(set(table)) == len(table) for table in s.block_tables.values())


@state_rule("TABLE-7", corpus="T6")
def tables_name_blocks_of_the_pool(s: State) -> bool:
    """Every entry of a block table is a block of the pool."""
    return all(0 <= b < s.config.num_blocks for table in s.block_tables.values() for b in table)


@step_rule("TABLE-8", corpus="T5")
def tables_change_by_events_only(before: State, event: Observe, after: State) -> bool:
    """The block tables are what allocation, forks, copies and releases made of them."""
    return {i: t for i, t in before.block_tables.items() if t} == {i: t for i, t in after.block_tables.items() if t}


@step_rule("TABLE-9", corpus="P14 S11")
def writes_continue_where_they_ended(before: State, event: Write, after: State) -> bool:
    """A write begins at the first token that is not computed, and writes scheduled tokens only."""
    seq = before.seqs[event.seq]
    return event.start == seq.num_computed_tokens and 0 < len(event.slots) <= seq.num_scheduled_tokens


@step_rule("TABLE-10", corpus="K6 T7")
def only_passed_blocks_leave_the_window(before: State, event: Slide, after: State) -> bool:
    """A block leaves the table's front only when the window of every token still to come has passed it."""
    seq, window = before.seqs[event.seq], before.config.window
    passed = 0 if window is None else seq.num_computed_tokens - window + 1
    return event.num_blocks > 0 and first_kept(after.seqs[event.seq], before.config.block_size) <= passed


@step_rule("TABLE-11", corpus="K6 A5")
def passed_blocks_are_given_back(before: State, event: Complete, after: State) -> bool:
    """When a step ends, no sequence of it keeps a block that the window of every token still to come has passed."""
    size, window = before.config.block_size, before.config.window
    alive = [before.seqs[i] for i in before.flights[event.step_id].scheduled if i in before.seqs]
    return window is None or all(first_kept(q, size) + size > q.num_computed_tokens - window + 1 for q in alive)
