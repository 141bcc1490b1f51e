"""Both engines and both pools go through the door that everybody's engine goes through; and the engines side by side."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

import optimized
import reference
from spec.conformance.judge import JudgedEngine
from spec.conformance.machine import lockstep_machine_for
from spec.engine import EngineFactory
from spec.prefix_cache import eviction_queue
from spec.vocabulary import Config, Prefix, Request, SeqId, Token
from tests.conformance.conftest import Run

OURS = pytest.mark.parametrize("package", ["reference", "optimized"])
PAIR = lockstep_machine_for(reference.make_engine, optimized.make_engine)


@pytest.mark.slow
@OURS
def test_an_engine_keeps_every_rule_in_some_stories(package: str, run: Run) -> None:
    done = run("--engine", f"{package}:make_engine", "-k", "works_together", "--conformance-max-examples", "12")
    assert done.status == pytest.ExitCode.OK, done.output
    assert set(done.outcomes().values()) == {"passed"}


@pytest.mark.slow
@OURS
def test_a_pool_keeps_every_rule_in_a_small_scope(package: str, run: Run) -> None:
    done = run("--engine", f"{package}:make_pool", "-k", "small_pool or host_memory", "--conformance-level", "L0,L1")
    assert done.status == pytest.ExitCode.OK, done.output
    assert set(done.outcomes().values()) == {"passed"}


@pytest.mark.slow
@OURS
def test_engine_and_pool_pass_the_whole_suite(package: str, run: Run) -> None:
    names = ["--engine", f"{package}:make_engine", "--engine", f"{package}:make_pool"]
    done = run(*names, "--conformance-max-examples", "6", "--conformance-level", "L0,L1,L2,L3", "-rs")
    assert done.status == pytest.ExitCode.OK, done.output
    assert all("does not declare" in test["reason"] for test in done.tests.values() if test["outcome"] != "passed")
    assert {"passed"} <= set(done.outcomes().values()) <= {"passed", "skipped"}


@pytest.mark.slow
def test_the_engines_stay_side_by_side_in_short_stories() -> None:
    run_state_machine_as_test(PAIR, settings=settings(max_examples=25, stateful_step_count=15))


@pytest.mark.slow
def test_the_engines_stay_side_by_side_whatever_their_caller_does() -> None:
    run_state_machine_as_test(PAIR, settings=settings(stateful_step_count=40))


FACTORIES = pytest.mark.parametrize("make_engine", [reference.make_engine, optimized.make_engine])


def serving(make_engine: EngineFactory, config: Config, *requests: Request) -> JudgedEngine:
    """The engine, which has made its first step."""
    engine = JudgedEngine(make_engine(config), config)
    assert all(engine.add(request) for request in requests)
    engine.step(own_token)
    return engine


def own_token(seq: SeqId, tokens: Prefix) -> Token:
    """No two sequences go on alike, so that nobody's blocks are known already."""
    return seq


def to_be_evicted(engine: JudgedEngine) -> list[Prefix]:
    """What the cache will forget, in this order."""
    return [engine.state.cached[block].tokens for block in eviction_queue(engine.state)]


@FACTORIES
def test_cache_17_what_an_abort_gave_up_is_free_before_what_ends_with_the_step(make_engine: EngineFactory) -> None:
    config = Config(num_blocks=8, block_size=1, max_num_seqs=2, prefix_cache=True)
    engine = serving(make_engine, config, Request(0, (0,), 4, (0,)), Request(1, (1,), 2, (1,)))
    engine.begin_step()
    engine.abort(0)
    engine.end_step(own_token)
    assert to_be_evicted(engine) == [(0,), (1, 1), (1,)]


@FACTORIES
def test_cache_17_sources_of_copies_are_free_when_their_step_is_over(make_engine: EngineFactory) -> None:
    """Of each pair one copies, and the other one fills the source and ends; the sources are free in their order."""
    config = Config(num_blocks=8, block_size=2, max_num_seqs=4, prefix_cache=True)
    engine = serving(make_engine, config, Request(0, (5,), 2, (0, 1)), Request(1, (6,), 2, (2, 3)))
    engine.step(own_token)
    assert to_be_evicted(engine) == [(5, 0), (6, 2), (5, 1), (6, 3)]


@FACTORIES
def test_cache_17_what_the_windows_leave_is_free_in_the_order_of_the_step(make_engine: EngineFactory) -> None:
    """A fork is served right after the sequence that it comes from, and so is a sample, whoever came meanwhile. What
    somebody lets go who ends comes before what he still had."""
    config = Config(num_blocks=16, block_size=1, max_num_seqs=4, prefix_cache=True, window=1)
    engine = serving(make_engine, config, Request(0, (5, 7), 4, (0, 1)), Request(1, (6, 7), 4, (2,)))
    assert to_be_evicted(engine) == [(5, 7), (5,), (6, 7), (6,)]
    engine.fork(0, 3)
    engine.step(own_token)
    engine.step(own_token)
    free = to_be_evicted(engine)
    assert free[4:7] == [(5, 7, 0), (5, 7, 1), (6, 7, 2)]
    assert free[7:] == [(5, 7, 0, 0), (5, 7, 1, 1), (5, 7, 0, 3), (6, 7, 2, 2)]
    config = Config(num_blocks=8, block_size=1, max_num_seqs=2, prefix_cache=True, window=2)
    engine = serving(make_engine, config, Request(0, (5, 7), 1, (0,)), Request(1, (6, 7), 1, (1,)))
    assert to_be_evicted(engine) == [(5,), (6,), (5, 7), (6, 7)]
