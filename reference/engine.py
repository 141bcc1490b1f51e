"""The reference engine: requests go in, steps happen, tokens come out."""

from dataclasses import replace

from reference.device import TokenSourceDevice
from reference.door import check_fork, check_request, room_for_fork
from reference.plan import Device, Plan
from reference.pool import BlockPool
from reference.roster import Roster
from reference.scheduler import Scheduler
from spec.engine import (
    Admission,
    Capability,
    EvictionOrder,
    InvalidField,
    InvalidRequest,
    Observer,
    Profile,
    Publication,
    StepReport,
    TokenSource,
)
from spec.vocabulary import (
    Abort,
    Add,
    AdmissionRule,
    Config,
    Event,
    Fork,
    Read,
    Refuse,
    Release,
    Request,
    RequestId,
    Reset,
    SeqId,
    State,
    Write,
)

PROFILE = Profile(
    name="reference",
    capabilities=frozenset(
        {
            Capability.FORK,
            Capability.COPY_ON_WRITE,
            Capability.CHUNKED_PREFILL,
            Capability.PREEMPTION,
            Capability.SWAP,
            Capability.PREFIX_CACHE,
            Capability.PRIORITY,
            Capability.WINDOW,
            Capability.ABORT,
            Capability.OVERLAP,
            Capability.PARTIAL_PREFILLS,
            Capability.STATIC_BATCHES,
        }
    ),
    publication=Publication.AFTER_COMPUTE,
    eviction_order=EvictionOrder.LRU,
    admission_rules=tuple(AdmissionRule),
)

MOST_STEPS_IN_FLIGHT = 2
"""One step runs, and the next one is ready when it ends."""


class ReferenceEngine:
    """The scheduler, the block pool and whichever device runs the plans."""

    def __init__(self, config: Config, observer: Observer | None = None) -> None:
        self.config = config
        self.observer = observer
        self.pool = BlockPool(config)
        self.roster = Roster(config)
        self.scheduler = Scheduler(config, self.pool, self.roster, self._emit)
        self.plans: list[Plan] = []

    @property
    def profile(self) -> Profile:
        return PROFILE

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.roster.requests or self.plans)

    def check(self, request: Request) -> None:
        """Raise ``InvalidRequest`` if the request cannot be added."""
        check_request(self.config, self.roster, self.pool, request)

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ``InvalidRequest`` and changes nothing if it can never be served."""
        try:
            self.check(request)
        except InvalidRequest:
            self._refuse(Add(request))
            raise
        self.roster.add(request)
        self._emit(Add(request))
        self._settled()

    def fork(self, parent: SeqId, child: SeqId) -> Admission:
        """Split a running sequence; the child joins its request."""
        try:
            check_fork(self.roster, self.pool, parent, child)
        except InvalidRequest:
            self._refuse(Fork(parent, child))
            raise
        answer = room_for_fork(self.config, self.roster, self.pool, parent)
        if answer is not Admission.NOW:
            self._refuse(Fork(parent, child))
            return answer
        self.scheduler.fork(parent, child)
        self._settled()
        return answer

    def step(self, token_source: TokenSource) -> StepReport:
        """One step with tokens from the token source."""
        return self.step_on(TokenSourceDevice(token_source))

    def step_on(self, device: Device) -> StepReport:
        """One step on a device: schedule, run, commit. An idle engine reports nothing.

        Raises ``InvalidRequest`` while a step is in flight.
        """
        if self.plans:
            raise InvalidField("the number of steps in flight", len(self.plans), "0 when a step is made whole")
        preempted = self.begin_step().preempted
        return replace(self.end_step_on(device), preempted=preempted)

    def begin_step(self) -> StepReport:
        """Schedule and submit a step, if there is something to schedule. Raises ``InvalidRequest`` while two are in flight."""
        if len(self.plans) == MOST_STEPS_IN_FLIGHT:
            raise InvalidField("the number of steps in flight", len(self.plans), "below 2 when a step begins")
        report = StepReport()
        if self.scheduler.may_begin():
            plan, preempted = self.scheduler.schedule()
            self.plans.append(plan)
            report = StepReport(preempted=preempted)
        self._settled()
        return report

    def end_step(self, token_source: TokenSource) -> StepReport:
        """The end of the oldest step in flight, with tokens from the token source."""
        return self.end_step_on(TokenSourceDevice(token_source))

    def end_step_on(self, device: Device) -> StepReport:
        """Run the oldest step in flight, but for what is gone since, and commit it."""
        report = StepReport()
        if self.plans:
            plan = self.scheduler.live_part(self.plans[0])
            outcome = device.run(plan)
            for event in outcome.events:
                if isinstance(event, Write | Read):  # Copies and swaps were told when the tables changed.
                    self._emit(event)
            report = replace(self.scheduler.commit(plan, outcome.tokens), device=outcome.events)
            del self.plans[0]
        self._settled()
        return report

    def abort(self, request_id: RequestId) -> None:
        """Give a request up. An unknown or finished id is ignored. What a step in flight touches is free when that step
        ends (ALLOC-5)."""
        if request_id in self.roster.requests:
            for seq_id in self.roster.seqs_of(request_id):
                self.scheduler.remove(seq_id)
            self._emit(Abort(request_id))
        self._settled()

    def release(self, seq_id: SeqId) -> None:
        """End one sequence: its caller has enough of it. An unknown id is ignored. Raises ``InvalidRequest`` while the
        request's other samples are still to be forked."""
        if seq_id in self.roster.seqs:
            if self.roster.unborn(self.roster.seqs[seq_id].request_id):
                raise InvalidField("seq_id", seq_id, "a sequence with output")
            self.scheduler.remove(seq_id)
            self._emit(Release(seq_id))
        self._settled()

    def reset_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing changes, while a cached block is in use."""
        done = self.pool.reset()
        if done:
            self._emit(Reset())
            self._settled()
        else:
            self._refuse(Reset())
        return done

    def snapshot(self) -> State:
        """What the engine is in right now. The contents of the cache are left out."""
        return State(
            config=self.config,
            free=tuple(self.pool.free),
            ref_count=tuple(self.pool.ref_count),
            block_tables=dict(self.pool.tables),
            seqs=dict(self.roster.seqs),
            requests=dict(self.roster.requests),
            waiting=tuple(self.roster.waiting),
            running=tuple(self.roster.running),
            num_preemptions=dict(self.roster.num_preemptions),
            flights=dict(self.pool.flights),
            cached=dict(self.pool.cached),
            host_free=tuple(self.pool.host_free),
            host_tables=dict(self.pool.host_tables),
        )

    def _emit(self, event: Event) -> None:
        if self.observer is not None:
            self.observer.event(event)

    def _refuse(self, call: Add | Fork | Reset) -> None:
        self._emit(Refuse(call))
        self._settled()

    def _settled(self) -> None:
        if self.observer is not None:
            self.observer.settled(self.snapshot)


def make_engine(config: Config, observer: Observer | None = None) -> ReferenceEngine:
    """An empty engine with these limits."""
    return ReferenceEngine(config, observer)
