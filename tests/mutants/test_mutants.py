"""Every sabotaged engine dies, and by the rule that names its fault; every rule has one."""

from importlib import import_module
from pathlib import Path

import pytest

import optimized
from reference.engine import make_engine
from reference.sequence_pool import make_pool
from spec.conformance.door import judged_pool
from spec.engine import EngineFactory
from spec.rules import RULES, RuleViolation
from spec.scope import Scope
from tests.mutants.ahead_zoo import AHEAD_ZOO
from tests.mutants.by_story import STORIES, factory, failure
from tests.mutants.by_the_suite import chosen, recorded
from tests.mutants.choices_zoo import CHOICES_ZOO
from tests.mutants.kv_events_zoo import KV_EVENTS_ZOO, kv_events_killer
from tests.mutants.kv_told_zoo import KV_TOLD_ZOO
from tests.mutants.optimized_zoo import OPTIMIZED_ZOO
from tests.mutants.overlap_zoo import OVERLAP_ZOO
from tests.mutants.pool_zoo import POOL_ZOO
from tests.mutants.reference_zoo import REFERENCE_ZOO
from tests.mutants.sabotage import Mutant, counters_agree, deaths, killer, pool_killer, sabotaged, stream_killer
from tests.mutants.stream_zoo import STREAM_ZOO
from tests.spec import model_engine

CHOOSY_ZOO = [*((mutant, "make_engine_at_schedule") for mutant in CHOICES_ZOO)]
CHOOSY_ZOO += [(mutant, "make_engine_ahead") for mutant in AHEAD_ZOO]
ZOO = [
    *REFERENCE_ZOO,
    *OVERLAP_ZOO,
    *OPTIMIZED_ZOO,
    *STREAM_ZOO,
    *POOL_ZOO,
    *CHOICES_ZOO,
    *AHEAD_ZOO,
    *KV_EVENTS_ZOO,
    *KV_TOLD_ZOO,
]
DOORED = list(chosen([]))
FATES = recorded()
CORRECT = [model_engine.make_engine, model_engine.make_engine_at_schedule, model_engine.make_engine_ahead]
"""Our two engines go through the suite itself."""
SCOPES = [scope for i, scope in enumerate(m.scope for m in POOL_ZOO) if scope not in [m.scope for m in POOL_ZOO[:i]]]


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "door"), DOORED, ids=[mutant.name for mutant, _ in DOORED])
def test_a_mutant_dies_by_its_rule_in_a_fixed_story_of_the_suite(mutant: Mutant, door: str, tmp_path: Path) -> None:
    """In the one that the book names: ``python -m tests.mutants.by_story`` looks for it."""
    with sabotaged(mutant, tmp_path) as package:
        failed = failure(factory(package, door), FATES[mutant.name])
    assert failed is not None
    assert failed.rule == mutant.rule
    if isinstance(failed.why, RuleViolation):
        counters_agree(failed.why)


def test_the_book_names_a_fixed_story_for_every_mutant_that_has_a_door() -> None:
    assert {mutant.name for mutant, _ in DOORED} == FATES.keys()
    assert set(FATES.values()) <= STORIES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("make", CORRECT, ids=lambda make: make.__name__)
def test_an_engine_without_a_fault_comes_to_the_end_of_every_fixed_story(make: EngineFactory) -> None:
    stories = [test for test, (_, judge) in STORIES.items() if judge is not judged_pool]
    assert [test for test in stories if failure(make, test) is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [*REFERENCE_ZOO, *OVERLAP_ZOO, *OPTIMIZED_ZOO], ids=lambda mutant: mutant.name)
def test_a_mutant_dies_by_the_named_rule(mutant: Mutant, tmp_path: Path) -> None:
    with sabotaged(mutant, tmp_path) as package:
        assert mutant.rule in deaths(killer, package.make_engine, mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", STREAM_ZOO, ids=lambda mutant: mutant.name)
def test_a_mutant_that_tells_its_events_dies_by_the_named_rule(mutant: Mutant, tmp_path: Path) -> None:
    with sabotaged(mutant, tmp_path) as package:
        assert mutant.rule in deaths(stream_killer, package.make_engine, mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", POOL_ZOO, ids=lambda mutant: mutant.name)
def test_a_mutant_pool_dies_by_the_named_rule(mutant: Mutant, tmp_path: Path) -> None:
    assert mutant.scope is not None
    with sabotaged(mutant, tmp_path) as package:
        assert pool_killer(package.make_pool, mutant.scope) == mutant.rule


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "make"), CHOOSY_ZOO, ids=[mutant.name for mutant, _ in CHOOSY_ZOO])
def test_a_mutant_that_chooses_otherwise_dies_by_the_named_rule(mutant: Mutant, make: str, tmp_path: Path) -> None:
    with sabotaged(mutant, tmp_path) as package:
        make_engine = getattr(import_module(f"{package.__name__}.model_engine"), make)
        assert mutant.rule in deaths(killer, make_engine, mutant)


@pytest.mark.parametrize("mutant", [*KV_EVENTS_ZOO, *KV_TOLD_ZOO], ids=lambda mutant: mutant.name)
def test_a_mutant_that_publishes_kv_events_dies_by_the_named_rule(mutant: Mutant, tmp_path: Path) -> None:
    with sabotaged(mutant, tmp_path) as package:
        assert kv_events_killer(package.make_engine) == mutant.rule


@pytest.mark.parametrize("make", [make_engine, optimized.make_engine], ids=["reference", "optimized"])
def test_an_engine_without_a_fault_publishes_its_kv_events_and_survives(make: EngineFactory) -> None:
    assert kv_events_killer(make) == "survived"


@pytest.mark.slow
def test_an_engine_without_a_fault_tells_its_events_and_survives() -> None:
    assert stream_killer(make_engine, max_examples=20) == "survived"


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES, ids=lambda scope: "-".join(sorted(scope.operations)))
def test_a_pool_without_a_fault_survives(scope: Scope) -> None:
    assert pool_killer(make_pool, scope) == "survived"


def test_every_rule_has_a_mutant() -> None:
    assert not RULES.keys() - {mutant.rule for mutant in ZOO}


def test_mutants_name_rules_that_exist() -> None:
    assert {mutant.rule for mutant in ZOO} <= RULES.keys()


def test_no_two_mutants_have_one_name() -> None:
    assert len({mutant.name for mutant in ZOO}) == len(ZOO)
