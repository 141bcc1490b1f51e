"""Follows an engine, call by call: its events in the executable model, its snapshots against the rules."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from spec.choices import USUAL_CHOICES, Choices
from spec.engine import Admission, Engine, InvalidRequest, OverlappedEngine, StepReport, TokenSource
from spec.replay import (
    BlockMove,
    block_moves,
    events_of_begin,
    events_of_end,
    events_of_step,
    not_moved,
    observe,
    step,
)
from spec.rules import check_rules
from spec.vocabulary import (
    Abort,
    Add,
    Config,
    Event,
    Fork,
    Observe,
    Prefix,
    Refuse,
    Request,
    RequestId,
    Reset,
    Sample,
    SeqId,
    State,
    StepId,
    Token,
    initial_state,
)


class Follower:
    """The model that walks beside an engine. It takes over what the engine is free to choose, and judges the rest.

    It is an observer as well: an engine that reports its events one by one is followed in that finer grain.
    """

    def __init__(self, config: Config, engine_name: str, choices: Choices = USUAL_CHOICES) -> None:
        self.state = initial_state(config, choices)
        self.engine_name = engine_name
        self.trace: list[Event] = []

    @property
    def num_judged(self) -> int:
        """How many events there were."""
        return len(self.trace)

    def event(self, event: Event) -> None:
        """The event is possible, and breaks no rule. Raises ``RuleViolation``."""
        after = step(self.state, event)
        self.trace.append(event)
        check_rules(self.state, event, after, engine=self.engine_name, trace=self.trace)
        self.state = after

    def settled(self, snapshot: Callable[[], State]) -> None:
        """What the engine shows is where its events led. Raises ``RuleViolation``."""
        shown = observe(self.state, snapshot())
        check_rules(self.state, Observe(), shown, engine=self.engine_name, trace=self.trace)
        self.state = shown

    def refused(self, call: Add | Fork | Reset, snapshot: Callable[[], State]) -> None:
        """The engine turned a call down: rightly, and without a trace."""
        refusal = Refuse(call)
        self.trace.append(refusal)
        shown = observe(self.state, snapshot())
        check_rules(self.state, refusal, shown, engine=self.engine_name, trace=self.trace)


class Draws:
    """A token source that remembers what it was asked and what it gave."""

    def __init__(self, token_source: TokenSource) -> None:
        self.token_source = token_source
        self.sampled: list[Sample] = []

    def __call__(self, seq: SeqId, tokens: Prefix) -> Token:
        token = self.token_source(seq, tokens)
        self.sampled.append(Sample(seq, tokens, token))
        return token


class JudgedEngine:
    """An engine whose every call is followed. Its calls are the engine's own; what they break is raised."""

    def __init__(self, engine: Engine, config: Config) -> None:
        self.engine = engine
        self.config = config
        self.follower = Follower(config, engine.profile.name, engine.profile.choices)
        self.follower.state = replace(self.follower.state, drawn={})  # every draw is known here
        free = engine.snapshot().free
        if sorted(free) == sorted(self.follower.state.free):  # none has been free longer than another one
            self.follower.state = replace(self.follower.state, free=free)
        self.is_sound = True
        """Whether every call so far has come to its end. After that nothing more can be said of the engine."""
        self._moves: dict[StepId, tuple[BlockMove, ...]] = {}

    @property
    def state(self) -> State:
        """Where the engine is, contents included."""
        return self.follower.state

    def add(self, request: Request) -> bool:
        """Whether the request came in."""
        with self._call():
            try:
                self.engine.add(request)
            except InvalidRequest:
                self.follower.refused(Add(request), self.engine.snapshot)
                return False
            self._follow([Add(request)])
            return True

    def fork(self, parent: SeqId, child: SeqId) -> Admission | None:
        """What the engine answered; None if it called the fork invalid."""
        with self._call():
            try:
                answer = self.engine.fork(parent, child)
            except InvalidRequest:
                self.follower.refused(Fork(parent, child), self.engine.snapshot)
                return None
            if answer is Admission.NOW:
                self._follow([Fork(parent, child)])
            else:
                self.follower.refused(Fork(parent, child), self.engine.snapshot)
            return answer

    def step(self, token_source: TokenSource) -> StepReport:
        with self._call():
            before, draws = self.state, Draws(token_source)
            report = self.engine.step(draws)
            self._follow(events_of_step(before, report, self.engine.snapshot(), draws.sampled))
            return report

    def begin_step(self) -> StepReport | None:
        """What the engine reported; None if it called the step invalid."""
        with self._call():
            before = self.state
            try:
                report = self._overlapped.begin_step()
            except InvalidRequest:
                self._follow([])
                return None
            events = events_of_begin(before, report, self.engine.snapshot())
            self._follow(events)
            self._moves |= {
                step_id: block_moves(events) for step_id in self.state.flights.keys() - before.flights.keys()
            }
            return report

    def end_step(self, token_source: TokenSource) -> StepReport:
        with self._call():
            draws, oldest = Draws(token_source), min(self.state.flights, default=-1)
            report, moves = self._overlapped.end_step(draws), self._moves.pop(oldest, ())
            self.follower.state = not_moved(self.state, report, moves)
            self._follow(events_of_end(self.state, report, self.engine.snapshot(), draws.sampled, moves))
            return report

    def abort(self, request_id: RequestId) -> None:
        with self._call():
            known = request_id in self.state.requests
            self.engine.abort(request_id)
            self._follow([Abort(request_id)] if known else [])

    def reset_cache(self) -> bool:
        with self._call():
            if not self.engine.reset_cache():
                self.follower.refused(Reset(), self.engine.snapshot)
                return False
            self._follow([Reset()])
            return True

    @property
    def _overlapped(self) -> OverlappedEngine:
        if not isinstance(self.engine, OverlappedEngine):
            raise TypeError(f"the engine {self.follower.engine_name} has no begin_step and end_step")
        return self.engine

    @contextmanager
    def _call(self) -> Iterator[None]:
        was_sound, self.is_sound = self.is_sound, False
        yield
        self.is_sound = was_sound

    def _follow(self, events: Iterable[Event]) -> None:
        for event in events:
            self.follower.event(event)
        self.follower.settled(self.engine.snapshot)
