"""Scopes: how far a search goes, which calls it makes, and one complete scope for each feature (a *lens*)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from spec.block_table import first_kept
from spec.engine import Admission, Capability, Pool, Profile
from spec.vocabulary import (
    Append,
    Call,
    Complete,
    Config,
    Event,
    Fork,
    InvalidConfig,
    Prefix,
    Publish,
    Refuse,
    Release,
    Reset,
    Rollback,
    Seq,
    SeqId,
    Start,
    State,
    StepId,
    Submit,
    SwapIn,
    SwapOut,
    Token,
)

PLAIN = frozenset({"allocate", "append", "fork", "release"})
SWAP = frozenset({"swap_out", "swap_in"})
CACHE = frozenset({"publish", "reset"})
FLIGHTS = frozenset({"submit", "complete"})
ROLLBACK = frozenset({"rollback"})


@dataclass(frozen=True)
class Scope:
    """How far a search goes, and which operations it knows."""

    config: Config
    max_seqs: int = 2
    max_tokens: int = 4
    num_token_values: int = 2
    max_flights: int = 0
    operations: frozenset[str] = PLAIN
    max_append: int = 1

    def __post_init__(self) -> None:
        """A scope of nothing would keep every rule."""
        for name in ("max_seqs", "max_tokens", "num_token_values", "max_append"):
            if getattr(self, name) < 1:
                raise InvalidConfig(name, getattr(self, name), "at least 1")
        if self.max_flights < 0:
            raise InvalidConfig("max_flights", self.max_flights, "at least 0")


@dataclass(frozen=True)
class Move:
    """A call of the ``Pool`` protocol."""

    operation: str
    seq: SeqId = 0
    tokens: Prefix = ()
    child: SeqId = 0
    number: int = 0

    def call(self, pool: Pool) -> tuple[Event, ...] | Admission:
        """Make the call."""
        match self.operation:
            case "allocate":
                return pool.allocate(self.seq, self.tokens)
            case "append":
                return pool.append(self.seq, self.tokens)
            case "fork":
                return pool.fork(self.seq, self.child)
            case "release":
                return pool.release(self.seq)
            case "swap_out":
                return pool.swap_out(self.seq)
            case "swap_in":
                return pool.swap_in(self.seq)
            case "publish":
                return pool.publish(self.seq)
            case "reset":
                return pool.reset()
            case "rollback":
                return pool.rollback(self.seq, self.number)
            case "submit":
                return pool.submit(self.number, (self.seq,))
            case _:
                return pool.complete(self.number)

    @property
    def refusal(self) -> Refuse:
        """What happens if the call is turned down."""
        calls: dict[str, Call] = {
            "allocate": Start(self.seq, self.tokens),
            "append": Append(self.seq, self.tokens),
            "fork": Fork(self.seq, self.child),
            "release": Release(self.seq),
            "swap_out": SwapOut(self.seq, ()),
            "swap_in": SwapIn(self.seq, ()),
            "publish": Publish(self.seq, 0),
            "rollback": Rollback(self.seq, self.number),
            "submit": Submit(self.number, (self.seq,)),
            "complete": Complete(self.number),
        }
        return Refuse(calls.get(self.operation, Reset()))

    def __str__(self) -> str:
        """The call as a person writes it."""
        arguments = {
            "allocate": (self.seq, self.tokens),
            "append": (self.seq, self.tokens),
            "fork": (self.seq, self.child),
            "reset": (),
            "rollback": (self.seq, self.number),
            "submit": (self.number, (self.seq,)),
            "complete": (self.number,),
        }.get(self.operation, (self.seq,))
        return f"{self.operation}({', '.join(map(repr, arguments))})"


def moves(s: State, scope: Scope) -> Iterator[Move]:
    """Every call that makes sense in this state, one of those that differ only in the names of new tokens."""
    seqs, known = s.seqs, known_prefixes(s)
    run = [i for i in seqs if i in s.block_tables]
    unused = next((i for i in range(scope.max_seqs) if i not in seqs), None)
    for name in sorted(scope.operations):
        match name:
            case "allocate" if unused is not None:
                yield from (Move(name, unused, tokens) for tokens in lines(known, (), scope.max_tokens, scope))
            case "append":
                yield from (Move(name, i, tokens) for i in run for tokens in appended(known, seqs[i], scope))
            case "fork" if unused is not None:
                yield from (Move(name, i, child=unused) for i in run)
            case "release":
                yield from (Move(name, i) for i in seqs)
            case "swap_out" | "publish":
                yield from (Move(name, i) for i in run)
            case "swap_in":
                yield from (Move(name, i) for i in s.host_tables)
            case "reset" if s.cached:
                yield Move(name)
            case "rollback":
                yield from (Move(name, i, number=n) for i in run for n in rollbacks(s, i))
            case "submit" if len(s.flights) < scope.max_flights:
                yield from (Move(name, i, number=_next_step(s)) for i in run)
            case "complete":
                yield from (Move(name, number=step_id) for step_id in sorted(s.flights)[:1])


def _next_step(s: State) -> StepId:
    return max(s.flights, default=-1) + 1


def rollbacks(s: State, seq_id: SeqId) -> range:
    """The lengths to which a sequence can go back: whatever the next token still sees stays."""
    seq, window = s.seqs[seq_id], s.config.window
    shortest = 1 if window is None else max(1, first_kept(seq, s.config.block_size) + window - 1)
    return range(shortest, seq.num_tokens)


def known_prefixes(s: State) -> frozenset[Prefix]:
    """Every prefix that a sequence has or that the prefix cache names."""
    longest = {seq.tokens for seq in s.seqs.values()} | {key.tokens for key in s.cached.values()}
    return frozenset(tokens[:length] for tokens in longest for length in range(1, len(tokens) + 1))


def next_tokens(known: frozenset[Prefix], tokens: Prefix, scope: Scope) -> Iterator[Token]:
    """The tokens that may follow: those that somewhere do, and one that nowhere does.

    Two that nowhere follow this prefix lead to states that differ in nothing but the names of tokens.
    """
    new = True
    for token in range(scope.num_token_values):
        is_known = (*tokens, token) in known
        if is_known or new:
            yield token
        new = new and is_known


def appended(known: frozenset[Prefix], seq: Seq, scope: Scope) -> Iterator[Prefix]:
    """What one call may append to the sequence."""
    return lines(known, seq.tokens, min(scope.max_append, scope.max_tokens - seq.num_tokens), scope)


def lines(known: frozenset[Prefix], start: Prefix, num_tokens: int, scope: Scope) -> Iterator[Prefix]:
    """Every line of at most so many tokens that may follow a prefix, short ones first."""
    level: list[Prefix] = [()]
    for _ in range(num_tokens):
        level = [(*line, token) for line in level for token in next_tokens(known, start + line, scope)]
        yield from level


def needs(scope: Scope) -> frozenset[Capability]:
    """What a pool must declare to be driven through the scope."""
    wanted = {
        Capability.FORK: "fork" in scope.operations,
        Capability.COPY_ON_WRITE: "fork" in scope.operations,
        Capability.SWAP: not SWAP.isdisjoint(scope.operations),
        Capability.PREFIX_CACHE: scope.config.prefix_cache,
        Capability.WINDOW: scope.config.window is not None,
        Capability.ROLLBACK: not ROLLBACK.isdisjoint(scope.operations),
        Capability.OVERLAP: scope.max_flights > 0,
    }
    return frozenset(capability for capability, is_wanted in wanted.items() if is_wanted)


def narrowed(scope: Scope, profile: Profile) -> Scope:
    """The scope without what an engine with this profile does not do."""
    lacks = needs(scope) - profile.capabilities
    off = {
        Capability.FORK: {"fork"},
        Capability.COPY_ON_WRITE: {"fork"},
        Capability.SWAP: SWAP,
        Capability.PREFIX_CACHE: CACHE,
        Capability.ROLLBACK: ROLLBACK,
        Capability.OVERLAP: FLIGHTS,
    }
    config = replace(
        scope.config,
        prefix_cache=scope.config.prefix_cache and Capability.PREFIX_CACHE not in lacks,
        window=None if Capability.WINDOW in lacks else scope.config.window,
    )
    gone = frozenset[str]().union(*(off.get(capability, frozenset()) for capability in lacks))
    flights = 0 if Capability.OVERLAP in lacks else scope.max_flights
    return replace(scope, config=config, max_flights=flights, operations=scope.operations - gone)


@dataclass(frozen=True)
class Lens:
    """A feature, and the scopes in which it is looked at: a small one for every change, a large one for the night."""

    name: str
    sentence: str
    small: Scope
    large: Scope


_ALL = PLAIN | CACHE | SWAP | FLIGHTS | ROLLBACK
_FOUR = Config(num_blocks=4, block_size=2)
_CACHED = replace(_FOUR, prefix_cache=True)
_SWAPPED = replace(_CACHED, num_host_blocks=2)
_WINDOW = replace(_FOUR, window=3, num_host_blocks=2)

LENSES: Mapping[str, Lens] = {
    lens.name: lens
    for lens in (
        Lens(
            "cache",
            "Pool, prefix cache and swap: publish, hit, evict, reset, move to host memory and back.",
            Scope(_SWAPPED, operations=PLAIN | CACHE | SWAP),
            Scope(_SWAPPED, max_seqs=3, operations=PLAIN | CACHE | SWAP),
        ),
        Lens(
            "window",
            "A sliding window: blocks leave the front of a table that is forked, swapped and rolled back.",
            Scope(_WINDOW, max_seqs=3, max_tokens=6, max_append=2, operations=PLAIN | SWAP | ROLLBACK),
            Scope(_WINDOW, max_seqs=3, max_tokens=8, max_append=2, operations=PLAIN | SWAP | ROLLBACK),
        ),
        Lens(
            "rollback",
            "Rollback with a prefix cache: tokens are taken back, and others written in their place.",
            Scope(_CACHED, max_tokens=5, max_append=2, operations=PLAIN | CACHE | ROLLBACK),
            Scope(_SWAPPED, max_tokens=5, max_append=2, operations=PLAIN | CACHE | ROLLBACK | SWAP),
        ),
        Lens(
            "flight",
            "Steps in flight: what they read stays whole, whatever the sequences do meanwhile.",
            Scope(_CACHED, max_tokens=3, max_flights=2, operations=PLAIN | CACHE | FLIGHTS),
            Scope(_CACHED, max_flights=2, operations=PLAIN | CACHE | FLIGHTS),
        ),
        Lens(
            "fork",
            "Forks and copy-on-write between three sequences.",
            Scope(replace(_FOUR, num_blocks=5), max_seqs=3, max_tokens=6, max_append=2),
            Scope(replace(_FOUR, num_blocks=6), max_seqs=4, max_tokens=6, max_append=2),
        ),
        Lens(
            "together",
            "Every feature at a time, but for the window.",
            Scope(_SWAPPED, num_token_values=1, max_flights=1, max_append=2, operations=_ALL),
            Scope(_SWAPPED, max_flights=1, max_append=2, operations=_ALL),
        ),
    )
}
"""The features, each with a scope that takes seconds and one that takes minutes."""
