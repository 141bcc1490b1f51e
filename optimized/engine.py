"""The engine core: a step as three calls with plain values between them, and the adapter by which it is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

from optimized.device import Device, Sampled
from optimized.kv_events import KvEvent, KvEvents
from optimized.one_by_one import in_batches
from optimized.plan import Plan, live_part
from optimized.scheduler import Scheduler
from optimized.snapshot import snapshot_of
from optimized.step import Outcome
from optimized.symbolic_device import SymbolicDevice
from spec.engine import (
    Admission,
    Capability,
    EvictionOrder,
    InvalidField,
    Observer,
    Profile,
    StepReport,
    TokenSource,
)
from spec.vocabulary import (
    Add,
    AdmissionRule,
    Append,
    Config,
    Finish,
    Fork,
    Preempt,
    Prefix,
    Refuse,
    Request,
    RequestId,
    Reset,
    SeqId,
    State,
)

T = TypeVar("T")

MOST_STEPS_IN_FLIGHT = 2
"""One step is on the device, and the next one is ready when it ends."""


class EngineCore:
    """Scheduler and device, without I/O, threads or a clock. An observer costs nothing when there is none."""

    def __init__(self, config: Config, device: Device, observer: Observer | None = None, model: str = "") -> None:
        self.config = config
        self.device = device
        batches = in_batches(observer, config.block_size) if observer is not None else None
        self.scheduler = Scheduler(config, batches, model)
        self._observer = observer

    @property
    def has_work(self) -> bool:
        """Whether a live request waits or runs."""
        return bool(self.scheduler.requests)

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ``InvalidRequest`` and changes nothing if it can never be served."""
        self._settle(lambda: self.scheduler.add(request), Add(request))

    def fork(self, parent: SeqId, child: SeqId) -> Admission:
        """Split a running sequence that is in no step."""
        return self._settle(lambda: self.scheduler.fork(parent, child), Fork(parent, child))

    def abort(self, request_id: RequestId) -> None:
        """Give a request up, at any time."""
        self._settle(lambda: self.scheduler.abort(request_id))

    def release(self, seq_id: SeqId) -> None:
        """End one sequence, between two steps."""
        self._settle(lambda: self.scheduler.release(seq_id))

    def reset_cache(self) -> bool:
        """Empty the prefix cache, if no block of it is in use."""
        return self._settle(self.scheduler.reset_cache, Reset())

    def tell_kv_events(self, tell: Callable[[KvEvent], None]) -> None:
        """From now on the caller hears what is stored in the prefix cache, removed, and cleared. Without a cache, nothing."""
        if self.scheduler.cache is not None:
            self.scheduler.cache.listener = KvEvents(tell, self.config.block_size, self.config.window)

    def schedule(self) -> Plan:
        """The first third of a step: what to compute. An earlier one may still be on the device."""
        return self._settle(self.scheduler.schedule)

    def commit(self, plan: Plan, sampled: Sequence[Sampled]) -> Outcome:
        """The last third of a step: what became of it. Raises ``RuntimeError`` unless it is the oldest one in flight."""
        if plan.step_id != next(iter(self.scheduler.flights), None):
            raise RuntimeError(f"step {plan.step_id} is not the oldest one in flight")
        return self._settle(lambda: self.scheduler.commit(plan, sampled))

    def step(self) -> Outcome:
        """Schedule, run and commit. An idle engine does nothing. Raises ``InvalidRequest`` while a step is in flight."""
        if self.scheduler.flights:
            raise InvalidField(
                "the number of steps in flight", len(self.scheduler.flights), "0 when a step is made whole"
            )
        if not self.has_work:
            return Outcome()
        plan = self.schedule()
        return self.commit(plan, self.device.run(plan))

    def begin_step(self) -> Plan | None:
        """Schedule a step if it would compute something. Raises ``InvalidRequest`` while two are in flight."""
        if len(self.scheduler.flights) == MOST_STEPS_IN_FLIGHT:
            raise InvalidField("the number of steps in flight", MOST_STEPS_IN_FLIGHT, "below 2 when a step begins")
        return self._settle(lambda: self.scheduler.schedule() if self.scheduler.may_schedule() else None)

    def end_step(self) -> Outcome | None:
        """Run and commit the oldest step in flight, if there is one."""
        plan = self.oldest_plan()
        return None if plan is None else self._settle(lambda: self.scheduler.commit(plan, self.device.run(plan)))

    def oldest_plan(self) -> Plan | None:
        """What the oldest step in flight computes for those who are still there."""
        step = next(iter(self.scheduler.flights.values()), None)
        if step is None:
            return None
        return live_part(step.plan, self.scheduler.seqs)[0] if step.is_torn else step.plan

    def next_plan(self, overlaps: bool = False) -> Plan | None:
        """What the step computes that ends next; None if there is nothing to compute. Where steps overlap, the one after it
        is scheduled by then."""
        if not overlaps:
            return self.schedule() if self.has_work else None
        while len(self.scheduler.flights) < MOST_STEPS_IN_FLIGHT and self.begin_step() is not None:
            pass
        return self.oldest_plan()

    def end_idle_steps(self) -> None:
        """Nobody is there any more for whom a step in flight would compute something: what it holds is free."""
        while not self.has_work and (plan := self.oldest_plan()) is not None:
            self.commit(plan, [])

    def stats(self) -> dict[str, int]:
        """Counts since the start, and what is in use now. O(1)."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return {
            **asdict(scheduler.counters),
            "num_waiting": len(scheduler.waiting),
            "num_running": len(scheduler.running),
            "num_free_blocks": pool.num_free,
            "num_shared_blocks": pool.num_shared,
            "peak_shared_blocks": pool.peak_shared,
            "num_cached_blocks": 0 if scheduler.cache is None else scheduler.cache.num_cached,
        }

    def snapshot(self) -> State:
        """What the engine is in right now."""
        return snapshot_of(self.scheduler)

    def _settle(self, call: Callable[[], T], asked: Add | Fork | Reset | None = None) -> T:
        """A public call: the observer hears that it is over, and before that if what was asked is refused."""
        observer = self._observer
        if observer is None:
            return call()
        refused = True
        try:
            result = call()
            refused = result is Admission.LATER or result is Admission.NEVER or result is False
            return result
        finally:
            if refused and asked is not None:
                observer.event(Refuse(asked))
            observer.settled(self.snapshot)


CAPABILITIES = frozenset(
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
)


class SymbolicEngine:
    """The engine core with a device that computes prefixes: an ``Engine`` of the specification."""

    profile = Profile("optimized", CAPABILITIES, eviction_order=EvictionOrder.LRU, admission_rules=tuple(AdmissionRule))

    def __init__(self, config: Config, observer: Observer | None = None) -> None:
        self.device = SymbolicDevice(config.block_size, lambda seq_id, prefix: 0, config.window, self._prefix_of)
        self.core = EngineCore(config, self.device, observer)

    def _prefix_of(self, seq_id: SeqId, num_tokens: int) -> Prefix:
        return tuple(self.core.scheduler.seqs[seq_id].tokens[:num_tokens])

    def add(self, request: Request) -> None:
        self.core.add(request)

    def fork(self, parent: SeqId, child: SeqId) -> Admission:
        return self.core.fork(parent, child)

    def step(self, token_source: TokenSource) -> StepReport:
        self.device.token_source = token_source
        self.device.events = ()
        return self._report(self.core.step())

    def begin_step(self) -> StepReport:
        plan = self.core.begin_step()
        return StepReport(preempted=tuple(Preempt(request_id) for request_id in plan.preempted) if plan else ())

    def end_step(self, token_source: TokenSource) -> StepReport:
        self.device.token_source = token_source
        outcome = self.core.end_step()
        return StepReport() if outcome is None else replace(self._report(outcome), preempted=())

    def _report(self, outcome: Outcome) -> StepReport:
        return StepReport(
            device=self.device.events,
            emitted=tuple(Append(i, (token,)) for i, token in zip(outcome.seq_ids, outcome.tokens, strict=True)),
            preempted=tuple(Preempt(request_id) for request_id in outcome.preempted),
            finished=tuple(Finish(seq_id, reason) for seq_id, reason in outcome.finished),
        )

    def abort(self, request_id: RequestId) -> None:
        self.core.abort(request_id)

    def reset_cache(self) -> bool:
        return self.core.reset_cache()

    def snapshot(self) -> State:
        return self.core.snapshot()


def make_engine(config: Config, observer: Observer | None = None) -> SymbolicEngine:
    """The engine that the specification judges: our scheduler and pool, and prefixes instead of K and V."""
    return SymbolicEngine(config, observer)
