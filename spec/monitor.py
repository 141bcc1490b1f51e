"""The monitor: follows a log with counters, and judges every rule that needs no more, fast.

For each kind of event a method looks at the few counters that the event touches. Where it sees nothing wrong it counts on;
where it is not sure it answers False, and then the rules themselves judge the step, by the states before and after it. So
a monitor reports what a replay reports, and what is rare is judged slowly.
"""

from bisect import insort
from collections.abc import Callable, Mapping, Sequence

from spec.attention import first_visible
from spec.batches import Computed
from spec.choices import USUAL_CHOICES, Choices, Publication
from spec.excerpt import concerned
from spec.mirror import LiveSeq, LiveStep, Mirror, slots_of_table
from spec.replay import observe, step
from spec.rules import RuleViolation, broken_rules
from spec.scheduler import fits_alone, is_servable
from spec.uncounted import UNCOUNTED
from spec.vocabulary import (
    Abort,
    Add,
    AdmissionRule,
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
    FinishReason,
    Fork,
    Hit,
    Observe,
    Preempt,
    Publish,
    Read,
    Recovery,
    Refuse,
    Release,
    Request,
    RequestId,
    Sample,
    SeqId,
    Slide,
    Slot,
    Start,
    State,
    StepId,
    Submit,
    Token,
    Write,
    initial_state,
    replace,
)


