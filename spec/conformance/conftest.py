"""What the tests of the suite are given: the engine, the pool, the kernel or the server that is judged."""

from collections.abc import Callable
from typing import cast

import pytest

from spec.conformance.suite import NO_SERVER, Suite
from spec.conformance.target import Kind
from spec.engine import EngineFactory


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
def make_engine(suite: Suite) -> EngineFactory:
    """The factory of engines that ``--engine`` names."""
    return cast(EngineFactory, suite.target(Kind.ENGINE).call)
