"""Giving the cache to somebody else for a while: preemption by recomputation or by swapping to host memory."""

from collections.abc import Callable, Mapping

from spec.allocator import give_back, take
from spec.block_table import budget_left, num_tokens_ahead, room, share_left, slots_of
from spec.prefix_cache import held_hits, longest_hit, sure_hits
from spec.rules import state_rule, step_rule
from spec.sharing import copies_owed, growth, move_cells
from spec.vocabulary import (
    Abort,
    Finish,
    Flight,
    HostBlockId,
    Observe,
    Preempt,
    Recovery,
    Release,
    RequestId,
    SeqId,
    State,
    SwapIn,
    SwapOut,
    open_step,
    replace,
    seqs_of,
    service_order,
)


def drop_table(s: State, seq_id: SeqId) -> State:
    """The sequence gives its device blocks back, the last one first, so that the end of a prefix is evicted first."""
    if s.choices.schedules_ahead:
        s = run_out(s, seq_id)
    tables = dict(s.block_tables)
    table = tables.pop(seq_id, ())
    return give_back(replace(s, block_tables=tables), table)


def run_out(s: State, seq_id: SeqId) -> State:
    """What submitted steps are still to write for the sequence is as good as written: no later step can come before."""
    seq, table = s.seqs[seq_id], s.block_tables.get(seq_id, ())
    planned = sum(flight.scheduled.get(seq_id, 0) for flight in s.flights.values() if not flight.submitted)
    stop = min(room(seq) - planned, (seq.num_dropped_blocks + len(table)) * s.config.block_size)
    slots = slots_of(s, seq_id, seq.num_computed_tokens, stop) if table else ()
    written = {at: seq.tokens[: p + 1] for p, at in enumerate(slots, seq.num_computed_tokens) if p < seq.num_tokens}
    return replace(s, cells={**{at: prefix for at, prefix in s.cells.items() if at not in slots}, **written})


def drop_host_table(s: State, seq_id: SeqId) -> State:
    """The sequence gives its host blocks back."""
    tables = dict(s.host_tables)
    table = tables.pop(seq_id, ())
    size = s.config.block_size
    gone = {at for block in table for at in range(block * size, (block + 1) * size)}
    return replace(
        s,
        host_tables=tables,
        host_free=s.host_free + table,
        host_cells={at: prefix for at, prefix in s.host_cells.items() if at not in gone},
    )


def without(counts: Mapping[SeqId, int], seq_id: SeqId) -> Mapping[SeqId, int]:
    return {i: count for i, count in counts.items() if i != seq_id}


def unschedule(s: State, seq_id: SeqId) -> State:
    """Steps that are not submitted yet forget the sequence."""
    flights = {
        step: replace(flight, scheduled=without(flight.scheduled, seq_id), stops=without(flight.stops, seq_id))
        for step, flight in s.flights.items()
        if not flight.submitted
    }
    return replace(s, flights={**s.flights, **flights})


def preempt(s: State, event: Preempt) -> State:
    """All sequences of the request go back to waiting: swapped ones with what they computed, the others from zero. A step
    in flight, if the engine schedules ahead, computes nothing for them any more that counts, but for its draw."""
    for seq_id in seqs_of(s, event.request_id):
        s = unschedule(drop_table(s, seq_id), seq_id)
        if s.choices.schedules_ahead:
            left = {i: replace(f, scheduled=without(f.scheduled, seq_id)) for i, f in s.flights.items()}
            s = replace(s, flights=left)
        swapped = seq_id in s.host_tables
        seq = replace(
            s.seqs[seq_id],
            num_scheduled_tokens=0,
            num_computed_tokens=s.seqs[seq_id].num_computed_tokens if swapped else 0,
            num_dropped_blocks=s.seqs[seq_id].num_dropped_blocks if swapped else 0,
        )
        s = replace(s, seqs={**s.seqs, seq_id: seq})
    count = s.num_preemptions.get(event.request_id, 0) + 1
    flights = {step: replace(f, preempting=f.preempting or not f.submitted) for step, f in s.flights.items()}
    return replace(
        s,
        flights=flights,
        running=tuple(r for r in s.running if r != event.request_id),
        waiting=tuple(sorted((*s.waiting, event.request_id), key=lambda i: service_order(s, i))),
        num_preemptions={**s.num_preemptions, event.request_id: count},
    )


def swap_out(s: State, event: SwapOut) -> State:
    """The contents of the table go to host blocks, the device blocks are given back."""
    cells = move_cells(s, zip(s.block_tables[event.seq], event.blocks, strict=True))
    s = replace(
        s,
        host_free=tuple(b for b in s.host_free if b not in event.blocks),
        host_tables={**s.host_tables, event.seq: event.blocks},
        host_cells={**s.host_cells, **cells},
    )
    return drop_table(s, event.seq)


