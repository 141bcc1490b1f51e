"""Level L2: who runs, who waits, how many tokens a step computes. Nobody is preempted, where an engine can promise that."""

from collections.abc import Callable

import pytest

from spec.conformance.fixed import FixedStory
from spec.conformance.fixed_scheduler import SCHEDULER_STORIES
from spec.engine import Capability as Can

Drive = Callable[..., None]
Tell = Callable[[FixedStory], None]
every_story = pytest.mark.parametrize("story", SCHEDULER_STORIES, ids=lambda story: story.name)


@every_story
def test_a_fixed_story(tell_engine: Tell, story: FixedStory) -> None:
    tell_engine(story)


@every_story
def test_a_fixed_story_that_is_told_event_by_event(tell_watched: Tell, story: FixedStory) -> None:
    tell_watched(story)


def test_requests_are_served_in_their_order(drive_engine: Drive) -> None:
    drive_engine(preempts=False)


@pytest.mark.conformance_requires(Can.CHUNKED_PREFILL)
def test_long_prompts_come_in_chunks(drive_engine: Drive) -> None:
    drive_engine(Can.CHUNKED_PREFILL, preempts=False)


@pytest.mark.conformance_requires(Can.PRIORITY)
def test_urgent_requests_go_first(drive_engine: Drive) -> None:
    drive_engine(Can.PRIORITY, Can.CHUNKED_PREFILL, preempts=False)


@pytest.mark.conformance_requires(Can.ABORT)
def test_requests_are_given_up_at_any_moment(drive_engine: Drive) -> None:
    drive_engine(Can.ABORT, Can.CHUNKED_PREFILL, preempts=False)


@pytest.mark.conformance_requires(Can.FORK, Can.COPY_ON_WRITE)
def test_samples_and_forks_share_blocks(drive_engine: Drive) -> None:
    drive_engine(Can.FORK, Can.COPY_ON_WRITE, Can.ABORT, preempts=False)


@pytest.mark.conformance_requires(Can.FORK, Can.COPY_ON_WRITE, Can.OVERLAP)
def test_samples_and_forks_share_blocks_while_a_step_runs(drive_engine: Drive) -> None:
    drive_engine(Can.FORK, Can.COPY_ON_WRITE, Can.OVERLAP, Can.ABORT, preempts=False)


@pytest.mark.conformance_requires(Can.PREFIX_CACHE)
def test_prompts_find_their_prefix(drive_engine: Drive) -> None:
    drive_engine(Can.PREFIX_CACHE, Can.CHUNKED_PREFILL, Can.ABORT, preempts=False)


@pytest.mark.conformance_requires(Can.WINDOW)
def test_blocks_leave_a_sliding_window(drive_engine: Drive) -> None:
    drive_engine(Can.WINDOW, Can.CHUNKED_PREFILL, Can.ABORT, preempts=False)
