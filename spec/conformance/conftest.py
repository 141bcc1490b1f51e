"""What the tests of the suite are given: the engine, the pool, the kernel or the server that is judged."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import pytest

from spec.conformance.attacker import Attacked
from spec.conformance.declared import try_engine, try_pool
from spec.conformance.door import judged_engine, judged_pool, watched_engine
from spec.conformance.fixed import FixedStory
from spec.conformance.hunt import Hunt, hunt_engine, hunt_pool, narrowed, walk_pool
from spec.conformance.suite import NO_ATTACK, NO_SERVER, SECURITY, Suite
from spec.conformance.target import Kind, Target
from spec.conformance.watched import takes_an_observer
from spec.engine import Capability, EngineFactory, PoolFactory, Profile
from spec.scope import Scope, needs


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> Suite:
    """The suite of this run; without one of its options there is none, and nothing to judge."""
    found = request.config.pluginmanager.get_plugin("kvproof-suite")
    return found if isinstance(found, Suite) else Suite(request.config)


@pytest.fixture
def attention_kernel(suite: Suite) -> Callable[..., object]:
    """The attention kernel that ``--engine`` names."""
    return suite.target(Kind.KERNEL).call


@pytest.fixture
def served_url(suite: Suite) -> str:
    """The server that ``--conformance-url`` names, without a slash at its end."""
    if suite.url is None:
        pytest.skip(NO_SERVER)
    return suite.url


@pytest.fixture
def served_keys(suite: Suite) -> list[str]:
    """The keys of that server."""
    return suite.keys


@pytest.fixture
def attacked(suite: Suite, served_url: str, served_keys: list[str]) -> Attacked:
    """The server that is to be attacked."""
    if SECURITY not in suite.levels:
        pytest.skip(NO_ATTACK)
    return Attacked(served_url, served_keys)


def profile_of(target: Target) -> Profile:
    """The profile of an engine or of a pool."""
    if target.profile is None:
        raise ValueError(f"{target.name} has no profile")
    return target.profile


def demand(target: Target, request: pytest.FixtureRequest) -> None:
    """Skip the test unless the profile declares what its mark says."""
    needed = [each for mark in request.node.iter_markers("conformance_requires") for each in mark.args]
    lacking = [each.name for each in needed if not profile_of(target).can(each)]
    if lacking:
        pytest.skip(f"the profile of {profile_of(target).name} does not declare {', '.join(lacking)}")


@pytest.fixture
def drive_engine(suite: Suite, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Drives engines of the factory that ``--engine`` names, with a caller who uses these capabilities and no other."""
    target = suite.target(Kind.ENGINE)
    demand(target, request)
    factory = cast(EngineFactory, target.call)

    def drive(*capabilities: Capability, preempts: bool | None = None) -> None:
        suite.trial(target, lambda: try_engine(factory, *capabilities))
        hunt = Hunt(target, suite.setting(target), partial(judged_engine, factory), suite.check_time)
        profile = narrowed(profile_of(target), frozenset(capabilities), preempts)
        hunt_engine(hunt, profile, suite.max_examples, request.node.originalname)

    return drive


@pytest.fixture
def drive_pool(suite: Suite, request: pytest.FixtureRequest) -> Callable[..., None]:
    """The same of pools."""
    target = suite.target(Kind.POOL)
    demand(target, request)
    factory = cast(PoolFactory, target.call)

    def drive(*capabilities: Capability) -> None:
        suite.trial(target, lambda: try_pool(factory, *capabilities))
        hunt = Hunt(target, suite.setting(target), partial(judged_pool, factory), suite.check_time)
        profile = narrowed(profile_of(target), frozenset(capabilities), None)
        hunt_pool(hunt, profile, suite.max_examples, request.node.originalname)

    return drive


def teller(
    suite: Suite, target: Target, judge: Callable[..., object], attempt: Callable[..., None] | None = None
) -> Callable[[FixedStory], None]:
    """Tells stories to what declares what they need; any other is skipped. What they need is attempted first, if asked."""
    profile = profile_of(target)
    hunt = Hunt(target, suite.setting(target, judge.__name__), partial(judge, target.call), suite.check_time)

    def tell(story: FixedStory) -> None:
        if (lacking := story.lacking(profile)) is not None:
            pytest.skip(lacking)
        if attempt is not None:
            suite.trial(target, lambda: attempt(target.call, *story.needed))
        hunt.tell(story, profile)

    return tell


@pytest.fixture
def tell_engine(suite: Suite) -> Callable[[FixedStory], None]:
    """Tells an engine a fixed story."""
    return teller(suite, suite.target(Kind.ENGINE), judged_engine, try_engine)


@pytest.fixture
def tell_watched(suite: Suite) -> Callable[[FixedStory], None]:
    """Tells an engine a fixed story, and hears the engine's own events."""
    target = suite.target(Kind.ENGINE)
    if not takes_an_observer(target.call):
        pytest.skip(f"{target.name} has no parameter observer: it does not tell its events")
    return teller(suite, target, watched_engine)


@pytest.fixture
def tell_pool(suite: Suite) -> Callable[[FixedStory], None]:
    """Tells a pool a fixed story."""
    return teller(suite, suite.target(Kind.POOL), judged_pool, try_pool)


@pytest.fixture
def walk_scope(suite: Suite, request: pytest.FixtureRequest) -> Callable[[Scope], None]:
    """Drives pools through every state of a scope."""
    target = suite.target(Kind.POOL)
    demand(target, request)
    factory = cast(PoolFactory, target.call)

    def walk(scope: Scope) -> None:
        suite.trial(target, lambda: try_pool(factory, *needs(scope)))
        hunt = Hunt(target, suite.setting(target), partial(judged_pool, factory), suite.check_time)
        num_blocks = scope.config.num_blocks + profile_of(target).num_reserved_blocks
        walk_pool(hunt, factory, replace(scope, config=replace(scope.config, num_blocks=num_blocks)))

    return walk
