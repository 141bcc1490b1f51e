"""Who watches the engine of a command: the rules, a log, both, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from spec.batches import Computed
    from spec.choices import Choices
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

    def __init__(self, engine: str, self_check: SelfCheck, trace: Path | None) -> None:
        self.engine = engine
        self.self_check = self_check
        self.trace = trace
        self._writer: Writer | None = None

    @property
    def is_wanted(self) -> bool:
        return self.self_check is not SelfCheck.OFF or self.trace is not None

    def make_observer(self, config: Config) -> Observer:
        """The observer of an engine with these limits. The log comes first: it must hold what breaks a rule."""
        observers: list[Observer] = []
        choices = _choices_of(self.engine)
        if self.trace is not None:
            from spec.trace import Writer

            self._writer = Writer(self.trace, config, self.engine, choices)
            observers.append(self._writer)
        if self.self_check is SelfCheck.SAMPLED:
            observers.append(Sampled(config, self.engine, choices))
        elif self.self_check is SelfCheck.EVERY_STEP:
            from spec.conformance.judge import Follower

            observers.append(Follower(config, self.engine, choices))
        return observers[0] if len(observers) == 1 else Several(config.block_size, observers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._writer is not None:
            self._writer.close()


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
