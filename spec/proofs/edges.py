"""The tie to the executable specification: every step of it is an instance of proved transitions.

A ``State`` is read as a state of the core, its ghosts computed; the event says which transitions it must be; these
run on plain values, their guards must hold, and where they lead must be what the specification shows.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spec.proofs import transitions
from spec.proofs.algebra import Fn, Run, Signature, Term
from spec.proofs.clauses import CLAUSES, STEP_CLAUSES
from spec.proofs.core import SIGNATURES, Core, build, extent, used
from spec.vocabulary import (
    Abort,
    Admit,
    Allocate,
    Append,
    Begin,
    CacheKey,
    Complete,
    Copy,
    Event,
    Evict,
    Finish,
    Fork,
    Hit,
    Preempt,
    Publish,
    Release,
    Reset,
    Rollback,
    SeqId,
    Slide,
    Start,
    State,
    StepId,
    SwapIn,
    SwapOut,
    Write,
)

_DEFAULTS: Mapping[str, Term] = {
    "Bool": False,
    "Int": 0,
    "Seq": None,
    "Block": None,
    "HostBlock": None,
    "Step": None,
    "Value": None,
    "Key": None,
}


@dataclass(frozen=True)
class Instance:
    """A transition with its choices, as plain values."""

    step: Callable[..., transitions.Step]
    choices: tuple[Term, ...]

    @property
    def name(self) -> str:
        return self.step.__name__


class Unexplained(Exception):
    """A step of the executable specification that no proved transitions account for."""

    def __init__(self, event: Event, instances: Sequence[Instance], reason: str) -> None:
        names = ", ".join(instance.name for instance in instances) or "nothing"
        super().__init__(f"{event!r} is not {names}: {reason}")
        self.event = event
        self.names = tuple(instance.name for instance in instances)
        self.reason = reason


def check_edge(before: State, event: Event, after: State) -> tuple[str, ...]:
    """The names of the transitions that the step is. Raises ``Unexplained`` if it is none."""
    A = algebra_of(before, after)
    S, shown = core_of(A, before), core_of(A, after)
    instances = tuple(instances_of(before, event, after))
    T = S
    for instance in instances:
        guard, T = instance.step(A, T, *instance.choices)
        if not guard:
            raise Unexplained(event, instances, f"the guard of {instance.name} does not hold")
    if (name := difference(A, T, shown)) is not None:
        raise Unexplained(event, instances, f"{name} is something else afterwards")
    for clause in CLAUSES.values():
        if not clause.holds(A, shown):
            raise Unexplained(event, instances, f"{clause.name} does not hold afterwards: {clause.sentence}")
    for clause in STEP_CLAUSES.values():
        # The clauses speak of single transitions; of several on end they hold where one of them acts.
        if len(instances) == 1 and not clause.holds(A, S, shown):
            raise Unexplained(event, instances, f"{clause.name} does not hold: {clause.sentence}")
    return tuple(instance.name for instance in instances)


def algebra_of(before: State, after: State) -> Run:
    """The algebra over what either state speaks of."""
    config, size = before.config, before.config.block_size

    def cached_value(key: CacheKey | None, offset: int) -> Term:
        return key.tokens[: len(key.tokens) - size + offset + 1] if key is not None else None

    most = max([0, *(count for s in (before, after) for count in holds_of(s).values())])
    elements: dict[str, Sequence[Term]] = {
        "Seq": sorted({*before.seqs, *after.seqs}),
        "Block": range(config.num_blocks),
        "HostBlock": range(config.num_host_blocks),
        "Step": [(k, layer) for k in sorted({*before.flights, *after.flights}) for layer in range(most or 1)],
    }
    window = divmod(config.window - 1, size) if config.window is not None else (1 << 30, 0)
    return Run(size, elements, cached_value, window)


def holds_of(s: State) -> Mapping[tuple[StepId, int], int]:
    """How often each step in flight holds each block."""
    return Counter((k, block) for k, flight in s.flights.items() for block in flight.holds)


def core_of(A: Run, s: State) -> Core:
    """The state as the core sees it, with the ghosts that its tables imply."""
    facts: dict[str, dict[tuple[Term, ...], Term]] = {name: {} for name in SIGNATURES}
    _enter_sequences(facts, s)
    _enter_tables(facts, "device", s.block_tables, s)
    _enter_tables(facts, "host", s.host_tables, s)
    _enter_blocks(facts, s)
    _enter_steps(facts, A, s)

    def look_up(name: str, signature: Signature) -> Fn:
        known, default = facts[name], _DEFAULTS[signature[-1]]
        return lambda *arguments: known.get(arguments, default)

    return build(look_up)


_Facts: TypeAlias = dict[str, dict[tuple[Term, ...], Term]]


def _enter_sequences(facts: _Facts, s: State) -> None:
    size = s.config.block_size
    for i, seq in s.seqs.items():
        if i not in s.block_tables and i not in s.host_tables:
            continue
        table = s.block_tables.get(i) or s.host_tables.get(i, ())
        facts["running"][i,] = i in s.block_tables
        facts["swapped"][i,] = i in s.host_tables
        facts["first"][i,] = seq.num_dropped_blocks
        facts["num_blocks"][i,] = seq.num_dropped_blocks + len(table)
        facts["computed_blocks"][i,], facts["computed_rest"][i,] = divmod(seq.num_computed_tokens, size)
        facts["token_blocks"][i,], facts["token_rest"][i,] = divmod(seq.num_tokens, size)
        for p in range(seq.num_tokens):
            facts["token"][i, p // size, p % size] = seq.tokens[: p + 1]


def _enter_tables(facts: _Facts, pool: str, tables: Mapping[SeqId, tuple[int, ...]], s: State) -> None:
    counts: Counter[int] = Counter()
    for i, table in tables.items():
        first = s.seqs[i].num_dropped_blocks if i in s.seqs else 0
        for index, block in enumerate(table, first):
            number = counts[block]
            counts[block] += 1
            facts[f"{pool}.table"][i, index] = block
            facts[f"{pool}.pos"][i, block] = index
            facts[f"{pool}.rank"][i, index] = number
            facts[f"{pool}.own"][block, number] = i
            facts[f"{pool}.idx"][block, number] = index
    for block, count in counts.items():
        facts[f"{pool}.entries"][block,] = count
        if pool == "host":
            facts["host.ref_count"][block,] = count


def _enter_blocks(facts: _Facts, s: State) -> None:
    size = s.config.block_size
    for block, count in enumerate(s.ref_count):
        facts["device.ref_count"][block,] = count
    for pool, free, cells in (("device", s.free, s.cells), ("host", s.host_free, s.host_cells)):
        for block in free:
            facts[f"{pool}.free"][block,] = True
        for slot, prefix in cells.items():
            facts[f"{pool}.kv"][slot // size, slot % size] = prefix
        for block in {slot // size for slot in cells}:
            run = next((o for o in range(size) if block * size + o not in cells), size)
            facts[f"{pool}.filled"][block,] = run
    for block, key in s.cached.items():
        facts["cached"][block,] = True
        facts["key"][block,] = key
    for block in range(s.config.num_blocks):
        for offset in range(size):
            facts["written"][block, offset] = True


def _enter_steps(facts: _Facts, A: Run, s: State) -> None:
    held: Counter[int] = Counter()
    for k, layer in A.elements["Step"]:
        facts["in_flight"][(k, layer),] = k in s.flights
    for (k, block), count in holds_of(s).items():
        for layer in range(count):
            facts["holds"][(k, layer), block] = True
            facts["hold_rank"][(k, layer), block] = held[block]
            facts["hold_own"][block, held[block]] = (k, layer)
            held[block] += 1
    for block, count in held.items():
        facts["held"][block,] = count


def difference(A: Run, X: Core, Y: Core) -> str | None:
    """The first function in which two states differ where it matters: ghosts, and what nobody reads, aside."""
    for s in A.elements["Seq"]:
        for name in ("running", "swapped"):
            if getattr(X, name)(s) != getattr(Y, name)(s):
                return name
        if used(A, Y, s):
            for name in ("first", "num_blocks", "computed_blocks", "computed_rest", "token_blocks", "token_rest"):
                if getattr(X, name)(s) != getattr(Y, name)(s):
                    return name
            if (place := _difference_of_tables(A, X, Y, s)) is not None:
                return place
    for b in A.elements["Block"]:
        if X.device.ref_count(b) != Y.device.ref_count(b) or X.device.entries(b) != Y.device.entries(b):
            return "ref_count"
        if X.device.free(b) != Y.device.free(b):
            return "free"
        if X.cached(b) != Y.cached(b) or (Y.cached(b) and X.key(b) != Y.key(b)):
            return "cached"
        if Y.cached(b) and any(X.device.kv(b, o) != Y.device.kv(b, o) for o in range(A.block_size)):
            return "kv of a cached block"
        if any(X.holds(k, b) != Y.holds(k, b) for k in A.elements["Step"]):
            return "holds"
    for h in A.elements["HostBlock"]:
        if X.host.free(h) != Y.host.free(h) or X.host.ref_count(h) != Y.host.ref_count(h):
            return "host_free"
    return "in_flight" if any(X.in_flight(k) != Y.in_flight(k) for k in A.elements["Step"]) else None


def _difference_of_tables(A: Run, X: Core, Y: Core, s: SeqId) -> str | None:
    pool, P, Q = ("host", X.host, Y.host) if Y.swapped(s) else ("device", X.device, Y.device)
    for i in range(Y.first(s), Y.num_blocks(s)):
        if P.table(s, i) != Q.table(s, i):
            return f"{pool}.table"
        for o in range(extent(A, Y, s, i)):
            if P.kv(Q.table(s, i), o) != Q.kv(Q.table(s, i), o):
                return f"{pool}.kv"
            if X.token(s, i, o) != Y.token(s, i, o):
                return "token"
    return None


# Which transitions an event is


def instances_of(before: State, event: Event, after: State) -> Iterator[Instance]:
    """The transitions that the event must be, with its choices: first new holds, then what it is about."""
    if not isinstance(event, Begin):
        yield from _new_holds(before, after)
    match event:
        case Admit() | Preempt() | Abort() | Release() | Finish() | Start():
            yield from _comings_and_goings(before, after)
        case Begin(step_id):
            yield from (
                Instance(transitions.begin, (k,)) for k in algebra_of(before, after).elements["Step"] if k[0] == step_id
            )
        case Complete(step_id):
            yield from (
                Instance(transitions.complete, (k,))
                for k in algebra_of(before, after).elements["Step"]
                if k[0] == step_id
            )
        case Append(seq, tokens):
            yield from _appends(before, seq, tokens)
        case Write(seq, _, slots):
            yield from _writes(before, seq, len(slots))
        case _:
            yield from _single(before, event, after)


def _single(s: State, event: Event, after: State) -> Iterator[Instance]:
    """Events that are one transition each, or none."""
    size = s.config.block_size
    match event:
        case Allocate(seq, _, blocks):
            pick, place = _picked(blocks, s.seqs[seq].num_dropped_blocks + len(s.block_tables.get(seq, ())))
            yield Instance(transitions.allocate, (seq, len(blocks), pick, place))
        case Hit(seq, blocks):
            pick, place = _picked(blocks)
            keys = {i: s.cached.get(block) for i, block in enumerate(blocks)}
            yield Instance(transitions.hit, (seq, 0, len(blocks), pick, place, keys.get))
        case Copy(seq, index, _, target):
            stale: dict[int, Term] = {}
            yield Instance(transitions.copy, (seq, s.seqs[seq].num_dropped_blocks + index, target, stale.get))
        case Fork(parent, child):
            yield Instance(transitions.fork, (parent, child))
        case Rollback(seq, num_tokens):
            left = after.seqs[seq]
            kept = left.num_dropped_blocks + len(after.block_tables[seq])
            counts = (*divmod(num_tokens, size), *divmod(left.num_computed_tokens, size))
            yield Instance(transitions.rollback, (seq, *counts, kept))
        case Slide(seq, num_blocks):
            yield Instance(transitions.slide, (seq, num_blocks))
        case SwapOut(seq, blocks):
            first = s.seqs[seq].num_dropped_blocks
            pick, place = _picked(blocks, first)
            yield Instance(transitions.swap_out, (seq, first + len(blocks), pick, place, lambda b, o: None))
        case SwapIn(seq, blocks):
            first = s.seqs[seq].num_dropped_blocks
            pick, place = _picked(blocks, first)
            yield Instance(transitions.swap_in, (seq, first + len(blocks), pick, place))
        case Publish(seq, index):
            block = s.block_tables[seq][index - s.seqs[seq].num_dropped_blocks]
            yield Instance(transitions.publish, (seq, index, after.cached.get(block)))
        case Evict(block):
            yield Instance(transitions.evict, (block,))
        case Reset():
            yield Instance(transitions.reset, ())


def _picked(blocks: Sequence[int], first: int = 0) -> tuple[Fn, Fn]:
    """A choice of blocks for the entries from ``first`` on, and its inverse."""
    pick = dict(enumerate(blocks, first))
    place = {block: i for i, block in pick.items()}
    return pick.get, lambda block: place.get(block, -1)


def _comings_and_goings(before: State, after: State) -> Iterator[Instance]:
    """Sequences that gave up their tables, and sequences that began to have one."""
    for seq in before.block_tables:
        if seq not in after.block_tables and seq not in after.host_tables:
            yield Instance(transitions.release, (seq,))
    for seq in before.host_tables:
        if seq not in after.host_tables and seq not in after.block_tables:
            yield Instance(transitions.release_swapped, (seq,))
    for seq in after.block_tables:
        if seq not in before.block_tables and seq not in before.host_tables:
            yield Instance(transitions.start, (seq, *_tokens(after, seq)))


def _tokens(s: State, seq: SeqId) -> tuple[Term, ...]:
    """The number of tokens of a sequence, and the prefix that ends at each of its positions."""
    tokens, size = s.seqs[seq].tokens, s.config.block_size

    def value(i: int, o: int) -> Term:
        return tokens[: i * size + o + 1]

    return *divmod(len(tokens), size), value


def _appends(s: State, seq: SeqId, tokens: Sequence[int]) -> Iterator[Instance]:
    """One transition a token; a sequence that waits is no part of the core."""
    if seq in s.block_tables or seq in s.host_tables:
        known = s.seqs[seq].tokens
        for count in range(1, len(tokens) + 1):
            yield Instance(transitions.append, (seq, known + tuple(tokens[:count])))


def _writes(s: State, seq: SeqId, num_tokens: int) -> Iterator[Instance]:
    """One transition a block."""
    start, size = s.seqs[seq].num_computed_tokens, s.config.block_size
    stop = start + num_tokens
    while start < stop:
        count = min(stop - start, size - start % size)
        yield Instance(transitions.write, (seq, count))
        start += count


def _new_holds(before: State, after: State) -> Iterator[Instance]:
    """The holds that a step in flight has afterwards and did not have before."""
    old, new = holds_of(before), holds_of(after)
    for k in after.flights:
        layers = {
            layer for (step, block), count in new.items() if step == k for layer in range(old.get((k, block), 0), count)
        }
        for layer in sorted(layers):
            fresh = {b for (step, b), count in new.items() if step == k and old.get((k, b), 0) <= layer < count}
            yield Instance(transitions.submit, ((k, layer), fresh.__contains__, lambda block: 0))
