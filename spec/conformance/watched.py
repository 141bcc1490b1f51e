"""An engine that tells its events one by one, to an observer: judged in that finer grain, and looked at while its steps run."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import cast

from spec.conformance.guard import CALL_LIMIT_S, AdapterFault, GuardedEngine
from spec.conformance.judge import Follower, JudgedEngine
from spec.conformance.values import Nonsense, taker
from spec.engine import Capability, Engine, InvalidRequest, StepReport, TokenSource
from spec.lockstep import NOBODY
from spec.rules import RuleViolation
from spec.vocabulary import Config, Event, Prefix, SeqId, State, Token, replace


def takes_an_observer(make: Callable[..., object]) -> bool:
    """Whether a factory of engines has a parameter ``observer``."""
    try:
        return "observer" in inspect.signature(make).parameters
    except (TypeError, ValueError):
        return False


class Watcher:
    """The observer. What is wrong first is remembered, and raised when the call is over: never into the engine."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.failure: Exception | None = None

    def event(self, event: Event) -> None:
        self._unless_failed(lambda: self.follower.event(cast(Event, taker(Event)(event))))

    def settled(self, snapshot: Callable[[], State]) -> None:
        self._unless_failed(lambda: self.follower.settled(lambda: cast(State, taker(State)(snapshot()))))

    def _unless_failed(self, follow: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            follow()
        except RuleViolation as violation:
            self.failure = violation
        except Nonsense as nonsense:
            self.failure = AdapterFault("observer", f"what it is told is nonsense: {nonsense.inside('it')}")


class WatchedEngine(JudgedEngine):
    """A judged engine that tells the follower its events itself."""

    def __init__(self, make: Callable[..., Engine], config: Config, limit_s: float = CALL_LIMIT_S) -> None:
        self.watcher = Watcher(Follower(config, "watched"))

        @wraps(make)
        def observed(limits: Config) -> Engine:
            return make(limits, observer=self.watcher)

        super().__init__(GuardedEngine(observed, config, limit_s), config)
        self.follower.state = replace(self.follower.state, drawn=None)
        self.watcher.follower = self.follower

    def step(self, token_source: TokenSource) -> StepReport:
        """The device draws a token while the step is in flight: that is the moment to look. An abort of nobody makes
        the engine show itself."""

        def look(seq: SeqId, tokens: Prefix) -> Token:
            if self.engine.profile.can(Capability.ABORT):
                self.engine.abort(NOBODY)
            return token_source(seq, tokens)

        with self._call():
            return self.engine.step(look)

    def begin_step(self) -> StepReport | None:
        """None if the engine called the step invalid."""
        with self._call():
            try:
                return self._overlapped.begin_step()
            except InvalidRequest:
                return None

    def end_step(self, token_source: TokenSource) -> StepReport:
        with self._call():
            return self._overlapped.end_step(token_source)

    @contextmanager
    def _call(self) -> Iterator[None]:
        with super()._call():
            try:
                yield
            except (AdapterFault, RuleViolation) as error:
                raise self.watcher.failure or error from None
            if self.watcher.failure is not None:
                raise self.watcher.failure

    def _follow(self, events: Iterable[Event]) -> None:
        """They have been told."""
