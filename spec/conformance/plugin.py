"""The pytest plugin: its options, and nothing else until one of them is given."""

import pytest

OPTIONS = (
    "engine",
    "conformance-level",
    "conformance-max-examples",
    "conformance-time-budget",
    "conformance-skips",
    "conformance-xfails",
    "conformance-report",
    "conformance-url",
    "conformance-key",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """All but ``--engine`` have a prefix: pytest ends with an error if two plugins share an option."""
    group = parser.getgroup("kvproof", "conformance of an engine with a paged KV cache (kvproof)")
    group.addoption(
        "--engine",
        action="append",
        metavar="MODULE:NAME",
        help="what is judged: a factory of engines or of pools, or an attention kernel; once for each kind",
    )
    group.addoption(
        "--conformance-level",
        metavar="LEVELS",
        help="run these levels only, for example L0,L1 (L0 allocator, L1 sharing and prefix cache, L2 scheduler, "
        "L3 preemption, L4 attention kernel, L5 served text; SECURITY attacks a server, and runs only if it is named)",
    )
    group.addoption("--conformance-max-examples", metavar="N", help="stories that a test of a state machine tells")
    group.addoption(
        "--conformance-time-budget",
        metavar="SECONDS",
        help="time for the whole suite; a test that it cuts off is incomplete, which is no pass",
    )
    group.addoption("--conformance-skips", metavar="FILE", help="ids of tests that are not run, one a line")
    group.addoption(
        "--conformance-xfails", metavar="FILE", help="ids of tests that must fail, one a line; a pass is an error"
    )
    group.addoption("--conformance-report", metavar="FILE", help="write the outcome of each test as JSON")
    group.addoption(
        "--conformance-url", metavar="URL", help="the server that L5 and SECURITY ask, as http://host:port/v1"
    )
    group.addoption(
        "--conformance-key", action="append", metavar="KEY", help="a key of that server; once for each that is known"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "conformance_requires(*capabilities): skipped if the engine does not declare these capabilities"
    )
    if any(config.getoption(option.replace("-", "_")) for option in OPTIONS):
        from spec.conformance.suite import Suite

        config.pluginmanager.register(Suite(config), "kvproof-suite")
