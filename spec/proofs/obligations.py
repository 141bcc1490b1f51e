"""What has to be proved: one obligation for each transition and clause, and one for each clause at the start."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spec.proofs.algebra import Algebra, Term
from spec.proofs.clauses import CLAUSES, STEP_CLAUSES, Clause
from spec.proofs.core import Core, in_table
from spec.proofs.symbolic import Prove
from spec.proofs.transitions import TRANSITIONS, Transition


@dataclass(frozen=True)
class Obligation:
    """From the hypotheses follows the goal. ``transition`` is empty where no transition is spoken of;
    ``may_search`` lets z3 look for instances beyond its patterns, which the laws of arithmetic need."""

    name: str
    transition: str
    clause: str
    sentence: str
    hypotheses: tuple[Term, ...]
    goal: Term
    may_search: bool = False


def initial(A: Algebra, S: Core) -> Term:
    """The state of an engine that has just started: no sequence, every block free, nothing cached or in flight."""
    return A.And(
        A.all("Seq", lambda s: A.And(A.Not(S.running(s)), A.Not(S.swapped(s)))),
        *[
            A.all(sort, lambda b, P=P: A.And(P.ref_count(b) == 0, P.entries(b) == 0, P.filled(b) == 0, P.free(b)))
            for sort, P in (("Block", S.device), ("HostBlock", S.host))
        ],
        A.all("Block", lambda b: A.And(A.Not(S.cached(b)), S.held(b) == 0)),
        A.all("Step", lambda k: A.all("Block", lambda b: A.And(A.Not(S.in_flight(k)), A.Not(S.holds(k, b))))),
    )


def base_case() -> Iterator[Obligation]:
    """The initial state has every clause."""
    A = Prove()
    S = A.state()
    for clause in CLAUSES.values():
        yield Obligation(
            f"initially: {clause.name}",
            "",
            clause.name,
            clause.sentence,
            (*A.axioms, initial(A, S)),
            clause.holds(A, S),
        )


def obligations_of(transition: Transition, known: Mapping[str, Clause] = CLAUSES) -> Iterator[Obligation]:
    """The transition keeps every clause, given the known ones and its guard."""
    A = Prove()
    S = A.state()
    choices = [A.choice(name, sort) for name, sort in zip(transition.choice_names, transition.choices, strict=True)]
    guard, T = transition.step(A, S, *choices)
    hypotheses = (*A.axioms, *(clause.holds(A, S) for clause in known.values()), guard)
    goals = [(clause, clause.holds(A, T)) for clause in CLAUSES.values()]
    goals += [(clause, clause.holds(A, S, T)) for clause in STEP_CLAUSES.values()]
    for clause, goal in goals:
        name = f"{transition.name}: {clause.name}"
        yield Obligation(name, transition.name, clause.name, clause.sentence, hypotheses, goal)


def lemmas() -> Iterator[Obligation]:
    """What follows from the clauses alone, in every state."""
    A = Prove()
    S = A.state()
    P = S.device
    s, t, i, j = (A.choice(name, sort) for name, sort in (("s", "Seq"), ("t", "Seq"), ("i", "Int"), ("j", "Int")))
    k, b, o = (A.choice(name, sort) for name, sort in (("k", "Step"), ("b", "Block"), ("o", "Int")))

    def entry(s: Term, i: Term) -> Term:
        return A.And(S.running(s), 0 <= i, in_table(A, S, s, i))

    two = A.And(entry(s, i), entry(t, j), A.Or(s != t, i != j), P.table(s, i) == P.table(t, j))
    slot = A.And(0 <= o, o < P.filled(b))
    statements = {
        "two_entries_count_twice": (
            "A block that two table entries name has two holders.",
            two,
            P.ref_count(P.table(s, i)) >= 2,
        ),
        "sharers_are_different_sequences": (
            "A block that two table entries name is shared by two sequences.",
            two,
            s != t,
        ),
        "table_entries_are_not_free": ("A block in a table is not free.", entry(s, i), A.Not(P.free(P.table(s, i)))),
        "held_blocks_are_not_free": (
            "A block that a step in flight holds is not free.",
            S.holds(k, b),
            A.Not(P.free(b)),
        ),
        "nothing_is_due_once_steps_are_over": (
            "A block that no step in flight holds is written as far as it is filled, also if it was published early.",
            A.And(slot, S.held(b) == 0),
            S.written(b, o),
        ),
        "cached_blocks_serve_their_key": (
            "A cached block that no step in flight holds has its key's contents, all of them written.",
            A.And(S.cached(b), S.held(b) == 0, 0 <= o, o < A.block_size),
            A.And(P.kv(b, o) == A.cached_value(S.key(b), o), S.written(b, o)),
        ),
    }
    known = (*A.axioms, *(clause.holds(A, S) for clause in CLAUSES.values()))
    for name, (sentence, condition, goal) in statements.items():
        yield Obligation(name, "", name, sentence, (*known, condition), goal)


def inductive(transitions: Mapping[str, Transition] = TRANSITIONS) -> Iterator[Obligation]:
    """Every transition keeps every clause."""
    for transition in transitions.values():
        yield from obligations_of(transition)
