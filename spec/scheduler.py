"""The scheduler: who runs, how many tokens a step computes, who is admitted, and who must wait."""

from spec.allocator import blocks_needed, give_back
from spec.answers import Admission
from spec.block_table import budget_left, is_drawing, num_tokens_ahead, room, share, share_left
from spec.preemption import blocks_for_step
from spec.prefix_cache import held_hits, longest_hit
from spec.rules import state_rule, step_rule
from spec.sharing import blocks_lacking, copies_owed, fork, growth, num_unborn, seq_ids_in_use
from spec.vocabulary import (
    Add,
    AdmissionRule,
    Admit,
    Allocate,
    Append,
    Begin,
    Complete,
    Config,
    Finish,
    Flight,
    Fork,
    Observe,
    Policy,
    Refuse,
    Request,
    RequestId,
    Rollback,
    Seq,
    SeqId,
    State,
    Submit,
    open_step,
    replace,
    seqs_of,
    service_order,
)


def most_tokens_stored(request: Request) -> int:
    """The most tokens of one sequence that are ever in the cache: the last sampled one needs no slot."""
    return len(request.prompt) + request.max_tokens - 1


def fits_alone(config: Config, request: Request, num_seqs: int, num_reserved_blocks: int = 0) -> bool:
    """Whether the request ends even when its sequences share nothing, if it is alone in the cache."""
    blocks = num_seqs * blocks_needed(most_tokens_stored(request), config.block_size)
    return blocks <= config.num_blocks - num_reserved_blocks and num_seqs <= config.max_num_seqs


def is_servable(config: Config, request: Request, num_reserved_blocks: int = 0) -> bool:
    """Whether the door lets the request in, all ids being new."""
    return (
        len(request.prompt) > 0
        and request.max_tokens > 0
        and len(request.seq_ids) == len(set(request.seq_ids)) > 0
        and len(request.prompt) + request.max_tokens <= config.max_model_len
        and fits_alone(config, request, len(request.seq_ids), num_reserved_blocks)
    )


def names_are_new(s: State, request: Request) -> bool:
    """Whether neither the request's id nor those of its sequences are in use."""
    return request.request_id not in s.requests and seq_ids_in_use(s).isdisjoint(request.seq_ids)


def may_come_in(s: State, request: Request) -> bool:
    """Whether the door lets the request in now."""
    return names_are_new(s, request) and is_servable(s.config, request, s.choices.num_reserved_blocks)


def num_seats(s: State, request_id: RequestId) -> int:
    """How many of the ``max_num_seqs`` the request takes while it runs."""
    return len(tuple(seqs_of(s, request_id))) + num_unborn(s, request_id)


def seats_taken(s: State) -> int:
    return sum(num_seats(s, request_id) for request_id in s.running)


def blocks_owed(s: State, request_id: RequestId) -> int:
    """The blocks that a running request may still ask for, as far as the admission rule looks ahead."""
    request, seq_ids = s.requests[request_id], tuple(seqs_of(s, request_id))
    if s.config.admission_rule is AdmissionRule.OPTIMISTIC:
        return 0
    if s.config.admission_rule is AdmissionRule.PROMPT:
        return blocks_lacking(s, seq_ids)
    most = most_tokens_stored(request)
    unborn = num_unborn(s, request_id) * blocks_needed(most, s.config.block_size)
    growing = [i for i in seq_ids if room(s.seqs[i]) < most]
    return unborn + copies_owed(s, growing) + sum(growth(s, i, most) for i in growing)


def blocks_wanted(s: State, request_id: RequestId, budget: int) -> int:
    """The free blocks that must be there before a waiting request is admitted. A cached block that nobody holds
    is one of them: to use it takes it out of the free list."""
    request, seq_ids = s.requests[request_id], tuple(seqs_of(s, request_id))
    size, rule = s.config.block_size, s.config.admission_rule
    wanted = 0
    for i in seq_ids:
        seq = s.seqs[i]
        if rule is AdmissionRule.OPTIMISTIC:
            num_tokens = min(seq.num_tokens, num_tokens_at_start(s, i) + budget)
        elif rule is AdmissionRule.PROMPT:
            num_tokens = seq.num_tokens
        else:
            num_tokens = most_tokens_stored(request)
        wanted += blocks_needed(num_tokens, size) - num_hits_in_use(s, i)
    if rule is AdmissionRule.NO_EVICT:
        wanted += num_unborn(s, request_id) * blocks_needed(most_tokens_stored(request), size)
    return wanted