class Monitor(Mirror):
    """Follows an engine, as its observer, or a log. Raises ``RuleViolation`` at the first event that breaks a rule."""

    def __init__(self, config: Config, engine: str = "model", choices: Choices = USUAL_CHOICES) -> None:
        super().__init__(initial_state(config, choices))
        self.engine = engine
        self.num_events = 0  # that were judged, the one that broke a rule included
        self._same: dict[SeqId, tuple[tuple[BlockId, ...], tuple[BlockId, ...]]] = {}
        self._slots: dict[SeqId, tuple[tuple[BlockId, ...], list[Slot]]] = {}

    def load(self, s: State) -> None:
        """Be this state. What an engine that schedules ahead may do, the rules know and the counters do not."""
        super().load(s)
        self.judges_all = s.choices.schedules_ahead

    def event(self, event: Event) -> None:
        self.num_events += 1
        method = METHODS.get(type(event))
        if method is None or self.judges_all or not method(self, **vars(event)):
            self.judge(event)

    def copy(self) -> "Monitor":
        """One that goes on from here on its own. O(pool)."""
        other = Monitor(self.config, self.engine, self.choices)
        other.load(self.state())
        return other

    def settled(self, snapshot: Callable[[], State]) -> None:
        """Nothing: what an engine shows is judged by ``shown``."""

    def shown(self, snapshot: State) -> None:
        """What the engine shows is where its events have led. O(pool)."""
        expected = self.state()
        self._raise_broken(expected, Observe(), observe(expected, snapshot))

    def allocated(self, seqs: Sequence[SeqId]) -> None:
        """Room for a token for each of these sequences, none of which needed a block."""
        for seq in seqs:
            self.num_events += 1
            if self.judges_all or not self._allocate(seq, 1, ()):
                self.judge(Allocate(seq, 1, ()))

    def computed(self, step: Computed) -> None:
        """The writes of a step, and then its reads."""
        starts, slots = step.query_start, step.slots
        for i, seq in enumerate(step.seqs):
            self.num_events += 1
            if self.judges_all or not self._write(seq, step.starts[i], slots[starts[i] : starts[i + 1]]):
                self.judge(step.write(i))
        for i, seq in enumerate(step.seqs):
            self.num_events += 1
            places = step.tables[seq], step.num_dropped(i), step.read_start(i), step.seq_lens[i]
            if self.judges_all or not self._read_table(seq, *places):
                self.judge(step.read(i, self.config.block_size))

    def appended(self, seqs: Sequence[SeqId], tokens: Sequence[Token]) -> None:
        """A token for each of these sequences."""
        for seq, token in zip(seqs, tokens, strict=True):
            self.num_events += 1
            if self.judges_all or not self._append(seq, (token,)):
                self.judge(Append(seq, (token,)))

    def judge(self, event: Event) -> None:
        """The rules themselves, which know. O(pool)."""
        before = self.state()
        if isinstance(event, Evict):  # CACHE-9 asks whether the block is written
            before = replace(before, cells=dict.fromkeys(self.written(), ()))
        after = step(before, event)
        self._raise_broken(before, event, after)
        self.load(after)

    def _raise_broken(self, before: State, event: Event, after: State) -> None:
        # Then nobody is preempted: it may take its time.
        promised = self.config.admission_rule is AdmissionRule.NO_EVICT
        for rule in broken_rules(before, event, after):
            if rule.id not in UNCOUNTED or (promised and rule.id == "PREEMPT-5"):
                before, after = concerned(before, event, after)
                raise RuleViolation(rule, before, event, after, engine=self.engine)

    # One method for each kind of event, in its fields. True: counted on, and no rule is broken. False: nothing changed.

    def _add(self, request: Request) -> bool:
        new = request.request_id not in self.requests and self.seqs.keys().isdisjoint(request.seq_ids)
        if not (new and is_servable(self.config, request, self.choices.num_reserved_blocks)) or any(
            map(self.is_promised, request.seq_ids)
        ):
            return False
        if request.request_id in self.seqs_of:  # a pool's own sequence has this number
            return False
        self.add(request)
        return True

    def _admit(self, request_id: RequestId) -> bool:
        if self.waiting[:1] != [request_id] or self.choices.runs_in_admission_order or self.is_preempting:
            return False
        seqs = self.seqs_of[request_id]
        if self.num_running + len(seqs) > self.config.max_num_seqs:
            return False
        del self.waiting[0]
        insort(self.running, request_id, key=self.arrivals.__getitem__)
        self.num_running += len(seqs)
        for seq in seqs:
            if seq not in self.host_tables:
                self.tables.setdefault(seq, ())
        return True

    def _preempt(self, request_id: RequestId) -> bool:
        if self.running[-1:] != [request_id] or self.overlaps() or self.config.admission_rule is AdmissionRule.NO_EVICT:
            return False
        if self.choices.runs_in_admission_order or self.config.recovery is Recovery.SWAP:
            return False
        for seq in self.seqs_of[request_id]:
            self.give_back(reversed(self.tables.pop(seq, ())))
            self.unschedule(seq)
            q = self.seqs[seq]
            q.scheduled = 0
            if seq not in self.host_tables:
                q.computed = q.dropped = 0
        for live in self.steps.values():
            live.preempting |= not live.submitted
        self.running.pop()
        self.num_running -= len(self.seqs_of[request_id])
        insort(self.waiting, request_id, key=self.arrivals.__getitem__)
        self.num_preemptions[request_id] = self.num_preemptions.get(request_id, 0) + 1
        return True

    def _abort(self, request_id: RequestId) -> bool:
        if request_id not in self.requests:
            return False
        seqs = self.seqs_of[request_id]
        if not self.host_tables.keys().isdisjoint(seqs):
            return False
        for seq in tuple(seqs):
            self.forget(seq)
        return True

    def _begin(self, step_id: StepId) -> bool:
        if step_id in self.steps:
            return False
        self.steps[step_id] = LiveStep(self.config.max_num_batched_tokens)
        self.find_open()
        return True

    def _submit(self, step_id: StepId, readers: Sequence[SeqId]) -> bool:
        live = self.steps.get(step_id)
        if live is None or live.submitted:
            return False
        if self.requests and not any(step.scheduled or step.stops for step in self.steps.values()):
            return False
        if self.choices.publication is Publication.AT_SCHEDULE:
            return False
        if any(self.is_behind(i, live) for i in self.running) if live.budget else not self.serves_in_order(live):
            return False
        live.submitted = True
        live.tables = [self.tables.get(seq, ()) for seq in (*live.scheduled, *readers)]
        live.held_at_submit, live.known = tuple(live.holds), None
        self.find_open()
        return True

    def _complete(self, step_id: StepId) -> bool:
        live = self.steps.get(step_id)
        if live is None or self.at_end:
            return False
        for seq, count in live.scheduled.items():
            q = self.seqs.get(seq)
            if q is not None and not (seq in live.readers and self._is_done(q, count)):
                return False
        del self.steps[step_id]
        self.find_open()
        for block in (*live.holds[live.num_copies :], *live.holds[: live.num_copies]):
            self.num_holds[block] -= 1
            self.give_back((block,))
        self.forget_prefixes()
        return True

    def _is_done(self, q: LiveSeq, count: int) -> bool:
        """Whether a step has computed the last ``count`` tokens of a sequence and left what it must leave."""
        size, window, computed = self.config.block_size, self.config.window, q.computed
        if q.scheduled or computed >= len(q.tokens):
            return False
        if window is not None and (q.dropped + 1) * size <= computed - window + 1:
            return False
        if self.config.prefix_cache and computed % size < count:
            filled = range((computed - count) // size, computed // size)
            return all(self.node(q, index) in self.block_of for index in filled)
        return True

    def _start(self, seq: SeqId, tokens: Sequence[Token]) -> bool:
        if seq in self.seqs or seq in self.requests or seq in self.seqs_of:
            return False
        self.seqs[seq] = LiveSeq(seq, list(tokens), len(tokens))
        self.seqs_of[seq] = [seq]
        self.tables[seq] = ()
        return True

    def _allocate(self, seq: SeqId, num_tokens: int, blocks: Sequence[BlockId]) -> bool:
        q, table, size = self.seqs.get(seq), self.tables.get(seq), self.config.block_size
        if q is None or table is None or seq in self.host_tables:
            return False
        room = q.computed + q.scheduled
        if not 0 < num_tokens <= len(q.tokens) - room:  # it runs: no other has a table
            return False
        if (len(table) + len(blocks) + q.dropped) * size - num_tokens - room not in range(size):
            return False
        if blocks:
            if not self.free.keys() >= set(blocks) or len(set(blocks)) < len(blocks) or not self.evicts(blocks):
                return False
            if self.config.prefix_cache and not table and q.computed == 0 and self._could_hit(q, 0):
                return False
        if (live := self.open) is not None:
            if live.budget < num_tokens or self.share < live.scheduled.get(seq, 0) + num_tokens:
                return False
            live.budget -= num_tokens
            live.scheduled[seq] = live.scheduled.get(seq, 0) + num_tokens
        if blocks:
            self.take(blocks)
            self.tables[seq] = (*table, *blocks)
        q.scheduled += num_tokens
        return True

    def _could_hit(self, q: LiveSeq, index: int) -> bool:
        """Whether full block ``index``, which is not the last token's, is cached."""
        return index < (len(q.tokens) - 1) // self.config.block_size and self.node(q, index) in self.block_of

    def _hit(self, seq: SeqId, blocks: Sequence[BlockId]) -> bool:
        q, size, count = self.seqs.get(seq), self.config.block_size, len(blocks)
        if q is None or self.tables.get(seq) != () or seq in self.host_tables or q.scheduled or q.dropped:
            return False
        if count * size >= len(q.tokens) or self._could_hit(q, count):
            return False
        if any(self.cached.get(block) != self.node(q, index) for index, block in enumerate(blocks)):
            return False
        for block in blocks:
            self.free.pop(block, None)
            self.ref_count[block] += 1
        q.computed = count * size
        self.tables[seq] = tuple(blocks)
        return True

    def _copy(self, seq: SeqId, index: int, source: BlockId, target: BlockId) -> bool:
        table, size = self.tables.get(seq), self.config.block_size
        if seq not in self.seqs or table is None or not 0 <= index < len(table) or table[index] != source:
            return False
        if target not in self.free or not self.must_copy(source) or not self.evicts((target,)):
            return False
        written = self.steps[max(self.steps)].written if self.steps else ()
        if any(at // size in (source, target) for at in written):
            return False
        self.take((target,))
        self.tables[seq] = (*table[:index], target, *table[index + 1 :])
        if self.open is None:
            self.give_back((source,))
        else:
            self.hold(self.open, source)
            self.open.num_copies += 1
        return True

    def _write(self, seq: SeqId, start: int, slots: Sequence[Slot]) -> bool:
        q, table, size, count = self.seqs.get(seq), self.tables.get(seq), self.config.block_size, len(slots)
        if q is None or table is None or start != q.computed or not 0 < count <= q.scheduled:
            return False
        first, last = start // size - q.dropped, (start + count - 1) // size - q.dropped
        if count == 1 and slots[0] != table[first] * size + start % size:
            return False
        if count > 1 and list(slots) != slots_of_table(table, start - q.dropped * size, count, size):
            return False
        for block in table[first : last + 1]:
            if self.ref_count[block] != 1 and self.num_entries(block) != 1 or block in self.cached:
                return False
        live = self.step_of(seq)
        if live is not None:
            if not live.written.isdisjoint(slots):
                return False
            live.written.update(slots)
        q.computed += count
        q.scheduled -= count
        return True

    def _read(self, seq: SeqId, slots: Sequence[Slot], start: int) -> bool:
        q, table, size = self.seqs.get(seq), self.tables.get(seq), self.config.block_size
        if q is None or table is None or not self._reads(seq, q, start, len(slots)):
            return False
        known, first = self._slots.get(seq), start - q.dropped * size
        if known is None or known[0] is not table:
            known = self._slots[seq] = (table, slots_of_table(table, 0, len(table) * size, size))
        if first >= 0 and [*slots] == known[1][first : first + len(slots)]:
            return True
        return {at // size for at in slots} <= set(table)

    def _read_table(self, seq: SeqId, table: tuple[BlockId, ...], dropped: int, start: int, stop: int) -> bool:
        q, mine = self.seqs.get(seq), self.tables.get(seq)
        if q is None or mine is None or q.dropped != dropped or not self._reads(seq, q, start, stop - start):
            return False
        same = self._same.get(seq)
        if same is None or same[0] is not table or same[1] is not mine:
            if table != mine:
                return False
            self._same[seq] = (table, mine)
        return True

    def _reads(self, seq: SeqId, q: LiveSeq, start: int, count: int) -> bool:
        """Whether the sequence reads what it must; its step knows then that it does."""
        live = self.step_of(seq)
        scheduled = 1 if live is None else live.scheduled[seq]
        if start + count != q.computed or start != first_visible(q.computed - scheduled, self.config.window):
            return False
        if live is not None:
            live.readers.add(seq)
        return True

    def _sample(self, seq: SeqId, prefix: Sequence[Token], token: Token) -> bool:
        q = self.seqs.get(seq)
        if q is None or q.tokens != list(prefix):
            return False
        self.drawn = {} if self.drawn is None else self.drawn
        self.drawn[seq] = token
        return True

    def _append(self, seq: SeqId, tokens: Sequence[Token]) -> bool:
        q = self.seqs.get(seq)
        if q is None or not tokens:
            return False
        request = self.requests.get(q.request_id)
        if request is not None:
            if q.computed != len(q.tokens):
                return False
            if len(q.tokens) == q.num_prompt and not self.seqs.keys() >= set(request.seq_ids):
                return False
            if self.drawn is not None and list(tokens) != [self.drawn.get(seq)]:
                return False
        if self.drawn is not None:
            self.drawn.pop(seq, None)
        q.tokens += tokens
        if self.ends(q):
            self.at_end.add(seq)
        return True

    def _fork(self, parent: SeqId, child: SeqId) -> bool:
        q, table = self.seqs.get(parent), self.tables.get(parent)
        if q is None or table is None or child in self.seqs:
            return False
        request = self.requests.get(q.request_id)
        own = request is not None and child in request.seq_ids
        if not own and self.is_promised(child):
            return False
        if request is not None:
            unborn = own and self.num_unborn(request) > 0
            mine, seats = self.num_seats(q.request_id) + (not unborn), sum(map(self.num_seats, self.running))
            if self.config.admission_rule is AdmissionRule.NO_EVICT:
                return False
            fits = fits_alone(self.config, request, mine, self.choices.num_reserved_blocks)
            if seats + (not unborn) > self.config.max_num_seqs or not fits:
                return False
            self.num_running += 1
        for block in table:
            self.ref_count[block] += 1
        self.seqs[child] = LiveSeq(
            q.request_id, q.tokens[:], q.num_prompt, q.computed, q.scheduled, q.dropped, q.chain[:]
        )
        self.seqs_of[q.request_id].append(child)
        self.tables[child] = table
        if parent in self.at_end:
            self.at_end.add(child)
        return True

    def _slide(self, seq: SeqId, num_blocks: int) -> bool:
        q, table, size, window = self.seqs.get(seq), self.tables.get(seq), self.config.block_size, self.config.window
        if q is None or table is None or window is None or not 0 < num_blocks < len(table):
            return False
        if (q.dropped + num_blocks) * size > q.computed - window + 1:
            return False
        q.dropped += num_blocks
        self.tables[seq] = table[num_blocks:]
        self.give_back(reversed(table[:num_blocks]))
        return True

    def _release(self, seq: SeqId) -> bool:
        if seq not in self.seqs or seq in self.host_tables:
            return False
        self.forget(seq)
        self._same.pop(seq, None)
        self._slots.pop(seq, None)
        return True

    def _finish(self, seq: SeqId, reason: FinishReason) -> bool:
        q = self.seqs.get(seq)
        request = None if q is None else self.requests.get(q.request_id)
        if q is None or request is None or seq not in self.at_end:
            return False
        stopped = len(q.tokens) > q.num_prompt and q.tokens[-1] in request.stop_token_ids
        return reason is (FinishReason.STOP if stopped else FinishReason.LENGTH) and self._release(seq)

    def _publish(self, seq: SeqId, index: int) -> bool:
        q, table, size = self.seqs.get(seq), self.tables.get(seq), self.config.block_size
        if q is None or table is None or not 0 <= index - q.dropped < len(table) or (index + 1) * size > q.computed:
            return False
        block, node = table[index - q.dropped], self.node(q, index)
        if node in self.block_of or block in self.cached:
            return False
        self.cached[block], self.block_of[node] = node, block
        return True

    def _evict(self, block: BlockId) -> bool:
        if block not in self.cached or self.ref_count[block]:
            return False
        self.uncache(block)
        return True

    def _refuse(self, call: Event) -> bool:
        reserved = self.choices.num_reserved_blocks
        return isinstance(call, Add) and not is_servable(self.config, call.request, reserved)


METHODS: Mapping[type, Callable[..., bool]] = {
    Add: Monitor._add,
    Admit: Monitor._admit,
    Preempt: Monitor._preempt,
    Abort: Monitor._abort,
    Begin: Monitor._begin,
    Submit: Monitor._submit,
    Complete: Monitor._complete,
    Start: Monitor._start,
    Allocate: Monitor._allocate,
    Hit: Monitor._hit,
    Copy: Monitor._copy,
    Write: Monitor._write,
    Read: Monitor._read,
    Sample: Monitor._sample,
    Append: Monitor._append,
    Fork: Monitor._fork,
    Slide: Monitor._slide,
    Release: Monitor._release,
    Finish: Monitor._finish,
    Publish: Monitor._publish,
    Evict: Monitor._evict,
    Refuse: Monitor._refuse,
    Observe: lambda monitor: True,
}
"""How a monitor counts each kind of event; the others are judged by the rules at once."""
