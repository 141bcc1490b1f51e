"""The ledger: for every rule how strongly it is known, and where; worked out from code and never written by hand.

The ledger is told what the proofs say, and where the explorer has been: it knows neither of them. A rule is

* **proved** if it is a state rule that follows from clauses which every transition of the proved core keeps;
* **explored** if it is judged wherever the explorer goes, in pools and in the reference engine under a small load, and
  does not hold there for lack of action: somewhere on the way one fault, a number off by one or an entry left out,
  would have broken it;
* **tested** otherwise: by its broken example, the test that is named after it, and every run of an engine.
"""

import ast
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypeAlias, TypeVar

import spec.replay
from spec.broken import BROKEN
from spec.choices import Choices
from spec.engine import Admission, Engine, EngineFactory
from spec.model_pool import ModelPool
from spec.rules import RULES, Kind, Rule
from spec.schedules import LOADS, Load, Turn, turns
from spec.scope import LENSES, Scope, moves
from spec.vocabulary import Add, Config, Event, Observe, Prefix, Sample, SeqId, State, Token, initial_state

ROOT = Path(spec.replay.__file__).parents[1]

StepTaken: TypeAlias = tuple[State, Event, State]
Judged: TypeAlias = tuple[State] | StepTaken
"""What a rule is asked about: a state, or a step."""

T = TypeVar("T")


class Strength(Enum):
    """How strongly a rule is known; the strongest first."""

    PROVED = "proved"
    EXPLORED = "explored"
    TESTED = "tested"


