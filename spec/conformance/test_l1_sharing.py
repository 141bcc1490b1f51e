"""Level L1: forks, copies, the prefix cache, and whatever else shares, moves or keeps the blocks of a pool."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from spec.conformance.fixed import FixedStory
from spec.conformance.fixed_pool import POOL_STORIES
from spec.engine import Capability as Can
from spec.scope import CACHE, FLIGHTS, PLAIN, ROLLBACK, SWAP, Scope
from spec.vocabulary import Config

Walk = Callable[[Scope], None]
ALONE = PLAIN - {"fork"}
THREE = Config(num_blocks=3, block_size=2)
CACHED = replace(THREE, prefix_cache=True)


@pytest.mark.parametrize("story", POOL_STORIES, ids=lambda story: story.name)
def test_a_fixed_story(tell_pool: Callable[[FixedStory], None], story: FixedStory) -> None:
    tell_pool(story)


@pytest.mark.conformance_requires(Can.FORK, Can.COPY_ON_WRITE)
def test_every_state_with_forks(walk_scope: Walk) -> None:
    walk_scope(Scope(THREE, max_seqs=3, max_tokens=5, num_token_values=1, max_append=2))


@pytest.mark.conformance_requires(Can.PREFIX_CACHE)
def test_every_state_with_a_prefix_cache(walk_scope: Walk) -> None:
    walk_scope(Scope(CACHED, max_tokens=4, operations=ALONE | CACHE))


@pytest.mark.conformance_requires(Can.PREFIX_CACHE, Can.FORK, Can.COPY_ON_WRITE)
def test_every_state_with_forks_and_a_prefix_cache(walk_scope: Walk) -> None:
    walk_scope(Scope(CACHED, max_tokens=4, num_token_values=1, operations=PLAIN | CACHE))


@pytest.mark.conformance_requires(Can.SWAP)
def test_every_state_with_host_memory(walk_scope: Walk) -> None:
    walk_scope(Scope(replace(THREE, num_host_blocks=2), max_tokens=4, num_token_values=1, operations=ALONE | SWAP))


@pytest.mark.conformance_requires(Can.WINDOW)
def test_every_state_with_a_sliding_window(walk_scope: Walk) -> None:
    walk_scope(Scope(replace(THREE, window=3), max_tokens=6, num_token_values=1, max_append=2, operations=ALONE))


@pytest.mark.conformance_requires(Can.WINDOW, Can.ROLLBACK)
def test_every_state_with_a_sliding_window_and_rollback(walk_scope: Walk) -> None:
    scope = Scope(replace(THREE, window=3), max_tokens=6, num_token_values=1, operations=ALONE | ROLLBACK)
    walk_scope(scope)


@pytest.mark.conformance_requires(Can.ROLLBACK)
def test_every_state_with_rollback(walk_scope: Walk) -> None:
    walk_scope(Scope(THREE, max_tokens=4, max_append=2, operations=ALONE | ROLLBACK))


@pytest.mark.conformance_requires(Can.OVERLAP)
def test_every_state_with_steps_in_flight(walk_scope: Walk) -> None:
    walk_scope(Scope(THREE, max_tokens=3, num_token_values=1, max_flights=2, operations=ALONE | FLIGHTS))


def test_long_stories_with_everything_that_is_declared(drive_pool: Callable[..., None]) -> None:
    drive_pool(*Can)
