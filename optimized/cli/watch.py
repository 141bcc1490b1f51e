"""Who watches the engine of a command: the rules, a log, both, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from optimized.block_residency import BlockResidency
    from optimized.checkpoint import Checkpoint
    from optimized.cli.last_events import Violations
    from optimized.cli.lossy_trace import LossyTraces, Uncaught
    from optimized.model_core import EngineArgs, MakeObserver, TorchCore
    from spec.batches import Computed
    from spec.choices import Choices
    from spec.conformance.judge import Follower
    from spec.engine import Observer
    from spec.trace import Writer
    from spec.vocabulary import Config, Event, SeqId, State, Token


class SelfCheck(Enum):
    """How an engine is judged while it works."""

    OFF = "off"
    SAMPLED = "sampled"
    EVERY_STEP = "every-step"


CALLS_A_LOOK = 64
"""A sampled self-check looks at the whole engine after so many calls, and while there were fewer, after the first, the
second, the fourth, and so on. A step is two calls."""

_EARLY = {1 << n for n in range(6)}


class Watch:
    """Makes the observer of an engine, and closes what it opened."""

    def __init__(
        self,
        engine: str,
        self_check: SelfCheck,
        trace: Path | None,
        kv_events: Path | None = None,
        residency: BlockResidency | None = None,
        traces: LossyTraces | None = None,
        violations: Violations | None = None,
    ) -> None:
        """A ``trace`` that can not be written ends the engine, unless it is one of ``traces``. Without one, the events that led
        to a broken rule are among ``violations``."""
        self.engine = engine
        self.self_check = self_check
        self.trace = trace
        self.kv_events = kv_events
        self.residency = residency
        self.traces = traces
        self.violations = violations
        self._writer: Writer | Uncaught | None = None
        self._num_made = 0
        self._judge: Sampled | Follower | None = None
        self._num_judged_before = 0
        self._kv_log: TextIO | None = None

    @property
    def num_judged(self) -> int:
        """How many events were judged, of all engines."""
        return self._num_judged_before + (0 if self._judge is None else self._judge.num_judged)

    @property
    def is_wanted(self) -> bool:
        return self.self_check is not SelfCheck.OFF or self.trace is not None or self.residency is not None

    def make_observer(self, config: Config) -> Observer:
        """The observer of an engine with these limits. The log comes first: it must hold what breaks a rule."""
        observers: list[Observer] = []
        choices = _choices_of(self.engine)
        if self.trace is not None:
            from spec.trace import Writer

            # An engine that is made anew after a broken rule must not write over what led there.
            self._num_made += 1
            path = self.trace if self._num_made == 1 else self.trace.with_name(f"{self.trace.name}.{self._num_made}")
            if self._writer is not None:
                self._writer.close()
            if self.traces is None:
                self._writer = Writer(path, config, self.engine, choices)
            else:
                is_first = self._num_made == 1
                self._writer = self.traces.begin(path, config, self.engine, choices, is_first=is_first)
            observers.append(self._writer)
        self._num_judged_before, self._judge = self.num_judged, None
        if self.self_check is SelfCheck.SAMPLED:
            self._judge = Sampled(config, self.engine, choices)
        elif self.self_check is SelfCheck.EVERY_STEP:
            from spec.conformance.judge import Follower

            self._judge = Follower(config, self.engine, choices)
        if self._judge is not None:
            observers.append(self._judge if self.trace is not None else self._kept(config, choices, self._judge))
        if self.residency is not None:
            observers.append(self.residency.observer(config))
        return observers[0] if len(observers) == 1 else Several(config.block_size, observers)

    def _kept(self, config: Config, choices: Choices, judge: Observer) -> Observer:
        """The judge, by whom the last events are written if he finds that a rule is broken: there is no trace."""
        if self.violations is None:
            from optimized.cli.last_events import Violations

            self.violations = Violations()
        return self.violations.begin(config, self.engine, choices, judge)

    def make_core(
        self, checkpoint: Checkpoint, args: EngineArgs, make_observer: MakeObserver | None = None
    ) -> TorchCore:
        """An engine whose prefix cache writes its KV events down."""
        from optimized.kv_events import write_kv_events
        from optimized.model_core import TorchCore

        core = TorchCore(checkpoint, args, make_observer)
        if self.kv_events is not None:
            self._kv_log = self.kv_events.open("w", encoding="utf-8")
            core.core.tell_kv_events(write_kv_events(self._kv_log))
        return core

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._kv_log is not None:
            self._kv_log.close()


def _choices_of(engine: str) -> Choices:
    """What the engine's profile declares."""
    if engine == "reference":
        from reference.engine import PROFILE

        return PROFILE.choices
    from optimized.engine import SymbolicEngine

    return SymbolicEngine.profile.choices


class Sampled:
    """Judges every event by counters, and now and then what the engine shows. Raises ``RuleViolation``."""

    def __init__(self, config: Config, engine: str, choices: Choices) -> None:
        from spec.monitor import Monitor

        self._monitor = monitor = Monitor(config, engine, choices)
        self._num_calls = 0
        self.event = monitor.event
        self.allocated, self.computed, self.appended = monitor.allocated, monitor.computed, monitor.appended

    @property
    def num_judged(self) -> int:
        """How many events there were."""
        return self._monitor.num_events

    def settled(self, snapshot: Callable[[], State]) -> None:
        self._num_calls += 1
        if self._num_calls % CALLS_A_LOOK == 0 or self._num_calls in _EARLY:
            self._monitor.shown(snapshot())


class Several:
    """Passes what an engine does on to several observers, to each as it takes it."""

    def __init__(self, block_size: int, observers: Sequence[Observer]) -> None:
        from optimized.one_by_one import in_batches

        self._observers = [in_batches(observer, block_size) for observer in observers]

    def event(self, event: Event) -> None:
        for observer in self._observers:
            observer.event(event)

    def allocated(self, seqs: Sequence[SeqId]) -> None:
        for observer in self._observers:
            observer.allocated(seqs)

    def computed(self, step: Computed) -> None:
        for observer in self._observers:
            observer.computed(step)

    def appended(self, seqs: Sequence[SeqId], tokens: Sequence[Token]) -> None:
        for observer in self._observers:
            observer.appended(seqs, tokens)

    def settled(self, snapshot: Callable[[], State]) -> None:
        for observer in self._observers:
            observer.settled(snapshot)
