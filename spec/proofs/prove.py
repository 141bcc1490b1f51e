"""The whole proof: every obligation by one solver or both, a witness for every guard, every mutation refuted."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from spec.proofs.finite import Instance, witness
from spec.proofs.laws import laws
from spec.proofs.liveness import STEP_PROPERTIES, liveness_laws, rank_falls
from spec.proofs.mutations import Trial, attempts
from spec.proofs.obligations import Obligation, base_case, inductive, lemmas
from spec.proofs.solvers import Result, Solver, Verdict, check
from spec.proofs.transitions import TRANSITIONS


def obligations() -> Iterator[Obligation]:
    """Everything that is proved: the start, the transitions, the lemmas, the laws, and that every request ends."""
    return chain(base_case(), inductive(), lemmas(), laws(), liveness_laws())


@dataclass(frozen=True)
class Report:
    """What was proved and what was not. Of the mutations there is nothing where they were not asked for."""

    results: tuple[Result, ...]
    witnesses: Mapping[str, Instance | None] = field(default_factory=dict)
    needed: Mapping[str, Verdict] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    seconds: float = 0.0

    @property
    def unproved(self) -> tuple[Result, ...]:
        """The obligations that a solver did not prove, whatever else it said."""
        return tuple(result for result in self.results if not result.is_proved)

    @property
    def vacuous(self) -> tuple[str, ...]:
        """The transitions whose guard no state of the finite scope has been found for."""
        return tuple(name for name, found in self.witnesses.items() if found is None)

    @property
    def superfluous(self) -> tuple[str, ...]:
        """The scheduler's properties without which every request would still end."""
        return tuple(name for name, verdict in self.needed.items() if verdict is not Verdict.REFUTED)

    @property
    def survivors(self) -> tuple[Trial, ...]:
        """The mutations that did not break the clause they must break."""
        return tuple(trial for trial in self.trials if not trial.is_refuted)

    @property
    def holds(self) -> bool:
        """Everything is proved, nothing is vacuous, and every mutation is refuted."""
        return not (self.unproved or self.vacuous or self.superfluous or self.survivors)

    def results_of(self, solver: Solver) -> tuple[Result, ...]:
        """What one solver said."""
        return tuple(result for result in self.results if result.solver is solver)

    def as_json(self) -> dict[str, object]:
        """The report as plain data."""
        return {
            "holds": self.holds,
            "seconds": round(self.seconds, 3),
            "obligations": [
                {
                    "name": result.name,
                    "transition": result.transition,
                    "clause": result.clause,
                    "solver": result.solver.value,
                    "verdict": result.verdict.value,
                    "seconds": round(result.seconds, 4),
                    "rlimit": result.rlimit,
                    "proof_steps": result.proof_steps,
                }
                for result in self.results
            ],
            "witnesses": {name: found is not None for name, found in self.witnesses.items()},
            "needed": {name: verdict.value for name, verdict in self.needed.items()},
            "mutations": [
                {
                    "name": trial.mutation.name,
                    "transition": trial.mutation.transition,
                    "clause": trial.mutation.clause,
                    "refuted": trial.is_refuted,
                    "unproved": list(trial.unproved),
                    "counterexample": trial.instance.report() if trial.instance else None,
                }
                for trial in self.trials
            ],
        }

    def summary(self) -> str:
        """The report in a few lines; what does not hold is named."""
        lines = []
        for solver in Solver:
            if results := self.results_of(solver):
                proved = sum(result.is_proved for result in results)
                spent = sum(result.seconds for result in results)
                steps = sum(result.proof_steps for result in results)
                checked = f", {steps:,} proof steps checked" if steps else ""
                lines.append(f"{solver.value}: {proved} of {len(results)} obligations proved in {spent:.1f} s{checked}")
        if self.witnesses:
            lines.append(f"guards: {len(self.witnesses) - len(self.vacuous)} of {len(self.witnesses)} have a witness")
        if self.needed:
            lines.append(
                f"liveness: {len(self.needed) - len(self.superfluous)} of {len(self.needed)} properties are needed"
            )
        if self.trials:
            lines.append(f"mutations: {len(self.trials) - len(self.survivors)} of {len(self.trials)} refuted")
        lines += [
            f"not proved by {result.solver.value}: {result.name} ({result.verdict.value})" for result in self.unproved
        ]
        lines += [f"no witness: {name}" for name in self.vacuous]
        lines += [f"not needed: {name}" for name in self.superfluous]
        lines += [
            f"not refuted: {trial.mutation.name} breaks {', '.join(trial.unproved) or 'nothing'}, "
            f"not {trial.mutation.clause}, or has no instance"
            for trial in self.survivors
        ]
        return "\n".join(lines)


def prove(
    solvers: Iterable[Solver] = (Solver.Z3,),
    *,
    witnesses: bool = True,
    mutations: bool = False,
    on_progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Prove everything. ``on_progress`` is told the name of each thing that is done."""
    started = time.perf_counter()
    results: list[Result] = []
    for solver in solvers:
        for obligation in obligations():
            results.append(check(obligation, solver))
            on_progress(obligation.name)
    found: dict[str, Instance | None] = {}
    for name, transition in TRANSITIONS.items() if witnesses else ():
        found[name] = witness(transition)
        on_progress(f"witness: {name}")
    needed = {name: check(rank_falls(without=name)).verdict for name in STEP_PROPERTIES}
    trials: list[Trial] = []
    for trial in attempts() if mutations else ():
        trials.append(trial)
        on_progress(f"mutation: {trial.mutation.name}")
    return Report(tuple(results), found, needed, tuple(trials), time.perf_counter() - started)