def num_tokens_at_start(s: State, seq_id: SeqId) -> int:
    """How many tokens a waiting sequence need not compute: those in host memory, or those it would hit."""
    hits = longest_hit(s, seq_id) if s.config.prefix_cache and seq_id not in s.host_tables else 0
    return max(s.seqs[seq_id].num_computed_tokens, hits * s.config.block_size)


def num_hits_in_use(s: State, seq_id: SeqId) -> int:
    """How many blocks of the sequence's longest cached prefix somebody holds already. A promise that holds to the end
    can not count on them: they may be gone before the sequence is scheduled."""
    if not s.config.prefix_cache or seq_id in s.host_tables or s.config.admission_rule is AdmissionRule.NO_EVICT:
        return 0
    return held_hits(s, seq_id)


def admission(s: State, request_id: RequestId, budget: int) -> Admission:
    """Whether a waiting request may run now, with ``budget`` tokens left in the step. Not while the step still runs in
    which it was preempted: what that draws would be drawn again; and not beside a static batch that is closed.

    The watermark is left free at every admission but the first: an empty engine admits whatever fits.
    """
    owed = max(blocks_for_step(s), sum(blocks_owed(s, running) for running in s.running))
    spare = len(s.free) - owed - (s.config.watermark_blocks if s.running else 0)
    seats = s.config.max_num_seqs - seats_taken(s)
    wanted = blocks_wanted(s, request_id, min(budget, share(s.config)))
    fits = num_seats(s, request_id) <= seats and wanted <= spare and budget > 0
    in_flight = any(i in flight.stops for flight in s.flights.values() for i in seqs_of(s, request_id))
    return Admission.NOW if fits and not in_flight and not batch_is_closed(s) else Admission.LATER


def batch_is_closed(s: State) -> bool:
    """Whether batches are static, and one of those who run has got a token."""
    is_static = s.config.policy is Policy.STATIC
    return is_static and any(q.num_output_tokens > 0 for q in s.seqs.values() if q.request_id in s.running)


def passed_over(s: State, flight: Flight) -> list[SeqId]:
    """The running sequences of which a step that has budget left schedules neither every token nor their share."""
    if budget_left(s, flight) == 0:
        return []
    seq_ids = [i for request_id in s.running for i in seqs_of(s, request_id)]
    return [i for i in seq_ids if room(s.seqs[i]) < s.seqs[i].num_tokens and share_left(s, flight, i) > 0]


def add(s: State, event: Add) -> State:
    """The request waits behind everybody who is served before it."""
    request = event.request
    seq = Seq(request.request_id, request.prompt, num_prompt_tokens=len(request.prompt))
    s = replace(
        s,
        requests={**s.requests, request.request_id: request},
        seqs={**s.seqs, request.seq_ids[0]: seq},
    )
    waiting = sorted((*s.waiting, request.request_id), key=lambda i: service_order(s, i))
    return replace(s, waiting=tuple(waiting))


def admit(s: State, event: Admit) -> State:
    """The request runs, in its place in the order of service, or behind all others if the engine says so."""
    running = [*s.running, event.request_id]
    if not s.choices.runs_in_admission_order:
        running.sort(key=lambda i: service_order(s, i))
    tables = {i: s.block_tables.get(i, ()) for i in seqs_of(s, event.request_id) if i not in s.host_tables}
    return replace(
        s,
        waiting=tuple(i for i in s.waiting if i != event.request_id),
        running=tuple(running),
        block_tables={**s.block_tables, **tables},
    )


def append(s: State, event: Append) -> State:
    seq = s.seqs[event.seq]
    drawn = None if s.drawn is None else {i: token for i, token in s.drawn.items() if i != event.seq}
    return replace(s, seqs={**s.seqs, event.seq: replace(seq, tokens=seq.tokens + event.tokens)}, drawn=drawn)


def begin(s: State, event: Begin) -> State:
    return replace(s, flights={**s.flights, event.step_id: Flight()})


def submit(s: State, event: Submit) -> State:
    """From now on the device may touch every block of every sequence in the step, and the step holds them, unless the
    engine schedules ahead: then nobody else's step comes in between."""
    flight = s.flights[event.step_id]
    if s.choices.schedules_ahead:
        return replace(s, flights={**s.flights, event.step_id: replace(flight, submitted=True)})
    blocks = frozenset(b for i in (*flight.scheduled, *event.readers) for b in s.block_tables.get(i, ()))
    flight = replace(flight, submitted=True, blocks=blocks | set(flight.holds))
    return replace(s, flights={**s.flights, event.step_id: flight})


