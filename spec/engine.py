"""What an implementation offers to be judged: the two protocols, its profile, and the three ways to say no."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable

from spec.answers import Admission as Admission  # noqa: PLC0414  engines have it from here
from spec.answers import DeviceEvent as DeviceEvent  # noqa: PLC0414  and this
from spec.answers import StepReport as StepReport  # noqa: PLC0414  and this too
from spec.choices import Choices
from spec.choices import EvictionOrder as EvictionOrder  # noqa: PLC0414  engines have it from here
from spec.choices import Publication as Publication  # noqa: PLC0414  and this
from spec.vocabulary import (
    AdmissionRule,
    Config,
    Event,
    Prefix,
    Request,
    RequestId,
    SeqId,
    State,
    StepId,
    Token,
)


class InvalidRequest(ValueError):
    """The caller's mistake. Nothing changed."""


class InvalidField(InvalidRequest):
    """One field of a request is out of its bounds."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} is {value!r}, it must be {limit}")
        self.field = field
        self.value = value
        self.limit = limit


class PromptTooLong(InvalidRequest):
    """The request does not fit into the cache even when it is alone there."""

    def __init__(self, num_tokens: int, num_seqs: int, num_slots: int) -> None:
        each = f"{num_seqs} sequences of {num_tokens} tokens" if num_seqs != 1 else f"{num_tokens} tokens"
        super().__init__(f"the request needs room for {each}, the cache has {num_slots} slots")
        self.num_tokens = num_tokens
        self.num_seqs = num_seqs
        self.num_slots = num_slots


class UnknownId(InvalidRequest):
    """An id that names nothing alive."""

    def __init__(self, kind: str, value: int) -> None:
        super().__init__(f"there is no {kind} {value}")
        self.kind = kind
        self.value = value


class Capability(Enum):
    """What an implementation may lack. A missing capability is declared, never faked."""

    FORK = "fork"
    COPY_ON_WRITE = "copy_on_write"
    CHUNKED_PREFILL = "chunked_prefill"
    PREEMPTION = "preemption"
    SWAP = "swap"
    PREFIX_CACHE = "prefix_cache"
    PRIORITY = "priority"
    WINDOW = "window"
    ROLLBACK = "rollback"
    ABORT = "abort"
    OVERLAP = "overlap"
    PARTIAL_PREFILLS = "partial_prefills"
    STATIC_BATCHES = "static_batches"


POOL_CAPABILITIES = frozenset(
    {
        Capability.FORK,
        Capability.COPY_ON_WRITE,
        Capability.SWAP,
        Capability.PREFIX_CACHE,
        Capability.WINDOW,
        Capability.ROLLBACK,
        Capability.OVERLAP,
    }
)
"""What a pool can declare: the others are a scheduler's."""

ENGINE_CAPABILITIES = frozenset(Capability) - {Capability.ROLLBACK}
"""What an engine can declare: only a pool's caller takes tokens back."""


@dataclass(frozen=True)
class Profile(Choices):
    """An engine's declared capabilities and legal choices."""

    name: str
    capabilities: frozenset[Capability]
    admission_rules: tuple[AdmissionRule, ...] = (AdmissionRule.PROMPT,)

    @property
    def choices(self) -> Choices:
        """What the states of somebody who follows the engine carry."""
        return Choices(**{each.name: getattr(self, each.name) for each in fields(Choices)})

    def can(self, *capabilities: Capability) -> bool:
        return self.capabilities.issuperset(capabilities)


TokenSource: TypeAlias = Callable[[SeqId, Prefix], Token]
"""Given a sequence and its tokens so far: the next token. It takes the place of the model and the sampler."""


