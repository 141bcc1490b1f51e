"""Stands between the judge and an adapter: what no engine may do to its judge is an ``AdapterFault``, never a broken rule."""

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import FrameType
from typing import TypeVar, cast

from spec.conformance.values import Nonsense, shown, taker
from spec.engine import (
    Admission,
    Capability,
    EngineFactory,
    InvalidRequest,
    PoolFactory,
    Profile,
    StepReport,
    TokenSource,
)
from spec.vocabulary import (
    Config,
    Copy,
    Event,
    Evict,
    Fork,
    Hit,
    Preempt,
    Prefix,
    Publish,
    Request,
    RequestId,
    Reset,
    Rollback,
    SeqId,
    Slide,
    State,
    StepId,
    Submit,
    SwapIn,
    SwapOut,
    Token,
)

T = TypeVar("T")
CALL_LIMIT_S, MAKE_LIMIT_S = 10.0, 120.0
"""How long a call may take, and how long a factory."""

NEEDED: Mapping[type, Capability] = {
    Copy: Capability.COPY_ON_WRITE,
    Evict: Capability.PREFIX_CACHE,
    Fork: Capability.FORK,
    Hit: Capability.PREFIX_CACHE,
    Preempt: Capability.PREEMPTION,
    Publish: Capability.PREFIX_CACHE,
    Reset: Capability.PREFIX_CACHE,
    Rollback: Capability.ROLLBACK,
    Slide: Capability.WINDOW,
    Submit: Capability.OVERLAP,
    SwapIn: Capability.SWAP,
    SwapOut: Capability.SWAP,
}
"""The capability without which there is no such event."""

EMPTY = ("requests", "waiting", "running", "seqs", "block_tables", "host_tables", "cached", "flights")
"""What a new engine shows nothing of."""


class AdapterFault(Exception):
    """An adapter does not keep to the protocol. ``method`` is the one of its methods that does not."""

    def __init__(self, method: str, sentence: str) -> None:
        super().__init__(f"{method}: {sentence}")
        self.method = method
        self.sentence = sentence


class _TooLong(BaseException):
    """Rings inside a call that does not return."""


