"""Which clauses the proof leans on: a clause is needed if some obligation about another one fails without it."""

from collections.abc import Mapping
from functools import cache

from spec.proofs.clauses import CLAUSES
from spec.proofs.obligations import obligations_of
from spec.proofs.solvers import check, used_hypotheses
from spec.proofs.symbolic import Prove
from spec.proofs.transitions import TRANSITIONS

WANTED_FOR_THEMSELVES: Mapping[str, str] = {
    "no_spare_block": "what blocks waste is bounded",
    "window_is_kept": "a token finds everything that its window shows",
    "counts_are_entries": "the other half of the count: no reference is counted that nobody has, so nothing leaks",
    "host_counts_are_entries": "the same for host blocks",
    "counts_are_holds": "the same for steps in flight",
    "host_reads_stay_filled": "what is swapped in was put there",
    "host_blocks_are_not_overfilled": "a slot lies in its own block",
    "reach_is_filled": "a step in flight touches no slot that was not given to a token",
    "unwritten_are_due": "what was published early is written in the end",
}
"""Clauses that hold up no other one, and why they are stated."""


def needed_for(clause: str) -> str | None:
    """An obligation about another clause that is no longer proved without this one; None if all still are."""
    known = {name: each for name, each in CLAUSES.items() if name != clause}
    for transition in TRANSITIONS.values():
        # Whatever has a proof that does not use it has that proof without it, too.
        leaning = {name for name, used in clauses_used(transition.name).items() if clause in used}
        for obligation in obligations_of(transition, known) if leaning else ():
            if obligation.clause in leaning - {clause} and not check(obligation).is_proved:
                return obligation.name
    return None


@cache
def clauses_used(transition: str) -> Mapping[str, frozenset[str]]:
    """For each clause that the transition keeps, the clauses that one proof of it uses; all of them where none is found."""
    names, first = list(CLAUSES), len(Prove().axioms)
    used = {}
    for obligation in obligations_of(TRANSITIONS[transition]):
        places = used_hypotheses(obligation)
        if places is None:
            places = frozenset(range(len(obligation.hypotheses)))
        used[obligation.clause] = frozenset(names[at - first] for at in places if first <= at < first + len(names))
    return used