@runtime_checkable
class Engine(Protocol):
    """A whole engine: requests go in, steps happen, tokens come out."""

    @property
    def profile(self) -> Profile:
        """Capabilities and legal choices."""
        ...

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ``InvalidRequest`` and changes nothing if it can never be served."""
        ...

    def fork(self, parent: SeqId, child: SeqId) -> Admission:
        """Split a sequence of a running request that has an output token. Anything but NOW changes nothing.

        Raises ``InvalidRequest`` if the parent is unknown or cannot be forked, or the child's id is taken.
        """
        ...

    def step(self, token_source: TokenSource) -> StepReport:
        """Schedule, run, and commit one step; an idle engine reports nothing."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Give a request up. An unknown or finished id is ignored."""
        ...

    def reset_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing changes, while a cached block is in use."""
        ...

    def snapshot(self) -> State:
        """What the engine is in right now; a value that later calls do not change."""
        ...


@runtime_checkable
class OverlappedEngine(Engine, Protocol):
    """An engine that schedules its next step while an earlier one still runs; it declares ``OVERLAP``.

    A step is ``begin_step`` and then ``end_step``; two steps at most are in flight, and they end in the order in which
    they were begun. ``step`` is both at once, and raises ``InvalidRequest`` while a step is in flight.
    """

    def begin_step(self) -> StepReport:
        """Schedule and submit a step. What it decided shows in the snapshot; the report names whom it preempted.

        A step that would compute nothing is not begun, unless the engine waits with it for the one before: then it is in
        flight like any other. Raises ``InvalidRequest`` while two steps are in flight.
        """
        ...

    def end_step(self, token_source: TokenSource) -> StepReport:
        """Run the oldest step in flight to its end and commit it; without one nothing is reported.

        Of sequences that are gone since, nothing is reported, and no token is asked for.
        """
        ...


@runtime_checkable
class Pool(Protocol):
    """A block pool without a scheduler: sequences are named by the caller and run at once.

    Each operation answers with the events that it caused, in order, or with LATER or NEVER when there is no room; then
    nothing has changed. Operations that the profile does not declare are not called.
    """

    @property
    def profile(self) -> Profile: ...

    def allocate(self, seq: SeqId, tokens: Prefix) -> tuple[Event, ...] | Admission:
        """A new sequence with these tokens; the longest cached prefix is hit, the rest is written."""
        ...

    def append(self, seq: SeqId, tokens: Prefix) -> tuple[Event, ...] | Admission:
        """More tokens for a running sequence, written at once; a shared tail is copied first."""
        ...

    def fork(self, parent: SeqId, child: SeqId) -> tuple[Event, ...] | Admission:
        """A new sequence that shares everything with its parent."""
        ...

    def release(self, seq: SeqId) -> tuple[Event, ...]:
        """The sequence, running or swapped, is gone."""
        ...

    def swap_out(self, seq: SeqId) -> tuple[Event, ...] | Admission: ...

    def swap_in(self, seq: SeqId) -> tuple[Event, ...] | Admission: ...

    def publish(self, seq: SeqId) -> tuple[Event, ...]:
        """Enter the full blocks of the sequence into the prefix cache, those whose key is not there yet."""
        ...

    def reset(self) -> tuple[Event, ...] | Admission:
        """Empty the prefix cache."""
        ...

    def rollback(self, seq: SeqId, num_tokens: int) -> tuple[Event, ...]:
        """Take back the last tokens: ``num_tokens`` are left."""
        ...

    def submit(self, step_id: StepId, seqs: tuple[SeqId, ...]) -> tuple[Event, ...]:
        """A step that reads these sequences is in flight."""
        ...

    def complete(self, step_id: StepId) -> tuple[Event, ...]:
        """That step is over."""
        ...

    def snapshot(self) -> State: ...


EngineFactory: TypeAlias = Callable[[Config], Engine]
PoolFactory: TypeAlias = Callable[[Config], Pool]


class Observer(Protocol):
    """Somebody who watches an engine: gets each event, and may ask for a state between two calls."""

    def event(self, event: Event) -> None: ...

    def settled(self, snapshot: Callable[[], State]) -> None:
        """A public call is over; ``snapshot`` shows where it left the engine."""
        ...