def swap_in(s: State, event: SwapIn) -> State:
    """The contents come back into device blocks, the host blocks are free."""
    moves = dict(zip(s.host_tables[event.seq], event.blocks, strict=True))
    size = s.config.block_size
    cells = {moves[at // size] * size + at % size: prefix for at, prefix in s.host_cells.items() if at // size in moves}
    s = drop_host_table(take(s, event.blocks), event.seq)
    return replace(s, block_tables={**s.block_tables, event.seq: event.blocks}, cells={**s.cells, **cells})


def forget_sequence(s: State, seq_id: SeqId) -> State:
    """The sequence is gone; with the last one of a request, so is the request."""
    request_id = s.seqs[seq_id].request_id
    if s.choices.schedules_ahead:  # it is given no token any more
        s = replace(s, flights={i: replace(f, stops=without(f.stops, seq_id)) for i, f in s.flights.items()})
    s = unschedule(drop_host_table(drop_table(s, seq_id), seq_id), seq_id)
    s = replace(s, seqs={i: seq for i, seq in s.seqs.items() if i != seq_id})
    return s if request_id in {seq.request_id for seq in s.seqs.values()} else forget_request(s, request_id)


def forget_request(s: State, request_id: RequestId) -> State:
    return replace(
        s,
        requests={i: request for i, request in s.requests.items() if i != request_id},
        waiting=tuple(i for i in s.waiting if i != request_id),
        running=tuple(i for i in s.running if i != request_id),
        num_preemptions={i: n for i, n in s.num_preemptions.items() if i != request_id},
    )


def release(s: State, event: Release | Finish) -> State:
    return forget_sequence(s, event.seq)


def abort(s: State, event: Abort) -> State:
    for seq_id in tuple(seqs_of(s, event.request_id)):
        s = forget_sequence(s, seq_id)
    return s


def blocks_for_step(s: State, hits_that_stay: Callable[[State, SeqId], int] = held_hits) -> int:
    """The free blocks that the step being scheduled still takes, when in the order of service every running sequence gets
    room for the tokens that it lacks, as far as budget and share go. A sequence that has nothing yet hits what is cached,
    and of that it takes no free block for the ``hits_that_stay``."""
    step_id = open_step(s)
    flight = Flight() if step_id is None else s.flights[step_id]
    budget = 0 if step_id is None else budget_left(s, flight)
    needed, writers = 0, list[SeqId]()
    for i in (i for request_id in s.running for i in seqs_of(s, request_id)):
        seq = s.seqs[i]
        hits = longest_hit(s, i) if s.config.prefix_cache and room(seq) == 0 else 0
        start = max(room(seq), hits * s.config.block_size)
        count = min(num_tokens_ahead(s, i) - start, budget, share_left(s, flight, i))
        if count > 0:
            needed += growth(s, i, start + count) - (hits_that_stay(s, i) if hits else 0)
            writers.append(i)
            budget -= count
    return needed + copies_owed(s, writers)


def host_blocks_held(s: State) -> list[HostBlockId]:
    """The host blocks of all swapped sequences, one after the other."""
    return [block for table in s.host_tables.values() for block in table]


def host_table_holds_its_tokens(s: State, seq_id: SeqId) -> bool:
    """Each computed position of a swapped sequence has its own prefix in its host slot."""
    seq, size = s.seqs[seq_id], s.config.block_size
    table, first = s.host_tables[seq_id], seq.num_dropped_blocks * size
    slots = (table[p // size] * size + p % size for p in range(seq.num_computed_tokens - first))
    return all(s.host_cells.get(at) == seq.tokens[: first + p + 1] for p, at in enumerate(slots))


@step_rule("PREEMPT-1", corpus="R5 S8")
def the_newest_is_preempted(before: State, event: Preempt, after: State) -> bool:
    """The victim of a preemption is the running request that is last in the order of service.

    So the first request is never a victim of a later one, and it always ends.
    """
    return event.request_id == max(before.running, key=lambda i: service_order(before, i))


@state_rule("PREEMPT-2", corpus="S4 R4")
def waiting_requests_hold_nothing(s: State) -> bool:
    """A waiting request holds no device block and has nothing scheduled."""
    return all(
        not s.block_tables.get(i) and s.seqs[i].num_scheduled_tokens == 0
        for request_id in s.waiting
        for i in seqs_of(s, request_id)
    )


@state_rule("PREEMPT-3", corpus="R4")
def what_is_not_stored_is_not_computed(s: State) -> bool:
    """A sequence without a table, on the device or in host memory, has computed nothing."""
    return all(
        seq.num_computed_tokens == seq.num_dropped_blocks * s.config.block_size
        for i, seq in s.seqs.items()
        if not s.block_tables.get(i) and i not in s.host_tables
    )


@step_rule("PREEMPT-4", corpus="R1 R2 R3")
def no_token_is_lost(before: State, event: Observe, after: State) -> bool:
    """Every sequence has its prompt and every token that it was given since, whatever happened to its blocks."""
    return {i: (q.tokens, q.num_prompt_tokens) for i, q in before.seqs.items()} == {
        i: (q.tokens, q.num_prompt_tokens) for i, q in after.seqs.items()
    }


@step_rule("PREEMPT-5", corpus="R10 R5")
def preemption_makes_room_that_is_needed(before: State, event: Preempt, after: State) -> bool:
    """A request is preempted only while the running ones lack blocks for what the step being scheduled can still compute.

    That is no more than its budget: of a long prompt the next chunk, and nothing for whom the budget does not reach.
    Who has nothing yet may lose what is cached behind a free block, which somebody who is served before takes. What the
    victim has swapped out just now was not free before.
    """
    swapped = sum(len(before.host_tables.get(i, ())) for i in seqs_of(before, event.request_id))
    return blocks_for_step(before, sure_hits) + swapped > len(before.free)


@step_rule("PREEMPT-6", corpus="R6 S10")
def preemptions_are_counted(before: State, event: Observe, after: State) -> bool:
    """An engine knows how often each live request was preempted."""
    return {i: n for i, n in before.num_preemptions.items() if n} == {
        i: n for i, n in after.num_preemptions.items() if n
    }


@step_rule("PREEMPT-7", corpus="A9 R9")
def nothing_in_flight_is_preempted(before: State, event: Preempt, after: State) -> bool:
    """A request that a submitted step computes is not preempted: its blocks would not be free before that step ends.

    Unless the engine schedules ahead: then they are free at once.
    """
    in_flight = {i for flight in before.flights.values() if flight.submitted for i in flight.scheduled}
    return before.choices.schedules_ahead or in_flight.isdisjoint(seqs_of(before, event.request_id))


@state_rule("SWAP-1", corpus="R7 A1 A3")
def host_blocks_have_one_place(s: State) -> bool:
    """Each host block is free once, or stands once in the host table of one sequence."""
    return sorted([*s.host_free, *host_blocks_held(s)]) == list(range(s.config.num_host_blocks))


@step_rule("SWAP-2", corpus="R7 A3")
def only_free_host_blocks_are_taken(before: State, event: SwapOut, after: State) -> bool:
    """A host block that a swap-out takes was free, and is taken once."""
    return len(set(event.blocks)) == len(event.blocks) and set(event.blocks) <= set(before.host_free)


@state_rule("SWAP-3", corpus="R7 P1")
def host_slots_hold_their_prefix(s: State) -> bool:
    """The host slot of a computed token of a swapped sequence holds the prefix that ends in it."""
    return all(host_table_holds_its_tokens(s, i) for i in s.host_tables if i in s.seqs)


@state_rule("SWAP-4", corpus="S5")
def a_sequence_is_in_one_memory(s: State) -> bool:
    """No sequence has a block table on the device and one in host memory."""
    return not any(s.block_tables.get(i) for i in s.host_tables)


@step_rule("SWAP-5", corpus="R7")
def swapping_moves_whole_tables(before: State, event: SwapOut | SwapIn, after: State) -> bool:
    """A swap moves every block of the sequence, each to a block of its own."""
    moved = before.block_tables if isinstance(event, SwapOut) else before.host_tables
    return len(event.blocks) == len(set(event.blocks)) == len(moved[event.seq]) > 0


@step_rule("SWAP-6", corpus="R7")
def host_tables_change_by_events_only(before: State, event: Observe, after: State) -> bool:
    """The host tables are what swapping made of them."""
    return dict(before.host_tables) == dict(after.host_tables)


@step_rule("SWAP-7", corpus="R6 R7")
def nothing_scheduled_is_swapped_out(before: State, event: SwapOut, after: State) -> bool:
    """A sequence is swapped out only when no step has scheduled it: every block of its table is whole."""
    return before.seqs[event.seq].num_scheduled_tokens == 0


@step_rule("SWAP-8", corpus="R7")
def what_can_be_swapped_out_is(before: State, event: Preempt, after: State) -> bool:
    """An engine whose recovery is SWAP swaps a request of one sequence out when it preempts it and host memory has room.

    Of several sequences the step may have scheduled one already, and then they are computed again (SWAP-7).
    """
    seq_ids = list(seqs_of(before, event.request_id))
    num_blocks = sum(len(before.block_tables.get(i, ())) for i in seq_ids)
    is_whole = len(seq_ids) == 1 and before.seqs[seq_ids[0]].num_scheduled_tokens == 0
    can_swap = before.config.recovery is Recovery.SWAP and is_whole and num_blocks <= len(before.host_free)
    return not can_swap or num_blocks == 0
