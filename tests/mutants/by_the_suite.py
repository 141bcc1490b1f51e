"""Send every sabotaged engine and pool through the door that its user's goes through, and record which test of the suite it dies in.

    python -m tests.mutants.by_the_suite [--json FILE] [--seconds 60] [--again] [NAME ...]

That is ``pytest --pyargs spec.conformance --engine ...`` with its levels L0 to L3, in this process and without other plugins. The
fixed stories come first, then the tests that its chapter is about (``FIRST``), the test of everything that is declared, and the others;
the run ends with the first failure by the rule that the zoo names, and what failed before that is recorded as well. With ``--again`` the
test in which it died when that was recorded comes before all. A test that the time budget cuts off is incomplete.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from subprocess import run

import pytest

from spec.conformance.suite import PROPERTY
from spec.vocabulary import AdmissionRule, Policy, Recovery
from tests.mutants.ahead_zoo import AHEAD_ZOO
from tests.mutants.choices_zoo import CHOICES_ZOO
from tests.mutants.kv_events_zoo import KV_EVENTS_ZOO
from tests.mutants.kv_told_zoo import KV_TOLD_ZOO
from tests.mutants.optimized_zoo import OPTIMIZED_ZOO
from tests.mutants.overlap_zoo import OVERLAP_ZOO
from tests.mutants.pool_zoo import POOL_ZOO
from tests.mutants.reference_zoo import REFERENCE_ZOO
from tests.mutants.sabotage import ROOT, Mutant, sabotaged
from tests.mutants.stream_zoo import STREAM_ZOO

DOORS = (
    ("make_engine", (*REFERENCE_ZOO, *OVERLAP_ZOO, *OPTIMIZED_ZOO, *STREAM_ZOO, *KV_EVENTS_ZOO)),
    ("model_engine:make_engine_at_schedule", CHOICES_ZOO),
    ("model_engine:make_engine_ahead", AHEAD_ZOO),
    ("make_pool", POOL_ZOO),
)
"""The factory in the sabotaged package, and in which of its modules it is."""
LEVELS = "L0,L1,L2,L3"
RECORDED = ROOT / "docs" / "by_the_suite.json"
NO_DOOR = {
    mutant.name: "the events that it publishes are at fault, and the protocol has none" for mutant in KV_TOLD_ZOO
}
"""Mutants that no test of these levels can see, and why."""
AT_THE_DOOR = {"a block is published before it is full": "CACHE-6"}
"""The rule by which a mutant dies here, where the zoo names that of another judge: KV events do not say what is computed,
and an engine shows it."""
FIRST = {"COW": ("fork",), "CACHE": ("prefix",), "PREEMPT": ("preempted", "gives_way"), "SWAP": ("host_memory",)}
"""Words in the names of the tests that a chapter is about. They save time, and nothing else."""


@dataclass(frozen=True)
class Death:
    """What became of a mutant: ``killers`` in their order, and ``test`` is the one that fails by the named rule."""

    mutant: str
    package: str
    rule: str
    killers: tuple[str, ...]
    test: str | None
    is_cut: bool
    seconds: float


class UntilTheRule:
    """A plugin of pytest's: the likeliest test first, and nothing more after the rule that is waited for."""

    def __init__(self, mutant: Mutant, known: str | None) -> None:
        self.rule = mutant.rule
        self.known = (known or "").partition("::")[2]
        self.words = telling(mutant)
        self.killers: list[str] = []
        self.test: str | None = None
        self.is_cut = False

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=self._turn)

    def _turn(self, item: pytest.Item) -> tuple[bool, bool, int, bool]:
        matches = sum(word in item.name for word in self.words)
        return item.name != self.known, "fixed" not in item.name, -matches, "everything" not in item.name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = dict(report.user_properties).get(PROPERTY)
        if not isinstance(outcome, dict):
            return
        if outcome["outcome"] == "incomplete":
            self.is_cut, self.session.shouldstop = True, "the time is over"
        elif outcome["outcome"] in ("failed", "error"):
            rule = str(outcome.get("rule") or outcome.get("method") or outcome.get("sentence") or outcome["reason"])
            self.killers.append(rule)
            if rule == self.rule:
                self.test, self.session.shouldstop = str(outcome["id"]), "it is dead"


