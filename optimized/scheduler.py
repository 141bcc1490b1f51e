"""The scheduler: who computes how many tokens in the next step, and what becomes of the tokens that come back.

Nothing here is proportional to the pool or to the number of waiting requests. A step costs O(1) for each scheduled
sequence, each block taken or given back and each token of a prompt.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence

from optimized.admission import may_admit, may_fork
from optimized.counters import Counters
from optimized.device import Branches, Failure, Sampled
from optimized.door import check_fork, check_request, room_for_fork
from optimized.placement import longest_hit, must_copy, num_blocks_to_place, num_passed_blocks
from optimized.plan import BlockCopy, Plan, Swap, computed_by, decode_batch, mixed_batch
from optimized.pool import BlockPool, blocks_needed
from optimized.prefix_cache import PrefixCache
from optimized.sequences import LiveRequest, LiveSeq
from optimized.step import Outcome, StepInFlight
from optimized.waiting import WaitingQueue
from spec.batches import BatchObserver
from spec.engine import Admission, InvalidField
from spec.vocabulary import (
    Abort,
    Add,
    Admit,
    Allocate,
    Begin,
    Complete,
    Config,
    Copy,
    Finish,
    FinishReason,
    Fork,
    Hit,
    Policy,
    Preempt,
    Publish,
    Recovery,
    Release,
    Request,
    RequestId,
    Reset,
    SeqId,
    Slide,
    StepId,
    Submit,
    SwapIn,
    SwapOut,
)


class Scheduler:
    """Queues, sequences and the pool. ``observer`` hears every event; without it none is made.

    ``model`` is the identity of the model: what the prefix cache holds is good for no other.
    """

    def __init__(self, config: Config, observer: BatchObserver | None = None, model: str = "") -> None:
        self.config = config
        self.cache = PrefixCache(config.num_blocks, config.block_size, model=model) if config.prefix_cache else None
        self.pool = BlockPool(config.num_blocks, self.cache)
        self.host_free = deque(range(config.num_host_blocks))
        self.waiting = WaitingQueue()
        self.running: list[LiveRequest] = []
        self.requests: dict[RequestId, LiveRequest] = {}
        self.seqs: dict[SeqId, LiveSeq] = {}
        self.flights: dict[StepId, StepInFlight] = {}
        self.counters = Counters()
        self._observer = observer
        self._emit = observer.event if observer is not None else None
        self._promised: set[SeqId] = set()  # ids of sequences that are still to be forked
        self._seats_taken = 0
        self._num_arrivals = 0
        self._given_up: list[RequestId] = []  # aborted while a step is in flight

    # --- the door ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """The request waits. O(prompt). Raises ``InvalidRequest`` and changes nothing if it can never be served."""
        self.check(request)
        priority = request.priority if self.config.policy is Policy.PRIORITY else 0
        chain = [] if self.cache is None else [self.cache.root(request.cache_salt)]
        live = LiveRequest(request, (priority, self._num_arrivals), chain)
        self._num_arrivals += 1
        self.requests[request.request_id] = live
        self.seqs[request.seq_ids[0]] = live.seqs[0]
        self._promised.update(request.seq_ids[1:])
        self.waiting.push(live)
        if self._emit is not None:
            self._emit(Add(request))

    def check(self, request: Request) -> None:
        """Raise ``InvalidRequest`` unless the request can be served to its end, under ids that are new (SCHED-8)."""
        check_request(self.config, request, self.requests, self._is_new)

    def _is_new(self, seq_id: SeqId) -> bool:
        return seq_id not in self.seqs and seq_id not in self._promised

    def fork(self, parent_id: SeqId, child_id: SeqId) -> Admission:
        """The child shares the parent's table and tokens. O(tokens / block size); anything but NOW changes nothing."""
        parent = check_fork(self.seqs, parent_id, child_id, self._is_new)
        answer = room_for_fork(self.config, parent.request, self._seats_taken)
        if answer is Admission.NOW and not may_fork(self.config, self.pool, self.running, parent):
            answer = Admission.LATER
        if answer is not Admission.NOW:
            return answer
        self._seats_taken += 1
        self._fork(parent, child_id)
        return Admission.NOW

    def _fork(self, parent: LiveSeq, child_id: SeqId) -> LiveSeq:
        child = parent.fork(child_id)
        self.pool.share(child.table)
        parent.request.seqs.append(child)
        self.seqs[child_id] = child
        if self._emit is not None:
            self._emit(Fork(parent.seq_id, child_id))
        return child

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """The next step. Running requests come first, in the order of service; then whoever there is room for."""
        if self.flights:
            raise RuntimeError(f"step {next(iter(self.flights))} is not committed yet")
        step = StepInFlight(self.counters.num_steps, self.config.max_num_batched_tokens)
        self.flights[step.step_id] = step
        self.counters.num_steps += 1
        if self._emit is not None:
            self._emit(Begin(step.step_id))
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        if self._emit is not None:
            self._emit(Submit(step.step_id))
        return self._plan(step)

    def _schedule_running(self, step: StepInFlight) -> None:
        running, block_size, ref_count = self.running, self.config.block_size, self.pool.ref_count
        scheduled, budget, observer = step.scheduled, step.budget, self._observer
        singles: list[SeqId] = []  # who got room for a token without a block, while nobody was told yet
        index = 0
        while index < len(running) and budget:
            request = running[index]
            index += 1
            for seq in request.seqs:
                computed = seq.num_computed
                count = len(seq.tokens) - computed
                # The common case is a token for a block that is there and that nobody shares: no pool work.
                if count == 1 and computed % block_size and budget and ref_count[seq.table[-1]] == 1:
                    seq.num_scheduled = 1
                    scheduled.append(seq)
                    budget -= 1
                    if observer is not None:
                        singles.append(seq.seq_id)
                elif count and budget:
                    step.budget = budget
                    if observer is not None and singles:
                        observer.allocated(singles)
                        singles = []
                    if not self._make_room(step, seq):
                        return
                    self._place(step, seq)
                    budget = step.budget
        if observer is not None and singles:
            observer.allocated(singles)
        step.budget = budget

    def _make_room(self, step: StepInFlight, seq: LiveSeq) -> bool:
        """Preempt the last running request until the sequence has room. False if it came to the sequence's own."""
        while num_blocks_to_place(self.pool, seq, step.budget, self.config.block_size) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(step, victim)
            if victim is seq.request:
                return False
        return True

    def _place(self, step: StepInFlight, seq: LiveSeq) -> None:
        """The sequence gets the blocks for its next tokens, as many as the budget allows, and is scheduled."""
        if self.cache is not None and not seq.num_computed:
            self._take_hits(seq)
        count = min(len(seq.tokens) - seq.num_computed, step.budget)
        if must_copy(self.pool, seq, self.config.block_size):
            self._copy_tail(step, seq)
        held = len(seq.table) + seq.num_dropped_blocks
        blocks = self.pool.take_many(blocks_needed(seq.num_computed + count, self.config.block_size) - held)
        if blocks:
            seq.table += blocks
        seq.num_scheduled = count
        step.scheduled.append(seq)
        step.budget -= count
        step.only_last_tokens &= count == 1 == len(seq.tokens) - seq.num_computed
        if self._emit is not None:
            self._emit(Allocate(seq.seq_id, count, blocks))

    def _take_hits(self, seq: LiveSeq) -> None:
        """CACHE-5: the sequence begins with the longest cached prefix that there is."""
        hits = tuple(longest_hit(self.pool, seq))
        self.counters.num_cache_queries += 1
        self.counters.num_queried_tokens += len(seq.tokens)
        if hits:
            self.pool.share(hits)
            seq.table = hits
            seq.num_computed = len(hits) * self.config.block_size
            self.counters.num_cache_hits += 1
            self.counters.num_hit_tokens += seq.num_computed
            if self._emit is not None:
                self._emit(Hit(seq.seq_id, hits))

    def _copy_tail(self, step: StepInFlight, seq: LiveSeq) -> None:
        """COW-2: somebody else names the tail block too, so the sequence goes on in a copy of it.

        The source stays held until the step is over, since the device reads it.
        """
        index, source = len(seq.table) - 1, seq.table[-1]
        target = self.pool.take()
        self.pool.hand_to_step(source)
        step.holds.append(source)
        seq.table = (*seq.table[:-1], target)
        step.copies.append(BlockCopy(seq.seq_id, index, source, target))
        if self._emit is not None:
            self._emit(Copy(seq.seq_id, index, source, target))

    def _preempt(self, step: StepInFlight, request: LiveRequest) -> None:
        """The last running request gives its blocks back and waits, before whoever is served after it (PREEMPT-1)."""
        in_step = any(seq.num_scheduled for seq in request.seqs)
        if not in_step:
            self._swap_out(step, request)
        for seq in request.seqs:
            step.budget += seq.num_scheduled
            seq.num_scheduled = 0
            if not seq.host_table:
                self._drop_table(seq)
                seq.num_computed = seq.num_dropped_blocks = 0
        if in_step:
            # In place: whoever schedules goes on with these lists. Sources of copies stay held until the step is over.
            step.scheduled[:] = [seq for seq in step.scheduled if seq.request is not request]
            seq_ids = {seq.seq_id for seq in request.seqs}
            step.copies[:] = [copy for copy in step.copies if copy.seq_id not in seq_ids]
        self.running.pop()
        request.running = False
        request.num_preemptions += 1
        self._seats_taken -= request.num_seats
        self.waiting.push(request)
        step.preempted.append(request.request.request_id)
        self.counters.num_preemptions += 1
        if self._emit is not None:
            self._emit(Preempt(request.request.request_id))

    def _swap_out(self, step: StepInFlight, request: LiveRequest) -> None:
        """All tables of the request go to host memory, or none if there is no room for all."""
        num_blocks = sum([len(seq.table) for seq in request.seqs])
        if self.config.recovery is not Recovery.SWAP or num_blocks > len(self.host_free):
            return
        for seq in request.seqs:
            if seq.table:
                host_table = tuple([self.host_free.popleft() for _ in seq.table])
                step.swaps.append(Swap(True, seq.seq_id, seq.table, host_table))
                self._drop_table(seq)
                seq.host_table = host_table
                self.counters.num_blocks_swapped_out += len(host_table)
                if self._emit is not None:
                    self._emit(SwapOut(seq.seq_id, host_table))

    def _swap_in(self, step: StepInFlight, seq: LiveSeq) -> None:
        """The sequence's table comes back into device blocks."""
        seq.table = self.pool.take_many(len(seq.host_table))
        step.swaps.append(Swap(False, seq.seq_id, seq.table, seq.host_table))
        self._drop_host_table(seq)
        if self._emit is not None:
            self._emit(SwapIn(seq.seq_id, seq.table))

    def _drop_host_table(self, seq: LiveSeq) -> None:
        self.host_free.extend(seq.host_table)
        seq.host_table = ()

    def _drop_table(self, seq: LiveSeq) -> None:
        self.pool.release(seq.table)
        seq.table = ()

    def _schedule_waiting(self, step: StepInFlight) -> None:
        while step.budget:
            head = self.waiting.head()
            if head is None or not self._may_admit(step, head):
                return
            self._admit(step, self.waiting.pop())
            for seq in head.seqs:
                if step.budget:
                    # Free blocks that are hit count for an optimistic admission only now: there may be no room after all.
                    if not self._make_room(step, seq):
                        return
                    self._place(step, seq)

    def _may_admit(self, step: StepInFlight, head: LiveRequest) -> bool:
        num_seats = self.config.max_num_seqs - self._seats_taken
        return may_admit(self.config, self.pool, self.running, head, num_seats, step.budget)

    def _admit(self, step: StepInFlight, request: LiveRequest) -> None:
        request.running = True
        self._seats_taken += request.num_seats
        insort(self.running, request, key=_service_order)
        if self._emit is not None:
            self._emit(Admit(request.request.request_id))
        for seq in request.seqs:
            if seq.host_table:
                self._swap_in(step, seq)

    def _plan(self, step: StepInFlight) -> Plan:
        # An unborn sequence is sampled beside the one it comes from, which only the general case knows.
        plain = step.only_last_tokens and not self._promised
        batch = (decode_batch if plain else mixed_batch)(step.scheduled, self.config.block_size)
        windowed = self.config.window is not None
        self.counters.num_blocks_copied += len(step.copies)
        self.counters.num_tokens_computed += len(batch.token_ids)
        return Plan(
            step.step_id,
            *batch,
            copies=tuple(step.copies),
            swaps=tuple(step.swaps),
            preempted=tuple(step.preempted),
            num_dropped_blocks=tuple([seq.num_dropped_blocks for seq in step.scheduled]) if windowed else (),
        )

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(self, plan: Plan, sampled: Sequence[Sampled]) -> Outcome:
        """The step is over: its tokens are computed, and who has all of them computed gets the next one.

        First come the forks, then all tokens, then all ends, each in the order of the plan; at last whoever was
        aborted meanwhile ends.
        """
        step = self.flights.pop(plan.step_id)
        if self._observer is not None:
            self._observer.computed(computed_by(plan, self.config.window))
        self._compute(step)
        if self.config.window is not None:
            self._slide(step, self.config.window)
        tokens = [token for token in sampled if not isinstance(token, Failure | Branches)]
        outcome = Outcome(plan.sample_seq_ids, tokens, preempted=step.preempted)
        if len(tokens) < len(sampled):
            self._end_failed(plan, sampled, outcome)
        if self._promised:
            self._fork_samples(step, outcome)
        if len(tokens) < len(sampled):
            self._branch(plan, sampled, outcome)
        self._append(outcome)
        self.pool.drop_holds(step.holds)
        if self._emit is not None:
            self._emit(Complete(step.step_id))
        for request_id in self._given_up:
            self.abort(request_id)
        self._given_up.clear()
        return outcome

    def _compute(self, step: StepInFlight) -> None:
        """The scheduled tokens are computed; the blocks that they have filled can be found from now on (CACHE-6)."""
        block_size, filled = self.config.block_size, []
        for seq in step.scheduled:
            count, computed = seq.num_scheduled, seq.num_computed + seq.num_scheduled
            seq.num_computed, seq.num_scheduled = computed, 0
            if computed % block_size < count:
                filled.append((seq, (computed - count) // block_size))
        if self.cache is not None:
            for seq, first in filled:
                for index in range(first, seq.num_computed // block_size):
                    block = seq.table[index - seq.num_dropped_blocks]
                    published = self.cache.publish(seq.chain, seq.tokens, index, block)
                    if published and self._emit is not None:
                        self._emit(Publish(seq.seq_id, index))

    def _slide(self, step: StepInFlight, window: int) -> None:
        """The blocks that no later token sees leave their tables, the last one first (TABLE-11).

        O(scheduled sequences + blocks that leave): a sequence pays for each of its blocks once.
        """
        for seq in step.scheduled:
            count = num_passed_blocks(seq.num_computed, window, self.config.block_size) - seq.num_dropped_blocks
            if count > 0:
                self.pool.release(seq.table[:count])
                seq.table = seq.table[count:]
                seq.num_dropped_blocks += count
                if self._emit is not None:
                    self._emit(Slide(seq.seq_id, count))

    def _end_failed(self, plan: Plan, sampled: Sequence[Sampled], outcome: Outcome) -> None:
        """A request that has a sequence without a token ends, and only that one; the others' tokens are left."""
        pairs = list(zip(plan.sample_seq_ids, sampled, strict=True))
        failures = {seq_id: token for seq_id, token in pairs if isinstance(token, Failure)}
        for request in list(self.requests.values()):
            for seq_id in (*request.request.seq_ids, *(seq.seq_id for seq in request.seqs)):
                if seq_id in failures and not self._is_new(seq_id):
                    outcome.failed.append((request.request.request_id, failures[seq_id]))
                    self._end_request(request)
        left = [(i, token) for i, token in pairs if not isinstance(token, Failure | Branches) and not self._is_new(i)]
        outcome.seq_ids, outcome.tokens = [i for i, _ in left], [token for _, token in left]

    def _fork_samples(self, step: StepInFlight, outcome: Outcome) -> None:
        """Whose prompt has just been computed gets its other sequences."""
        for seq in step.scheduled:
            request = seq.request
            if request.num_unborn and request.running and seq.num_computed == len(seq.tokens):
                children = request.request.seq_ids[1:]
                self._promised.difference_update(children)
                request.num_unborn = 0
                for child_id in children:
                    self._fork(seq, child_id)
                    outcome.forked.append((seq.seq_id, child_id))

    def _branch(self, plan: Plan, sampled: Sequence[Sampled], outcome: Outcome) -> None:
        """Sequences that go on in no way end, so that there are seats; then the others are forked as often as they must."""
        pairs = list(zip(plan.sample_seq_ids, sampled, strict=True))
        branches = [(i, each.tokens) for i, each in pairs if isinstance(each, Branches) and i in self.seqs]
        for seq_id, tokens in branches:
            if not tokens:
                self._release(self.seqs[seq_id])
        for seq_id, tokens in branches:
            for child_id, _ in tokens[1:]:
                self._fork(self.seqs[seq_id], child_id)
                self._seats_taken += 1
                outcome.forked.append((seq_id, child_id))
        outcome.seq_ids = [*outcome.seq_ids, *(i for _, tokens in branches for i, _ in tokens)]
        outcome.tokens = [*outcome.tokens, *(token for _, tokens in branches for _, token in tokens)]

    def _append(self, outcome: Outcome) -> None:
        """The tokens come to the ends of their sequences; a sequence at its end gives its blocks back."""
        seqs, ended = self.seqs, []
        for seq_id, token in zip(outcome.seq_ids, outcome.tokens, strict=True):
            seq = seqs[seq_id]
            tokens = seq.tokens
            tokens.append(token)
            if len(tokens) >= seq.max_tokens or token in seq.request.stop:
                ended.append(seq)
        self.counters.num_tokens_sampled += len(outcome.tokens)
        if self._observer is not None:
            self._observer.appended(outcome.seq_ids, outcome.tokens)
        for seq in ended:
            reason = FinishReason.STOP if seq.tokens[-1] in seq.request.stop else FinishReason.LENGTH
            outcome.finished.append((seq.seq_id, reason))
            self._end_seq(seq)
            if self._emit is not None:
                self._emit(Finish(seq.seq_id, reason))
        if ended:
            self._forget_ended()

    # --- ends -------------------------------------------------------------------------------------------------------

    def abort(self, request_id: RequestId) -> None:
        """The request ends and gives back what it holds: at once, or with the step that may still touch it.

        An unknown id is ignored. O(what it holds).
        """
        if self.flights:
            self._given_up.append(request_id)
        elif request_id in self.requests:
            self._end_request(self.requests[request_id])

    def release(self, seq_id: SeqId) -> None:
        """The caller has enough of one sequence (a stop string came); between steps only. An unknown id is ignored."""
        seq = self.seqs.get(seq_id)
        if seq is None:
            return
        if self.flights or seq.request.num_unborn:
            raise InvalidField("seq_id", seq_id, "a sequence with output, between two steps")
        self._release(seq)

    def _release(self, seq: LiveSeq) -> None:
        self._end_seq(seq)
        if self._emit is not None:
            self._emit(Release(seq.seq_id))
        self._forget_ended()

    def reset_cache(self) -> bool:
        """The prefix cache is emptied; False, and nothing changes, while one of its blocks is in use. O(cached)."""
        if self.cache is not None:
            blocks = self.cache.cached_blocks()
            if self.pool.num_in_use(blocks):
                return False
            for block in blocks:
                self.cache.evict(block)
        if self._emit is not None:
            self._emit(Reset())
        return True

    def _end_request(self, request: LiveRequest) -> None:
        self._promised.difference_update(request.request.seq_ids if request.num_unborn else ())
        for seq in tuple(request.seqs):
            self._end_seq(seq)
        if self._emit is not None:
            self._emit(Abort(request.request.request_id))
        self._forget_ended()

    def _end_seq(self, seq: LiveSeq) -> None:
        """The sequence is gone; with the last one of a request, so is the request."""
        request = seq.request
        self._drop_table(seq)
        self._drop_host_table(seq)
        del self.seqs[seq.seq_id]
        request.seqs.remove(seq)
        if request.running:
            self._seats_taken -= 1
        if not request.seqs:
            del self.requests[request.request.request_id]
            if request.running:
                self._seats_taken -= request.num_unborn
                request.running = False
            else:
                self.waiting.remove(request)

    def _forget_ended(self) -> None:
        """Requests that have ended leave the running ones. O(running), for all that ended in a step."""
        self.running = [request for request in self.running if request.running]


def _service_order(request: LiveRequest) -> tuple[int, int]:
    return request.key