def complete(s: State, event: Complete) -> State:
    """The step's holds are given back: what sequences have let go, and then the sources of copies, each in its order."""
    flights = dict(s.flights)
    flight = flights.pop(event.step_id)
    sources, let_go = flight.holds[: flight.num_copies], flight.holds[flight.num_copies :]
    return give_back(replace(s, flights=flights), reversed((*let_go, *sources)))


@state_rule("SCHED-1", corpus="S1")
def steps_keep_the_token_budget(s: State) -> bool:
    """A step computes at most ``max_num_batched_tokens`` tokens."""
    return all(budget_left(s, flight) >= 0 for flight in s.flights.values())


@state_rule("SCHED-2", corpus="S1")
def at_most_max_num_seqs_run(s: State) -> bool:
    """At most ``max_num_seqs`` sequences run."""
    return sum(1 for seq in s.seqs.values() if seq.request_id in s.running) <= s.config.max_num_seqs


@state_rule("SCHED-3", corpus="S5")
def every_request_has_one_place(s: State) -> bool:
    """Every live request is once in waiting or once in running, and has a sequence."""
    places = (*s.waiting, *s.running)
    alive = {seq.request_id for seq in s.seqs.values() if seq.request_id in s.requests}
    return len(places) == len(s.requests) and set(places) == set(s.requests) == alive


@state_rule("SCHED-4", corpus="S8 R5")
def nobody_overtakes(s: State) -> bool:
    """The running requests and then the waiting ones stand in the order of service.

    With priorities a newcomer may be more urgent than somebody who runs: then each of the two lines is in order.
    Nobody overtakes the head of the queue, and a preempted request comes back before everybody who arrived later. An
    engine may declare that with priorities those who run stand in the order in which they were admitted.
    """
    running = () if s.choices.runs_in_admission_order else s.running
    lines = [running, s.waiting] if s.config.policy is Policy.PRIORITY else [s.running + s.waiting]
    return all(list(line) == sorted(line, key=lambda i: service_order(s, i)) for line in lines)


@step_rule("SCHED-5", corpus="S1 S5 S11")
def only_running_sequences_are_scheduled(before: State, event: Allocate, after: State) -> bool:
    """A step computes, for a running sequence, at least one token and none that it does not have.

    An engine may declare that it schedules ahead: then also the one that an earlier step still draws, unless the sequence
    ends with it for sure.
    """
    seq = before.seqs[event.seq]
    runs = seq.request_id in before.running or seq.request_id not in before.requests
    return runs and 0 < event.num_tokens <= num_tokens_ahead(before, event.seq) - room(seq)


@step_rule("SCHED-6", corpus="S11")
def a_token_is_sampled_when_all_are_computed(before: State, event: Append, after: State) -> bool:
    """A sequence is given its next token only when all the tokens it has are computed.

    Who was preempted in flight, by an engine that schedules ahead, is given the one that was being drawn.
    """
    seq = before.seqs[event.seq]
    is_owed = seq.request_id in before.waiting and is_drawing(before, event.seq)
    return seq.num_computed_tokens == seq.num_tokens or seq.request_id not in before.requests or is_owed


@step_rule("SCHED-7", corpus="S11 S3")
def every_complete_sequence_is_sampled(before: State, event: Complete, after: State) -> bool:
    """A sequence whose tokens a step has all computed has been given the next one when the step ends."""
    return all(
        before.seqs[i].num_computed_tokens < before.seqs[i].num_tokens
        for i in before.flights[event.step_id].scheduled
        if i in before.seqs
    )


@step_rule("SCHED-8", corpus="S2 S7 S9 A7")
def only_what_fits_comes_in(before: State, event: Add, after: State) -> bool:
    """The door lets in what an empty engine can serve to its end, under ids that are new, and nothing else."""
    return may_come_in(before, event.request)


@step_rule("SCHED-9", corpus="S3")
def a_step_with_work_computes(before: State, event: Submit, after: State) -> bool:
    """If there is work and no other step in flight computes anything, a step computes at least one token."""
    return not before.requests or any(flight.scheduled or flight.stops for flight in before.flights.values())


@step_rule("SCHED-10", corpus="A7 S8")
def only_the_head_is_admitted(before: State, event: Admit, after: State) -> bool:
    """The request that is admitted is the head of the queue."""
    return before.waiting[:1] == (event.request_id,)


