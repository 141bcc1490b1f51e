"""The finite scope at work: a witness for every guard, and a concrete counterexample for every clause that fails.

Whatever z3 finds here is replayed in plain Python before anybody is told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import z3

from spec.proofs.algebra import UNINTERPRETED, Fn, Run, Signature, Sort, Term
from spec.proofs.clauses import CLAUSES, STEP_CLAUSES
from spec.proofs.core import Blocks, Core, build, functions, in_table, used
from spec.proofs.symbolic import Scope
from spec.proofs.transitions import Transition

Sizes: TypeAlias = Mapping[Sort, int]
SMALL: Sizes = {"Seq": 2, "Block": 2, "HostBlock": 1, "Step": 1, "Value": 2, "Key": 1}
SHARING: Sizes = {"Seq": 3, "Block": 2, "HostBlock": 1, "Step": 2, "Value": 2, "Key": 1}
LARGE: Sizes = {"Seq": 3, "Block": 3, "HostBlock": 2, "Step": 2, "Value": 3, "Key": 2}
RLIMIT = 100_000_000
"""The resources that z3 may spend on one search in the scope."""

TIMEOUT_S = 300
"""A backstop, should a search spend none of them."""


@dataclass(frozen=True)
class Instance:
    """One transition with all its choices made, in plain values; ``clause`` is what it breaks, if anything."""

    transition: str
    clause: str
    choices: Mapping[str, str]
    before: Mapping[str, str]
    after: Mapping[str, str]

    def report(self) -> str:
        """The instance as a person reads it: what differs between two lines is what to look at."""
        choices = ", ".join(f"{name}={value}" for name, value in self.choices.items())
        lines = [f"{self.transition}({choices})" + (f" breaks {self.clause}" if self.clause else "")]
        shown = [name for name in self.before if self.before[name] != self.after[name] or name == "block_tables"]
        for title, state in (("before", self.before), ("now", self.after)):
            lines.append(f"  {title:8}" + "   ".join(f"{name} {state[name]}" for name in shown))
        return "\n".join(lines)


class Spurious(Exception):
    """z3 gave an instance that plain Python does not confirm: the finite scope has a bug."""

    def __init__(self, transition: str, clause: str, failed: str) -> None:
        super().__init__(f"{transition}, {clause or 'guard'}: z3's instance is wrong about {failed}")


def witness(transition: Transition) -> Instance | None:
    """A state with a shared block and a step in flight in which the transition may happen and changes something."""
    A = Scope(SHARING)
    S, choices = A.state(), _choices(A, transition)
    guard, T = transition.step(A, S, *choices)
    shared = z3.Or(*[S.device.entries(b) >= 2 for b in A.elements["Block"]])
    busy = z3.Or(*[S.holds(k, b) for k in A.elements["Step"] for b in A.elements["Block"]])
    return _solve(A, SHARING, transition, S, choices, [guard, shared, busy, _changed(A, S, T), A.bounds(T, 1)], "")


def counterexample(transition: Transition, clause: str) -> Instance | None:
    """A state with every clause from which the transition leads to one without this clause: the smaller scope is
    searched first. None if there is none in the larger one either."""
    for sizes in (SMALL, LARGE):
        A = Scope(sizes)
        S, choices = A.state(), _choices(A, transition)
        guard, T = transition.step(A, S, *choices)
        broken = z3.Not(_clause(A, S, T, clause))
        found = _solve(A, sizes, transition, S, choices, [guard, broken, A.bounds(T, 1)], clause)
        if found is not None:
            return found
    return None


def _changed(A: Scope, S: Core, T: Core) -> Term:
    """The two states differ in more than ghosts."""
    terms: list[Term] = []
    for name in ("running", "swapped", "num_blocks", "first", "computed_blocks", "computed_rest", "token_rest"):
        terms += [getattr(S, name)(s) != getattr(T, name)(s) for s in A.elements["Seq"]]
    for name in ("cached", "held"):
        terms += [getattr(S, name)(b) != getattr(T, name)(b) for b in A.elements["Block"]]
    terms += [S.device.ref_count(b) != T.device.ref_count(b) for b in A.elements["Block"]]
    terms += [S.in_flight(k) != T.in_flight(k) for k in A.elements["Step"]]
    terms += [
        S.written(b, z3.IntVal(o)) != T.written(b, z3.IntVal(o))
        for b in A.elements["Block"]
        for o in range(A.block_size)
    ]
    return z3.Or(*terms)


def _choices(A: Scope, transition: Transition) -> list[Term]:
    return [A.choice(name, sort) for name, sort in zip(transition.choice_names, transition.choices, strict=True)]


def _clause(A: Any, S: Core, T: Core, clause: str) -> Term:
    return CLAUSES[clause].holds(A, T) if clause in CLAUSES else STEP_CLAUSES[clause].holds(A, S, T)


def _solve(
    A: Scope,
    sizes: Sizes,
    transition: Transition,
    S: Core,
    choices: Sequence[Term],
    wanted: Sequence[Term],
    clause: str,
) -> Instance | None:
    """What z3 finds, confirmed by running it."""
    solver = z3.Solver()
    solver.set("rlimit", RLIMIT)
    solver.set("timeout", TIMEOUT_S * 1000)
    solver.add(A.bounds(S), *[known.holds(A, S) for known in CLAUSES.values()], *wanted)
    if str(solver.check()) != "sat":
        return None
    concrete = _Concrete(A, solver.model())
    run = Run(A.block_size, {sort: range(size) for sort, size in sizes.items()}, concrete.cached_value(), A.window)
    before = build(concrete.function)
    chosen = [
        concrete.choice(name, sort) for name, sort in zip(transition.choice_names, transition.choices, strict=True)
    ]
    guard, after = transition.step(run, before, *chosen)
    confirmed = {known.name: known.holds(run, before) for known in CLAUSES.values()} | {"the guard": guard}
    if clause:
        confirmed["the broken clause"] = not _clause(run, before, after, clause)
    for name, holds in confirmed.items():
        if not holds:
            raise Spurious(transition.name, clause, name)
    shown = {
        name: _shown(run, value, sort)
        for name, value, sort in zip(transition.choice_names, chosen, transition.choices, strict=True)
    }
    return Instance(transition.name, clause, shown, describe(run, before), describe(run, after))


class _Concrete:
    """The values that a model of z3 gives to functions and choices, as plain Python."""

    def __init__(self, A: Scope, model: Any) -> None:
        self.scope = A
        self.model = model
        self.number = {str(element): i for elements in A.elements.values() for i, element in enumerate(elements)}

    def function(self, name: str, signature: Signature) -> Fn:
        symbol = self.scope.function(name, signature)

        @cache
        def value(*arguments: Term) -> Term:
            terms = [self._term(sort, x) for sort, x in zip(signature[:-1], arguments, strict=True)]
            return self._plain(symbol(*terms))

        return value

    def choice(self, name: str, sort: Sort | Signature) -> Term:
        if isinstance(sort, tuple):
            return self.function(f"choice.{name}", sort)
        return self._plain(self.scope.choice(name, sort))

    def cached_value(self) -> Fn:
        return self.function("cached_value", ("Key", "Int", "Value"))

    def _term(self, sort: Sort, value: Term) -> Term:
        return self.scope.elements[sort][value] if sort in UNINTERPRETED else z3.IntVal(value)

    def _plain(self, term: Term) -> Term:
        value = self.model.eval(term, model_completion=True)
        if z3.is_bool(value):
            return bool(z3.is_true(value))
        return value.as_long() if z3.is_int_value(value) else self.number[str(value)]


def _shown(A: Run, value: Term, sort: Sort | Signature) -> str:
    """A choice as text: a function by its first values."""
    if isinstance(sort, str):
        return str(value)
    first = [A.elements.get(s, range(3)) for s in sort[:-1]]
    if len(first) == 1:
        return str(tuple(value(x) for x in first[0]))
    return str(tuple(tuple(value(x, y) for y in first[1]) for x in first[0]))


def describe(A: Run, S: Core) -> dict[str, str]:
    """A state of the core in the words of a snapshot, zero entries left out."""
    seqs, steps = A.elements["Seq"], A.elements["Step"]
    device, host = A.elements["Block"], A.elements["HostBlock"]

    def table(P: Blocks, s: Term) -> tuple[Term, ...]:
        return tuple(P.table(s, i) for i in range(S.num_blocks(s)) if in_table(A, S, s, i))

    def contents(P: Blocks, b: Term) -> tuple[Term, ...]:
        return tuple(P.kv(b, o) for o in range(P.filled(b)))

    def length(blocks: int, rest: int) -> int:
        return blocks * A.block_size + rest

    live = [s for s in seqs if used(A, S, s)]
    facts: dict[str, object] = {
        "block_tables": {s: table(S.device, s) for s in seqs if S.running(s)},
        "ref_count": {b: S.device.ref_count(b) for b in device if S.device.ref_count(b)},
        "free": {b for b in device if S.device.free(b)} or "{}",
        "num_computed_tokens": {s: length(*S.num_computed_tokens(s)) for s in live},
        "num_tokens": {s: length(*S.num_tokens(s)) for s in live},
        "first": {s: S.first(s) for s in live if S.first(s)},
        "kv": {b: contents(S.device, b) for b in device if S.device.filled(b)},
        "cached": {b: S.key(b) for b in device if S.cached(b)},
        "holds": {k: {b: S.reach(k, b) for b in device if S.holds(k, b)} for k in steps if S.in_flight(k)},
        "due": {
            b: {o: S.writer(b, o) for o in range(S.device.filled(b)) if not S.written(b, o)}
            for b in device
            if any(not S.written(b, o) for o in range(S.device.filled(b)))
        },
        "host_tables": {s: table(S.host, s) for s in seqs if S.swapped(s)},
        "host_ref_count": {h: S.host.ref_count(h) for h in host if S.host.ref_count(h)},
        "host_free": {h for h in host if S.host.free(h)} or "{}",
        "host_kv": {h: contents(S.host, h) for h in host if S.host.filled(h)},
    }
    ghosts = {name: fn for name, fn in functions(S).items() if name.rpartition(".")[2] in ("pos", "rank", "own", "idx")}
    facts["entries"] = {b: S.device.entries(b) for b in device if S.device.entries(b)}
    facts["ghosts"] = {name: tuple(fn(x, y) for x, y in _pairs(A, name, S)) for name, fn in ghosts.items()}
    return {name: str(value) for name, value in facts.items()}


def _pairs(A: Run, name: str, S: Core) -> list[tuple[Term, Term]]:
    """The arguments for which a ghost means something."""
    pool, _, ghost = name.partition(".")
    P, sort = (S.device, "Block") if pool == "device" else (S.host, "HostBlock")
    live = [s for s in A.elements["Seq"] if (S.running if pool == "device" else S.swapped)(s)]
    entries = [(s, i) for s in live for i in range(S.num_blocks(s)) if in_table(A, S, s, i)]
    if ghost == "rank":
        return entries
    if ghost == "pos":
        return [(s, P.table(s, i)) for s, i in entries]
    return [(b, j) for b in A.elements[sort] for j in range(P.entries(b))]
