"""Tell every sabotaged engine and pool the fixed stories of the suite, and say which of them it dies in.

    python -m tests.mutants.by_story [--json FILE] [--again] [NAME ...]

That is what the tests of ``pytest --pyargs spec.conformance`` do that are called ``a_fixed_story``: through the same door,
in this process, without pytest and without making a story shorter, until one fails by the rule that the zoo names. With
``--again`` the one that is recorded in ``docs/by_the_suite.json`` comes first, and the whole zoo takes seconds.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from spec.conformance.door import judged_engine, judged_pool, watched_engine
from spec.conformance.fixed import FixedStory
from spec.conformance.fixed_pool import POOL_STORIES
from spec.conformance.fixed_preemption import PREEMPTION_STORIES
from spec.conformance.fixed_scheduler import SCHEDULER_STORIES
from spec.conformance.hunt import Hunt
from spec.conformance.story import Failed, Setting
from spec.conformance.target import Kind, Target
from spec.conformance.watched import takes_an_observer
from spec.vocabulary import Config
from tests.mutants.by_the_suite import Death, chosen, commit, line, recorded, save, summary
from tests.mutants.sabotage import Mutant, sabotaged

Judge = Callable[..., Any]
ENGINES = {"test_l2_scheduler.py": SCHEDULER_STORIES, "test_l3_preemption.py": PREEMPTION_STORIES}
STORIES: Mapping[str, tuple[FixedStory, Judge]] = {
    **{f"test_l1_sharing.py::test_a_fixed_story[{story.name}]": (story, judged_pool) for story in POOL_STORIES},
    **{
        f"{file}::{name}[{story.name}]": (story, judge)
        for name, judge in (
            ("test_a_fixed_story", judged_engine),
            ("test_a_fixed_story_that_is_told_event_by_event", watched_engine),
        )
        for file, stories in ENGINES.items()
        for story in stories
    },
}
"""The stories by the ids of the tests that tell them."""


def factory(package: ModuleType, door: str) -> Callable[[Config], Any]:
    """What the sabotaged package makes its engines or pools with."""
    module, _, name = door.rpartition(":")
    made: Callable[[Config], Any] = getattr(import_module(".".join(filter(None, (package.__name__, module)))), name)
    return made


def failure(make: Callable[[Config], Any], test: str) -> Failed | None:
    """How a fixed story ends badly; None if it is not for an engine like that, or ends well."""
    story, judge = STORIES[test]
    profile = make(Config(num_blocks=8)).profile
    if story.lacking(profile) is not None or (judge is watched_engine and not takes_an_observer(make)):
        return None
    kind = Kind.POOL if judge is judged_pool else Kind.ENGINE
    hunt = Hunt(Target(test, kind, make, profile), Setting("", {}), lambda c, s: judge(make, c, s), lambda done: None)
    try:
        hunt.tell(story, profile, most_replays=0)
    except Failed as failed:
        return failed
    return None


def told(mutant: Mutant, door: str, folder: Path, first: str | None) -> Death:
    """Tell it one story after the other, until one fails by the named rule."""
    begin, killers, is_pool = time.process_time(), list[str](), door == "make_pool"
    mine = [test for test, (_, judge) in STORIES.items() if (judge is judged_pool) == is_pool]
    found = None
    with sabotaged(mutant, folder) as package:
        make = factory(package, door)
        for test in sorted(mine, key=lambda test: test != first):
            if (failed := failure(make, test)) is not None:
                killers.append(failed.kind)
                if failed.kind == mutant.rule:
                    found = test
                    break
    took = round(time.process_time() - begin, 1)
    return Death(mutant.name, mutant.package, mutant.rule, tuple(killers), found, False, took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants whose names have this in them")
    parser.add_argument("--json", type=Path, help="record the table there as well, after each mutant")
    parser.add_argument("--again", action="store_true", help="begin with the test in which it died before")
    args = parser.parse_args()
    command = f"python -m tests.mutants.by_story --json FILE{' --again' * args.again}"
    known, made_at, deaths = recorded() if args.again else {}, commit(), list[Death]()
    for mutant, door in chosen(args.names):
        with tempfile.TemporaryDirectory() as folder:
            deaths.append(death := told(mutant, door, Path(folder), known.get(mutant.name)))
        print(line(death), death.test, flush=True)
        if args.json:
            save(deaths, args.json, command, made_at)
    print(summary(deaths))


if __name__ == "__main__":
    main()
