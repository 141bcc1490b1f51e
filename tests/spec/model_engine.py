"""The executable model as an engine: it decides as plainly as the rules allow, and does what the transitions say."""

from collections.abc import Iterable
from dataclasses import replace

from spec.attention import first_visible
from spec.block_table import budget_left, first_kept, num_tokens_ahead, room, share, slots_of
from spec.choices import EvictionOrder, Publication
from spec.engine import (
    Admission,
    Capability,
    InvalidRequest,
    Profile,
    StepReport,
    TokenSource,
    UnknownId,
)
from spec.prefix_cache import find, is_written, key_of, longest_hit, may_reset
from spec.replay import step
from spec.scheduler import (
    admission,
    ends,
    fits_alone,
    may_come_in,
    may_fork,
    seq_ids_in_use,
)
from spec.sharing import growth, must_copy
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
    Flight,
    Fork,
    Hit,
    Preempt,
    Publish,
    Read,
    Recovery,
    Request,
    RequestId,
    Reset,
    SeqId,
    Slide,
    State,
    StepId,
    Submit,
    SwapIn,
    SwapOut,
    Write,
    initial_state,
    seqs_of,
    service_order,
)

PROFILE = Profile(
    name="model",
    capabilities=frozenset(Capability) - {Capability.OVERLAP, Capability.ROLLBACK},
    eviction_order=EvictionOrder.LRU,
    admission_rules=tuple(AdmissionRule),
)


AT_SCHEDULE = replace(PROFILE, name="model at schedule", publication=Publication.AT_SCHEDULE, num_reserved_blocks=1)
"""Other choices: blocks are published before they are written, and one is kept for padding."""
AHEAD = replace(
    AT_SCHEDULE,
    name="model ahead",
    capabilities=frozenset(
        {
            Capability.ABORT,
            Capability.CHUNKED_PREFILL,
            Capability.OVERLAP,
            Capability.PREEMPTION,
            Capability.PREFIX_CACHE,
            Capability.PRIORITY,
        }
    ),
    publishes_equal_blocks=True,
    resets_idle_only=True,
    runs_in_admission_order=True,
    schedules_ahead=True,
)
"""What vLLM chooses, each of it."""