def telling(mutant: Mutant) -> tuple[str, ...]:
    """Words in the names of the tests in which the mutant should show: those of its chapter, and of the limits that suit it."""
    words = FIRST.get(mutant.rule.partition("-")[0], ())
    config = mutant.config or (mutant.scope.config if mutant.scope else None)
    if config is not None:
        words += ("prefix",) if config.prefix_cache else ()
        words += ("sliding_window",) if config.window is not None else ()
        words += ("host_memory",) if config.recovery is Recovery.SWAP or config.num_host_blocks else ()
        words += ("urgent",) if config.policy is Policy.PRIORITY else ()
        words += ("preempted",) if config.admission_rule is AdmissionRule.OPTIMISTIC else ()
    if mutant.scope is not None:
        words += ("rollback",) if "rollback" in mutant.scope.operations else ()
        words += ("in_flight",) if mutant.scope.max_flights else ()
    return words + (("while_another_one_runs", "while_a_step_runs") if mutant in OVERLAP_ZOO else ())


def judged(mutant: Mutant, door: str, seconds: float, known: str | None = None) -> Death:
    """Run the suite on the mutant."""
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder, sabotaged(mutant, Path(folder)) as package:
        module, _, factory = door.rpartition(":")
        target = f"{'.'.join(filter(None, (package.__name__, module)))}:{factory}"
        own = ["-p", "spec.conformance.plugin", "-p", "no:cacheprovider", "-p", "no:terminal", "-c", os.devnull]
        asked = ["--engine", target, "--conformance-level", LEVELS, "--conformance-time-budget", f"{seconds:g}"]
        until = UntilTheRule(mutant, known)
        pytest.main([*own, "--rootdir", folder, "--pyargs", "spec.conformance", *asked], plugins=[until])
    took = round(time.process_time() - begin, 1)
    return Death(mutant.name, mutant.package, mutant.rule, tuple(until.killers), until.test, until.is_cut, took)


def chosen(names: list[str]) -> Iterator[tuple[Mutant, str]]:
    """The mutants whose names have one of these in them, or all."""
    for door, zoo in DOORS:
        for mutant in zoo:
            if not names or any(name in mutant.name for name in names):
                yield replace(mutant, rule=AT_THE_DOOR.get(mutant.name, mutant.rule)), door


def recorded() -> dict[str, str]:
    """The test in which each mutant died, by its name, as it stands in the book."""
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))["mutants"]
    return {row["mutant"]: row["test"] for row in rows if row["test"] is not None}


def verdict(death: Death) -> str:
    if death.test is not None:
        return "by its rule"
    if death.killers:
        return "by another"
    return "OUT OF TIME" if death.is_cut else "SURVIVES"


def line(death: Death) -> str:
    """A death in one line."""
    facts = f"{verdict(death):12} {death.rule:11} {death.seconds:6.1f} s  {', '.join(death.killers):30}"
    return f"{facts} {death.package}: {death.mutant}"


def summary(deaths: list[Death]) -> str:
    named = sum(death.test is not None for death in deaths)
    dead = sum(bool(death.killers) for death in deaths)
    return (
        f"{len(deaths)} mutants judged: {named} die by the rule that is named, {dead - named} by others, "
        f"{len(deaths) - dead} survive"
    )


def commit() -> str:
    """What is checked out; with a plus behind it if something is changed."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--exclude", "*", "--abbrev=12", "--dirty=+"]
    return run(asked, capture_output=True, text=True, check=False).stdout.strip()


def save(deaths: list[Death], path: Path, command: str, made_at: str) -> None:
    """Record the deaths, under the command, the commit and the day; those that were recorded before stay."""
    known: list[dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))["mutants"] if path.exists() else []
    names = {death.mutant for death in deaths}
    rows = [*(row for row in known if row["mutant"] not in names), *map(asdict, deaths)]
    rows.sort(key=lambda row: (str(row["rule"]), str(row["mutant"])))
    head = {"command": command, "commit": made_at, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    path.write_text(json.dumps({**head, "no_door": NO_DOOR, "mutants": rows}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants whose names have this in them")
    parser.add_argument("--json", type=Path, help="record the table there as well, after each mutant")
    parser.add_argument("--seconds", type=float, default=60, help="the time budget of each run")
    parser.add_argument("--again", action="store_true", help="begin with the test in which it died before")
    args = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = f"python -m tests.mutants.by_the_suite --json FILE --seconds {args.seconds:g}{' --again' * args.again}"
    mutants = list(chosen(args.names))
    random.Random(0).shuffle(mutants)  # a run that is cut short has seen something of everything
    known, made_at, deaths = recorded() if args.again else {}, commit(), list[Death]()
    for mutant, door in mutants:
        deaths.append(death := judged(mutant, door, args.seconds, known.get(mutant.name)))
        print(line(death), flush=True)
        if args.json:
            save(deaths, args.json, command, made_at)
    print(summary(deaths))


if __name__ == "__main__":
    main()
