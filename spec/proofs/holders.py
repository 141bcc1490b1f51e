"""How a pool changes when holders come and go: the three moves that every transition is made of."""

from collections.abc import Callable
from dataclasses import replace

from spec.proofs.algebra import Algebra, Fn, Term
from spec.proofs.core import Blocks, Core


def picked(A: Algebra, start: Term, stop: Term, pick: Fn, place: Fn) -> Callable[[Term], Term]:
    """Whether a block is one of ``pick(start)`` to ``pick(stop - 1)``; ``place`` is the inverse of ``pick``."""
    return lambda b: A.And(start <= place(b), place(b) < stop, pick(place(b)) == b)


def distinct(A: Algebra, start: Term, stop: Term, pick: Fn, place: Fn, each: Callable[[Term], Term]) -> Term:
    """The blocks picked for the entries from ``start`` to ``stop`` are different ones, and each is as it must be."""
    different = A.upto(stop, lambda i: A.Implies(start <= i, place(pick(i)) == i))
    return A.And(different, A.upto(stop, lambda i: A.Implies(start <= i, each(i))))


def take(A: Algebra, P: Blocks, s: Term, start: Term, stop: Term, pick: Fn, place: Fn) -> Blocks:
    """Entries ``start`` to ``stop`` of the table of s name the picked blocks: the new entry of a block gets the
    first number that is not used yet."""
    got = picked(A, start, stop, pick, place)

    def here(t: Term, i: Term) -> Term:
        return A.And(t == s, start <= i, i < stop)

    return replace(
        P,
        table=lambda t, i: A.If(here(t, i), pick(i), P.table(t, i)),
        ref_count=lambda b: P.ref_count(b) + A.If(got(b), 1, 0),
        free=lambda b: A.And(A.Not(got(b)), P.free(b)),
        entries=lambda b: P.entries(b) + A.If(got(b), 1, 0),
        pos=lambda t, b: A.If(A.And(t == s, got(b)), place(b), P.pos(t, b)),
        rank=lambda t, i: A.If(here(t, i), P.entries(pick(i)), P.rank(t, i)),
        own=lambda b, j: A.If(A.And(got(b), j == P.entries(b)), s, P.own(b, j)),
        idx=lambda b, j: A.If(A.And(got(b), j == P.entries(b)), place(b), P.idx(b, j)),
    )


def drop(A: Algebra, P: Blocks, s: Term, start: Term, stop: Term) -> Blocks:
    """Entries ``start`` to ``stop`` leave the table of s: the last entry of a block takes over the number that is
    given up."""

    def gone(b: Term) -> Term:
        i = P.pos(s, b)
        return A.And(start <= i, i < stop, P.table(s, i) == b)

    def number(b: Term) -> Term:
        return P.rank(s, P.pos(s, b))

    def last(b: Term) -> Term:
        return P.entries(b) - 1

    def moved(b: Term, r: Term) -> Term:
        return A.And(gone(b), r == last(b))

    def vacant(b: Term, j: Term) -> Term:
        return A.And(gone(b), j == number(b))

    return replace(
        P,
        ref_count=lambda b: P.ref_count(b) - A.If(gone(b), 1, 0),
        free=lambda b: A.Or(P.free(b), A.And(gone(b), P.ref_count(b) == 1)),
        entries=lambda b: P.entries(b) - A.If(gone(b), 1, 0),
        rank=lambda t, i: A.If(moved(P.table(t, i), P.rank(t, i)), number(P.table(t, i)), P.rank(t, i)),
        own=lambda b, j: A.If(vacant(b, j), P.own(b, last(b)), P.own(b, j)),
        idx=lambda b, j: A.If(vacant(b, j), P.idx(b, last(b)), P.idx(b, j)),
    )


def hold(A: Algebra, S: Core, k: Term, some: Callable[[Term], Term], reach: Fn) -> Core:
    """Step k holds these blocks, and counts on the first ``reach`` slots of each."""
    P = S.device
    return replace(
        S,
        device=replace(P, ref_count=lambda b: P.ref_count(b) + A.If(some(b), 1, 0)),
        holds=lambda m, b: A.Or(A.And(m == k, some(b)), S.holds(m, b)),
        held=lambda b: S.held(b) + A.If(some(b), 1, 0),
        hold_rank=lambda m, b: A.If(A.And(m == k, some(b)), S.held(b), S.hold_rank(m, b)),
        hold_own=lambda b, j: A.If(A.And(some(b), j == S.held(b)), k, S.hold_own(b, j)),
        reach=lambda m, b: A.If(A.And(m == k, some(b)), reach(b), S.reach(m, b)),
        seen=lambda m, b, o: A.If(A.And(m == k, some(b)), P.kv(b, o), S.seen(m, b, o)),
    )


def let_go(A: Algebra, S: Core, k: Term) -> Core:
    """Step k holds nothing any more: the last hold of a block takes over the number that is given up."""
    P = S.device

    def last(b: Term) -> Term:
        return S.held(b) - 1

    def vacant(b: Term, j: Term) -> Term:
        return A.And(S.holds(k, b), j == S.hold_rank(k, b))

    return replace(
        S,
        device=replace(
            P,
            ref_count=lambda b: P.ref_count(b) - A.If(S.holds(k, b), 1, 0),
            free=lambda b: A.Or(P.free(b), A.And(S.holds(k, b), P.ref_count(b) == 1)),
        ),
        holds=lambda m, b: A.And(m != k, S.holds(m, b)),
        held=lambda b: S.held(b) - A.If(S.holds(k, b), 1, 0),
        hold_rank=lambda m, b: A.If(
            A.And(S.holds(k, b), S.hold_rank(m, b) == last(b)), S.hold_rank(k, b), S.hold_rank(m, b)
        ),
        hold_own=lambda b, j: A.If(vacant(b, j), S.hold_own(b, last(b)), S.hold_own(b, j)),
    )