class ModelEngine:
    """An engine that is nothing but a state of the specification and the events that change it."""

    def __init__(self, config: Config, profile: Profile = PROFILE) -> None:
        self.profile = profile
        self.state = initial_state(config, profile.choices)
        self.done: list[Event] = []

    def add(self, request: Request) -> None:
        if not may_come_in(self.state, request):
            raise InvalidRequest(f"request {request.request_id} can never be served, or its ids are in use")
        self._do(Add(request))

    def fork(self, parent: SeqId, child: SeqId) -> Admission:
        if parent not in self.state.seqs:
            raise UnknownId("sequence", parent)
        seq = self.state.seqs[parent]
        if (
            child in seq_ids_in_use(self.state)
            or seq.request_id not in self.state.running
            or seq.num_output_tokens == 0
        ):
            raise InvalidRequest(f"sequence {parent} cannot be forked into {child}")
        num_seqs = len(tuple(seqs_of(self.state, seq.request_id))) + 1
        reserved = self.profile.num_reserved_blocks
        if not fits_alone(self.state.config, self.state.requests[seq.request_id], num_seqs, reserved):
            return Admission.NEVER
        if not may_fork(self.state, Fork(parent, child)):
            return Admission.LATER
        self._do(Fork(parent, child))
        return Admission.NOW

    def abort(self, request_id: RequestId) -> None:
        if request_id in self.state.requests:
            self._do(Abort(request_id))

    def reset_cache(self) -> bool:
        if not may_reset(self.state):
            return False
        self._do(Reset())
        return True

    def snapshot(self) -> State:
        """What an engine would know: everything but the contents."""
        return replace(self.state, cells={}, host_cells={})

    def step(self, token_source: TokenSource) -> StepReport:
        if self.state.flights:
            raise InvalidRequest("a step is in flight")
        self.done = []
        self._begin()
        self._end(token_source)
        return self._report()

    def begin_step(self) -> StepReport:
        if len(self.state.flights) == 2:
            raise InvalidRequest("two steps are in flight")
        self.done = []
        self._begin()
        return self._report()

    def end_step(self, token_source: TokenSource) -> StepReport:
        self.done = []
        self._end(token_source)
        return self._report()

    def _report(self) -> StepReport:
        return StepReport(
            device=tuple(e for e in self.done if isinstance(e, Write | Read | Copy | SwapOut | SwapIn)),
            emitted=tuple(e for e in self.done if isinstance(e, Append)),
            preempted=tuple(e for e in self.done if isinstance(e, Preempt)),
            finished=tuple(e for e in self.done if isinstance(e, Finish)),
        )

    def _begin(self) -> None:
        if not self.state.requests:
            return
        step_id = max(self.state.flights, default=0) + 1
        self._do(Begin(step_id))
        self._serve_running()
        self._serve_waiting()
        self._do(Submit(step_id))
        if not self.state.flights[step_id].scheduled:
            self._do(Complete(step_id))

    def _end(self, token_source: TokenSource) -> None:
        if self.state.flights:
            step_id = min(self.state.flights)
            for seq_id in tuple(self._served(step_id)):
                self._compute(seq_id, self.state.flights[step_id].scheduled[seq_id])
            self._sample(step_id, token_source)
            self._do(Complete(step_id))

    def _served(self, step_id: StepId) -> list[SeqId]:
        """Those that a step computes and that are still there."""
        return [i for i in self.state.flights[step_id].scheduled if i in self.state.seqs]

    def _do(self, event: Event) -> None:
        self.state = step(self.state, event)
        self.done.append(event)

    # Scheduling

    def _serve_running(self) -> None:
        for request_id in self.state.running:
            if request_id in self.state.running:
                self._serve(request_id)

    def _serve_waiting(self) -> None:
        while self.state.waiting and not self._open.preempting:
            head = self.state.waiting[0]
            if admission(self.state, head, self._budget()) is not Admission.NOW:
                return
            self._do(Admit(head))
            for seq_id in tuple(seqs_of(self.state, head)):
                if seq_id in self.state.host_tables:
                    self._do(SwapIn(seq_id, self._free(len(self.state.host_tables[seq_id]))))
            if not self._serve(head):
                return

    def _serve(self, request_id: RequestId) -> bool:
        """Room for all sequences of the request. False if it became a victim itself."""
        return all(self._make_room(seq_id) for seq_id in tuple(seqs_of(self.state, request_id)))

    def _make_room(self, seq_id: SeqId) -> bool:
        if self._budget() == 0 or room(self.state.seqs[seq_id]) == num_tokens_ahead(self.state, seq_id):
            return True
        while self._num_taken(seq_id) > len(self.state.free):
            victim = max(self.state.running, key=lambda i: service_order(self.state, i))
            self._preempt(victim)
            if victim == self.state.seqs[seq_id].request_id:
                return False
        if hits := self._hits(seq_id):
            self._do(Hit(seq_id, hits))
        if (shared := self._shared_tail(seq_id)) is not None:
            source = self.state.block_tables[seq_id][shared]
            self._do(Copy(seq_id, shared, source, self._free(1)[0]))
        num_tokens = self._num_next(seq_id)
        blocks = self._free(growth(self.state, seq_id, room(self.state.seqs[seq_id]) + num_tokens))
        self._do(Allocate(seq_id, num_tokens, blocks))
        if self.profile.publication is Publication.AT_SCHEDULE:
            self._publish(seq_id)
        return True

    def _num_taken(self, seq_id: SeqId) -> int:
        """The free blocks that the sequence takes: unused ones that it hits, a copy, new ones."""
        hits = self._hits(seq_id)
        after_hit = step(self.state, Hit(seq_id, hits)) if hits else self.state
        unused = sum(1 for block in hits if self.state.ref_count[block] == 0)
        there = room(after_hit.seqs[seq_id])
        num_tokens = min(num_tokens_ahead(after_hit, seq_id) - there, self._budget(), share(self.state.config))
        copies = 0 if self._shared_tail(seq_id) is None else 1
        return unused + copies + growth(after_hit, seq_id, there + num_tokens)

    def _num_next(self, seq_id: SeqId) -> int:
        missing = num_tokens_ahead(self.state, seq_id) - room(self.state.seqs[seq_id])
        return min(missing, self._budget(), share(self.state.config))

    def _hits(self, seq_id: SeqId) -> tuple[BlockId, ...]:
        is_new = not self.state.block_tables.get(seq_id) and self.state.seqs[seq_id].num_computed_tokens == 0
        if not self.state.config.prefix_cache or not is_new:
            return ()
        keys = (key_of(self.state, seq_id, index) for index in range(longest_hit(self.state, seq_id)))
        return tuple(block for key in keys if (block := find(self.state, key)) is not None)

    def _shared_tail(self, seq_id: SeqId) -> int | None:
        """The entry that the next token would write to, if it has to be copied first."""
        seq, size = self.state.seqs[seq_id], self.state.config.block_size
        index = room(seq) // size - seq.num_dropped_blocks
        table = self.state.block_tables[seq_id]
        return index if room(seq) % size and index < len(table) and must_copy(self.state, table[index]) else None

    def _preempt(self, request_id: RequestId) -> None:
        seq_ids = tuple(seqs_of(self.state, request_id))
        tables = {i: self.state.block_tables.get(i, ()) for i in seq_ids}
        fits = sum(map(len, tables.values())) <= len(self.state.host_free)
        planned = any(self.state.seqs[i].num_scheduled_tokens for i in seq_ids)
        if self.state.config.recovery is Recovery.SWAP and fits and not planned:
            for seq_id in filter(tables.get, seq_ids):
                self._do(SwapOut(seq_id, self.state.host_free[: len(tables[seq_id])]))
        self._unpublish(tables.values())
        self.done = [e for e in self.done if not (isinstance(e, Copy) and e.seq in seq_ids)]
        self._do(Preempt(request_id))

    def _budget(self) -> int:
        return budget_left(self.state, self._open)

    @property
    def _open(self) -> Flight:
        return self.state.flights[max(self.state.flights)]

    def _free(self, count: int) -> tuple[BlockId, ...]:
        """The next free blocks, those that have been free longest."""
        return self.state.free[:count]

    # The device, and what comes after it

    def _compute(self, seq_id: SeqId, num_tokens: int) -> None:
        seq, config = self.state.seqs[seq_id], self.state.config
        start, stop = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        self._do(Write(seq_id, start, slots_of(self.state, seq_id, start, stop)))
        first = max(first_kept(seq, config.block_size), first_visible(start, config.window))
        self._do(Read(seq_id, slots_of(self.state, seq_id, first, stop), first))

    def _sample(self, step_id: StepId, token_source: TokenSource) -> None:
        scheduled = self._served(step_id)
        complete = [i for i in scheduled if self.state.seqs[i].num_computed_tokens == self.state.seqs[i].num_tokens]
        for seq_id in scheduled:
            self._publish(seq_id)
            self._slide(seq_id)
        children = {i: self._unborn(i) for i in complete}
        for parent, unborn in children.items():
            for child in unborn:
                self._do(Fork(parent, child))
        for seq_id in [each for parent, unborn in children.items() for each in (parent, *unborn)] + self._owed(step_id):
            self._do(Append(seq_id, (token_source(seq_id, self.state.seqs[seq_id].tokens),)))
        for event in [e for e in self.done if isinstance(e, Append)]:
            if ends(self.state, event.seq):
                stops = self.state.requests[self.state.seqs[event.seq].request_id].stop_token_ids
                self._do(Finish(event.seq, FinishReason.STOP if event.tokens[0] in stops else FinishReason.LENGTH))

    def _owed(self, step_id: StepId) -> list[SeqId]:
        """Those that were preempted while the step computed the last token that they have."""
        stops, waiting = self.state.flights[step_id].stops, self.state.waiting
        gone = [i for i in stops if i not in self.state.flights[step_id].scheduled and i in self.state.seqs]
        return [
            i for i in gone if self.state.seqs[i].request_id in waiting and stops[i] == self.state.seqs[i].num_tokens
        ]

    def _unborn(self, seq_id: SeqId) -> tuple[SeqId, ...]:
        request = self.state.requests[self.state.seqs[seq_id].request_id]
        is_first = seq_id == request.seq_ids[0] and self.state.seqs[seq_id].num_output_tokens == 0
        return tuple(i for i in request.seq_ids if i not in self.state.seqs) if is_first else ()

    def _publish(self, seq_id: SeqId) -> None:
        seq = self.state.seqs[seq_id]
        num_tokens = min(room(seq), seq.num_tokens) if self.state.config.prefix_cache else 0
        full = num_tokens // self.state.config.block_size
        for index in range(seq.num_dropped_blocks, full):
            block = self.state.block_tables[seq_id][index - seq.num_dropped_blocks]
            is_new = find(self.state, key_of(self.state, seq_id, index)) is None
            if is_new or (self.profile.publishes_equal_blocks and block not in self.state.cached):
                self._do(Publish(seq_id, index))

    def _unpublish(self, tables: Iterable[tuple[BlockId, ...]]) -> None:
        """What will not be written after all can not be found any more (CACHE-1)."""
        for block in {block for table in tables for block in table if block in self.state.cached}:
            if not is_written(self.state, block) and block not in self._written_in_flight():
                self._do(Evict(block))

    def _written_in_flight(self) -> set[BlockId]:
        """The blocks that submitted steps are still to write: such a step comes to its end."""
        size, blocks = self.state.config.block_size, set[BlockId]()
        for i in self.state.block_tables:
            seq = self.state.seqs[i]
            slots = slots_of(self.state, i, seq.num_computed_tokens, room(seq) - self._open.scheduled.get(i, 0))
            blocks.update(at // size for at in slots)
        return blocks

    def _slide(self, seq_id: SeqId) -> None:
        seq, config = self.state.seqs[seq_id], self.state.config
        passed = first_visible(seq.num_computed_tokens, config.window) // config.block_size - seq.num_dropped_blocks
        if passed > 0:
            self._do(Slide(seq_id, passed))


def make_engine(config: Config) -> ModelEngine:
    """An empty engine with these limits."""
    return ModelEngine(config)


def make_engine_at_schedule(config: Config) -> ModelEngine:
    """One that publishes at the schedule and keeps a block for itself."""
    return ModelEngine(config, AT_SCHEDULE)


def make_engine_ahead(config: Config) -> ModelEngine:
    """One that schedules ahead as well."""
    return ModelEngine(config, AHEAD)
