"""The scheduler: what the next step computes (``schedule``), and what its tokens change (``commit``).

There is one counter: ``num_computed_tokens`` catches up with ``num_tokens``. Prefill, chunked prefill, decode, a prefix
hit and recomputation are the same thing with different numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from reference.admission import may_admit, share
from reference.plan import Plan, Sample, ScheduledSeq, Swap
from reference.pool import BlockPool, num_tokens_with_room, slots_of
from reference.roster import Roster
from spec.engine import StepReport
from spec.vocabulary import (
    Admit,
    Append,
    Begin,
    BlockId,
    Complete,
    Config,
    Copy,
    Event,
    Finish,
    FinishReason,
    Fork,
    Hit,
    Preempt,
    Publish,
    Recovery,
    RequestId,
    SeqId,
    Slide,
    StepId,
    Submit,
    SwapIn,
    SwapOut,
    Token,
)

Emit = Callable[[Event], None]


@dataclass
class Draft:
    """A step while it is being scheduled."""

    step_id: StepId
    budget: int
    counts: dict[SeqId, int] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    preempted: list[Preempt] = field(default_factory=list)
    holds: list[BlockId] = field(default_factory=list)

    def forget(self, seq_id: SeqId) -> None:
        """The sequence is not part of the step after all; the sources of its copies stay held until the step ends."""
        self.budget += self.counts.pop(seq_id, 0)
        self.copies = [copy for copy in self.copies if copy.seq != seq_id]


class Scheduler:
    """Decides, step by step; the device works in between."""

    def __init__(self, config: Config, pool: BlockPool, roster: Roster, emit: Emit) -> None:
        self.config = config
        self.share = share(config)
        self.pool = pool
        self.roster = roster
        self.emit = emit
        self.next_step_id = 0

    # Schedule -----------------------------------------------------------------------------------------------------

    def may_begin(self) -> bool:
        """Whether there is something to schedule. While a step is in flight nobody is preempted: then the first sequence
        that lacks tokens decides or, if none does, the head of the queue (SCHED-9)."""
        if not self.pool.flights:
            return bool(self.roster.requests)
        draft = Draft(self.next_step_id, budget=self.config.max_num_batched_tokens)
        for request_id in self.roster.running:
            for seq_id in self.roster.seqs_of(request_id):
                if self._num_missing(seq_id) > 0:
                    return self.pool.num_free >= self._blocks_to_take(draft, seq_id)
        waiting = self.roster.waiting
        return bool(waiting) and may_admit(self.roster, self.pool, waiting[0], draft.budget)

    def schedule(self) -> tuple[Plan, tuple[Preempt, ...]]:
        """The plan of the next step, and whom it preempted. Earlier steps may still be in flight."""
        draft = Draft(self.next_step_id, budget=self.config.max_num_batched_tokens)
        self.next_step_id += 1
        self.emit(Begin(draft.step_id))
        if self._schedule_running(draft):
            self._schedule_waiting(draft)
        plan = self._plan(draft)
        self.pool.submit(draft.step_id, draft.counts, draft.holds)
        self.emit(Submit(draft.step_id))
        return plan, tuple(draft.preempted)

    def _schedule_running(self, draft: Draft) -> bool:
        """Everybody who runs gets what is missing, or a share, in the order of service, while budget and blocks last.
        False if the blocks did not last, also if others were preempted for them."""
        for request_id in tuple(self.roster.running):
            if request_id not in self.roster.running:
                return False  # Preempted, and so is everybody behind it (PREEMPT-1).
            if not self._schedule_request(draft, request_id):
                return False
        return not draft.preempted

    def _schedule_waiting(self, draft: Draft) -> None:
        """Admit from the head of the queue; nobody overtakes it (SCHED-4)."""
        while self.roster.waiting:
            head = self.roster.waiting[0]
            if not may_admit(self.roster, self.pool, head, draft.budget):
                break
            self._admit(draft, head)
            if not self._schedule_request(draft, head):
                break

    def _schedule_request(self, draft: Draft, request_id: RequestId) -> bool:
        """Schedule each sequence of a running request. False if there was no room for one of them."""
        return all(self._schedule_seq(draft, seq_id) for seq_id in self.roster.seqs_of(request_id))

    def _schedule_seq(self, draft: Draft, seq_id: SeqId) -> bool:
        """Give a sequence room for its missing tokens, as many as budget and share allow, at the cost of newer requests.

        False if its own request was the newest, and was preempted; or if a step is in flight, which nobody is preempted
        under: its end may make room, and what it touches would not become free.
        """
        if draft.budget == 0 or self._num_missing(seq_id) == 0:
            return True
        while self.pool.num_free < self._blocks_to_take(draft, seq_id):
            if self.pool.flights:
                return False
            victim = self.roster.running[-1]
            is_own = victim == self.roster.seqs[seq_id].request_id
            self._preempt(draft, victim)
            if is_own:
                return False
        self._take_hits(seq_id)
        num_tokens = min(self._num_missing(seq_id), draft.budget, self.share)
        seqs = self.roster.seqs
        for event in self.pool.extend(seq_id, seqs[seq_id], num_tokens):
            self.emit(event)
            if isinstance(event, Copy):
                draft.copies.append(event)
                draft.holds.append(event.source)
        num_scheduled_tokens = seqs[seq_id].num_scheduled_tokens + num_tokens
        seqs[seq_id] = replace(seqs[seq_id], num_scheduled_tokens=num_scheduled_tokens)
        draft.counts[seq_id] = num_tokens
        draft.budget -= num_tokens
        return True

    def _num_missing(self, seq_id: SeqId) -> int:
        seq = self.roster.seqs[seq_id]
        return seq.num_tokens - seq.num_computed_tokens - seq.num_scheduled_tokens

    def _blocks_to_take(self, draft: Draft, seq_id: SeqId) -> int:
        """The free blocks that scheduling the sequence takes: free ones that it hits, new ones, a copy."""
        seq, hits = self.roster.seqs[seq_id], self._hits(seq_id)
        num_hit_tokens = len(hits) * self.config.block_size
        num_tokens = num_hit_tokens + min(self._num_missing(seq_id) - num_hit_tokens, draft.budget, self.share)
        free_hits = sum(1 for block in hits if self.pool.ref_count[block] == 0)
        return free_hits + self.pool.blocks_to_take(seq_id, seq, num_tokens) - len(hits)

    def _hits(self, seq_id: SeqId) -> tuple[BlockId, ...]:
        """The cached blocks that a sequence without a block of its own can begin with."""
        is_new = self.roster.seqs[seq_id].num_computed_tokens == 0 and not self.pool.tables[seq_id]
        if not self.config.prefix_cache or not is_new:
            return ()
        return self.pool.longest_hit(self.roster.seqs[seq_id].tokens, self.roster.request_of(seq_id).cache_salt)

    def _take_hits(self, seq_id: SeqId) -> None:
        hits = self._hits(seq_id)
        if hits:
            self.pool.hit(seq_id, hits)
            num_hit_tokens = len(hits) * self.config.block_size
            seqs = self.roster.seqs
            seqs[seq_id] = replace(seqs[seq_id], num_computed_tokens=num_hit_tokens)
            self.emit(Hit(seq_id, hits))

    # Admit and preempt --------------------------------------------------------------------------------------------

    def _admit(self, draft: Draft, request_id: RequestId) -> None:
        """The request runs: its swapped sequences come back, the others begin with an empty table."""
        self.roster.admit(request_id)
        self.emit(Admit(request_id))
        for seq_id in self.roster.seqs_of(request_id):
            if seq_id in self.pool.host_tables:
                sources = self.pool.host_tables[seq_id]
                swap = SwapIn(seq_id, self.pool.swap_in(seq_id))
                draft.swaps.append(Swap(swap, sources))
                self.emit(swap)
            else:
                self.pool.tables[seq_id] = ()

    def _preempt(self, draft: Draft, request_id: RequestId) -> None:
        """The request waits again, with all its tokens and none of its device blocks."""
        seq_ids = self.roster.seqs_of(request_id)
        if self._can_swap_out(draft, seq_ids):
            self._swap_out(draft, seq_ids)
        for seq_id in seq_ids:
            draft.forget(seq_id)
            seq = replace(self.roster.seqs[seq_id], num_scheduled_tokens=0)
            if seq_id not in self.pool.host_tables:
                self.pool.drop(seq_id)
                seq = replace(seq, num_computed_tokens=0, num_dropped_blocks=0)
            self.roster.seqs[seq_id] = seq
        self.roster.preempt(request_id)
        event = Preempt(request_id)
        draft.preempted.append(event)
        self.emit(event)

    def _can_swap_out(self, draft: Draft, seq_ids: list[SeqId]) -> bool:
        """All or nothing: the host has room for every block of the request, shared ones counted for each holder.

        A request of which this step has scheduled something already is recomputed: its newest blocks are empty.
        """
        num_blocks = sum(len(self.pool.tables[seq_id]) for seq_id in seq_ids)
        return (
            self.config.recovery is Recovery.SWAP
            and num_blocks <= len(self.pool.host_free)
            and not any(seq_id in draft.counts for seq_id in seq_ids)
        )

    def _swap_out(self, draft: Draft, seq_ids: list[SeqId]) -> None:
        for seq_id in seq_ids:
            sources = self.pool.tables[seq_id]
            if sources:
                swap = SwapOut(seq_id, self.pool.swap_out(seq_id))
                draft.swaps.append(Swap(swap, sources))
                self.emit(swap)

    # Plan ---------------------------------------------------------------------------------------------------------

    def _plan(self, draft: Draft) -> Plan:
        scheduled = tuple(self._scheduled_seq(seq_id, num_tokens) for seq_id, num_tokens in draft.counts.items())
        return Plan(
            step_id=draft.step_id,
            block_size=self.config.block_size,
            window=self.config.window,
            swaps=tuple(draft.swaps),
            copies=tuple(draft.copies),
            scheduled=scheduled,
            samples=tuple(sample for each in scheduled for sample in self._samples(each)),
        )

    def _scheduled_seq(self, seq_id: SeqId, num_tokens: int) -> ScheduledSeq:
        seq, table, size = self.roster.seqs[seq_id], self.pool.tables[seq_id], self.config.block_size
        stop, first_kept = num_tokens_with_room(seq), seq.num_dropped_blocks * size
        start = stop - num_tokens
        slot_mapping = slots_of(table, first_kept, start, stop, size)
        return ScheduledSeq(seq_id, start, seq.tokens[start:stop], slot_mapping, table, first_kept)

    def _samples(self, scheduled: ScheduledSeq) -> list[Sample]:
        """A token for the sequence whose tokens are then all computed, and for each that is forked from it."""
        seq = self.roster.seqs[scheduled.seq]
        if scheduled.stop < seq.num_tokens:
            return []
        return [Sample(i, scheduled.seq, seq.tokens) for i in (scheduled.seq, *self._children(scheduled.seq))]

    def _children(self, seq_id: SeqId) -> tuple[SeqId, ...]:
        """The sequences that are forked from this one when its tokens are computed."""
        request = self.roster.request_of(seq_id)
        return self.roster.unborn(request.request_id) if seq_id == request.seq_ids[0] else ()

    # Commit -------------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, tokens: Mapping[SeqId, Token]) -> StepReport:
        """The device has run the plan and drawn these tokens: count, publish, fork, append, finish.

        What its ended sequences give back is free when the step is over, behind what was given back before (CACHE-17).
        """
        for each in plan.scheduled:
            seq = self.roster.seqs[each.seq]
            num_scheduled_tokens = seq.num_scheduled_tokens - len(each.tokens)
            self.roster.seqs[each.seq] = replace(
                seq, num_computed_tokens=each.stop, num_scheduled_tokens=num_scheduled_tokens
            )
            self._publish(each)
            self._slide(each.seq)
        for sample in plan.samples:
            if sample.seq != sample.source:
                self.fork(sample.source, sample.seq)
        emitted = tuple(self._append(sample.seq, tokens[sample.seq]) for sample in plan.samples)
        finished = tuple(finish for sample in plan.samples for finish in self._finish(sample.seq))
        self.pool.complete(plan.step_id)
        self.emit(Complete(plan.step_id))
        return StepReport(emitted=emitted, finished=finished)

    def live_part(self, plan: Plan) -> Plan:
        """The plan without the sequences that are gone since it was made: nobody would read what they compute."""
        live = self.roster.seqs
        return replace(
            plan,
            swaps=tuple(swap for swap in plan.swaps if swap.event.seq in live),
            copies=tuple(copy for copy in plan.copies if copy.seq in live),
            scheduled=tuple(each for each in plan.scheduled if each.seq in live),
            samples=tuple(sample for sample in plan.samples if sample.source in live),
        )

    def _publish(self, scheduled: ScheduledSeq) -> None:
        """The blocks that this step has filled can be found from now on, and those before them without which nobody would
        find them: a block of somebody else had their key and has lost it since."""
        if not self.config.prefix_cache:
            return
        seq, size = self.roster.seqs[scheduled.seq], self.config.block_size
        salt = self.roster.request_of(scheduled.seq).cache_salt
        first, stop = scheduled.start // size, scheduled.stop // size
        while first < stop and first > seq.num_dropped_blocks and self.pool.is_lost(seq.tokens[: first * size], salt):
            first -= 1
        for index in range(first, stop):
            if self.pool.publish(scheduled.seq, seq, index, salt):
                self.emit(Publish(scheduled.seq, index))

    def _slide(self, seq_id: SeqId) -> None:
        """The blocks that no later token sees leave the table."""
        seq, window = self.roster.seqs[seq_id], self.config.window
        if window is None:
            return
        first_visible = max(0, seq.num_computed_tokens - window + 1)
        num_blocks = first_visible // self.config.block_size - seq.num_dropped_blocks
        if num_blocks > 0:
            self.pool.drop_front(seq_id, num_blocks)
            self.roster.seqs[seq_id] = replace(seq, num_dropped_blocks=seq.num_dropped_blocks + num_blocks)
            self.emit(Slide(seq_id, num_blocks))

    def fork(self, parent: SeqId, child: SeqId) -> None:
        """A new sequence that shares everything with its parent: a sample of a prompt, or the caller's, between two steps."""
        self.pool.fork(parent, child)
        self.roster.seqs[child] = self.roster.seqs[parent]
        self.emit(Fork(parent, child))

    def _append(self, seq_id: SeqId, token: Token) -> Append:
        self.roster.append(seq_id, token)
        event = Append(seq_id, (token,))
        self.emit(event)
        return event

    def _finish(self, seq_id: SeqId) -> list[Finish]:
        """End the sequence if its last token says so, or if it is at its length."""
        seq, request = self.roster.seqs[seq_id], self.roster.request_of(seq_id)
        if seq.tokens[-1] in request.stop_token_ids:
            reason = FinishReason.STOP
        elif seq.num_output_tokens == request.max_tokens:
            reason = FinishReason.LENGTH
        else:
            return []
        self.remove(seq_id)
        event = Finish(seq_id, reason)
        self.emit(event)
        return [event]

    def remove(self, seq_id: SeqId) -> None:
        """The sequence and all it holds are gone."""
        self.pool.drop(seq_id)
        self.roster.remove(seq_id)
