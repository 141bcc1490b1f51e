"""The kill matrix of the book is the zoo that the tests run, and every public bug is caught or out of scope."""

import sys
from pathlib import Path

import pytest

from spec.bugs import BUGS, CLASSES, is_covered
from spec.corpus import CORPUS
from tests.kernels import test_mutants as kernels
from tests.mutants.test_mutants import ZOO

EXTENSIONS = Path(__file__).parents[2] / "docs" / "_ext"
KERNEL_ZOO = [*kernels.ATTENTION, *kernels.CACHE, *kernels.FP8, *kernels.LAYER, *kernels.SAMPLING]


@pytest.fixture
def kill_matrix(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(EXTENSIONS)
    import kill_matrix

    yield kill_matrix
    for name in ("kill_matrix", "ledger"):
        sys.modules.pop(name, None)


def test_the_book_lists_the_mutants_that_are_run(kill_matrix) -> None:
    listed = sorted((each.name, each.package, each.killer, each.row) for each in kill_matrix.zoo())
    assert listed == sorted((mutant.name, mutant.package, mutant.rule, mutant.row) for mutant in ZOO)


def test_the_book_lists_the_mutants_of_kernels_that_are_run(kill_matrix) -> None:
    listed = [(each.name, each.killer, each.row) for each in kill_matrix.kernel_zoo()]
    assert listed == [(mutant.name, mutant.check.__name__, mutant.row) for mutant in KERNEL_ZOO]


def test_the_book_says_of_every_bug_what_becomes_of_it(kill_matrix) -> None:
    ways = {bug.id: kill_matrix.caught(bug) for bug in BUGS.values()}
    assert all(ways.values())
    assert all(ways[mutant.row].count("kills") for mutant in ZOO)


def test_every_mutant_is_like_a_bug_that_somebody_had() -> None:
    assert {mutant.row for mutant in ZOO} <= BUGS.keys()
    assert {mutant.row for mutant in KERNEL_ZOO if mutant.row} <= BUGS.keys()


def test_there_are_forty_mutants_and_more_of_classes_one_to_seven() -> None:
    rows = [mutant.row for mutant in [*ZOO, *KERNEL_ZOO] if mutant.row]
    classes = [BUGS[row].bug_class for row in rows]
    assert len(rows) >= 40
    assert set(classes) >= set(range(1, 8))


def test_a_bug_is_covered_or_out_of_scope_and_cites_what_exists() -> None:
    for bug in BUGS.values():
        assert set(bug.invariants) <= CORPUS.keys(), bug.id
        assert is_covered(bug) or bug.out, bug.id
        assert bug.sources, bug.id
        assert bug.bug_class in CLASSES


def test_what_is_out_of_scope_has_no_mutant() -> None:
    assert {bug.id for bug in BUGS.values() if bug.out} & {mutant.row for mutant in [*ZOO, *KERNEL_ZOO]} == set()
