"""Level L3: who gives way when memory is short, and how he comes back."""

from collections.abc import Callable

import pytest

from spec.conformance.fixed import FixedStory
from spec.conformance.fixed_preemption import PREEMPTION_STORIES
from spec.engine import Capability as Can

Drive = Callable[..., None]
Tell = Callable[[FixedStory], None]
every_story = pytest.mark.parametrize("story", PREEMPTION_STORIES, ids=lambda story: story.name)


@every_story
def test_a_fixed_story(tell_engine: Tell, story: FixedStory) -> None:
    tell_engine(story)


@every_story
def test_a_fixed_story_that_is_told_event_by_event(tell_watched: Tell, story: FixedStory) -> None:
    tell_watched(story)


@pytest.mark.conformance_requires(Can.PREEMPTION)
def test_a_preempted_request_is_computed_again(drive_engine: Drive) -> None:
    drive_engine(Can.PREEMPTION, Can.CHUNKED_PREFILL, Can.ABORT, preempts=True)


@pytest.mark.conformance_requires(Can.PREEMPTION, Can.FORK, Can.COPY_ON_WRITE)
def test_a_request_with_forks_gives_way_as_a_whole(drive_engine: Drive) -> None:
    drive_engine(Can.PREEMPTION, Can.FORK, Can.COPY_ON_WRITE, preempts=True)


@pytest.mark.conformance_requires(Can.PREEMPTION, Can.SWAP)
def test_a_preempted_request_moves_to_host_memory(drive_engine: Drive) -> None:
    drive_engine(Can.PREEMPTION, Can.SWAP, Can.CHUNKED_PREFILL, preempts=True)


@pytest.mark.conformance_requires(Can.PREEMPTION, Can.PREFIX_CACHE)
def test_a_preempted_request_finds_its_prefix(drive_engine: Drive) -> None:
    drive_engine(Can.PREEMPTION, Can.PREFIX_CACHE, Can.CHUNKED_PREFILL, preempts=True)


@pytest.mark.conformance_requires(Can.PREEMPTION, Can.OVERLAP)
def test_a_step_begins_while_another_one_runs(drive_engine: Drive) -> None:
    drive_engine(Can.PREEMPTION, Can.OVERLAP, Can.CHUNKED_PREFILL, Can.ABORT, preempts=True)


def test_everything_that_is_declared_works_together(drive_engine: Drive) -> None:
    drive_engine(*Can)
