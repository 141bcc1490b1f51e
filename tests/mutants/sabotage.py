"""Engines and pools with one fault each: a copy of a package of ours in which one piece of text was replaced, and three
ways to find out which rule it breaks first."""

import importlib
import itertools
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol, Self

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from spec.canonical import Key, canonical
from spec.conformance.door import watched_engine
from spec.conformance.judge import Follower, JudgedEngine
from spec.conformance.machine import machine_for
from spec.engine import Engine, EngineFactory, InvalidRequest, Pool
from spec.lockstep import mistakes
from spec.monitor import Monitor
from spec.replay import step
from spec.rules import RuleViolation, broken_rules
from spec.scope import Move, Scope, moves
from spec.uncounted import UNCOUNTED
from spec.vocabulary import Config, Event, Observe, State, initial_state

ROOT = Path(__file__).parents[2]
NUM_SEARCHES = 5
_numbers = itertools.count()


@dataclass(frozen=True)
class Mutant:
    """One fault: what it does wrong, where, the rule that must catch it, and the row of the bug corpus it is like. A
    fault of a pool has the scope in which it shows, and one that needs a full pool the limits under which it does."""

    name: str
    package: str
    file: str
    old: str
    new: str
    rule: str
    row: str = ""
    scope: Scope | None = None
    config: Config | None = None


@contextmanager
def sabotaged(mutant: Mutant, folder: Path) -> Iterator[ModuleType]:
    """The package with the fault, under a name of its own; gone again afterwards."""
    alias = f"{mutant.package.replace('/', '_')}_mutant_{next(_numbers)}"
    shutil.copytree(ROOT / mutant.package, folder / alias, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / alias).rglob("*.py"):
        text = path.read_text()
        if path == folder / alias / mutant.file:
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


def deaths(search: Callable[..., str], factory: Callable[..., Engine], mutant: Mutant) -> list[str]:
    """What each of several searches meets first, until one meets the mutant's rule: a fault breaks several rules, and which
    of them shows first is chance. (Its fixed story is about the rule alone.)"""
    met: list[str] = []
    while mutant.rule not in met and len(met) < NUM_SEARCHES:
        met.append(search(factory, mutant.config, number=len(met)))
    return met


def killer(factory: EngineFactory, config: Config | None = None, max_examples: int = 300, number: int = 0) -> str:
    """The id of the first rule that the machine sees broken, or what else happened. With ``config``, under these limits
    only. Another ``number`` is another search."""
    return _first_broken(
        lambda: _drive(factory, lambda limits: JudgedEngine(factory(limits), limits), config, max_examples, number)
    )


def stream_killer(
    factory: Callable[..., Engine], config: Config | None = None, max_examples: int = 300, number: int = 0
) -> str:
    """The same of an engine that tells its events one by one, and is looked at while its steps are in flight."""
    return _first_broken(
        lambda: _drive(factory, lambda limits: watched_engine(factory, limits), config, max_examples, number)
    )


def pool_killer(factory: Callable[[Config], "ClonedPool"], scope: Scope, max_states: int = 500) -> str:
    """The same of a pool, in the states of a scope that are nearest to the empty one."""
    return _first_broken(lambda: _walk(factory(scope.config), scope, max_states))


def _first_broken(drive: Callable[[], None]) -> str:
    try:
        drive()
    except RuleViolation as violation:
        counters_agree(violation)
        return violation.rule.id
    except Exception as error:  # noqa: BLE001  a broken engine may fail in any way
        return f"{type(error).__name__}: {error}"
    return "survived"


def counters_agree(violation: RuleViolation) -> None:
    """A monitor that stands where the model stood reports the same, if it is a rule that needs only counters."""
    before, event, after = violation.before, violation.event, violation.after
    rules = [rule.id for rule in broken_rules(before, event, after) if rule.id not in UNCOUNTED]
    told = isinstance(event, Observe) or after == step(before, event)
    if not rules or not told:  # a refusal that left a trace is seen in what an engine shows, never in its events
        return
    monitor = Monitor(before.config)
    monitor.load(before)
    with pytest.raises(RuleViolation) as caught:
        monitor.shown(after) if isinstance(event, Observe) else monitor.event(event)
    assert caught.value.rule.id == rules[0]


def _drive(
    factory: EngineFactory,
    judged: Callable[[Config], JudgedEngine],
    config: Config | None,
    max_examples: int,
    number: int,
) -> None:
    @seed(number)
    class Machine(machine_for(factory)):  # type: ignore[misc]  # a class made at run time
        def make(self, drawn: Config) -> JudgedEngine:
            self.config = config or drawn
            return judged(self.config)

    tier = settings(
        max_examples=max_examples,
        stateful_step_count=30,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    run_state_machine_as_test(Machine, settings=tier)


class ClonedPool(Pool, Protocol):
    """A pool that can be copied."""

    def clone(self) -> Self: ...


def _walk(pool: ClonedPool, scope: Scope, max_states: int) -> None:
    """Breadth first, each call on a pool of its own, mistakes too; what is answered is followed, what is refused has
    changed nothing."""
    first = initial_state(scope.config, pool.profile.choices)
    queue: deque[tuple[ClonedPool, State]] = deque([(pool, first)])
    seen: set[Key] = {canonical(first)}
    while queue and len(seen) < max_states:
        place, state = queue.popleft()
        for move in (*mistakes(state, scope), *moves(state, scope)):
            pool, follower = place.clone(), Follower(scope.config, "pool")
            follower.state = state
            for event in _answer(move, pool):
                follower.event(event)
            follower.settled(pool.snapshot)
            key = canonical(follower.state)
            if key not in seen:
                seen.add(key)
                queue.append((pool, follower.state))


def _answer(move: Move, pool: Pool) -> tuple[Event, ...]:
    try:
        answer = move.call(pool)
    except InvalidRequest:
        return ()
    return answer if isinstance(answer, tuple) else ()
