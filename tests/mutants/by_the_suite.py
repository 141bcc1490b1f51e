"""Send every sabotaged engine and pool through the suite's own tests, as the plugin makes them, and print what each dies by.

    python -m tests.mutants.by_the_suite [--json FILE] [--seconds 40] [NAME ...]

The tests are those of the levels L0 to L3, with the plugin's guard, judge and number of stories; the test of everything that
is declared comes first. A mutant is done when a test fails by the rule that the zoo names, or when none is left. What it was
killed by before that is shown as well. Mutants that tell their events themselves, or publish them, have no door here.
"""

import argparse
import inspect
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any  # a factory of a package that was made a moment ago

from spec.conformance import test_l0_allocator, test_l1_sharing, test_l2_scheduler, test_l3_preemption
from spec.conformance.declared import try_engine, try_pool
from spec.conformance.door import judged_engine, judged_pool
from spec.conformance.guard import AdapterFault
from spec.conformance.hunt import Hunt, hunt_engine, hunt_pool, narrowed, walk_pool
from spec.conformance.shrink import Calls
from spec.conformance.story import Failed, Setting
from spec.conformance.suite import MAX_EXAMPLES
from spec.conformance.target import Kind, Target
from spec.engine import Capability, Profile
from spec.scope import Scope, needs
from spec.vocabulary import Config
from tests.mutants.ahead_zoo import AHEAD_ZOO
from tests.mutants.choices_zoo import CHOICES_ZOO
from tests.mutants.optimized_zoo import OPTIMIZED_ZOO
from tests.mutants.overlap_zoo import OVERLAP_ZOO
from tests.mutants.pool_zoo import POOL_ZOO
from tests.mutants.reference_zoo import REFERENCE_ZOO
from tests.mutants.sabotage import Mutant, sabotaged

MAKERS = (
    ("", "make_engine", (*REFERENCE_ZOO, *OVERLAP_ZOO, *OPTIMIZED_ZOO)),
    (".model_engine", "make_engine_at_schedule", CHOICES_ZOO),
    (".model_engine", "make_engine_ahead", AHEAD_ZOO),
    ("", "make_pool", POOL_ZOO),
)
"""In which module of the sabotaged package the factory is, and what it is called."""
NO_SETTING = Setting("", {})


class OutOfTime(Exception):
    """A mutant was given all the time that there is."""


class Quick(Hunt):
    """A hunt that keeps the story as it was found."""

    def replay(self, config: Config, calls: Calls) -> Failed | None:
        return None


class Door:
    """Gives the suite's tests what pytest would: the fixtures of ``spec/conformance/conftest.py``."""

    def __init__(self, target: Target, profile: Profile, seconds: float) -> None:
        self.target = target
        self.profile = profile
        self.end = time.process_time() + seconds
        self.test = ""

    def check_time(self, done: Callable[[], str]) -> None:
        if time.process_time() > self.end:
            raise OutOfTime

    def _hunt(self, judge: Callable[..., object]) -> Quick:
        return Quick(self.target, NO_SETTING, partial(judge, self.target.call), self.check_time)

    def drive_engine(self, *capabilities: Capability, preempts: bool | None = None) -> None:
        make: Any = self.target.call
        try_engine(make, *capabilities)
        profile = narrowed(self.profile, frozenset(capabilities), preempts)
        hunt_engine(self._hunt(judged_engine), profile, MAX_EXAMPLES, self.test)

    def drive_pool(self, *capabilities: Capability) -> None:
        make: Any = self.target.call
        try_pool(make, *capabilities)
        profile = narrowed(self.profile, frozenset(capabilities), None)
        hunt_pool(self._hunt(judged_pool), profile, MAX_EXAMPLES, self.test)

    def walk_scope(self, scope: Scope) -> None:
        make: Any = self.target.call
        try_pool(make, *needs(scope))
        num_blocks = scope.config.num_blocks + self.profile.num_reserved_blocks
        walk_pool(self._hunt(judged_pool), make, replace(scope, config=replace(scope.config, num_blocks=num_blocks)))

    def tests(self) -> Iterator[tuple[str, Callable[..., None]]]:
        """The tests for what the profile declares, that of everything first."""
        modules = (test_l0_allocator, test_l1_sharing, test_l2_scheduler, test_l3_preemption)
        found = [item for module in modules for item in vars(module).items() if item[0].startswith("test_")]
        for name, test in sorted(found, key=lambda item: "everything" not in item[0]):
            takes_engine = "drive_engine" in inspect.signature(test).parameters
            needed = [each for mark in getattr(test, "pytestmark", []) for each in mark.args]
            if takes_engine == (self.target.kind is Kind.ENGINE) and self.profile.can(*needed):
                yield name, test

    def killers(self, rule: str) -> Iterator[str]:
        """What each test dies by, as long as it is not this rule."""
        for name, test in self.tests():
            self.test = name
            try:
                test(*(getattr(self, fixture) for fixture in inspect.signature(test).parameters))
            except Failed as failed:
                yield failed.kind
                if failed.rule == rule:
                    return
            except AdapterFault as fault:
                yield f"AdapterFault in {fault.method}"
            except OutOfTime:
                yield "out of time"
                return


def killers(mutant: Mutant, package: ModuleType, module: str, factory: str, seconds: float) -> list[str]:
    make = getattr(import_module(f"{package.__name__}{module}"), factory)
    kind = Kind.POOL if factory == "make_pool" else Kind.ENGINE
    profile = make(Config(num_blocks=8)).profile
    target = Target(f"{package.__name__}:{factory}", kind, make, profile)
    return list(Door(target, profile, seconds).killers(mutant.rule))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants whose names have this in them")
    parser.add_argument("--json", type=Path, help="write the table there as well, after each mutant")
    parser.add_argument("--seconds", type=float, default=40, help="of processor time, for each mutant")
    args = parser.parse_args()
    chosen = [
        (mutant, module, factory)
        for module, factory, zoo in MAKERS
        for mutant in zoo
        if not args.names or any(name in mutant.name for name in args.names)
    ]
    random.Random(0).shuffle(chosen)  # a run that is cut short has seen something of everything
    rows: list[dict[str, object]] = []
    for mutant, module, factory in chosen:
        with tempfile.TemporaryDirectory() as folder, sabotaged(mutant, Path(folder)) as package:
            found = killers(mutant, package, module, factory, args.seconds)
        rows.append({"mutant": mutant.name, "package": mutant.package, "rule": mutant.rule, "killers": found})
        verdict = (
            "by its rule" if mutant.rule in found else "by another" if set(found) - {"out of time"} else "SURVIVES"
        )
        print(f"{verdict:12} {mutant.rule:11} {', '.join(found):40} {mutant.package}: {mutant.name}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    named = sum(1 for row in rows if row["rule"] in row["killers"])  # type: ignore[operator]  # a list of texts
    dead = sum(1 for row in rows if set(row["killers"]) - {"out of time"})  # type: ignore[call-overload]  # the same
    print(
        f"{len(rows)} of {len(chosen)} mutants judged: {named} die by the rule that is named, {dead - named} by others, "
        f"{len(rows) - dead} survive"
    )


if __name__ == "__main__":
    main()
