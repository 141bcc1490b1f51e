"""Every reachable state of a small scope: a pool that follows the specification alone, and the search over it."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import TypeAlias

from spec.block_table import first_kept, room, slots_of
from spec.engine import Admission, Pool
from spec.prefix_cache import find, key_of, longest_hit
from spec.replay import step
from spec.rules import Rule, broken_state_rules, broken_step_rules
from spec.sharing import growth, must_copy
from spec.vocabulary import (
    Allocate,
    Append,
    Begin,
    BlockId,
    CacheKey,
    Complete,
    Config,
    Copy,
    Event,
    Fork,
    Hit,
    HostBlockId,
    Prefix,
    Publish,
    Release,
    Reset,
    Rollback,
    SeqId,
    Slide,
    Start,
    State,
    Submit,
    SwapIn,
    SwapOut,
    Token,
    Write,
    initial_state,
)


@dataclass(frozen=True)
class Scope:
    """How far a search goes, and which operations it knows."""

    config: Config
    max_seqs: int = 2
    max_tokens: int = 4
    num_token_values: int = 2
    max_flights: int = 0
    operations: frozenset[str] = frozenset({"allocate", "append", "fork", "release"})


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


def moves(s: State, scope: Scope) -> Iterator[Move]:
    """Every call that makes sense in this state."""
    run = [i for i in s.seqs if i in s.block_tables]
    unused = next((i for i in range(scope.max_seqs) if i not in s.seqs), None)
    values = range(scope.num_token_values)
    everything = {
        "allocate": (Move("allocate", unused, p) for p in prompts(scope) if unused is not None),
        "append": (Move("append", i, (t,)) for i in run if s.seqs[i].num_tokens < scope.max_tokens for t in values),
        "fork": (Move("fork", i, child=unused) for i in run if unused is not None),
        "release": (Move("release", i) for i in s.seqs),
        "swap_out": (Move("swap_out", i) for i in run),
        "swap_in": (Move("swap_in", i) for i in s.host_tables),
        "publish": (Move("publish", i) for i in run),
        "reset": (Move("reset") for _ in range(bool(s.cached))),
        "rollback": (Move("rollback", i, number=n) for i in run for n in rollbacks(s, i)),
        "submit": (
            Move("submit", i, number=max(s.flights, default=-1) + 1) for i in run if len(s.flights) < scope.max_flights
        ),
        "complete": (Move("complete", number=min(s.flights)) for _ in range(bool(s.flights))),
    }
    return (move for name, offered in everything.items() if name in scope.operations for move in offered)


def rollbacks(s: State, seq_id: SeqId) -> range:
    """The lengths to which a sequence can go back: whatever the next token still sees stays."""
    seq, window = s.seqs[seq_id], s.config.window
    shortest = 1 if window is None else max(1, first_kept(seq, s.config.block_size) + window - 1)
    return range(shortest, seq.num_tokens)


def prompts(scope: Scope) -> Iterator[Prefix]:
    """Every prompt of the scope, short ones first."""
    level: list[Prefix] = [()]
    for _ in range(scope.max_tokens):
        level = [(*p, t) for p in level for t in range(scope.num_token_values)]
        yield from level


class ModelPool:
    """A pool that does what the specification says, with its free choices made one way: the block that has been free
    longest is taken, and the longest cached prefix is hit."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.events: list[Event] = []

    def call(self, move: Move) -> tuple[Event, ...] | Admission:
        """The events of a move; after a refusal the state is what it was."""
        before, self.events = self.state, []
        admission = getattr(self, f"_{move.operation}")(move)
        if admission is not Admission.NOW:
            self.state = before
            return Admission.LATER
        return tuple(self.events)

    def _do(self, event: Event) -> None:
        self.state = step(self.state, event)
        self.events.append(event)

    def _write(self, seq: SeqId) -> Admission:
        """Room for every token that the sequence has, and the write of them."""
        s = self.state
        start, stop = s.seqs[seq].num_computed_tokens, s.seqs[seq].num_tokens
        index = start // s.config.block_size - s.seqs[seq].num_dropped_blocks
        if start % s.config.block_size and must_copy(s, s.block_tables[seq][index]):
            if not s.free:
                return Admission.LATER
            self._do(Copy(seq, index, s.block_tables[seq][index], s.free[0]))
        s = self.state
        count = growth(s, seq, stop)
        if count > len(s.free):
            return Admission.LATER
        self._do(Allocate(seq, stop - room(s.seqs[seq]), s.free[:count]))
        self._do(Write(seq, start, slots_of(self.state, seq, start, stop)))
        return self._slide(seq)

    def _slide(self, seq: SeqId) -> Admission:
        s = self.state
        if s.config.window is not None:
            passed = s.seqs[seq].num_computed_tokens - s.config.window + 1
            count = passed // s.config.block_size - s.seqs[seq].num_dropped_blocks
            if count > 0:
                self._do(Slide(seq, count))
        return Admission.NOW

    def _allocate(self, move: Move) -> Admission:
        self._do(Start(move.seq, move.tokens))
        s = self.state
        keys = [key_of(s, move.seq, index) for index in range(longest_hit(s, move.seq))]
        hits = tuple(block for block in (find(s, key) for key in keys) if block is not None)
        if hits and s.config.prefix_cache:
            self._do(Hit(move.seq, hits))
        return self._write(move.seq)

    def _append(self, move: Move) -> Admission:
        self._do(Append(move.seq, move.tokens))
        return self._write(move.seq)

    def _fork(self, move: Move) -> Admission:
        self._do(Fork(move.seq, move.child))
        return Admission.NOW

    def _release(self, move: Move) -> Admission:
        self._do(Release(move.seq))
        return Admission.NOW

    def _swap_out(self, move: Move) -> Admission:
        count = len(self.state.block_tables[move.seq])
        if count > len(self.state.host_free):
            return Admission.LATER
        if count:
            self._do(SwapOut(move.seq, self.state.host_free[:count]))
        return Admission.NOW

    def _swap_in(self, move: Move) -> Admission:
        count = len(self.state.host_tables[move.seq])
        if count > len(self.state.free):
            return Admission.LATER
        self._do(SwapIn(move.seq, self.state.free[:count]))
        return Admission.NOW

    def _publish(self, move: Move) -> Admission:
        s = self.state
        seq = s.seqs[move.seq]
        for index in range(seq.num_dropped_blocks, seq.num_computed_tokens // s.config.block_size):
            block = s.block_tables[move.seq][index - seq.num_dropped_blocks]
            if block not in self.state.cached and find(self.state, key_of(s, move.seq, index)) is None:
                self._do(Publish(move.seq, index))
        return Admission.NOW

    def _reset(self, move: Move) -> Admission:
        if any(self.state.ref_count[block] for block in self.state.cached):
            return Admission.LATER
        self._do(Reset())
        return Admission.NOW

    def _rollback(self, move: Move) -> Admission:
        self._do(Rollback(move.seq, move.number))
        return Admission.NOW

    def _submit(self, move: Move) -> Admission:
        self._do(Begin(move.number))
        self._do(Submit(move.number, (move.seq,)))
        return Admission.NOW

    def _complete(self, move: Move) -> Admission:
        self._do(Complete(move.number))
        return Admission.NOW


Key: TypeAlias = tuple[object, ...]


class Names:
    """New names in order of first use: for blocks, for host blocks, and for the tokens that follow each prefix."""

    def __init__(self) -> None:
        self.blocks: dict[BlockId, int] = {}
        self.host_blocks: dict[HostBlockId, int] = {}
        self.trie: dict[Prefix, dict[Token, int]] = {}

    def block(self, block: BlockId) -> int:
        return self.blocks.setdefault(block, len(self.blocks))

    def host_block(self, block: HostBlockId) -> int:
        return self.host_blocks.setdefault(block, len(self.host_blocks))

    def prefix(self, tokens: Prefix) -> Prefix:
        """A slot depends only on which prefix it holds, so the tokens that may follow one are interchangeable."""
        renamed = []
        for i, token in enumerate(tokens):
            children = self.trie.setdefault(tokens[:i], {})
            renamed.append(children.setdefault(token, len(children)))
        return tuple(renamed)


def canonical(s: State) -> Key:
    """One key for all states that differ only in the names of blocks, sequences and tokens."""
    orders = _orders(s)
    return min((_key(s, order) for order in orders), key=repr) if len(orders) > 1 else _key(s, orders[0])


def _orders(s: State) -> list[tuple[SeqId, ...]]:
    """The orders of the sequences that a cheap signature leaves open."""
    groups: dict[Key, list[SeqId]] = {}
    for i, seq in s.seqs.items():
        table = s.block_tables.get(i)
        shared = tuple(s.ref_count[b] for b in table) if table is not None else None
        mark: Key = (seq.num_tokens, seq.num_computed_tokens, seq.num_dropped_blocks, shared is None, shared or ())
        groups.setdefault(mark, []).append(i)
    orders: list[tuple[SeqId, ...]] = [()]
    for mark in sorted(groups, key=repr):
        orders = [(*order, *more) for order in orders for more in permutations(groups[mark])]
    return orders


def _key(s: State, order: tuple[SeqId, ...]) -> Key:
    names = Names()
    seqs = tuple(
        (
            names.prefix(s.seqs[i].tokens),
            s.seqs[i].num_computed_tokens,
            s.seqs[i].num_dropped_blocks,
            tuple(names.block(b) for b in s.block_tables[i]) if i in s.block_tables else None,
            tuple(names.host_block(b) for b in s.host_tables.get(i, ())),
        )
        for i in order
    )
    flights = tuple(
        (tuple(sorted(names.block(b) for b in _in_order(s, f.blocks))), tuple(names.block(b) for b in f.holds))
        for _, f in sorted(s.flights.items())
    )
    free = tuple(names.block(b) for b in s.free)
    cached = tuple(sorted((names.block(b), names.prefix(key.tokens)) for b, key in _by_name(s.cached, names)))
    return seqs, flights, free, cached, len(s.host_free)


def _in_order(s: State, blocks: frozenset[BlockId]) -> list[BlockId]:
    """The blocks of a set in an order that does not depend on their ids: as the tables and the holds name them."""
    named = [b for table in s.block_tables.values() for b in table]
    named += [b for _, flight in sorted(s.flights.items()) for b in flight.holds]
    return [b for b in dict.fromkeys([*named, *s.free]) if b in blocks]


def _by_name(cached: Mapping[BlockId, CacheKey], names: Names) -> list[tuple[BlockId, CacheKey]]:
    return sorted(cached.items(), key=lambda item: names.block(item[0]))


@dataclass
class Exploration:
    """What a search found: how many states and edges there are, and the shortest way to a violation."""

    num_states: int = 0
    num_edges: int = 0
    num_refusals: int = 0
    depth: int = 0
    broken: tuple[Rule, ...] = ()
    path: tuple[Move, ...] = ()
    events: tuple[Event, ...] = ()
    state: State | None = None


def explore(
    scope: Scope,
    *,
    reach: Callable[[State], bool] | None = None,
    on_edge: Callable[[State, Event, State], None] | None = None,
) -> Exploration:
    """Visit every reachable state of the scope, shortest paths first; stop at the first broken rule, or where
    ``reach`` says so."""
    first = initial_state(scope.config)
    parents: dict[Key, tuple[Key | None, Move | None]] = {canonical(first): (None, None)}
    queue = deque([(first, canonical(first), 0)])
    found = Exploration(num_states=1)
    while queue:
        state, key, depth = queue.popleft()
        found.depth = depth
        for move in moves(state, scope):
            pool = ModelPool(state)
            events = pool.call(move)
            if isinstance(events, Admission):
                found.num_refusals += 1
                continue
            found.num_edges += 1
            broken = _broken_on_the_way(state, events, on_edge)
            new_key = canonical(pool.state)
            fresh = new_key not in parents
            if fresh:
                parents[new_key] = (key, move)
                broken += broken_state_rules(pool.state)
            if broken or (reach is not None and fresh and reach(pool.state)):
                parents[new_key] = (key, move)
                found.broken, found.events, found.state = tuple(broken), events, pool.state
                found.path = _path(parents, new_key)
                return found
            if fresh:
                found.num_states += 1
                queue.append((pool.state, new_key, depth + 1))
    return found


def _broken_on_the_way(
    s: State, events: tuple[Event, ...], on_edge: Callable[[State, Event, State], None] | None
) -> list[Rule]:
    for event in events:
        after = step(s, event)
        broken = list(broken_step_rules(s, event, after))
        if broken:
            return broken
        if on_edge is not None:
            on_edge(s, event, after)
        s = after
    return []


def _path(parents: Mapping[Key, tuple[Key | None, Move | None]], key: Key) -> tuple[Move, ...]:
    path: list[Move] = []
    step_back: Key | None = key
    while step_back is not None:
        step_back, move = parents[step_back]
        if move is not None:
            path.append(move)
    return tuple(reversed(path))
