"""The proof has teeth: each change of the model breaks the clause that one would name, and shows how."""

from collections import Counter

import pytest

pytest.importorskip("z3", reason="the extra 'formal' is not installed")

from spec.proofs.clauses import CLAUSES, STEP_CLAUSES
from spec.proofs.finite import counterexample
from spec.proofs.laws import FreeList, free_list_laws, unlink
from spec.proofs.mutations import MUTATIONS, Mutation, Unmatched, attempt, mutated
from spec.proofs.obligations import obligations_of
from spec.proofs.solvers import check
from spec.proofs.transitions import TRANSITIONS


def test_there_are_enough_mutations_for_every_transition_and_clause() -> None:
    assert len(MUTATIONS) >= 30
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    harmless = {"begin", "evict", "reset"}  # they only take away, or only open
    assert {mutation.transition for mutation in MUTATIONS} == TRANSITIONS.keys() - harmless


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_matches_the_model_once(mutation: Mutation) -> None:
    assert mutation.clause in CLAUSES.keys() | STEP_CLAUSES.keys()
    assert mutated(mutation).sentence == TRANSITIONS[mutation.transition].sentence


def test_a_mutation_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(Unmatched, match="stands 0 times in transitions.py, not once"):
        mutated(Mutation("none", "fork", "content", "no such text", ""))


@pytest.mark.slow
def test_an_instance_reads_like_a_counterexample() -> None:
    by_name = {mutation.name: mutation for mutation in MUTATIONS}
    trial = attempt(by_name["fork_does_not_count"])
    assert trial.is_refuted
    assert trial.instance is not None
    first, before, now = trial.instance.report().splitlines()
    assert first.startswith("fork(parent=") and first.endswith("breaks count_is_holders")
    assert before.startswith("  before  block_tables") and now.startswith("  now     block_tables")


def test_the_model_itself_has_no_counterexample() -> None:
    assert counterexample(TRANSITIONS["begin"], "count_is_holders") is None


def test_a_link_that_is_forgotten_breaks_the_free_list() -> None:
    def one_sided(q: FreeList, block: object) -> FreeList:
        return unlink(q, block)._replace(before=q.before)

    failed = Counter(check(law).is_proved for law in free_list_laws(unlinked=one_sided))
    assert failed[False] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_mutation_breaks_the_clause_one_would_name(mutation: Mutation) -> None:
    transition = mutated(mutation)
    [named] = [each for each in obligations_of(transition) if each.clause == mutation.clause]
    assert not check(named).is_proved
    assert counterexample(transition, mutation.clause) is not None, "no instance in the finite scope"
