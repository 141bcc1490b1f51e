"""The words that all packages share: ids, limits, requests, events, and what an implementation shows of itself."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from spec.choices import USUAL_CHOICES, Choices

BlockId: TypeAlias = int
HostBlockId: TypeAlias = int
SeqId: TypeAlias = int
RequestId: TypeAlias = int
StepId: TypeAlias = int
Token: TypeAlias = int
Slot: TypeAlias = int
Prefix: TypeAlias = tuple[Token, ...]
"""The tokens up to and including one position: what decides that position's K and V."""

if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414  the chapters have it from here
else:
    T = TypeVar("T")

    def replace(record: T, /, **changes: object) -> T:
        """The record with other values in these fields, unchecked: every transition ends here, and what the record
        of the standard library costs, field by field, is a fifth of a search. Raises TypeError for an unknown field."""
        new = object.__new__(type(record))
        fields = vars(new)
        fields.update(vars(record))
        known = len(fields)
        fields.update(changes)
        if len(fields) != known:
            raise TypeError(f"{type(record).__name__} has no field {', '.join(changes.keys() - vars(record).keys())}")
        return new


class Recovery(Enum):
    """How a preempted request comes back."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


class Policy(Enum):
    """The order of service: by arrival, or by priority (a smaller number first) and then by arrival. Static batches are
    served by arrival too, and nobody joins those who run while one of them has got a token."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    STATIC = "static"


class AdmissionRule(Enum):
    """What admission asks room for: the next step, all tokens known so far, or all tokens there can ever be."""

    OPTIMISTIC = "optimistic"
    PROMPT = "prompt"
    NO_EVICT = "no_evict"


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class InvalidConfig(ValueError):
    """A limit of the engine makes no sense; nothing was built."""

    def __init__(self, field_name: str, value: object, limit: str) -> None:
        super().__init__(f"{field_name} is {value!r}, it must be {limit}")
        self.field = field_name
        self.value = value
        self.limit = limit


@dataclass(frozen=True)
class Config:
    """The limits of one engine. Counts are blocks, tokens or sequences, as the names say."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 8192
    watermark_blocks: int = 0
    num_host_blocks: int = 0
    prefix_cache: bool = False
    window: int | None = None
    policy: Policy = Policy.FCFS
    admission_rule: AdmissionRule = AdmissionRule.PROMPT
    recovery: Recovery = Recovery.RECOMPUTE
    max_num_partial_prefills: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name in ("watermark_blocks", "num_host_blocks") else 1
            if isinstance(value, int) and value < least and name != "prefix_cache":
                raise InvalidConfig(name, value, f"at least {least}" + ", or None" * (name == "window"))
        if self.watermark_blocks >= self.num_blocks:
            raise InvalidConfig("watermark_blocks", self.watermark_blocks, f"below num_blocks ({self.num_blocks})")

    @property
    def num_slots(self) -> int:
        """The number of tokens that the whole pool has room for."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True)
class Request:
    """What a caller asks for. ``seq_ids`` names its sequences: the first holds the prompt, the others are forked
    from it as soon as the prompt is computed, so that each draws its own first token."""

    request_id: RequestId
    prompt: tuple[Token, ...]
    max_tokens: int
    seq_ids: tuple[SeqId, ...]
    stop_token_ids: tuple[Token, ...] = ()
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Seq:
    """One line of tokens. Its K and V exist for the first ``num_computed_tokens``; a step in flight computes the
    next ``num_scheduled_tokens``. With a sliding window the first ``num_dropped_blocks`` have left its table."""

    request_id: RequestId
    tokens: tuple[Token, ...]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_dropped_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens together."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


@dataclass(frozen=True)
class CacheKey:
    """What a cached block stands for: the whole prefix up to its last token, and whom it may be shown to."""

    tokens: Prefix
    salt: str = ""


@dataclass(frozen=True)
class Flight:
    """A step between its schedule and its end: what it computes, which blocks it may touch, what it keeps
    alive, what it has written and who has read. The first ``num_copies`` of what it keeps alive are sources of copies.
    Of an engine that schedules ahead ``stops`` says how many tokens of a sequence are computed when the step is over."""

    scheduled: Mapping[SeqId, int] = field(default_factory=dict)
    blocks: frozenset[BlockId] = frozenset()
    holds: tuple[BlockId, ...] = ()
    written: frozenset[Slot] = frozenset()
    readers: frozenset[SeqId] = frozenset()
    submitted: bool = False
    preempting: bool = False
    num_copies: int = 0
    stops: Mapping[SeqId, int] = field(default_factory=dict)


