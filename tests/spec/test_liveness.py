"""Who waits ends: every schedule of the engines under a small load, and the lassos of wrong policies."""

from dataclasses import replace
from pathlib import Path

import pytest

import optimized
import reference
from spec.engine import EngineFactory
from spec.proofs.liveness import RULES_OF, STEP_PROPERTIES
from spec.rules import RULES
from spec.schedules import LOADS, Lasso, Load, RequestKind, find_lasso, schedules, tell
from spec.vocabulary import Config
from tests.mutants.sabotage import ROOT, Mutant, sabotaged

ENGINES: dict[str, EngineFactory] = {"reference": reference.make_engine, "optimized": optimized.make_engine}
SMALL = {name: replace(load, max_requests=3) for name, load in LOADS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"), {"fcfs": (459, 833, 10), "recovery": (514, 930, 11), "priority": (253, 412, 17)}.items()
)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_rule_holds_and_by_arrival_every_request_ends(
    engine: str, name: str, expected: tuple[int, int, int]
) -> None:
    found = schedules(SMALL[name], ENGINES[engine])
    assert found.violation is None
    assert (found.num_states, found.num_edges, found.depth) == expected
    assert name == "priority" or find_lasso(found) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    {"fcfs": (1_461, 2_837, 11), "recovery": (1_639, 3_180, 12), "priority": (811, 1_412, 24)}.items(),
)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_rule_holds_and_by_arrival_every_request_ends_under_larger_loads(
    engine: str, name: str, expected: tuple[int, int, int]
) -> None:
    found = schedules(LOADS[name], ENGINES[engine])
    assert found.violation is None
    assert (found.num_states, found.num_edges, found.depth) == expected
    assert name == "priority" or find_lasso(found) is None


def test_by_priority_the_least_urgent_may_wait_for_ever() -> None:
    load = SMALL["priority"]
    lasso = find_lasso(schedules(load, reference.make_engine, judged=False))
    assert lasso is not None
    story = tell(load, reference.make_engine, lasso)
    assert story.startswith("  A arrives: a prompt of 3, at most 3 more\n")
    assert "A never ends" in story
    assert not load.everyone_ends


# Wrong policies

NEWEST = "            victim = self.roster.running[-1]\n"
OLDEST = "            victim = self.roster.running[0]\n"
FORGET = """\
            for i in self.roster.seqs_of(victim):
                own = self.roster.seqs[i]
                self.roster.seqs[i] = replace(own, tokens=own.tokens[: own.num_prompt_tokens])
"""
TO_THE_BACK = """\
        self.running.remove(request_id)
        self.requests[request_id] = self.requests.pop(request_id)
        self.waiting.append"""


