"""The two solvers: each gets one obligation and a fixed resource limit, and says whether it is proved."""

import time
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import z3

from spec.proofs.obligations import Obligation

# Otherwise z3 takes Ctrl-C for the end of one obligation, and we would go on with the next.
z3.set_param("ctrl_c", False)

Z3_RLIMIT = 1_000_000
"""The resources that z3 may spend on one obligation, in its own units: the same on every machine."""

TIMEOUT_S = 60
"""A backstop: z3 has loops that spend none of its resources. It ends as unknown, which is a failure."""

CVC5_RLIMIT = 1_000_000
"""The resources that cvc5 may spend on one obligation, in its own units."""


class Verdict(Enum):
    """What a solver said of an obligation."""

    PROVED = "proved"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


class Solver(Enum):
    """A solver, and whether its proofs are checked."""

    Z3 = "z3"
    CVC5 = "cvc5"


@dataclass(frozen=True)
class Result:
    """What a solver said, and what it spent. ``proof_steps`` counts the steps of a checked proof (cvc5)."""

    name: str
    transition: str
    clause: str
    verdict: Verdict
    seconds: float
    rlimit: int
    solver: Solver
    proof_steps: int = 0

    @property
    def is_proved(self) -> bool:
        return self.verdict is Verdict.PROVED


class UncheckedProof(Exception):
    """cvc5 said that an obligation holds, and its proof has a step that it asks us to trust."""

    def __init__(self, name: str, num_trusted: int) -> None:
        super().__init__(f"the proof of {name!r} has {num_trusted} steps that nothing checks")
        self.name = name
        self.num_trusted = num_trusted


def check(obligation: Obligation, solver: Solver = Solver.Z3, rlimit: int | None = None) -> Result:
    """What the solver says of the obligation, within the resource limit."""
    started = time.perf_counter()
    if solver is Solver.Z3:
        verdict, spent = _ask_z3(obligation, rlimit or Z3_RLIMIT)
        steps = 0
    else:
        verdict, spent, steps = _ask_cvc5(obligation, rlimit or CVC5_RLIMIT)
    seconds = time.perf_counter() - started
    return Result(obligation.name, obligation.transition, obligation.clause, verdict, seconds, spent, solver, steps)


def smt_text(obligation: Obligation) -> str:
    """The obligation in SMT-LIB, which any solver reads: unsatisfiable means proved."""
    solver = z3.Solver()
    solver.add(*obligation.hypotheses, z3.Not(obligation.goal))
    return f"(set-logic ALL)\n{solver.to_smt2().replace('(check-sat)', '')}"


_VERDICTS = {"unsat": Verdict.PROVED, "sat": Verdict.REFUTED}


def _ask_z3(obligation: Obligation, rlimit: int) -> tuple[Verdict, int]:
    # A context of its own and the text alone: what z3 does then depends on nothing that it did before.
    solver = z3.Solver(ctx=z3.Context())
    solver.set("rlimit", rlimit)
    solver.set("timeout", TIMEOUT_S * 1000)
    # Instances come from patterns alone: then a failed proof ends at once, and the finite scope finds out why.
    solver.set("smt.mbqi", obligation.may_search)
    solver.from_string(smt_text(obligation))
    answer = str(solver.check())
    spent = int(solver.statistics().get_key_value("rlimit count"))
    return _VERDICTS.get(answer, Verdict.UNKNOWN), spent


def used_hypotheses(obligation: Obligation) -> frozenset[int] | None:
    """The places of the hypotheses that a proof of z3's uses, which needs no others; None if it finds none."""
    context = z3.Context()
    given = z3.parse_smt2_string(smt_text(obligation), ctx=context)
    solver = z3.Solver(ctx=context)
    solver.set("rlimit", Z3_RLIMIT)
    solver.set("timeout", TIMEOUT_S * 1000)
    solver.set("smt.mbqi", obligation.may_search)
    for place, each in enumerate(given):
        solver.assert_and_track(each, f"given {place}")
    if _VERDICTS.get(str(solver.check())) is not Verdict.PROVED:
        return None
    places = {int(name.decl().name().removeprefix("given ")) for name in solver.unsat_core()}
    return frozenset(places & set(range(len(obligation.hypotheses))))


def _ask_cvc5(obligation: Obligation, rlimit: int) -> tuple[Verdict, int, int]:
    cvc5 = _cvc5()
    solver = cvc5.Solver(cvc5.TermManager())
    solver.setOption("rlimit", str(rlimit))
    solver.setOption("produce-proofs", "true")
    solver.setOption("check-proofs", "true")
    solver.setOption("proof-granularity", "dsl-rewrite")
    parser = cvc5.InputParser(solver)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, f"{smt_text(obligation)}(check-sat)", obligation.name)
    symbols, answer = parser.getSymbolManager(), ""
    while not (command := parser.nextCommand()).isNull():
        answer += command.invoke(solver, symbols)
    verdict = _VERDICTS.get(answer.strip(), Verdict.UNKNOWN)
    steps = _steps_of_proof(cvc5, solver, obligation.name) if verdict is Verdict.PROVED else 0
    spent = int(solver.getStatistics().get(True, True)["resource::resourceUnitsUsed"]["value"])
    return verdict, spent, steps


def _steps_of_proof(cvc5: Any, solver: Any, name: str) -> int:
    """The number of steps of the proof that cvc5 has just checked; none of them may be taken on trust."""
    text = solver.proofToString(solver.getProof()[0], cvc5.ProofFormat.CPC).decode()
    if num_trusted := text.count(":rule trust"):
        raise UncheckedProof(name, num_trusted)
    return int(text.count(":rule "))


@cache
def _cvc5() -> Any:
    """The module, which is loaded only when the second solver is asked; it has no types."""
    import cvc5

    return cvc5
