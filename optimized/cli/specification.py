"""``kvproof spec``: look at the rules, search for one that breaks, prove that none does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from optimized.cli.exploration import explore
from optimized.cli.guard import FAILED, plain_errors
from optimized.cli.printing import JsonOption, print_json, with_status

if TYPE_CHECKING:
    from spec.ledger import Entry
    from spec.rules import Rule

app = typer.Typer(help="Look at the specification, search it, prove it.", no_args_is_help=True)
app.command()(explore)


@app.command()
@plain_errors
def rules(as_json: JsonOption = False) -> None:
    """List every rule, and how strongly it is known."""
    from spec.corpus import CORPUS

    entries = with_status("Looking where each rule is judged", lambda _: read_ledger())
    if as_json:
        corpus = [
            {
                "id": each.id,
                "sentence": each.sentence,
                "way": each.way.value,
                "rules": list(each.rules),
                "tests": list(each.tests),
                "remark": each.remark,
            }
            for each in CORPUS.values()
        ]
        print_json({"rules": [entry.as_json() for entry in entries.values()], "corpus": corpus})
        return
    for entry in entries.values():
        after = " | ".join(event.__name__ for event in entry.rule.events)
        typer.echo(f"{entry.rule.id:11}{entry.strength.value:10}{entry.rule.sentence}{f'  [{after}]' if after else ''}")


@cache
def read_ledger() -> Mapping[str, Entry]:
    """The ledger, told by the proofs, the explorer and the sabotaged engines of a checkout."""
    import reference
    from spec.ledger import explored_rules, ledger, mutants_in, walks
    from spec.proofs.ledger import RULE_OF_CLAUSE, RULE_OF_GUARD

    explored = explored_rules(walks(reference.make_engine))
    return ledger(clauses=RULE_OF_CLAUSE, guards=RULE_OF_GUARD, explored=explored, mutants=mutants_in())


def all_rules() -> list[Rule]:
    """Every rule, in the order of the chapters."""
    import spec.replay  # noqa: F401  it loads the chapters, which enter their rules
    from spec.rules import RULES

    return list(RULES.values())


@app.command()
@plain_errors
def prove(
    solver: Annotated[str, typer.Option(help="z3 (the faster one), cvc5 or both.")] = "both",
    mutations: Annotated[bool, typer.Option(help="Break the model too, and see proofs fail.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Prove the rules of the core for every size, by both solvers, and refute every mutation: some minutes.

    With --solver z3 --no-mutations it takes seconds.
    """
    from spec.proofs.matrix import matrix
    from spec.proofs.prove import prove as prove_all
    from spec.proofs.solvers import Solver
    from spec.vocabulary import InvalidConfig

    solvers = {"z3": (Solver.Z3,), "cvc5": (Solver.CVC5,), "both": (Solver.Z3, Solver.CVC5)}
    if solver not in solvers:
        raise InvalidConfig("solver", solver, f"one of {', '.join(solvers)}")
    report = with_status("Proving", lambda say: prove_all(solvers[solver], mutations=mutations, on_progress=say))
    if as_json:
        print_json(report.as_json())
    else:
        typer.echo(f"{matrix(report.results).text()}\n\n{report.summary()}\n{report.seconds:.1f} s")
    if not report.holds:
        raise typer.Exit(FAILED)