class MalformedState(ValueError):
    """An implementation showed a state that leaves something out."""


@dataclass(frozen=True)
class State:
    """What an implementation shows of itself. Facts are shown twice on purpose (tables and reference counts),
    so that a rule can compare them.

    ``free`` is in the order in which blocks will be taken, if the implementation has one. ``requests`` is in the order
    of arrival. Of equal blocks in ``cached`` the first is the one that a look-up finds. ``cells`` and ``host_cells``
    say, for each slot, the prefix whose K and V it holds, ``drawn`` the tokens that were drawn and not appended yet, and
    ``choices`` what the engine's profile says: an engine leaves them out, and whoever follows it fills them in.
    """

    config: Config
    free: tuple[BlockId, ...]
    ref_count: tuple[int, ...]
    block_tables: Mapping[SeqId, tuple[BlockId, ...]] = field(default_factory=dict)
    seqs: Mapping[SeqId, Seq] = field(default_factory=dict)
    requests: Mapping[RequestId, Request] = field(default_factory=dict)
    waiting: tuple[RequestId, ...] = ()
    running: tuple[RequestId, ...] = ()
    num_preemptions: Mapping[RequestId, int] = field(default_factory=dict)
    flights: Mapping[StepId, Flight] = field(default_factory=dict)
    cached: Mapping[BlockId, CacheKey] = field(default_factory=dict)
    host_free: tuple[HostBlockId, ...] = ()
    host_tables: Mapping[SeqId, tuple[HostBlockId, ...]] = field(default_factory=dict)
    cells: Mapping[Slot, Prefix] = field(default_factory=dict)
    host_cells: Mapping[Slot, Prefix] = field(default_factory=dict)
    drawn: Mapping[SeqId, Token] | None = None
    choices: Choices = USUAL_CHOICES

    def __post_init__(self) -> None:
        if len(self.ref_count) != self.config.num_blocks:
            raise MalformedState(f"ref_count names {len(self.ref_count)} blocks, the pool has {self.config.num_blocks}")


def initial_state(config: Config, choices: Choices = USUAL_CHOICES) -> State:
    """An engine that has just started: every block is free but the reserved ones, nobody waits, nobody runs.

    Raises ``InvalidConfig`` if no block is left for sequences.
    """
    if not 0 <= choices.num_reserved_blocks < config.num_blocks:
        raise InvalidConfig("num_reserved_blocks", choices.num_reserved_blocks, f"0 to {config.num_blocks - 1}")
    return State(
        config=config,
        free=tuple(range(choices.num_reserved_blocks, config.num_blocks)),
        ref_count=(0,) * config.num_blocks,
        host_free=tuple(range(config.num_host_blocks)),
        choices=choices,
    )


def all_blocks(s: State) -> range:
    """Every block id that a sequence may be given: those of the pool but the reserved ones."""
    return range(s.choices.num_reserved_blocks, s.config.num_blocks)


def seqs_of(s: State, request_id: RequestId) -> Iterator[SeqId]:
    """The live sequences of a request, in the order in which they were made."""
    return (seq_id for seq_id, seq in s.seqs.items() if seq.request_id == request_id)


def service_order(s: State, request_id: RequestId) -> tuple[int, int]:
    """Smaller is served first: by priority if the policy says so, then by arrival."""
    priority = s.requests[request_id].priority if s.config.policy is Policy.PRIORITY else 0
    return priority, list(s.requests).index(request_id)


def open_step(s: State) -> StepId | None:
    """The step that is being scheduled, if there is one."""
    return max((i for i, flight in s.flights.items() if not flight.submitted), default=None)


def step_of(s: State, seq_id: SeqId) -> StepId | None:
    """The oldest step in flight that computes the sequence, if there is one."""
    return min((i for i, flight in s.flights.items() if seq_id in flight.scheduled), default=None)


# Events: one thing that an engine did, with the choices it made.


@dataclass(frozen=True)
class Add:
    """A request came through the door; its first sequence holds the prompt and waits."""

    request: Request


@dataclass(frozen=True)
class Admit:
    """The request moved from waiting to running."""

    request_id: RequestId


@dataclass(frozen=True)
class Preempt:
    """A running request gave back its device blocks and waits again, before everybody who arrived later."""

    request_id: RequestId


