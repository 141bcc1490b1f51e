"""Every sabotaged engine dies, and by the rule that names its fault."""

from pathlib import Path

import pytest

from spec.rules import RULES
from tests.mutants.optimized_zoo import OPTIMIZED_ZOO
from tests.mutants.reference_zoo import REFERENCE_ZOO
from tests.mutants.sabotage import Mutant, killer, sabotaged

ZOO = [*REFERENCE_ZOO, *OPTIMIZED_ZOO]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ZOO, ids=lambda mutant: mutant.name)
def test_a_mutant_dies_by_the_named_rule(mutant: Mutant, tmp_path: Path) -> None:
    with sabotaged(mutant, tmp_path) as package:
        assert killer(package.make_engine) == mutant.rule


def test_mutants_name_rules_that_exist() -> None:
    assert {mutant.rule for mutant in ZOO} <= RULES.keys()


def test_no_two_mutants_have_one_name() -> None:
    assert len({mutant.name for mutant in ZOO}) == len(ZOO)