@step_rule("SCHED-11", corpus="A7 R5")
def admission_leaves_room(before: State, event: Admit, after: State) -> bool:
    """A request is admitted only when seats and blocks suffice for it, for what those before it are owed, and, unless
    nobody runs, for the watermark; and to a static batch only while none of those who run has got a token.

    At least what the running ones still take in this step is owed, whatever the admission rule promises: so nobody who ran
    before is preempted behind an admission (a lemma), and in which order an engine decides makes no difference.
    """
    step_id = open_step(before)
    flight = before.flights[step_id] if step_id is not None else Flight()
    return admission(before, event.request_id, budget_left(before, flight)) is Admission.NOW


@step_rule("SCHED-12", corpus="S3 S10")
def room_is_not_left_unused(before: State, event: Submit, after: State) -> bool:
    """A step that preempts nobody and passes nobody over leaves the head of the queue waiting only when there is no
    room for it, or a static batch is closed to it."""
    flight = before.flights[event.step_id]
    if flight.preempting or not before.waiting or passed_over(before, flight):
        return True
    return admission(before, before.waiting[0], budget_left(before, flight)) is not Admission.NOW


@step_rule("SCHED-13", corpus="S3 S8")
def running_sequences_are_not_passed_over(before: State, event: Submit, after: State) -> bool:
    """A step that has budget left has scheduled every token of every running sequence, or its share of the budget, unless
    another step is in flight and those that are left lack blocks."""
    left = passed_over(before, before.flights[event.step_id])
    return not left or (len(before.flights) > 1 and blocks_lacking(before, left) > len(before.free))


@step_rule("SCHED-14", corpus="S5 S10")
def queues_change_by_events_only(before: State, event: Observe, after: State) -> bool:
    """Waiting and running are what adding, admitting, preempting and ending made of them."""
    return (before.waiting, before.running) == (after.waiting, after.running)


@step_rule("SCHED-15", corpus="S10 R9 P14")
def counters_change_by_events_only(before: State, event: Observe, after: State) -> bool:
    """``num_computed_tokens`` counts the tokens that were written or hit, ``num_scheduled_tokens`` those in flight."""
    return {i: (q.num_computed_tokens, q.num_scheduled_tokens) for i, q in before.seqs.items()} == {
        i: (q.num_computed_tokens, q.num_scheduled_tokens) for i, q in after.seqs.items()
    }


@step_rule("SCHED-16", corpus="C5 S9")
def a_sequence_ends_when_it_must(before: State, event: Finish, after: State) -> bool:
    """A sequence ends by a stop token, or without one at its length, and is then at its end."""
    seq = before.seqs[event.seq]
    request = before.requests[seq.request_id]
    stopped = seq.num_output_tokens > 0 and seq.tokens[-1] in request.stop_token_ids
    return event.reason.value == ("stop" if stopped else "length") and ends(before, event.seq)


@step_rule("SCHED-17", corpus="C5 S9")
def an_ended_sequence_is_gone(before: State, event: Complete, after: State) -> bool:
    """When a step is over, no sequence is left that is at its end."""
    return not any(ends(after, i) for i in after.seqs if after.seqs[i].request_id in after.requests)


@step_rule("SCHED-18", corpus="C5")
def samples_are_forked_from_the_prompt(before: State, event: Append, after: State) -> bool:
    """The sequences of a request are all there before the first of them is given a token."""
    return before.seqs[event.seq].request_id not in before.requests or all_born(before, before.seqs[event.seq])


@step_rule("SCHED-19", corpus="C7 S1")
def forks_have_a_seat(before: State, event: Fork, after: State) -> bool:
    """A fork belongs to a running request and leaves no more than ``max_num_seqs`` seats taken."""
    request_id = before.seqs[event.parent].request_id
    return request_id not in before.requests or (
        request_id in before.running and seats_taken(after) <= before.config.max_num_seqs
    )


@step_rule("SCHED-20", corpus="S2 A11")
def what_fits_is_not_refused(before: State, event: Refuse, after: State) -> bool:
    """The door turns a request down only if an empty engine cannot serve it, or one of its ids is in use."""
    return not isinstance(event.call, Add) or not may_come_in(before, event.call.request)


