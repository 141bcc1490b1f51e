"""The proof holds: every obligation, a witness for every guard, nothing superfluous, nothing unnamed."""

import subprocess
import sys

import pytest

pytest.importorskip("z3", reason="the extra 'formal' is not installed")

from typer.testing import CliRunner

from optimized.cli import app
from spec.proofs.__main__ import main
from spec.proofs.clauses import CLAUSES, STEP_CLAUSES
from spec.proofs.ledger import RULE_OF_CLAUSE, RULE_OF_GUARD, RULE_OF_LAW
from spec.proofs.matrix import START, matrix
from spec.proofs.obligations import obligations_of
from spec.proofs.prove import Report, obligations, prove
from spec.proofs.solvers import Z3_RLIMIT, Solver, Verdict, check
from spec.proofs.support import WANTED_FOR_THEMSELVES, clauses_used, needed_for
from spec.proofs.transitions import TRANSITIONS
from spec.rules import RULES


@pytest.fixture(scope="module")
def report() -> Report:
    return prove()


@pytest.mark.slow
def test_every_obligation_is_proved(report: Report) -> None:
    assert report.unproved == (), report.summary()


@pytest.mark.slow
def test_every_guard_has_a_witness(report: Report) -> None:
    assert report.vacuous == ()
    assert report.witnesses.keys() == TRANSITIONS.keys()


@pytest.mark.slow
def test_each_of_the_five_scheduler_properties_is_needed(report: Report) -> None:
    assert set(report.needed.values()) == {Verdict.REFUTED}
    assert list(report.needed) == ["P1", "P2", "P3", "P4", "P5"]


@pytest.mark.slow
def test_the_report_holds_and_says_so(report: Report) -> None:
    assert report.holds
    assert report.as_json()["holds"] is True
    assert f"{len(report.results)} of {len(report.results)} obligations proved" in report.summary()


@pytest.mark.slow
def test_there_is_an_obligation_for_every_transition_and_clause(report: Report) -> None:
    places = {(result.transition, result.clause) for result in report.results}
    assert places >= {(t, c) for t in TRANSITIONS for c in (*CLAUSES, *STEP_CLAUSES)} | {("", c) for c in CLAUSES}


@pytest.mark.slow
def test_the_proofs_leave_half_of_their_resources_unused(report: Report) -> None:
    slowest = max(report.results, key=lambda result: result.rlimit)
    assert slowest.rlimit < Z3_RLIMIT / 2, slowest.name


@pytest.mark.slow
def test_the_names_of_obligations_are_distinct(report: Report) -> None:
    names = [result.name for result in report.results]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_the_matrix_is_full(report: Report) -> None:
    shown = matrix(report.results)
    empty = {place for place, proved in shown.cells.items() if not proved}
    assert empty == {(clause, START) for clause in STEP_CLAUSES}, "a clause about two states has no base case"


def test_the_matrix_has_a_line_for_each_clause() -> None:
    lines = matrix().text().splitlines()
    assert {line.split()[0] for line in lines} >= {*CLAUSES, *STEP_CLAUSES}


def test_what_is_not_proved_is_unknown_within_the_limit() -> None:
    assert check(next(iter(obligations())), rlimit=1).verdict is Verdict.UNKNOWN


def test_a_failure_is_told_by_exit_status_and_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Report(results=(check(next(iter(obligations())), rlimit=1),))
    monkeypatch.setattr("spec.proofs.__main__.prove", lambda *_, **__: broken)
    assert main([]) == 1
    assert "not proved by z3: initially: one_place (unknown)" in capsys.readouterr().out


def test_both_solvers_and_the_mutations_are_what_is_asked_for_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Report((check(next(iter(obligations()))),))
    asked = list[tuple[tuple[Solver, ...], bool]]()

    def proved(solvers: tuple[Solver, ...], *, mutations: bool, **_: object) -> Report:
        asked.append((solvers, mutations))
        return small

    for where in ("spec.proofs.__main__.prove", "spec.proofs.prove.prove"):
        monkeypatch.setattr(where, proved)
    for quick in ([], ["--solver", "z3", "--no-mutations"]):
        assert main(quick) == 0
        assert CliRunner().invoke(app, ["spec", "prove", *quick]).exit_code == 0
    assert asked == [((Solver.Z3, Solver.CVC5), True)] * 2 + [((Solver.Z3,), False)] * 2
    assert "z3: 1 of 1 obligations proved" in capsys.readouterr().out


def test_the_ledger_names_every_clause_and_no_other() -> None:
    assert RULE_OF_CLAUSE.keys() == CLAUSES.keys() | STEP_CLAUSES.keys()


def test_the_ledger_names_existing_rules() -> None:
    named = {rule for ledger in (RULE_OF_CLAUSE, RULE_OF_LAW, RULE_OF_GUARD) for ids in ledger.values() for rule in ids}
    assert named <= RULES.keys()


@pytest.mark.slow
def test_the_ledger_names_existing_laws_and_transitions(report: Report) -> None:
    assert RULE_OF_LAW.keys() <= {result.clause for result in report.results}
    assert RULE_OF_GUARD.keys() <= TRANSITIONS.keys()


def test_importing_the_package_loads_no_solver() -> None:
    code = "import sys, spec.proofs; sys.exit(bool({'z3', 'cvc5'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_cvc5_proves_everything_too_and_checks_its_proofs() -> None:
    pytest.importorskip("cvc5")
    report = prove((Solver.CVC5,), witnesses=False)
    assert report.unproved == (), report.summary()
    assert all(result.proof_steps > 0 for result in report.results)


@pytest.mark.slow
def test_every_clause_is_needed_for_another_one_or_for_itself() -> None:
    assert {clause for clause in CLAUSES if needed_for(clause) is None} == WANTED_FOR_THEMSELVES.keys()


def test_a_proof_says_which_clauses_it_uses() -> None:
    """And holds with these alone."""
    used = clauses_used("append")
    assert "computed_are_known" in used["content"] and "window_is_kept" not in used["content"]
    known = {name: CLAUSES[name] for name in used["content"]}
    [again] = [each for each in obligations_of(TRANSITIONS["append"], known) if each.clause == "content"]
    assert check(again).is_proved