def within(limit_s: float, call: Callable[[], T]) -> T:
    """The result of the call. Raises ``_TooLong`` inside it when the limit is over: again and again, since somebody may
    catch it. Only the main thread has alarms; elsewhere there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    armed, begin = True, time.monotonic()

    def ring(number: int, frame: FrameType | None) -> None:
        if armed:
            raise _TooLong

    handler = signal.signal(signal.SIGALRM, ring)
    others_s, interval_s = signal.setitimer(signal.ITIMER_REAL, limit_s, 0.1)
    try:
        try:
            return call()
        finally:
            armed = False
    finally:
        left_s = max(others_s - (time.monotonic() - begin), 0.001) if others_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


class Guard:
    """What is known of one adapter. The first fault is remembered: whoever catches it on the way does not hide it."""

    def __init__(self, config: Config, limit_s: float = CALL_LIMIT_S) -> None:
        self.config = config
        self.limit_s = limit_s
        self.profile: Profile | None = None
        self.fault: AdapterFault | None = None
        self.in_flight = False
        self._shown: deque[tuple[object, State]] = deque(maxlen=2)

    def blame(self, method: str, sentence: str) -> AdapterFault:
        self.fault = self.fault or AdapterFault(method, sentence)
        return self.fault

    def call(self, method: str, hint: object, call: Callable[[], object], *, refuses: bool = False) -> object:
        """What the adapter answers, as a value of this type and our own. Raises ``AdapterFault``, or
        ``InvalidRequest`` where the method may."""
        try:
            answer = within(self.limit_s, call)
        except InvalidRequest as error:
            if not refuses:
                raise self.blame(method, f"raised {_raised(error)}, and has nothing to refuse") from error
            self._unchanged(method)
            raise
        except _TooLong:
            raise self.blame(method, f"did not return within {self.limit_s:g} s") from None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self.fault is not None:
                raise self.fault from error
            raise self.blame(method, f"raised {_raised(error)}") from error
        if self.fault is not None:
            raise self.fault
        self._unchanged(method)
        return self.take(method, hint, answer)

    def take(self, method: str, hint: object, answer: object) -> object:
        try:
            return taker(hint)(answer)
        except Nonsense as nonsense:
            raise self.blame(method, f"the answer is nonsense: {nonsense.inside('it')}") from None
        except Exception as error:
            raise self.blame(method, f"the answer cannot be read: {_raised(error)}") from error

    def snapshot(self, call: Callable[[], object]) -> State:
        """What the engine shows; that it shows nothing undeclared and none of its own variables."""
        originals: list[object] = []

        def remember() -> object:
            originals.append(call())
            return originals[-1]

        state = cast(State, self.call("snapshot", State, remember))
        if state.config != self.config:
            raise self.blame("snapshot", f"it shows the limits {state.config}, and was made with {self.config}")
        if state.cached and not self.can(Capability.PREFIX_CACHE):
            raise self.blame("snapshot", "it shows cached blocks, and the profile does not declare PREFIX_CACHE")
        if state.host_tables and not self.can(Capability.SWAP):
            raise self.blame("snapshot", "it shows tables in host memory, and the profile does not declare SWAP")
        if state.flights and not self.can(Capability.OVERLAP):
            raise self.blame("snapshot", "it shows a step in flight, and the profile does not declare OVERLAP")
        self.in_flight = bool(state.flights)
        self._shown.append((originals[-1], state))
        return state

    def can(self, capability: Capability) -> bool:
        return self.profile is not None and self.profile.can(capability)

    def declared(self, method: str, events: tuple[object, ...]) -> None:
        """Nothing happened that the profile does not declare."""
        for event in events:
            needed = NEEDED.get(type(event))
            if needed is not None and not self.can(needed):
                raise self.blame(method, f"it reports {event!r}, and the profile does not declare {needed.name}")

    def _unchanged(self, method: str) -> None:
        """The snapshots that were handed out are still what they were. Most are, and to compare them is cheaper than to
        take them over again."""
        for original, copy in self._shown:
            if _same(original, copy):
                continue
            now = self.take("snapshot", State, original)
            if now != copy:
                name = next(each.name for each in fields(State) if getattr(now, each.name) != getattr(copy, each.name))
                was, has = getattr(copy, name), getattr(now, name)
                raise self.blame(
                    "snapshot",
                    f"what it handed out is no value of its own: during {method}, {name} in it "
                    f"changed from {shown(was)} to {shown(has)}",
                )


def _same(original: object, copy: State) -> bool:
    try:
        return type(original) is State and original == copy
    except Exception:  # noqa: BLE001  values of somebody else's may do anything
        return False


def _raised(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  a text may do anything
        return type(error).__name__


class _Guarded:
    """What the two kinds of adapters have in common."""

    def __init__(self, make: Callable[[Config], object], config: Config, limit_s: float) -> None:
        self.guard = Guard(config, MAKE_LIMIT_S)
        made: list[object] = []
        self.guard.call(_name(make), type(None), lambda: made.append(make(config)))
        self.guard.limit_s = limit_s
        self.adapter = made[0]
        self.guard.profile = self.profile

    @property
    def profile(self) -> Profile:
        """Always the same one."""
        profile = cast(Profile, self.guard.call("profile", Profile, lambda: getattr(self.adapter, "profile")))  # noqa: B009
        if self.guard.profile not in (None, profile):
            raise self.guard.blame("profile", f"it was {self.guard.profile}, and is {profile} now")
        return profile

    def snapshot(self) -> State:
        return self.guard.snapshot(lambda: self._method("snapshot")())

    def _method(self, name: str) -> Callable[..., object]:
        return cast(Callable[..., object], getattr(self.adapter, name))

    def _starts_empty(self, make: Callable[[Config], object]) -> None:
        state = self.snapshot()
        for name in EMPTY:
            if getattr(state, name):
                what = f"what it makes is not new: it shows {name} {shown(getattr(state, name))}"
                raise self.guard.blame(_name(make), what)


def _name(make: Callable[[Config], object]) -> str:
    return str(getattr(make, "__name__", type(make).__name__))


class GuardedEngine(_Guarded):
    """An engine behind its guard; an ``Engine`` itself."""

    def __init__(self, make: EngineFactory, config: Config, limit_s: float = CALL_LIMIT_S) -> None:
        super().__init__(make, config, limit_s)
        self._starts_empty(make)

    def add(self, request: Request) -> None:
        self.guard.call("add", type(None), lambda: self._method("add")(request), refuses=True)

    def fork(self, parent: SeqId, child: SeqId) -> Admission:
        answer = self.guard.call("fork", Admission, lambda: self._method("fork")(parent, child), refuses=True)
        return cast(Admission, answer)

    def step(self, token_source: TokenSource) -> StepReport:
        return self._reported("step", self._asking("step", token_source), refuses=self.guard.in_flight)

    def begin_step(self) -> StepReport:
        return self._reported("begin_step", refuses=True)

    def end_step(self, token_source: TokenSource) -> StepReport:
        return self._reported("end_step", self._asking("end_step", token_source))

    def _reported(self, method: str, *arguments: object, refuses: bool = False) -> StepReport:
        answer = self.guard.call(method, StepReport, lambda: self._method(method)(*arguments), refuses=refuses)
        report = cast(StepReport, answer)
        self.guard.declared(method, (*report.device, *report.preempted))
        return report

    def _asking(self, method: str, token_source: TokenSource) -> TokenSource:
        """The same source, for whoever asks properly."""

        def ask(seq: SeqId, tokens: Prefix) -> Token:
            if type(seq) is not int or not isinstance(tokens, tuple) or any(type(token) is not int for token in tokens):
                asked = f"({shown(seq)}, {shown(tokens)})"
                sentence = f"it asks for a token with {asked}, it must be a sequence and its tokens"
                raise self.guard.blame(method, sentence)
            return token_source(seq, tokens)

        return ask

    def abort(self, request_id: RequestId) -> None:
        self.guard.call("abort", type(None), lambda: self._method("abort")(request_id))

    def reset_cache(self) -> bool:
        return cast(bool, self.guard.call("reset_cache", bool, self._method("reset_cache")))


Events = tuple[Event, ...]
Answer = Events | Admission


class GuardedPool(_Guarded):
    """A pool behind its guard; a ``Pool`` itself, and never cloned: an adapter's copies are not for us to trust."""

    def __init__(self, make: PoolFactory, config: Config, limit_s: float = CALL_LIMIT_S) -> None:
        super().__init__(make, config, limit_s)
        self._starts_empty(make)

    def allocate(self, seq: SeqId, tokens: Prefix) -> Answer:
        return self._call("allocate", seq, tokens)

    def append(self, seq: SeqId, tokens: Prefix) -> Answer:
        return self._call("append", seq, tokens)

    def fork(self, parent: SeqId, child: SeqId) -> Answer:
        return self._call("fork", parent, child)

    def release(self, seq: SeqId) -> Events:
        return self._done("release", seq)

    def swap_out(self, seq: SeqId) -> Answer:
        return self._call("swap_out", seq)

    def swap_in(self, seq: SeqId) -> Answer:
        return self._call("swap_in", seq)

    def publish(self, seq: SeqId) -> Events:
        return self._done("publish", seq)

    def reset(self) -> Answer:
        return self._call("reset")

    def rollback(self, seq: SeqId, num_tokens: int) -> Events:
        return self._done("rollback", seq, num_tokens)

    def submit(self, step_id: StepId, seqs: tuple[SeqId, ...]) -> Events:
        return self._done("submit", step_id, seqs)

    def complete(self, step_id: StepId) -> Events:
        return self._done("complete", step_id)

    def _call(self, method: str, *arguments: object) -> Answer:
        hint = tuple[Event, ...] | Admission
        answer = cast(Answer, self.guard.call(method, hint, lambda: self._method(method)(*arguments), refuses=True))
        if isinstance(answer, tuple):
            self.guard.declared(method, answer)
        return answer

    def _done(self, method: str, *arguments: object) -> Events:
        hint = tuple[Event, ...]
        events = cast(Events, self.guard.call(method, hint, lambda: self._method(method)(*arguments), refuses=True))
        self.guard.declared(method, events)
        return events