@step_rule("SCHED-22", corpus="A7")
def forks_keep_what_was_promised(before: State, event: Fork, after: State) -> bool:
    """Under the admission rule NO_EVICT a fork leaves free all blocks that the running requests may still ask for."""
    owed = sum(blocks_owed(after, request_id) for request_id in after.running)
    return before.config.admission_rule is not AdmissionRule.NO_EVICT or owed <= len(after.free)


@step_rule("SCHED-23", corpus="S2 C7")
def forks_leave_a_request_that_fits(before: State, event: Fork, after: State) -> bool:
    """After a fork the request, with all its sequences, still fits alone into an empty engine."""
    request_id = before.seqs[event.parent].request_id
    request = before.requests.get(request_id)
    reserved = before.choices.num_reserved_blocks
    return request is None or fits_alone(before.config, request, num_seats(after, request_id), reserved)


@step_rule("SCHED-24", corpus="C7 S10")
def what_can_be_forked_is_not_refused(before: State, event: Refuse, after: State) -> bool:
    """A fork is turned down only if it is no legal call, or for want of a seat or of blocks that are promised."""
    return not isinstance(event.call, Fork) or not may_fork(before, event.call)


@step_rule("SCHED-25", corpus="R5 S8")
def who_is_before_others_is_served_before_them(before: State, event: Submit, after: State) -> bool:
    """A step passes a running sequence over, though it has tokens to compute, only if it computes nothing for later
    requests.

    So the first request comes closer to its end in every step, whatever the budget is and whoever arrives.
    """
    flight, running = before.flights[event.step_id], before.running
    first = next((n for n, r in enumerate(running) if is_passed_over(before, flight, r)), len(running))
    return not any(i in flight.scheduled for r in running[first + 1 :] for i in seqs_of(before, r))


@step_rule("SCHED-26", corpus="R2 R3")
def served_sequences_keep_their_tokens(before: State, event: Rollback, after: State) -> bool:
    """No token of a sequence that a scheduler serves is taken back."""
    return before.seqs[event.seq].request_id not in before.requests


@state_rule("SCHED-27", corpus="S1")
def nobody_gets_more_than_a_share(s: State) -> bool:
    """Where several prompts may be computed in parts at a time, a step computes of no sequence more than its share of the
    budget.

    A share is ``max_num_batched_tokens`` divided by ``max_num_partial_prefills``, rounded up. So nobody waits behind the
    whole of a long prompt; and an engine that gives each its share before it goes on to the next leaves no more sequences
    than that half computed.
    """
    counts = [count for flight in s.flights.values() for count in flight.scheduled.values()]
    return s.config.max_num_partial_prefills == 1 or all(count <= share(s.config) for count in counts)


@step_rule("SCHED-28", corpus="S8 R5")
def who_preempts_admits_nobody(before: State, event: Admit, after: State) -> bool:
    """A step that has preempted somebody admits nobody.

    What a victim gives back is for those who ran before it, and the head of the queue, most often the victim itself, comes
    in with the next step. So who runs does not depend on the order in which an engine decides.
    """
    step_id = open_step(before)
    return step_id is None or not before.flights[step_id].preempting


def is_passed_over(s: State, flight: Flight, request_id: RequestId) -> bool:
    """Whether a sequence of the request has tokens to compute, and the step computes none of them."""
    return any(i not in flight.scheduled and room(s.seqs[i]) < s.seqs[i].num_tokens for i in seqs_of(s, request_id))


def may_fork(s: State, event: Fork) -> bool:
    """Whether the caller may fork now: a running sequence with output and nothing scheduled, under a new name."""
    parent = s.seqs.get(event.parent)
    if parent is None or parent.request_id not in s.running or event.child in seq_ids_in_use(s):
        return False
    after = fork(s, event)
    rules = (forks_have_a_seat, forks_keep_what_was_promised, forks_leave_a_request_that_fits)
    ready = parent.num_output_tokens > 0 and parent.num_scheduled_tokens == 0
    return ready and all(rule(s, event, after) for rule in rules)


def ends(s: State, seq_id: SeqId) -> bool:
    """Whether the sequence must not be given another token."""
    seq = s.seqs[seq_id]
    request = s.requests[seq.request_id]
    stopped = seq.num_output_tokens > 0 and seq.tokens[-1] in request.stop_token_ids
    return stopped or seq.num_output_tokens >= request.max_tokens


def all_born(s: State, seq: Seq) -> bool:
    """Whether the request's sequences exist, or have existed: an output token shows that they did."""
    return seq.num_output_tokens > 0 or s.seqs.keys() >= set(s.requests[seq.request_id].seq_ids)
