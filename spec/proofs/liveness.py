"""Every request ends: five properties of one step of a scheduler make the rank of the first request fall."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import z3

from spec.proofs.algebra import Fn, Term
from spec.proofs.laws import law
from spec.proofs.obligations import Obligation

STEP_PROPERTIES: Mapping[str, str] = {
    "P1": "Nobody runs while a request before it in the order of service waits.",
    "P2": "Whenever a request is present, some request runs.",
    "P3": "A request that runs in two steps on end, and has nobody before it, computes at least one more token.",
    "P4": "A request that is not preempted has no fewer computed tokens after a step than before.",
    "P5": "A request that has computed all its tokens leaves, and nobody who comes is before one who was there.",
}
"""The five properties, each about two steps on end of any scheduler, seen when the step is submitted."""

RULES_OF: Mapping[str, tuple[str, ...]] = {
    "P1": ("SCHED-3", "SCHED-4"),
    "P2": ("SCHED-5", "SCHED-9"),
    "P3": ("SCHED-25", "ATTN-4", "SCHED-7"),
    "P4": ("SCHED-15", "SCHED-26"),
    "P5": ("SCHED-7", "SCHED-17", "API-4"),
}
"""The rules of which each property is made. SCHED-8 sees to it that nobody comes in who could never end."""


@dataclass(frozen=True)
class Steps:
    """Two steps on end. ``before`` is the order of service: by arrival, or by priority and then by arrival;
    ``computed`` is ``num_computed_tokens``, and ``target`` what it must reach at most."""

    present: Fn
    present_after: Fn
    runs: Fn
    runs_after: Fn
    computed: Fn
    computed_after: Fn
    target: Fn
    before: Fn


def steps() -> tuple[Term, Steps]:
    """The sort of requests, and two steps of which nothing is known."""
    request = z3.DeclareSort("Request")

    def flag(name: str) -> Fn:
        return z3.Function(name, request, z3.BoolSort())  # type: ignore[no-any-return]

    def count(name: str) -> Fn:
        return z3.Function(name, request, z3.IntSort())  # type: ignore[no-any-return]

    return request, Steps(
        present=flag("present"),
        present_after=flag("present_after"),
        runs=flag("runs"),
        runs_after=flag("runs_after"),
        computed=count("computed"),
        computed_after=count("computed_after"),
        target=count("target"),
        before=z3.Function("before", request, request, z3.BoolSort()),
    )


def order_of_service(request: Term, t: Steps) -> list[Term]:
    """``before`` is a strict order, and of two requests one is before the other."""
    q, r, u = z3.Consts("q r u", request)
    return [
        z3.ForAll([q], z3.Not(t.before(q, q))),
        z3.ForAll([q, r, u], z3.Implies(z3.And(t.before(q, r), t.before(r, u)), t.before(q, u))),
        z3.ForAll([q, r], z3.Or(q == r, t.before(q, r), t.before(r, q))),
    ]


def properties(request: Term, t: Steps) -> dict[str, Term]:
    """P1 to P5 about these two steps."""
    q, r = z3.Consts("q r", request)
    overtaken = z3.And(t.runs_after(r), t.present(q), t.before(q, r))
    preempted = z3.And(t.runs(r), z3.Not(t.runs_after(r)))
    comes = z3.And(t.present_after(r), z3.Not(t.present(r)))
    is_first = z3.ForAll([q], z3.Implies(t.present(q), z3.Not(t.before(q, r))))
    runs_on = z3.And(t.runs(r), t.runs_after(r), is_first)
    return {
        "P1": z3.ForAll([r, q], z3.Implies(overtaken, z3.Or(t.runs_after(q), z3.Not(t.present_after(q))))),
        "P2": z3.Implies(
            z3.Exists([r], t.present_after(r)), z3.Exists([r], z3.And(t.runs_after(r), t.present_after(r)))
        ),
        "P3": z3.ForAll([r], z3.Implies(runs_on, t.computed_after(r) >= t.computed(r) + 1)),
        "P4": z3.ForAll([r], z3.Implies(z3.Not(preempted), t.computed_after(r) >= t.computed(r))),
        "P5": z3.And(leaving(request, t), z3.ForAll([r, q], z3.Implies(z3.And(comes, t.present(q)), t.before(q, r)))),
    }


def leaving(request: Term, t: Steps) -> Term:
    """A request that has computed all its tokens leaves: the first half of P5."""
    r = z3.Const("r", request)
    return z3.ForAll([r], z3.Implies(t.present_after(r), t.computed_after(r) < t.target(r)))


def first_in_order(request: Term, t: Steps) -> tuple[Term, list[Term]]:
    """A request that is first in the order of service, where nobody present is done."""
    first, q, r = z3.Consts("first q r", request)
    ahead = z3.ForAll([q], z3.Implies(z3.And(t.present(q), q != first), t.before(first, q)))
    unfinished = z3.ForAll([r], z3.Implies(t.present(r), t.computed(r) < t.target(r)))
    return first, [t.present(first), ahead, unfinished]


def rank(t: Steps, request: Term) -> Term:
    """Twice the tokens that are to be computed, and one more while the request waits; -1 once it is gone."""
    missing = 2 * (t.target(request) - t.computed(request))
    return z3.If(t.present(request), missing + z3.If(t.runs(request), 0, 1), -1)


def rank_after(t: Steps, request: Term) -> Term:
    """The rank after the step."""
    missing = 2 * (t.target(request) - t.computed_after(request))
    return z3.If(t.present_after(request), missing + z3.If(t.runs_after(request), 0, 1), -1)


def rank_falls(without: str = "") -> Obligation:
    """The rank of the first request is lower after each step; ``without`` leaves one of the properties out."""
    request, t = steps()
    first, situation = first_in_order(request, t)
    kept = [term for name, term in properties(request, t).items() if name != without]
    return law(
        "the_rank_of_the_first_request_falls",
        "In every step the request that is first in the order of service comes closer to its end.",
        [*order_of_service(request, t), *situation, *kept],
        rank_after(t, first) < rank(t, first),
    )


def liveness_laws() -> Iterator[Obligation]:
    """The rank falls and cannot fall for ever, so the first request ends; then another one is the first."""
    request, t = steps()
    first, situation = first_in_order(request, t)
    five = properties(request, t)
    known = [*order_of_service(request, t), *situation, *five.values()]
    q = z3.Const("q", request)
    yield rank_falls()
    yield law(
        "the_rank_is_bounded",
        "The rank of a request that is present is above 0, so that it falls only so often.",
        situation,
        rank(t, first) > 0,
    )
    yield law(
        "who_is_present_is_not_done",
        "Whoever is present after a step still has a token to compute.",
        known,
        z3.ForAll([q], z3.Implies(t.present_after(q), t.computed_after(q) < t.target(q))),
    )
    yield law(
        "the_first_request_is_never_preempted",
        "Once the first request runs it runs until it ends: the number of preemptions is bounded.",
        [*known, t.runs(first)],
        z3.Or(t.runs_after(first), z3.Not(t.present_after(first))),
    )
    stays = z3.ForAll([q], z3.Implies(z3.And(t.present_after(q), q != first), t.before(first, q)))
    yield law(
        "the_first_request_stays_first",
        "Nobody who comes overtakes the first request.",
        [*known, t.present_after(first)],
        stays,
    )
    # With priorities somebody may come and be first: then what is promised is promised to those nobody overtakes.
    yield law(
        "the_rank_falls_unless_somebody_comes_first",
        "With priorities, a first request that nobody overtakes comes closer to its end in every step.",
        [
            *order_of_service(request, t),
            *situation,
            *[five[name] for name in ("P1", "P2", "P3", "P4")],
            leaving(request, t),
            stays,
        ],
        rank_after(t, first) < rank(t, first),
    )
