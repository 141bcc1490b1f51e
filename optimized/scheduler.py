"""The scheduler: who computes how many tokens in the next step, and what becomes of the tokens that come back.

Nothing here is proportional to the pool or to the number of waiting requests. A step costs O(1) for each scheduled
sequence, each block taken or given back and each token of a prompt.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import cast

from optimized.admission import may_admit
from optimized.device import Branches, Failure, Sampled
from optimized.placement import longest_hit, must_copy, num_blocks_to_place, num_passed_blocks
from optimized.plan import BlockCopy, Plan, Swap, batch_of, computed_by, live_part
from optimized.pool import blocks_needed
from optimized.prefix_cache import PrefixCache
from optimized.roster import Roster
from optimized.sequences import LiveRequest, LiveSeq
from optimized.step import Outcome, StepInFlight
from spec.vocabulary import (
    Admit,
    Allocate,
    Begin,
    Complete,
    Copy,
    Finish,
    FinishReason,
    Hit,
    Preempt,
    Publish,
    Recovery,
    SeqId,
    Slide,
    Submit,
    SwapIn,
    SwapOut,
    Token,
)


class Scheduler(Roster):
    """Makes the plans of steps out of who lives, and takes the tokens that come back."""

    # --- schedule ---------------------------------------------------------------------------------------------------

    def may_schedule(self) -> bool:
        """Whether a step would compute something. O(1), O(running sequences) while another step is in flight.

        Then nobody is preempted: the first sequence that lacks tokens decides or, if none does, the head of the queue.
        """
        if not self.flights:
            return bool(self.requests)
        budget = self.config.max_num_batched_tokens
        for request in self.running:
            for seq in request.seqs:
                if len(seq.tokens) > seq.num_computed + seq.num_scheduled:
                    wanted = num_blocks_to_place(self.pool, seq, self._share, self.config.block_size)
                    return wanted <= self.pool.num_free
        head = self.waiting.head()
        return head is not None and self._may_admit(budget, head)

    def schedule(self) -> Plan:
        """The next step. Running requests come first, in the order of service; then whoever there is room for.

        Earlier steps may still be in flight: their tokens are not scheduled again, and nobody is preempted meanwhile.
        """
        step = StepInFlight(self.counters.num_steps, self.config.max_num_batched_tokens)
        self.counters.num_steps += 1
        if self._emit is not None:
            self._emit(Begin(step.step_id))
        if self._schedule_running(step) and not step.preempted:
            self._schedule_waiting(step)
        step.plan = self._plan(step)
        self.flights[step.step_id] = step
        self.pool.submit(step.step_id, holds=step.holds)
        self.counters.num_block_steps += self.pool.num_blocks - self.pool.num_free
        self.counters.num_spared_block_steps += self.pool.num_spared
        if self._emit is not None:
            self._emit(Submit(step.step_id))
        return step.plan

    def _schedule_running(self, step: StepInFlight) -> bool:
        """Whoever runs gets what is missing, while budget and blocks last. False if the blocks did not last."""
        running, block_size, ref_count = self.running, self.config.block_size, self.pool.ref_count
        scheduled, counts, budget = step.scheduled, step.counts, step.budget
        num_told = 0  # of those in ``scheduled``: the observer hears of many single tokens at once
        for request in running:  # a victim leaves at the end
            for seq in request.seqs:
                room = seq.num_computed + seq.num_scheduled
                count = len(seq.tokens) - room
                # The common case is a token for a block that is there and that nobody shares: no pool work.
                if count == 1 and room % block_size and budget and ref_count[seq.table[-1]] == 1:
                    seq.num_scheduled += 1
                    scheduled.append(seq)
                    counts.append(1)
                    budget -= 1
                elif count and budget:
                    step.budget = budget
                    self._tell_allocated(scheduled, num_told)
                    if count == 1 and room and not room % block_size and self.pool.num_free:
                        self._place_last_token(step, seq)
                    elif not self._make_room(step, seq):
                        return False
                    else:
                        self._place(step, seq)
                    budget, num_told = step.budget, len(scheduled)
            if not budget:
                break
        self._tell_allocated(scheduled, num_told)
        step.budget = budget
        return True

    def _tell_allocated(self, scheduled: Sequence[LiveSeq], start: int) -> None:
        """The observer hears who got room for a token without a block."""
        if self._observer is not None and start < len(scheduled):
            self._observer.allocated([seq.seq_id for seq in scheduled[start:]])

    def _place_last_token(self, step: StepInFlight, seq: LiveSeq) -> None:
        """What ``_place`` does for a token that is the first of a new block: a free one is there, and nothing to copy."""
        blocks = self.pool.take_many(1)
        seq.table += blocks
        seq.num_scheduled += 1
        step.scheduled.append(seq)
        step.counts.append(1)
        step.budget -= 1
        if self._emit is not None:
            self._emit(Allocate(seq.seq_id, 1, blocks))

    def _make_room(self, step: StepInFlight, seq: LiveSeq) -> bool:
        """Preempt the last running request until the sequence has room. False if it came to the sequence's own.

        False also while another step is in flight: its end may make room, and what it touches would not become free.
        """
        most = min(step.budget, self._share)
        while num_blocks_to_place(self.pool, seq, most, self.config.block_size) > self.pool.num_free:
            if self.flights:
                return False
            victim = self.running[-1]
            self._preempt(step, victim)
            if victim is seq.request:
                return False
        return True

    def _place(self, step: StepInFlight, seq: LiveSeq) -> None:
        """The sequence gets the blocks for its next tokens, as many as budget and share allow, and is scheduled."""
        room = seq.num_computed + seq.num_scheduled
        if self.cache is not None and not room:
            self._take_hits(step, seq)
            room = seq.num_computed
        count = min(len(seq.tokens) - room, step.budget, self._share)
        if must_copy(self.pool, seq, self.config.block_size):
            self._copy_tail(step, seq)
        held = len(seq.table) + seq.num_dropped_blocks
        blocks = self.pool.take_many(blocks_needed(room + count, self.config.block_size) - held)
        if blocks:
            seq.table += blocks
        seq.num_scheduled += count
        if step.num_decodes is None and not count == 1 == len(seq.tokens) - room:
            step.num_decodes = len(step.scheduled)
        step.scheduled.append(seq)
        step.counts.append(count)
        step.budget -= count
        if self._emit is not None:
            self._emit(Allocate(seq.seq_id, count, blocks))

    def _take_hits(self, step: StepInFlight, seq: LiveSeq) -> None:
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
            step.num_hit_tokens[seq.seq_id] = seq.num_computed
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
        """The last running request gives its blocks back and waits, before whoever is served after it (PREEMPT-1).

        If this step has scheduled some of it, it is a victim of its own, and nobody else is scheduled.
        """
        in_step = any(seq.num_scheduled for seq in request.seqs)
        if not in_step:
            self._swap_out(step, request)
        for seq in request.seqs:
            seq.num_scheduled = 0
            if not seq.host_table:
                self._drop_table(seq)
                seq.num_computed = seq.num_dropped_blocks = 0
        if in_step:
            # In place: whoever schedules goes on with these lists. Sources of copies stay held until the step is over.
            kept = [i for i, seq in enumerate(step.scheduled) if seq.request is not request]
            step.scheduled[:], step.counts[:] = [step.scheduled[i] for i in kept], [step.counts[i] for i in kept]
            if step.num_decodes is not None:
                step.num_decodes = bisect_left(kept, step.num_decodes)
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

    def _schedule_waiting(self, step: StepInFlight) -> None:
        while step.budget:
            head = self.waiting.head()
            if head is None or not self._may_admit(step.budget, head):
                return
            self._admit(step, self.waiting.pop())
            for seq in head.seqs:
                if step.budget:
                    # Free blocks that are hit count for an optimistic admission only now: there may be no room after all.
                    if not self._make_room(step, seq):
                        return
                    self._place(step, seq)

    def _may_admit(self, budget: int, head: LiveRequest) -> bool:
        num_seats = self.config.max_num_seqs - self._seats_taken
        return may_admit(self.config, self.pool, self.running, head, num_seats, budget)

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
        num_decodes = len(step.scheduled) if step.num_decodes is None else step.num_decodes
        batch = batch_of(step.scheduled, step.counts, 0 if self._promised else num_decodes, self.config.block_size)
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

        First come the forks, then all tokens, then all ends, each in the order of the plan. Sequences that are gone
        since the plan was made are left out. Steps end in the order in which they were scheduled.
        """
        step = self.flights.pop(plan.step_id)
        let_go = self.pool.retire(plan.step_id)[len(step.holds) :]
        self.pool.drop_holds(let_go)  # CACHE-17: before what ends now, and the sources of copies after it
        if step.is_torn:
            kept = [i for i, seq in enumerate(step.scheduled) if seq.seq_id not in step.gone]
            step.scheduled, step.counts = [step.scheduled[i] for i in kept], [step.counts[i] for i in kept]
            plan, left = live_part(plan, self.seqs)
            sampled = [sampled[index] for index in left]
        if self._observer is not None:
            self._observer.computed(computed_by(plan, self.config.window))
        self._compute(step)
        if self.config.window is not None:
            self._slide(step, self.config.window)
        tokens = _plain_tokens(sampled)
        outcome = Outcome(plan.sample_seq_ids, tokens, preempted=step.preempted, num_hit_tokens=step.num_hit_tokens)
        pairs = list(zip(plan.sample_seq_ids, sampled, strict=True)) if len(tokens) < len(sampled) else []
        if pairs:
            self._end_failed(pairs, outcome)
        if self._promised:
            self._fork_samples(step, outcome)
        if pairs:
            self._branch(pairs, outcome)
        self._append(outcome)
        self.pool.drop_holds(step.holds)
        if self._emit is not None:
            self._emit(Complete(step.step_id))
        return outcome

    def _compute(self, step: StepInFlight) -> None:
        """The scheduled tokens are computed; the blocks that they have filled can be found from now on (CACHE-6)."""
        block_size, filled = self.config.block_size, []
        for seq, count in zip(step.scheduled, step.counts, strict=True):
            seq.num_scheduled -= count
            seq.num_computed = computed = seq.num_computed + count
            if computed % block_size < count:
                filled.append((seq, (computed - count) // block_size))
        if self.cache is not None:
            for seq, first in filled:
                self.publish(seq, first)

    def publish(self, seq: LiveSeq, first: int) -> None:
        """The full blocks of a sequence from ``first`` on go into the prefix cache, which there must be."""
        cache, dropped, stop = (
            cast(PrefixCache, self.cache),
            seq.num_dropped_blocks,
            seq.num_computed // self.config.block_size,
        )
        # Without its parent nobody would find a block, and it may be gone since: a block with the same key held it.
        while first > dropped and cache.is_lost(seq.chain, first - 1):
            first -= 1
        published = cache.publish(seq.chain, seq.tokens, first, seq.table[first - dropped : stop - dropped])
        if self._emit is not None:
            for index in published:
                self._emit(Publish(seq.seq_id, index))

    def _slide(self, step: StepInFlight, window: int) -> None:
        """The blocks that no later token sees leave their tables, the last one first (TABLE-11).

        O(scheduled sequences + blocks that leave): a sequence pays for each of its blocks once.
        """
        for seq in step.scheduled:
            count = num_passed_blocks(seq.num_computed, window, self.config.block_size) - seq.num_dropped_blocks
            if count > 0:
                self._give_back(seq, seq.table[:count])
                seq.table = seq.table[count:]
                seq.num_dropped_blocks += count
                if self._emit is not None:
                    self._emit(Slide(seq.seq_id, count))

    def _end_failed(self, pairs: Sequence[tuple[SeqId, Sampled]], outcome: Outcome) -> None:
        """A request that has a sequence without a token ends, and only that one; the others' tokens are left."""
        failures = {seq_id: token for seq_id, token in pairs if isinstance(token, Failure)}
        for request in list(self.requests.values()):
            for seq_id in (*request.request.seq_ids, *(seq.seq_id for seq in request.seqs)):
                if seq_id in failures and self._is_known(seq_id):
                    outcome.failed.append((request.request.request_id, failures[seq_id]))
                    self._end_request(request)
        left = [(i, token) for i, token in pairs if not isinstance(token, Failure | Branches) and self._is_known(i)]
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

    def _branch(self, pairs: Sequence[tuple[SeqId, Sampled]], outcome: Outcome) -> None:
        """Sequences that go on in no way end, so that there are seats; then the others are forked as often as they must."""
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
        ended = []
        for seq, token in zip(map(self.seqs.__getitem__, outcome.seq_ids), outcome.tokens, strict=True):
            tokens = seq.tokens
            tokens.append(token)
            if len(tokens) >= seq.max_tokens or token in seq.stop:
                ended.append(seq)
        self.counters.num_tokens_sampled += len(outcome.tokens)
        if self._observer is not None:
            self._observer.appended(outcome.seq_ids, outcome.tokens)
        for seq in ended:
            reason = FinishReason.STOP if seq.tokens[-1] in seq.stop else FinishReason.LENGTH
            outcome.finished.append((seq.seq_id, reason))
            self._end_seq(seq)
            if self._emit is not None:
                self._emit(Finish(seq.seq_id, reason))
        if ended:
            self._forget_ended()


def _plain_tokens(sampled: Sequence[Sampled]) -> Sequence[Token]:
    """Those that are tokens: nearly always all of them, which one look at their types tells."""
    if _NO_TOKEN.isdisjoint(map(type, sampled)):
        return cast(Sequence[Token], sampled)
    return [token for token in sampled if not isinstance(token, Failure | Branches)]


_NO_TOKEN = {Failure, Branches}


def _service_order(request: LiveRequest) -> tuple[int, int]:
    return request.key
