"""Who watches the engine of a command: the rules, a log, both, or nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from spec.engine import Observer
    from spec.vocabulary import Config, Event, State


class Watch:
    """Passes what an engine does on to whoever was asked for."""

    def __init__(self, engine: str, self_check: bool, trace: Path | None) -> None:
        self.engine = engine
        self.self_check = self_check
        self.trace = trace
        self.observers: list[Observer] = []
        self._close: list[Callable[[], None]] = []

    @property
    def is_wanted(self) -> bool:
        return self.self_check or self.trace is not None

    def make_observer(self, config: Config) -> Observer:
        """The observer of an engine with these limits. The log comes first: it must hold what breaks a rule."""
        if self.trace is not None:
            from spec.trace import Writer

            writer = Writer(self.trace, config, self.engine)
            self._close.append(writer.close)
            self.observers.append(writer)
        if self.self_check:
            from spec.conformance.judge import Follower

            self.observers.append(Follower(config, self.engine))
        return self

    def event(self, event: Event) -> None:
        for observer in self.observers:
            observer.event(event)

    def settled(self, snapshot: Callable[[], State]) -> None:
        for observer in self.observers:
            observer.settled(snapshot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for close in self._close:
            close()
