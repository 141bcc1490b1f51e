"""``python -m spec.proofs``: prove everything with both solvers, or one, refute the mutations, and print the matrix."""

import argparse
import json
import sys

from spec.proofs.matrix import matrix
from spec.proofs.prove import Report, prove
from spec.proofs.solvers import Solver

SOLVERS = {"z3": (Solver.Z3,), "cvc5": (Solver.CVC5,), "both": (Solver.Z3, Solver.CVC5)}


def main(arguments: list[str] | None = None) -> int:
    """0 if everything holds, else 1."""
    parser = argparse.ArgumentParser(prog="python -m spec.proofs", description="Prove the core for every size.")
    parser.add_argument("--solver", choices=SOLVERS, default="both", help="which solver to ask")
    parser.add_argument(
        "--mutations", action=argparse.BooleanOptionalAction, default=True, help="break the model, and see clauses fail"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    chosen = parser.parse_args(arguments)
    report: Report = prove(SOLVERS[chosen.solver], mutations=chosen.mutations)
    if chosen.json:
        print(json.dumps(report.as_json()))
    else:
        print(f"{matrix(report.results).text()}\n\n{report.summary()}\n{report.seconds:.1f} s")
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
