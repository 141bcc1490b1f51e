"""The executable model: where an event leads, and where a list of events leads."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from spec import attention, block_table, preemption, prefix_cache, scheduler, sharing
from spec.answers import StepReport
from spec.choices import USUAL_CHOICES, Choices, Publication
from spec.interface import names_exist
from spec.prefix_cache import find, key_of, longest_hit
from spec.rules import check_rules
from spec.vocabulary import (
    Abort,
    Add,
    Admit,
    Allocate,
    Append,
    Begin,
    BlockId,
    Complete,
    Config,
    Copy,
    Event,
    Evict,
    Finish,
    Flight,
    Fork,
    Hit,
    HostBlockId,
    Preempt,
    Publish,
    Read,
    Release,
    RequestId,
    Reset,
    Rollback,
    Sample,
    SeqId,
    Slide,
    Start,
    State,
    StepId,
    Submit,
    SwapIn,
    SwapOut,
    Write,
    initial_state,
    replace,
    seqs_of,
)

BlockMove: TypeAlias = Copy | SwapOut | SwapIn
"""What a step decides when it begins, and the device does later: blocks are copied, or moved from memory to memory."""


def step(s: State, event: Event) -> State:
    """Where the event leads. The model follows: whether the event was allowed is for the rules to say.

    An event about something that does not exist leads nowhere; API-2 says so.
    """
    if not names_exist(s, event) or type(event) not in TRANSITIONS:
        return s
    return TRANSITIONS[type(event)](s, event)


TRANSITIONS: Mapping[type, Callable[..., State]] = {
    Add: scheduler.add,
    Admit: scheduler.admit,
    Preempt: preemption.preempt,
    Abort: preemption.abort,
    Begin: scheduler.begin,
    Submit: scheduler.submit,
    Complete: scheduler.complete,
    Start: block_table.begin_sequence,
    Allocate: block_table.allocate,
    Hit: prefix_cache.hit,
    Copy: sharing.copy,
    Write: block_table.write,
    Append: scheduler.append,
    Fork: sharing.fork,
    Rollback: sharing.rollback,
    Slide: sharing.slide,
    Release: preemption.release,
    Finish: preemption.release,
    SwapOut: preemption.swap_out,
    SwapIn: preemption.swap_in,
    Publish: prefix_cache.publish,
    Evict: prefix_cache.evict,
    Reset: prefix_cache.reset,
    Read: attention.read,
    Sample: attention.sample,
}
"""Where each event leads; what is refused or shown changes nothing."""


def replay(config: Config, events: Iterable[Event], choices: Choices = USUAL_CHOICES) -> State:
    """Where the events lead from an empty engine. Raises ``RuleViolation`` at the first one that breaks a rule.

    >>> from spec.vocabulary import Allocate, Start
    >>> replay(Config(num_blocks=2, block_size=4), [Start(0, (5, 6)), Allocate(0, 2, (1,))]).block_tables
    {0: (1,)}
    """
    state, done = initial_state(config, choices), list[Event]()
    for event in events:
        after = step(state, event)
        done.append(event)
        check_rules(state, event, after, trace=done)
        state = after
    return state


def observe(expected: State, shown: State) -> State:
    """What an engine shows, in mappings of our own, with what only its follower knows: the contents, the draws, and what
    the steps in flight have done so far."""
    flights = {
        i: replace(known, scheduled=f.scheduled, blocks=f.blocks, holds=f.holds, submitted=f.submitted)
        for i, f in shown.flights.items()
        for known in [expected.flights.get(i, Flight())]
    }
    return replace(
        shown,
        block_tables=dict(shown.block_tables),
        host_tables=dict(shown.host_tables),
        seqs=dict(shown.seqs),
        requests=dict(shown.requests),
        num_preemptions=dict(shown.num_preemptions),
        flights=flights,
        cached=dict(shown.cached),
        cells=expected.cells,
        host_cells=expected.host_cells,
        drawn=expected.drawn,
        choices=expected.choices,
    )


def events_of_step(before: State, report: StepReport, shown: State, sampled: Iterable[Sample] = ()) -> list[Event]:
    """The events of one step, from what the engine reports and what it shows afterwards, and from what its tokens were
    drawn from, if somebody knows.

    An engine need not say in which order it decided, so the order here is a fixed one: victims, room for whoever ran
    already, admissions with their room, the device's work, samples, tokens, ends, publications. (Nobody who ran before is
    preempted behind an admission, by a lemma: of an engine that does so the admission is judged where the room was gone.)
    Copies count as decided with the room, unless the device made them after its first write.
    """
    if not before.requests and report == StepReport():
        return []
    counts: dict[SeqId, int] = {}
    for write in report.writes:
        counts[write.seq] = counts.get(write.seq, 0) + len(write.slots)
    rooms = {seq: _room_reported(before, report, shown, seq, n) for seq, n in counts.items() if seq in before.seqs}
    runs = {_request(before, seq) for seq in counts} | set(shown.running)
    begun = _begun(before, _next_step(before), report, report.swaps, rooms, runs, shown, [])
    return [*begun, *events_of_end(_follow(before, begun), report, shown, sampled, block_moves(begun))]


def events_of_begin(before: State, report: StepReport, shown: State) -> list[Event]:
    """The events up to the submission of a step, from what the engine shows then. A step that is not begun is one that
    computes nothing and is over at once."""
    new = shown.flights.keys() - before.flights.keys()
    if not before.requests and not new and report == StepReport():
        return []
    step_id = min(new, default=_next_step(before))
    counts = shown.flights[step_id].scheduled if new else {}
    swaps: list[SwapOut | SwapIn] = [
        SwapOut(i, blocks) for i, blocks in shown.host_tables.items() if i not in before.host_tables
    ]
    swaps += [
        SwapIn(i, shown.block_tables[i][: len(blocks)])
        for i, blocks in before.host_tables.items()
        if i not in shown.host_tables and i in shown.block_tables
    ]
    rooms = {seq: _room_shown(before, shown, swaps, seq, n) for seq, n in counts.items() if seq in before.seqs}
    held = list(shown.flights[step_id].holds) if new else []
    for copy in block_moves(event for room in rooms.values() for event in room):
        if isinstance(copy, Copy) and copy.source in held:
            held.remove(copy.source)
    events = _begun(before, step_id, report, swaps, rooms, set(shown.running), shown, held)
    events += _evictions(_follow(before, events), shown)
    return events if new else [*events, Complete(step_id)]


def events_of_end(
    before: State,
    report: StepReport,
    shown: State,
    sampled: Iterable[Sample] = (),
    moves: Iterable[BlockMove] = (),
) -> list[Event]:
    """The events from the submission of the oldest step in flight to its end. The report names the ``moves`` again that
    were events of its beginning."""
    if not before.flights and report == StepReport():
        return []
    scheduled = before.flights[min(before.flights)].scheduled if before.flights else {}
    known = [move for move in _early_moves(report) if move in tuple(moves) or _is_undone(move, scheduled)]
    events: list[Event] = [e for e in report.device if e not in known]
    for append in report.emitted:
        if append.seq not in before.seqs:
            parent = next((r.seq_ids[0] for r in before.requests.values() if append.seq in r.seq_ids), append.seq)
            events.append(Fork(parent, append.seq))
    events += [*sampled, *report.emitted]
    state = _follow(before, events)
    # A victim may have taken such a block and given it back: its name is gone before another has it (CACHE-8).
    late: list[Event] = [e for e in _evictions(state, shown) if e.block in state.free]
    late += _publications(_follow(state, late), shown)
    late += [
        *_slides(state, shown, [before.seqs[i].request_id for i in scheduled if i in before.seqs]),
        *report.finished,
    ]
    late += _evictions(_follow(state, late), shown)
    return [*events, *late, *(Complete(step_id) for step_id in sorted(before.flights)[:1])]


def _is_undone(move: BlockMove, scheduled: Mapping[SeqId, int]) -> bool:
    """A copy for somebody who was preempted after all: what it was made for is nobody's, and it came before all writes."""
    return isinstance(move, Copy) and move.seq not in scheduled