def policy(name: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(name, "reference", file, old, new, "")


STARVING = {
    "whoever is preempted waits behind everybody": policy(
        "to the back", "roster.py", "        self.running.remove(request_id)\n        self.waiting.append", TO_THE_BACK
    ),
    "the newest is admitted first": policy(
        "last in", "scheduler.py", "head = self.roster.waiting[0]", "head = self.roster.waiting[-1]"
    ),
    "the oldest is preempted and begins again from its prompt": policy(
        "oldest, from the prompt", "scheduler.py", NEWEST, OLDEST + FORGET
    ),
}
HARMLESS = {
    "the oldest is preempted": policy("oldest", "scheduler.py", NEWEST, OLDEST),
    "the newest is preempted and begins again from its prompt": policy(
        "newest, from the prompt", "scheduler.py", NEWEST, NEWEST + FORGET
    ),
    "a step that preempts admits": policy(
        "admits at once",
        "scheduler.py",
        "if self._schedule_running(draft):",
        "if self._schedule_running(draft) or True:",
    ),
}
"""What costs time, and lets everybody end: each time a request is admitted it gains at least a token that it keeps."""


def lasso_of(mutant: Mutant, load: Load, folder: Path) -> tuple[Lasso | None, str]:
    """The lasso of a sabotaged reference engine, and its story."""
    with sabotaged(mutant, folder) as package:
        lasso = find_lasso(schedules(load, package.make_engine, judged=False))
        return lasso, tell(load, package.make_engine, lasso) if lasso is not None else ""


@pytest.mark.slow
@pytest.mark.parametrize("name", STARVING)
def test_a_wrong_policy_has_a_lasso(name: str, tmp_path: Path) -> None:
    lasso, story = lasso_of(STARVING[name], SMALL["fcfs"], tmp_path)
    assert lasso is not None
    assert None in lasso.cycle, "the engine makes steps for ever"
    first, again = story.split("and from here on the same for ever, while ")
    hero = again.split(" ")[0]
    assert f"{hero} arrives" in first
    assert f"{hero} has ended" not in story


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_a_policy_that_only_costs_time_has_none(name: str, tmp_path: Path) -> None:
    assert lasso_of(HARMLESS[name], SMALL["fcfs"], tmp_path) == (None, "")


def test_the_story_of_a_request_that_goes_to_the_back(tmp_path: Path) -> None:
    """B and those who come after it take turns: each time B has computed its prompt again, it is preempted."""
    load = replace(SMALL["fcfs"], kinds=(RequestKind(3, 3),))
    lasso, story = lasso_of(STARVING["whoever is preempted waits behind everybody"], load, tmp_path)
    assert lasso is not None
    assert (
        story
        == """\
  A arrives: a prompt of 3, at most 3 more
  B arrives: a prompt of 3, at most 3 more
and from here on the same for ever, while B never ends:
  step: running A 3/4; waiting B
  step: running A 4/5, B 2/3; waiting nobody
  C arrives: a prompt of 3, at most 3 more
  step: running nobody; waiting C, B (B was preempted, A has ended)"""
    )


def test_a_livelock_is_a_lasso_without_arrivals(tmp_path: Path) -> None:
    """Nobody comes and nobody ends: a victim that waits for itself."""
    never = policy(
        "never",
        "scheduler.py",
        "        elif seq.num_output_tokens == request.max_tokens:\n",
        "        elif not seq.tokens:\n",
    )
    load = Load(Config(2, 2, max_num_seqs=1), (RequestKind(1, 2),), max_requests=1)
    with sabotaged(never, tmp_path) as package:
        assert find_lasso(schedules(load, package.make_engine, judged=False)) is not None


def test_a_rule_that_breaks_ends_the_search_with_the_way_there(tmp_path: Path) -> None:
    with sabotaged(STARVING["the newest is admitted first"], tmp_path) as package:
        found = schedules(SMALL["fcfs"], package.make_engine)
    assert found.violation is not None
    assert found.violation.rule.id == "SCHED-10"
    assert found.path[-1] is None
    assert sum(turn is not None for turn in found.path) == 2


def test_sched_25_is_needed(tmp_path: Path) -> None:
    """Whoever came first waits for ever, if each newcomer is served before it and has the whole budget."""
    newcomers = policy(
        "newcomers first",
        "scheduler.py",
        "        if self._schedule_running(draft):\n            self._schedule_waiting(draft)\n",
        "        self._schedule_waiting(draft)\n        self._schedule_running(draft)\n",
    )
    load = replace(SMALL["fcfs"], kinds=(RequestKind(1, 4), RequestKind(3, 1)), max_requests=2)
    assert find_lasso(schedules(load, reference.make_engine, judged=False)) is None
    lasso, story = lasso_of(newcomers, load, tmp_path)
    assert lasso is not None
    assert "while A never ends" in story
    with sabotaged(newcomers, tmp_path / "judged") as package:
        found = schedules(load, package.make_engine)
    assert found.violation is not None
    assert found.violation.rule.id == "SCHED-25"


def test_the_five_properties_are_made_of_rules() -> None:
    book = (ROOT / "docs/proved.rst").read_text(encoding="utf-8")
    assert list(RULES_OF) == list(STEP_PROPERTIES)
    for name, rules in RULES_OF.items():
        assert STEP_PROPERTIES[name] in " ".join(book.split())
        assert all(rule_id in RULES and f":rule:`{rule_id}`" in book for rule_id in rules)