@dataclass(frozen=True)
class Abort:
    """The caller gave the request up; whatever it held is given back."""

    request_id: RequestId


@dataclass(frozen=True)
class Begin:
    """A step is being scheduled."""

    step_id: StepId


@dataclass(frozen=True)
class Submit:
    """The plan of a step is final: the device may from now on read and write the blocks of every sequence that it
    computes, and read those of ``readers``."""

    step_id: StepId
    readers: tuple[SeqId, ...] = ()


@dataclass(frozen=True)
class Complete:
    """The step is over; what it kept alive is given back."""

    step_id: StepId


@dataclass(frozen=True)
class Start:
    """A pool was given a sequence of its own, without a scheduler: it runs at once."""

    seq: SeqId
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Allocate:
    """A sequence got room for its next ``num_tokens`` tokens; ``blocks`` are the ones the engine chose, possibly
    none, and come at the end of its table."""

    seq: SeqId
    num_tokens: int
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True)
class Hit:
    """A sequence with an empty table took ``blocks`` from the prefix cache: their tokens need no computing."""

    seq: SeqId
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True)
class Copy:
    """Copy-on-write: entry ``index`` of the table now names ``target``, which got the contents of ``source``."""

    seq: SeqId
    index: int
    source: BlockId
    target: BlockId


@dataclass(frozen=True)
class Write:
    """K and V of the tokens from position ``start`` on went to ``slots``, one a token."""

    seq: SeqId
    start: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Read:
    """The attention of this step read ``slots``, one a position from ``start`` on."""

    seq: SeqId
    slots: tuple[Slot, ...]
    start: int = 0


@dataclass(frozen=True)
class Sample:
    """The sequence's next token was drawn from what the device found in the cache: the K and V of ``prefix``."""

    seq: SeqId
    prefix: Prefix
    token: Token


@dataclass(frozen=True)
class Append:
    """Tokens came to the end of a sequence: sampled ones, or given ones."""

    seq: SeqId
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Fork:
    """A new sequence of the same request that shares its parent's blocks and tokens."""

    parent: SeqId
    child: SeqId


@dataclass(frozen=True)
class Rollback:
    """A sequence gave up its last tokens: it has ``num_tokens`` left."""

    seq: SeqId
    num_tokens: int


@dataclass(frozen=True)
class Slide:
    """The first ``num_blocks`` entries left the table: the window has passed them. Their places stay counted."""

    seq: SeqId
    num_blocks: int


@dataclass(frozen=True)
class Release:
    """A sequence ended and gave its references back."""

    seq: SeqId


@dataclass(frozen=True)
class Finish:
    """A sequence ended, and why; its references are given back."""

    seq: SeqId
    reason: FinishReason


@dataclass(frozen=True)
class SwapOut:
    """A sequence moved to host memory: entry i of its table now lies in host block ``blocks[i]``."""

    seq: SeqId
    blocks: tuple[HostBlockId, ...]


@dataclass(frozen=True)
class SwapIn:
    """A sequence came back from host memory: entry i of its table is device block ``blocks[i]``."""

    seq: SeqId
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True)
class Publish:
    """Entry ``index`` of the sequence's table can be found in the prefix cache from now on."""

    seq: SeqId
    index: int


@dataclass(frozen=True)
class Evict:
    """A block can no longer be found in the prefix cache."""

    block: BlockId


@dataclass(frozen=True)
class Reset:
    """The prefix cache was emptied."""


@dataclass(frozen=True)
class Refuse:
    """A call was turned down: an invalid request at the door, or an operation without room. ``call`` is the event
    that it would have been, with empty choices."""

    call: "Call"


@dataclass(frozen=True)
class Observe:
    """An implementation showed itself: ``before`` is where its events lead, ``after`` is what it shows."""


Call: TypeAlias = (
    Add | Start | Append | Fork | Release | Rollback | SwapOut | SwapIn | Publish | Reset | Submit | Complete
)
"""What can be turned down."""

Event: TypeAlias = (
    Add
    | Refuse
    | Admit
    | Preempt
    | Abort
    | Begin
    | Submit
    | Complete
    | Start
    | Allocate
    | Hit
    | Copy
    | Write
    | Read
    | Sample
    | Append
    | Fork
    | Rollback
    | Slide
    | Release
    | Finish
    | SwapOut
    | SwapIn
    | Publish
    | Evict
    | Reset
    | Observe
)