@dataclass(frozen=True)
class Entry:
    """A rule in the ledger. ``clauses`` are those of the proof that speak of it; ``assumed_by`` are the transitions
    whose guard it is, so that the proof starts from it; ``explored`` is a lens in which it is at stake; ``mutants`` are the sabotaged engines that it catches."""

    rule: Rule
    strength: Strength
    clauses: tuple[str, ...] = ()
    assumed_by: tuple[str, ...] = ()
    explored: str = ""
    example: str = ""
    remark: str = ""
    mutants: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The entry as plain data."""
        return {
            "id": self.rule.id,
            "name": self.rule.name,
            "sentence": self.rule.sentence,
            "reason": self.rule.reason,
            "kind": self.rule.kind.value,
            "events": [event.__name__ for event in self.rule.events],
            "corpus": list(self.rule.corpus),
            "strength": self.strength.value,
            "clauses": list(self.clauses),
            "assumed_by": list(self.assumed_by),
            "explored": self.explored,
            "broken_example": self.example,
            "remark": self.remark,
            "mutants": list(self.mutants),
        }


OPEN: Mapping[str, str] = {
    "ALLOC-5": "The clauses speak of blocks that a step holds; a step becomes a holder when it is the last one.",
    "CACHE-2": "In the proof a key is a name without a length: what is proved is that the block is full.",
    "SWAP-1": "The proof lets several sequences share a host block, and its free list is a set.",
    "TABLE-1": "The proof knows no scheduled tokens: a table has at least the blocks of the computed tokens, and at most "
    "those of the known ones.",
}
"""State rules of which the proof says a part only, and what it leaves open. A test finds for each of them a state that
has every clause and breaks the rule, and for none of the others."""


def ledger(
    *,
    clauses: Mapping[str, Collection[str]],
    guards: Mapping[str, Collection[str]],
    explored: Mapping[str, str],
    mutants: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, Entry]:
    """The entry of every rule. ``clauses`` and ``guards`` say which rules each clause and each guard stands for."""

    def entry(rule: Rule) -> Entry:
        spoken = tuple(clause for clause, rule_ids in clauses.items() if rule.id in rule_ids)
        assumed = tuple(transition for transition, rule_ids in guards.items() if rule.id in rule_ids)
        return Entry(
            rule,
            strength_of(rule, bool(spoken), rule.id in explored),
            spoken,
            assumed,
            explored.get(rule.id, ""),
            BROKEN[rule.id].story if rule.id in BROKEN else "",
            OPEN.get(rule.id, "") if spoken else "",
            (mutants or {}).get(rule.id, ()),
        )

    return {rule.id: entry(rule) for rule in RULES.values()}


def strength_of(rule: Rule, has_clauses: bool, is_explored: bool) -> Strength:
    """A step rule says what an engine may do: to the proof it is where it starts from, and not what it shows."""
    if rule.kind is Kind.STATE and has_clauses and rule.id not in OPEN:
        return Strength.PROVED
    return Strength.EXPLORED if is_explored else Strength.TESTED


# What the explorer judges and what could have gone wrong there


def walk_in(scope: Scope, num_moves: int = 120, seed: int = 0) -> Iterator[StepTaken]:
    """The steps of a random walk through a scope. Each is one that a search of the whole scope comes by."""
    chance, pool = random.Random(seed), ModelPool(initial_state(scope.config, ModelPool.profile.choices))
    for _ in range(num_moves):
        offered = list(moves(pool.state, scope))
        if offered and not isinstance(chance.choice(offered).call(pool), Admission):
            yield from pool.steps


def walk_under(load: Load, make: EngineFactory, num_turns: int = 60, seed: int = 0) -> Iterator[StepTaken]:
    """The steps of an engine in a random run under a load: some of those that a search of all its schedules judges."""
    chance, engine = random.Random(seed), make(load.config)
    state = replace(engine.snapshot(), choices=engine.profile.choices)
    for _ in range(num_turns):
        events, shown = events_of_turn(engine, state, chance.choice(list(turns(state, load))), load)
        for event in events:
            after = spec.replay.step(state, event)
            yield state, event, after
            state = after
        shown = spec.replay.observe(state, shown)
        yield state, Observe(), shown
        state = shown


def events_of_turn(engine: Engine, state: State, turn: Turn, load: Load) -> tuple[list[Event], State]:
    """What happens if a request arrives, or the engine makes a step, and what the engine shows then."""
    if turn is not None:
        request = load.kinds[turn].request(min(set(range(load.max_requests)) - state.requests.keys()))
        engine.add(request)
        return [Add(request)], engine.snapshot()
    sampled: list[Sample] = []

    def next_token(seq: SeqId, tokens: Prefix) -> Token:
        sampled.append(Sample(seq, tokens, 0))
        return 0

    report = engine.step(next_token)
    shown = engine.snapshot()
    return spec.replay.events_of_step(state, report, shown, sampled), shown


def walks(make: EngineFactory) -> dict[str, Iterator[StepTaken]]:
    """A walk through each lens of the explorer, and one of the engine under each of its loads."""
    through_pools = {lens.name: walk_in(lens.small) for lens in LENSES.values()}
    return through_pools | {name: walk_under(load, make) for name, load in LOADS.items()}


def explored_rules(walks: Mapping[str, Iterable[StepTaken]], num_tries: int = 3) -> dict[str, str]:
    """The rules that one fault would have broken, somewhere on these walks, and the first walk where it would. For each
    rule and each kind of event a few steps are tried, spread over the walk."""
    found: dict[str, str] = {}
    for name, walk in walks.items():
        tried: Counter[tuple[str, type]] = Counter()
        steps = list(walk)
        random.Random(1).shuffle(steps)
        for taken in steps:
            kind = type(taken[1])
            left = [
                r for r in RULES.values() if r.id not in found and tried[r.id, kind] < num_tries and judges(r, kind)
            ]
            tried.update((rule.id, kind) for rule in left)
            found |= dict.fromkeys(broken_by_a_fault(left, taken), name)
    return found


def judges(rule: Rule, kind: type) -> bool:
    """Whether a rule has something to say about such an event, or about where it leads."""
    return rule.kind is Kind.STATE or issubclass(kind, rule.events)


def broken_by_a_fault(rules: Iterable[Rule], taken: StepTaken) -> set[str]:
    """Those of the rules that hold of the step, and that some single fault breaks."""
    left = {rule.id: rule for rule in rules if rule.holds(*part_for(rule, taken))}
    found: set[str] = set()
    for faulty in with_one_fault(taken):
        if not left:
            break
        found |= {rule_id for rule_id, rule in left.items() if says_no(rule, part_for(rule, faulty))}
        left = {rule_id: rule for rule_id, rule in left.items() if rule_id not in found}
    return found


def part_for(rule: Rule, taken: StepTaken) -> Judged:
    """What a rule is asked about: a state rule only about where the step leads."""
    return taken[2:] if rule.kind is Kind.STATE else taken


def says_no(rule: Rule, judged: Judged) -> bool:
    """Whether the rule itself answers no. Nonsense, of which a rule answers False as well, is no answer here."""
    try:
        return not rule.predicate(*judged)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return False


def with_one_fault(taken: StepTaken) -> Iterator[StepTaken]:
    """The same step with one fault in it: first in the event, then in what came of it, then in what was before."""
    before, event, after = taken
    yield from ((before, faulty, after) for faulty in faults(event))
    yield from ((before, event, faulty) for faulty in faults(after))
    yield from ((faulty, event, after) for faulty in faults(before))


def faults(thing: T) -> Iterator[T]:
    """The same thing but for one number that is off by one, or one entry that is left out or stands there twice."""
    made: Iterable[object] = ()
    match thing:
        case bool():
            made = (not thing,)
        case int():
            made = (thing + 1, thing - 1)
        case str():
            made = (thing + "?",)
        case tuple():
            made = _faults_of_tuple(thing)
        case frozenset():
            made = (thing - {each} for each in thing)
        case Mapping():
            made = _faults_of_mapping(thing)
        case _ if is_dataclass(thing):
            made = _faults_of_record(thing)
    yield from made  # type: ignore[misc]  # a fault has the type of what it is a fault of


def _faults_of_tuple(items: tuple[object, ...]) -> Iterator[object]:
    for i, item in enumerate(items):
        yield items[:i] + items[i + 1 :]
        yield items[: i + 1] + items[i:]
        yield from (items[:i] + (faulty,) + items[i + 1 :] for faulty in faults(item))


def _faults_of_mapping(items: Mapping[object, object]) -> Iterator[object]:
    for key, item in items.items():
        yield {other: kept for other, kept in items.items() if other != key}
        yield from ({**items, key: faulty} for faulty in faults(item))


def _faults_of_record(record: object) -> Iterator[object]:
    change: Callable[..., object] = replace
    for field in fields(record):  # type: ignore[arg-type]  # only records come here
        value = getattr(record, field.name)
        for faulty in () if isinstance(value, Config | Choices) else faults(value):
            try:
                yield change(record, **{field.name: faulty})
            except ValueError:  # a state that leaves a block out is not even built
                continue


# The sabotaged engines


def mutants_in(folder: Path = ROOT / "tests" / "mutants") -> dict[str, tuple[str, ...]]:
    """For each rule the sabotaged engines that it must catch, as the tests of a checkout list them; of an installed
    package nothing. The files are read and not run: what stands in somebody's folder ``tests`` is not ours to run."""
    caught: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*_zoo.py")) if folder.is_dir() else ():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            words = _words(node) if isinstance(node, ast.Call) else []
            for rule_id in RULES.keys() & set(words[1:]):
                caught.setdefault(rule_id, []).append(words[0])
    return {rule_id: tuple(names) for rule_id, names in caught.items()}


def _words(call: ast.Call) -> list[str]:
    """The plain strings among the arguments, in order."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]
