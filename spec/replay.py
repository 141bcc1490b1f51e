"""The executable model: where an event leads, and where a list of events leads."""

from collections.abc import Iterable

from spec import attention, block_table, preemption, prefix_cache, scheduler, sharing
from spec.engine import StepReport
from spec.interface import names_exist
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
    Fork,
    Hit,
    Observe,
    Preempt,
    Publish,
    Read,
    Refuse,
    Release,
    RequestId,
    Reset,
    Rollback,
    Sample,
    SeqId,
    Slide,
    Start,
    State,
    Submit,
    SwapIn,
    SwapOut,
    Write,
    initial_state,
    replace,
)


def step(s: State, event: Event) -> State:
    """Where the event leads. The model follows: whether the event was allowed is for the rules to say.

    An event about something that does not exist leads nowhere; API-2 says so.
    """
    if not names_exist(s, event):
        return s
    match event:
        case Add():
            return scheduler.add(s, event)
        case Admit():
            return scheduler.admit(s, event)
        case Preempt():
            return preemption.preempt(s, event)
        case Abort():
            return preemption.abort(s, event)
        case Begin():
            return scheduler.begin(s, event)
        case Submit():
            return scheduler.submit(s, event)
        case Complete():
            return scheduler.complete(s, event)
        case Start():
            return block_table.begin_sequence(s, event)
        case Allocate():
            return block_table.allocate(s, event)
        case Hit():
            return prefix_cache.hit(s, event)
        case Copy():
            return sharing.copy(s, event)
        case Write():
            return block_table.write(s, event)
        case Append():
            return scheduler.append(s, event)
        case Fork():
            return sharing.fork(s, event)
        case Rollback():
            return sharing.rollback(s, event)
        case Slide():
            return sharing.slide(s, event)
        case Release() | Finish():
            return preemption.release(s, event)
        case SwapOut():
            return preemption.swap_out(s, event)
        case SwapIn():
            return preemption.swap_in(s, event)
        case Publish():
            return prefix_cache.publish(s, event)
        case Evict():
            return prefix_cache.evict(s, event)
        case Reset():
            return prefix_cache.reset(s, event)
        case Read():
            return attention.read(s, event)
        case Sample():
            return attention.sample(s, event)
        case Refuse() | Observe():
            return s


def replay(config: Config, events: Iterable[Event]) -> State:
    """Where the events lead from an empty engine. Raises ``RuleViolation`` at the first one that breaks a rule.

    >>> from spec.vocabulary import Allocate, Start
    >>> replay(Config(num_blocks=2, block_size=4), [Start(0, (5, 6)), Allocate(0, 2, (1,))]).block_tables
    {0: (1,)}
    """
    state, done = initial_state(config), list[Event]()
    for event in events:
        after = step(state, event)
        done.append(event)
        check_rules(state, event, after, trace=done)
        state = after
    return state


def observe(expected: State, shown: State) -> State:
    """What an engine shows, in mappings of our own, with the contents that only its follower knows."""
    return replace(
        shown,
        block_tables=dict(shown.block_tables),
        host_tables=dict(shown.host_tables),
        seqs=dict(shown.seqs),
        requests=dict(shown.requests),
        num_preemptions=dict(shown.num_preemptions),
        cached=dict(shown.cached),
        cells=expected.cells,
        host_cells=expected.host_cells,
        drawn=expected.drawn,
    )


