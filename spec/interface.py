"""The caller's side: what a refusal leaves behind, which names an event may use, what an engine must show."""

from spec.rules import step_rule
from spec.vocabulary import (
    Abort,
    Add,
    Admit,
    Allocate,
    Append,
    Complete,
    Copy,
    Event,
    Finish,
    Flight,
    Fork,
    Hit,
    Observe,
    Preempt,
    Publish,
    Read,
    Refuse,
    Release,
    RequestId,
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
    all_blocks,
)


def seq_named(event: Event) -> SeqId | None:
    """The live sequence that an event is about."""
    match event:
        case Fork(parent=seq):
            return seq
        case (
            Allocate(seq=seq)
            | Append(seq=seq)
            | Copy(seq=seq)
            | Finish(seq=seq)
            | Hit(seq=seq)
            | Publish(seq=seq)
            | Read(seq=seq)
            | Release(seq=seq)
            | Rollback(seq=seq)
            | Sample(seq=seq)
            | Slide(seq=seq)
            | SwapIn(seq=seq)
            | SwapOut(seq=seq)
            | Write(seq=seq)
        ):
            return seq
    return None


def request_named(event: Event) -> RequestId | None:
    """The live request that an event is about."""
    match event:
        case Abort(request_id=request) | Admit(request_id=request) | Preempt(request_id=request):
            return request
    return None


def step_named(event: Event) -> StepId | None:
    """The step in flight that an event is about."""
    match event:
        case Submit(step_id=step) | Complete(step_id=step):
            return step
    return None


NEED_A_TABLE = (Copy, Fork, Publish, Read, Rollback, Slide, SwapIn, SwapOut, Write)
"""The events that change or use a block table which is there already."""


def names_exist(s: State, event: Event) -> bool:
    """Whether everything that the event names is there, so that the event can be followed."""
    seq, request, step = seq_named(event), request_named(event), step_named(event)
    tables = s.host_tables if isinstance(event, SwapIn) else s.block_tables
    needs_table = isinstance(event, NEED_A_TABLE)
    return (
        (seq is None or seq in s.seqs)
        and (request is None or request in s.requests)
        and (step is None or step in s.flights)
        and (not needs_table or seq in tables)
        and not (isinstance(event, Start) and event.seq in s.seqs)
        and entries_exist(s, event)
    )


def entries_exist(s: State, event: Event) -> bool:
    """Whether the table has the entries that the event is about. A swap is about all of them, one by one."""
    match event:
        case Copy(seq=seq, index=index):
            return 0 <= index < len(s.block_tables[seq])
        case Publish(seq=seq, index=index):
            return 0 <= index - s.seqs[seq].num_dropped_blocks < len(s.block_tables[seq])
        case SwapOut(seq=seq, blocks=blocks):
            return len(blocks) == len(s.block_tables[seq])
        case SwapIn(seq=seq, blocks=blocks):
            return len(blocks) == len(s.host_tables[seq])
        case Add(request=request):
            return bool(request.seq_ids)
    return True


AnyNamed = (
    Abort
    | Admit
    | Allocate
    | Append
    | Complete
    | Copy
    | Finish
    | Fork
    | Hit
    | Preempt
    | Publish
    | Read
    | Release
    | Rollback
    | Sample
    | Slide
    | Start
    | Submit
    | SwapIn
    | SwapOut
    | Write
)


@step_rule("API-1", corpus="A6 C7 X1")
def a_refusal_leaves_no_trace(before: State, event: Refuse, after: State) -> bool:
    """A call that is turned down changes nothing."""
    return before == after


@step_rule("API-2", corpus="S6 X2")
def events_name_what_exists(before: State, event: AnyNamed, after: State) -> bool:
    """An event is about sequences, requests and steps that exist."""
    return names_exist(before, event)


@step_rule("API-3", corpus="S10")
def snapshots_show_every_block(before: State, event: Observe, after: State) -> bool:
    """What an engine shows of its pool is the pool that its events lead to, up to the order of the free list."""
    same_counts = all(before.ref_count[b] == after.ref_count[b] for b in all_blocks(before))
    return same_counts and sorted(before.free) == sorted(after.free)


@step_rule("API-4", corpus="S5 S6")
def snapshots_show_every_request(before: State, event: Observe, after: State) -> bool:
    """The live requests are those that came in and have neither ended nor been aborted."""
    return list(before.requests.items()) == list(after.requests.items())


@step_rule("API-5", corpus="A9 S10")
def snapshots_show_every_step(before: State, event: Observe, after: State) -> bool:
    """The steps in flight are those that were begun and are not over: what they compute, and what they may touch."""
    return {i: step_shown(f) for i, f in before.flights.items()} == {i: step_shown(f) for i, f in after.flights.items()}


def step_shown(flight: Flight) -> tuple[object, ...]:
    """What an engine shows of a step in flight, but for its holds: those are counted (ALLOC-2, API-3)."""
    return dict(flight.scheduled), frozenset(flight.blocks), flight.submitted