def block_moves(events: Iterable[Event]) -> tuple[BlockMove, ...]:
    """The copies and swaps among the events."""
    return tuple(event for event in events if isinstance(event, Copy | SwapOut | SwapIn))


def not_moved(s: State, report: StepReport, moves: Iterable[BlockMove]) -> State:
    """The state without the contents that a step was to move into tables when it began, and that its device did not move
    before it wrote anything."""
    size, done, blocks, host_blocks = s.config.block_size, _early_moves(report), set[BlockId](), set[HostBlockId]()
    for move in moves:
        if move not in done and isinstance(move, SwapOut):
            host_blocks |= {*move.blocks} & {*s.host_tables.get(move.seq, ())}
        elif move not in done:
            targets = (move.target,) if isinstance(move, Copy) else move.blocks
            blocks |= {*targets} & {*s.block_tables.get(move.seq, ())}
    return replace(
        s,
        cells={at: prefix for at, prefix in s.cells.items() if at // size not in blocks},
        host_cells={at: prefix for at, prefix in s.host_cells.items() if at // size not in host_blocks},
    )


def _begun(
    before: State,
    step_id: StepId,
    report: StepReport,
    swaps: Iterable[SwapOut | SwapIn],
    rooms: Mapping[SeqId, list[Event]],
    runs: set[RequestId | None],
    shown: State,
    held: list[BlockId],
) -> list[Event]:
    """The events up to the submission of a step: who is preempted, who gets room, who is admitted. ``held`` are the
    sources of copies that were made for victims."""
    victims = [event.request_id for event in report.preempted]
    events: list[Event] = [Begin(step_id)]
    for victim in (i for i in victims if i in before.running):
        events += _preempted(_follow(before, events), shown, victim, swaps, held)
    for seq in (i for request in before.running if request not in victims for i in seqs_of(before, request)):
        events += rooms.get(seq, [])
        events += _published_ahead(before, events, shown)
    for request in before.waiting:
        if request in runs and request not in victims:
            events.append(Admit(request))
            events += [e for e in swaps if isinstance(e, SwapIn) and _request(before, e.seq) == request]
            for seq in seqs_of(before, request):
                events += rooms.get(seq, [])
                events += _published_ahead(before, events, shown)
    for victim in (i for i in victims if i in before.waiting):
        events.append(Admit(victim))
        events += _room_in_between(_follow(before, events), step_id, shown, victim)
        events += _preempted(_follow(before, events), shown, victim, swaps, held)
    ended = {_request(before, event.seq) for event in report.finished}
    events += [Admit(i) for i in victims if i in before.running and i in {*shown.running, *ended}]
    return [*events, Submit(step_id)]


def _preempted(
    s: State, shown: State, victim: RequestId, swaps: Iterable[SwapOut | SwapIn], held: list[BlockId]
) -> list[Event]:
    """The end of a request's time on the device, with what was done for it until then."""
    events = _undone_copies(s, shown, victim, held)
    events += [e for e in swaps if isinstance(e, SwapOut) and _request(s, e.seq) == victim]
    return [*events, *_published_by(_follow(s, events), shown, victim), Preempt(victim)]


def _room_in_between(s: State, step_id: StepId, shown: State, victim: RequestId) -> list[Event]:
    """The room that sequences of a request got before it was preempted in the step in which it was admitted: as much as
    there was, and a share at most (SCHED-27). Which blocks that were does not matter, as long as the cache has forgotten
    what they held."""
    events: list[Event] = []
    for seq in tuple(seqs_of(s, victim)):
        hits = tuple(b for i in range(longest_hit(s, seq)) if (b := find(s, key_of(s, seq, i))) is not None)
        begun: list[Event] = [Hit(seq, hits)] if hits and s.config.prefix_cache else []
        after, budget = _follow(s, begun), block_table.budget_left(s, s.flights[step_id])
        start = block_table.room(after.seqs[seq])
        count = min(after.seqs[seq].num_tokens - start, budget, block_table.share(s.config))
        free = [b for b in after.free if b not in after.cached or after.cached[b] != shown.cached.get(b)]
        lacking = sharing.growth(after, seq, start + count)
        if seq in s.host_tables or count < 1 or lacking > len(free):
            return events
        got = [*begun, Allocate(seq, count, tuple(free[:lacking]))]
        events += got
        s = _follow(s, got)
    return events


def _undone_copies(s: State, shown: State, victim: RequestId, held: list[BlockId]) -> list[Event]:
    """The copies that a step made for a request before it preempted it: it still holds their sources. Where they went
    to does not matter any more."""
    events: list[Event] = []
    free = [block for block in s.free if block not in shown.cached]
    for seq in seqs_of(s, victim):
        for index, block in enumerate(s.block_tables.get(seq, ())):
            if block in held and free:
                held.remove(block)
                events.append(Copy(seq, index, block, free.pop(0)))
    return events


def _next_step(s: State) -> StepId:
    return max(s.flights, default=-1) + 1


def _follow(s: State, events: Iterable[Event]) -> State:
    for event in events:
        s = step(s, event)
    return s


def _request(s: State, seq: SeqId) -> RequestId | None:
    return s.seqs[seq].request_id if seq in s.seqs else None


def _early_moves(report: StepReport) -> list[BlockMove]:
    """The copies that the device made before it wrote anything, and all swaps."""
    first_write = next((i for i, e in enumerate(report.device) if isinstance(e, Write)), len(report.device))
    return [
        e
        for i, e in enumerate(report.device)
        if isinstance(e, BlockMove) and not (i > first_write and isinstance(e, Copy))
    ]


def _old_table(before: State, swaps: Iterable[SwapOut | SwapIn], seq: SeqId) -> tuple[BlockId, ...]:
    """The table before the step grew it: after a swap, what came back."""
    back = next((event.blocks for event in swaps if isinstance(event, SwapIn) and event.seq == seq), None)
    return before.block_tables.get(seq, ()) if back is None else back


def _room_reported(before: State, report: StepReport, shown: State, seq: SeqId, num_tokens: int) -> list[Event]:
    """How a sequence came by the slots of this step, told by what the step wrote and read through its table, and by
    what is left of that. A hit that the window passed in the same step is where the cache named it."""
    size, own = before.config.block_size, before.seqs[seq]
    old = _old_table(before, report.swaps, seq)
    table: dict[int, BlockId] = {}
    for event in report.device:
        if isinstance(event, Read | Write) and event.seq == seq:
            table.update({(event.start + i) // size: at // size for i, at in enumerate(event.slots)})
    if seq in shown.block_tables and seq in shown.seqs:
        table.update(enumerate(shown.block_tables[seq], shown.seqs[seq].num_dropped_blocks))
    else:
        table = _without_repeats(before, report, shown, table)
    start = next(write.start for write in report.writes if write.seq == seq)
    # What is published at the schedule may be hit in the same step, and only what is shown then names it.
    named = (shown, before) if before.choices.publication is Publication.AT_SCHEDULE else (before,)
    for index in range((start - own.num_computed_tokens) // size):
        for state in named:
            found = find(state, key_of(before, seq, index))
            if found is not None:
                table.setdefault(index, found)
    copies = [e for e in _early_moves(report) if isinstance(e, Copy) and e.seq == seq]
    return _room(before, seq, num_tokens, (start - own.num_computed_tokens) // size, old, copies, table)


def _without_repeats(before: State, report: StepReport, shown: State, table: dict[int, BlockId]) -> dict[int, BlockId]:
    """The table of a sequence that has ended, when its slots name a block twice though every block is free once: then the
    slots are wrong and not the table (TABLE-2), and a free block that nobody touched stands for the one that is not known."""
    if len(set(shown.free)) < len(shown.free):
        return table
    size, seen, known = before.config.block_size, set[BlockId](), dict[int, BlockId]()
    touched = {at // size for event in report.device if isinstance(event, Read | Write) for at in event.slots}
    spare = [b for b in before.free if b in shown.free and b not in touched | before.cached.keys()]
    for index, block in sorted(table.items()):
        known[index] = spare.pop() if block in seen and spare else block
        seen.add(block)
    return known


def _room_shown(
    before: State, shown: State, swaps: Iterable[SwapOut | SwapIn], seq: SeqId, num_tokens: int
) -> list[Event]:
    """How a sequence came by the slots of this step, told by its table as it is now."""
    own, old = before.seqs[seq], _old_table(before, swaps, seq)
    table = shown.block_tables.get(seq, ())
    copies = [Copy(seq, i, a, b) for i, (a, b) in enumerate(zip(old, table, strict=False)) if a != b]
    num_hit_tokens = shown.seqs[seq].num_computed_tokens - own.num_computed_tokens if seq in shown.seqs else 0
    num_hits = num_hit_tokens // before.config.block_size
    return _room(before, seq, num_tokens, num_hits, old, copies, dict(enumerate(table, own.num_dropped_blocks)))


def _room(
    before: State,
    seq: SeqId,
    num_tokens: int,
    num_hits: int,
    old: tuple[BlockId, ...],
    copies: Iterable[Copy],
    table: Mapping[int, BlockId],
) -> list[Event]:
    """From the prefix cache, by a copy, from the free list. ``table`` has the blocks by their place in the sequence."""
    first_new = max(before.seqs[seq].num_dropped_blocks + len(old), num_hits)
    hits = tuple(table[index] for index in range(num_hits) if index in table)
    new = tuple(table[index] for index in sorted(table) if index >= first_new)
    return [*([Hit(seq, hits)] if hits else []), *copies, Allocate(seq, num_tokens, new)]


def _slides(s: State, shown: State, served: Iterable[RequestId]) -> list[Slide]:
    """What leaves the windows, in the order of the step; samples come behind the sequence that they are forked from,
    which let go before. Nothing shows what somebody let go who has ended: what his window had passed."""
    order, window, events = [*dict.fromkeys(served), *s.requests], s.config.window, list[Slide]()
    for i, seq in sorted(s.seqs.items(), key=lambda item: order.index(item[1].request_id)):
        passed = 0 if window is None else max(0, seq.num_computed_tokens - window + 1) // s.config.block_size
        num_dropped_blocks = shown.seqs[i].num_dropped_blocks if i in shown.seqs else passed
        if num_dropped_blocks > seq.num_dropped_blocks:
            events.append(Slide(i, num_dropped_blocks - seq.num_dropped_blocks))
    return events


def _evictions(s: State, shown: State) -> list[Evict]:
    return [Evict(block) for block in s.cached if block not in shown.cached]


def _published_ahead(before: State, events: Iterable[Event], shown: State) -> list[Publish]:
    """The blocks that an engine which publishes at the schedule has published by now, for all that one can tell."""
    if before.choices.publication is not Publication.AT_SCHEDULE:
        return []
    s = _follow(before, events)
    size, names = s.config.block_size, set(s.cached.values())
    planned = [p for p in _publications(s, shown) if (p.index + 1) * size <= block_table.room(s.seqs[p.seq])]
    return [p for p in planned if s.choices.publishes_equal_blocks or key_of(s, p.seq, p.index) not in names]


def _published_by(s: State, shown: State, victim: RequestId) -> list[Event]:
    """What an engine that publishes at the schedule has published for a victim before it preempted it: blocks that were
    written long ago, under names that the victim's own next block had taken from free ones."""
    if s.choices.publication is not Publication.AT_SCHEDULE:
        return []
    events: list[Event] = []
    for own in _publications(s, shown):
        name = key_of(s, own.seq, own.index)
        block = s.block_tables[own.seq][own.index - s.seqs[own.seq].num_dropped_blocks]
        if _request(s, own.seq) == victim and shown.cached[block] == name:
            events += [Evict(b) for b in s.free if s.cached.get(b) == name != shown.cached.get(b)]
            events.append(own)
    return events


def _publications(s: State, shown: State) -> list[Publish]:
    """The blocks that the cache names and that it does not name in ``s``, when every sequence still has its table."""
    events: list[Publish] = []
    for block, key in shown.cached.items():
        holder = next((i for i, table in s.block_tables.items() if block in table and i in s.seqs), None)
        if s.cached.get(block) != key and holder is not None:
            events.append(Publish(holder, s.block_tables[holder].index(block) + s.seqs[holder].num_dropped_blocks))
    return events