def events_of_step(before: State, report: StepReport, shown: State, sampled: Iterable[Sample] = ()) -> list[Event]:
    """The events of one step, from what the engine reports and what it shows afterwards, and from what its tokens were
    drawn from, if somebody knows.

    An engine need not say in which order it decided, so the order here is a fixed one: victims, room for whoever ran
    already, admissions with their room, the device's work, samples, tokens, ends, publications. Copies count as
    decided with the room, unless the device made them after its first write.
    """
    step_id = max(before.flights, default=-1) + 1
    victims = [event.request_id for event in report.preempted]
    events: list[Event] = [Begin(step_id)]
    for victim in victims:
        if victim in before.waiting:
            events.append(Admit(victim))
        events += [e for e in report.swaps if isinstance(e, SwapOut) and _request(before, e.seq) == victim]
        events.append(Preempt(victim))

    counts: dict[SeqId, int] = {}
    for write in report.writes:
        counts[write.seq] = counts.get(write.seq, 0) + len(write.slots)
    for seq, count in counts.items():
        if _request(before, seq) in before.running and _request(before, seq) not in victims:
            events += _room(before, report, shown, seq, count)
    runs = {_request(before, seq) for seq in counts} | set(shown.running)
    for request in before.waiting:
        if request in runs and request not in victims:
            events.append(Admit(request))
            events += [e for e in report.swaps if isinstance(e, SwapIn) and _request(before, e.seq) == request]
            for seq, count in counts.items():
                if _request(before, seq) == request:
                    events += _room(before, report, shown, seq, count)
    events.append(Submit(step_id))
    early = _early_copies(report)
    events += [e for e in report.device if isinstance(e, Copy | Write | Read) and e not in early]

    for append in report.emitted:
        if append.seq not in before.seqs:
            parent = next((r.seq_ids[0] for r in before.requests.values() if append.seq in r.seq_ids), append.seq)
            events.append(Fork(parent, append.seq))
    events += sampled
    events += report.emitted
    events += _publications(_follow(before, events), shown)
    for seq, kept in _follow(before, events).seqs.items():
        if seq in shown.seqs and shown.seqs[seq].num_dropped_blocks > kept.num_dropped_blocks:
            events.append(Slide(seq, shown.seqs[seq].num_dropped_blocks - kept.num_dropped_blocks))
    events += report.finished
    events += [Evict(block) for block in _follow(before, events).cached if block not in shown.cached]
    events.append(Complete(step_id))
    return events


def _follow(s: State, events: Iterable[Event]) -> State:
    for event in events:
        s = step(s, event)
    return s


def _request(s: State, seq: SeqId) -> RequestId | None:
    return s.seqs[seq].request_id if seq in s.seqs else None


def _early_copies(report: StepReport) -> list[Copy]:
    """The copies that the device made before it wrote anything."""
    first_write = next((i for i, e in enumerate(report.device) if isinstance(e, Write)), len(report.device))
    return [e for e in report.device[:first_write] if isinstance(e, Copy)]


def _room(before: State, report: StepReport, shown: State, seq: SeqId, num_tokens: int) -> list[Event]:
    """How a sequence came by the slots of this step: from the prefix cache, from the free list, by a copy."""
    if seq not in before.seqs:
        return []
    swap = next((event for event in report.swaps if isinstance(event, SwapIn) and event.seq == seq), None)
    old = swap.blocks if swap else before.block_tables.get(seq, ())
    first = next(write for write in report.writes if write.seq == seq)
    copied = {event.target: event.source for event in report.copies if event.seq == seq}
    table = tuple(copied.get(block, block) for block in _table_of(before, report, shown, seq, old))
    num_hits = (first.start - before.seqs[seq].num_computed_tokens) // before.config.block_size
    events: list[Event] = [Hit(seq, table[:num_hits])] if num_hits else []
    events += [copy for copy in _early_copies(report) if copy.seq == seq]
    return [*events, Allocate(seq, num_tokens, table[max(len(old), num_hits) :])]


def _table_of(
    before: State, report: StepReport, shown: State, seq: SeqId, old: tuple[BlockId, ...]
) -> tuple[BlockId, ...]:
    """The table that the step worked with: what it was, what it is, and what the step wrote and read through it."""
    size = before.config.block_size
    dropped = before.seqs[seq].num_dropped_blocks if old else 0
    blocks: dict[int, BlockId] = {dropped + i: block for i, block in enumerate(old)}
    for event in report.device:
        if isinstance(event, Read | Write) and event.seq == seq:
            blocks.update({(event.start + i) // size: at // size for i, at in enumerate(event.slots)})
    if seq in shown.block_tables and seq in shown.seqs:
        first = shown.seqs[seq].num_dropped_blocks
        blocks.update({first + i: block for i, block in enumerate(shown.block_tables[seq])})
    return tuple(blocks[index] for index in sorted(blocks))


def _publications(s: State, shown: State) -> list[Event]:
    """The blocks that the cache names and that it does not name in ``s``, when every sequence still has its table."""
    events: list[Event] = []
    for block, key in shown.cached.items():
        holder = next((i for i, table in s.block_tables.items() if block in table and i in s.seqs), None)
        if s.cached.get(block) != key and holder is not None:
            events.append(Publish(holder, s.block_tables[holder].index(block) + s.seqs[holder].num_dropped_blocks))
    return events
