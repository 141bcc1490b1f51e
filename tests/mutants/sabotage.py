"""Engines with one fault each: a copy of a package of ours in which one piece of text was replaced."""

import importlib
import itertools
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from spec.conformance.machine import machine_for
from spec.engine import EngineFactory
from spec.rules import RuleViolation

ROOT = Path(__file__).parents[2]
_numbers = itertools.count()


@dataclass(frozen=True)
class Mutant:
    """One fault: what it does wrong, where, the rule that must catch it, and the row of the bug corpus it is like."""

    name: str
    package: str
    file: str
    old: str
    new: str
    rule: str
    row: str = ""


@contextmanager
def sabotaged(mutant: Mutant, folder: Path) -> Iterator[ModuleType]:
    """The package with the fault, under a name of its own; gone again afterwards."""
    alias = f"{mutant.package}_mutant_{next(_numbers)}"
    shutil.copytree(ROOT / mutant.package, folder / alias, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / alias).rglob("*.py"):
        text = path.read_text()
        if path.name == mutant.file:
            if text.count(mutant.old) != 1:
                pytest.fail(
                    f"{mutant.name}: the text to replace stands {text.count(mutant.old)} times in {mutant.file}"
                )
            text = text.replace(mutant.old, mutant.new)
        text = re.sub(rf"\b{mutant.package}(?=\.[\w{{]| import)", alias, text)
        path.write_text(text)
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(alias)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == alias]:
            del sys.modules[name]


def killer(factory: EngineFactory, max_examples: int = 1000) -> str:
    """The id of the first rule that the machine sees broken, or what else happened."""
    tier = settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    try:
        run_state_machine_as_test(machine_for(factory), settings=tier)
    except RuleViolation as violation:
        return violation.rule.id
    except Exception as error:  # noqa: BLE001  a broken engine may fail in any way
        return f"{type(error).__name__}: {error}"
    return "survived"
