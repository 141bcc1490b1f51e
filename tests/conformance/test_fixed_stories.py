"""Fixed stories: who is told which, what is said of one that ends badly, and engines that tell their own events."""

import pytest

from spec.conformance.fixed import FixedStory, ask, steps
from spec.conformance.fixed_pool import POOL_STORIES
from spec.conformance.fixed_preemption import PREEMPTION_STORIES
from spec.conformance.fixed_scheduler import SCHEDULER_STORIES
from spec.engine import Capability, Profile
from spec.rules import RuleViolation
from spec.vocabulary import AdmissionRule, Config
from tests.conformance.conftest import Run

FAULTY = "tests.conformance.faulty"
SEATS = "one request after the other in three seats"
PLAIN = Profile(
    name="plain", capabilities=frozenset(), admission_rules=(AdmissionRule.NO_EVICT,), num_reserved_blocks=2
)


def test_a_story_is_told_to_whom_declares_what_it_needs() -> None:
    swaps = next(story for story in PREEMPTION_STORIES if story.name == "samples move to host memory")
    assert swaps.needed == {Capability.PREEMPTION, Capability.SWAP, Capability.FORK, Capability.COPY_ON_WRITE}
    assert swaps.lacking(PLAIN) == ("the profile of plain does not declare COPY_ON_WRITE, FORK, PREEMPTION, SWAP")
    shared = next(story for story in POOL_STORIES if "shared" in story.name)
    assert shared.needed == {Capability.SWAP, Capability.FORK, Capability.COPY_ON_WRITE}


def test_a_story_has_the_limits_that_suit_the_profile() -> None:
    story = FixedStory("a", Config(num_blocks=4), (ask(0, (1,), 1), *steps(1)))
    assert story.lacking(PLAIN) is None
    assert (story.limits(PLAIN).num_blocks, story.limits(PLAIN).admission_rule) == (6, AdmissionRule.NO_EVICT)
    insists = FixedStory("b", Config(num_blocks=4), story.calls, insists=True)
    assert insists.lacking(PLAIN) == "the profile of plain does not name the admission rule PROMPT"


def test_no_two_stories_of_a_file_have_one_name() -> None:
    for stories in (POOL_STORIES, PREEMPTION_STORIES, SCHEDULER_STORIES):
        assert len({story.name for story in stories}) == len(stories)


def test_a_fixed_story_that_ends_badly_is_made_shorter(run: Run) -> None:
    done = run(
        "--engine",
        f"{FAULTY}:CountsSharedBlocksOnce",
        "-k",
        "test_a_fixed_story and ends and within and not event_by_event",
    )
    assert done.status == pytest.ExitCode.TESTS_FAILED
    [failed] = [test for test in done.tests.values() if test["outcome"] == "failed"]
    assert failed["rule"] == "ALLOC-2"
    assert failed["test"].count("judged.add(") == 1


def test_who_does_not_tell_his_events_is_not_judged_by_them(run: Run) -> None:
    done = run("--engine", f"{FAULTY}:Adapter", "-k", f"event_by_event and {SEATS.split()[-1]} and three")
    assert {test["reason"] for test in done.tests.values()} == {
        f"{FAULTY}:Adapter has no parameter observer: it does not tell its events"
    }


def test_what_an_engine_tells_is_judged_and_can_be_told_again(run: Run) -> None:
    done = run("--engine", f"{FAULTY}:TellsTwice", "--conformance-level", "L2", "-k", "fixed and after and seats")
    assert {test["outcome"] for name, test in done.tests.items() if "event_by_event" not in name} == {"passed"}
    [told] = [test for name, test in done.tests.items() if "event_by_event" in name]
    assert told["rule"] == "SCHED-6"
    pasted: dict[str, object] = {}
    exec(told["test"], pasted)  # noqa: S102  it is meant to be run
    replayed = pasted["test_sched_6_holds"]
    assert callable(replayed)
    with pytest.raises(RuleViolation, match="^SCHED-6 does not hold"):
        replayed()


def test_nonsense_that_an_engine_tells_is_blamed_on_no_rule(run: Run) -> None:
    done = run(
        "--engine",
        f"{FAULTY}:TellsNonsense",
        "--conformance-level",
        "L2",
        "-k",
        "event_by_event and after and seats",
    )
    [told] = done.tests.values()
    assert (told["rule"], told["method"]) == (None, "observer")
    assert "it is told is nonsense" in told["sentence"]
