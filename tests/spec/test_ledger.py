"""The ledger: what it calls proved follows from the clauses, what it names exists, and the specification stays small."""

import ast
import io
import json
import random
import re
import tokenize
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import reference
from optimized.cli.specification import app, read_ledger
from spec.broken import EXAMPLES, BrokenState
from spec.corpus import CORPUS, LEMMAS, NOT_USED, REMARKS, SENTENCES, TESTS, Way
from spec.ledger import (
    OPEN,
    Strength,
    broken_by_a_fault,
    explored_rules,
    faults,
    ledger,
    mutants_in,
    says_no,
    walk_in,
    walk_under,
)
from spec.proofs.clauses import CLAUSES, STEP_CLAUSES
from spec.proofs.edges import algebra_of, core_of
from spec.proofs.ledger import RULE_OF_CLAUSE, RULE_OF_GUARD
from spec.replay import step
from spec.rules import RULES, Kind, Rule, broken_rules, broken_state_rules
from spec.schedules import LOADS
from spec.scope import LENSES
from spec.vocabulary import (
    Abort,
    Add,
    Admit,
    Allocate,
    Begin,
    BlockId,
    Config,
    Fork,
    Observe,
    Request,
    State,
    Submit,
    Write,
    all_blocks,
    initial_state,
)

ROOT = Path(__file__).parents[2]
NAMED_BY_CLAUSES = {rule_id for rule_ids in RULE_OF_CLAUSE.values() for rule_id in rule_ids}
SPOKEN_OF = [rule for rule in RULES.values() if rule.kind is Kind.STATE and rule.id in NAMED_BY_CLAUSES]


def sound_states(num_states: int) -> Iterator[State]:
    """Some states of each lens."""
    for lens in LENSES.values():
        states = [after for _, _, after in walk_in(lens.small)]
        random.Random(2).shuffle(states)
        yield from states[:num_states]


FAULTY = [
    *(example.state for example in EXAMPLES if isinstance(example, BrokenState)),
    *(faulty for state in sound_states(6) for faulty in faults(state)),
]


def has_every_clause(state: State) -> bool:
    """Whether the state, read as one of the proved core, has every clause. One that cannot be read has not."""
    try:
        A = algebra_of(state, state)
        S = core_of(A, state)
        return all(clause.holds(A, S) for clause in CLAUSES.values())
    except (LookupError, TypeError):
        return False


# What is proved


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in SPOKEN_OF if rule.id not in OPEN], ids=lambda rule: rule.id)
def test_what_breaks_a_proved_rule_breaks_a_clause(rule: Rule) -> None:
    breaking = [state for state in FAULTY if says_no(rule, (state,))]
    assert breaking, f"nothing that is tried breaks {rule.id}"
    assert not [state for state in breaking if has_every_clause(state)]


@pytest.mark.parametrize("rule_id", OPEN)
def test_a_rule_that_is_left_open_breaks_where_every_clause_holds(rule_id: str) -> None:
    assert RULES[rule_id] in SPOKEN_OF, f"no clause speaks of {rule_id}"
    assert any(has_every_clause(state) for state in FAULTY if says_no(RULES[rule_id], (state,)))


def test_sound_states_have_every_clause_and_every_rule() -> None:
    for state in sound_states(6):
        assert has_every_clause(state)
        assert not list(broken_state_rules(state))


def test_no_step_rule_is_called_proved() -> None:
    assert {e.rule.kind for e in read_ledger().values() if e.strength is Strength.PROVED} == {Kind.STATE}


def test_the_proofs_name_what_exists() -> None:
    assert set(RULE_OF_CLAUSE) == {*CLAUSES, *STEP_CLAUSES}
    assert {i for ids in (*RULE_OF_CLAUSE.values(), *RULE_OF_GUARD.values()) for i in ids} <= RULES.keys()


def test_the_recorded_matrix_is_that_of_the_proof() -> None:
    pytest.importorskip("z3")
    from spec.proofs.matrix import matrix

    recorded = json.loads((ROOT / "docs/proof_matrix.json").read_text(encoding="utf-8"))
    now = matrix()
    again = "record it again: python docs/_ext/proof_matrix.py"
    assert [(r["clause"], r["formula"], tuple(r["rule_ids"])) for r in recorded["rows"]] == [
        (row.clause, row.formula, row.rule_ids) for row in now.rows
    ], again
    assert [(c["transition"], c["guard"], tuple(c["changes"])) for c in recorded["columns"]] == [
        (column.transition, column.guard, column.changes) for column in now.columns
    ], again
    for row in now.rows:
        names = {column.transition for column in now.columns[1 if row.is_step else 0 :]}
        assert set(recorded["proved"][row.clause]) == names, f"{row.clause} is not proved; {again}"


# What is explored


def test_every_step_of_a_lens_keeps_every_rule() -> None:
    for lens in LENSES.values():
        for before, event, after in walk_in(lens.small, 30):
            assert not broken_rules(before, event, after)


def test_every_step_of_a_load_keeps_every_rule() -> None:
    for load in LOADS.values():
        for before, event, after in walk_under(load, reference.make_engine, 30):
            assert not broken_rules(before, event, after)


@pytest.mark.slow
def test_a_rule_about_what_never_happens_is_not_called_explored() -> None:
    """In a pool nobody waits, and no engine is observed; under the loads nobody is refused or gives up."""
    through_pools = explored_rules({lens.name: walk_in(lens.small) for lens in LENSES.values()})
    assert through_pools.keys().isdisjoint({"SCHED-1", "SCHED-3", "SCHED-4", "PREEMPT-1", "TABLE-8", "API-3"})
    assert not read_ledger()["API-1"].explored
    assert not read_ledger()["SCHED-20"].explored


@pytest.mark.parametrize(
    ("rule_id", "lens"), [("ALLOC-4", "cache"), ("TABLE-10", "window"), ("ALLOC-5", "flight"), ("SCHED-11", "fcfs")]
)
def test_a_rule_that_a_single_fault_breaks_is_called_explored(rule_id: str, lens: str) -> None:
    assert read_ledger()[rule_id].explored == lens


def test_nonsense_is_no_fault() -> None:
    """A rule that answers False because it cannot be asked has not been broken."""
    state = initial_state(Config(num_blocks=2))
    unknown = (state, Write(9, 0, (0,)), state)
    assert not RULES["TABLE-2"].holds(*unknown)
    assert not says_no(RULES["TABLE-2"], unknown)


def test_a_fault_is_looked_for_where_the_rule_holds() -> None:
    rule = RULES["ALLOC-1"]
    broken = next(example.state for example in EXAMPLES if example.rule_id == rule.id)
    sound = initial_state(broken.config)
    assert broken_by_a_fault([rule], (broken, Observe(), broken)) == set()
    assert broken_by_a_fault([rule], (sound, Observe(), sound)) == {rule.id}


def test_faults_are_one_change_each() -> None:
    assert list(faults((1, 2))) == [(2,), (1, 1, 2), (2, 2), (0, 2), (1,), (1, 2, 2), (1, 3), (1, 1)]
    assert list(faults({1: True})) == [{}, {1: False}]
    config = Config(num_blocks=2)
    assert all(state.config is config for state in faults(initial_state(config)))
    assert initial_state(config) not in list(faults(initial_state(config)))


def test_without_proofs_and_walks_everything_is_tested() -> None:
    told_nothing = ledger(clauses={}, guards={}, explored={})
    assert {entry.strength for entry in told_nothing.values()} == {Strength.TESTED}
    assert list(told_nothing) == list(RULES)


# The sabotaged engines


def test_the_mutants_of_the_ledger_are_those_of_the_tests() -> None:
    found = {(rule_id, name) for rule_id, names in mutants_in().items() for name in names}
    zoos = [import_module(f"tests.mutants.{path.stem}") for path in sorted((ROOT / "tests/mutants").glob("*_zoo.py"))]
    mutants = [mutant for zoo in zoos for name in vars(zoo) if name.endswith("_ZOO") for mutant in getattr(zoo, name)]
    assert found == {(mutant.rule, mutant.name) for mutant in mutants}


def test_an_installed_package_has_no_mutants(tmp_path: Path) -> None:
    assert mutants_in(tmp_path / "tests" / "mutants") == {}


# The command


def test_the_command_tells_the_strength_of_every_rule() -> None:
    told = json.loads(CliRunner().invoke(app, ["rules", "--json"]).stdout)
    assert {rule["id"]: rule["strength"] for rule in told["rules"]} == {
        rule_id: entry.strength.value for rule_id, entry in read_ledger().items()
    }
    assert {each["id"] for each in told["corpus"]} == set(CORPUS)


# The corpus


def test_every_invariant_of_the_corpus_is_there() -> None:
    last = {"A": 11, "T": 8, "C": 7, "P": 14, "R": 10, "S": 11, "K": 10, "X": 12}
    expected = {f"{area}{number}" for area, most in last.items() for number in range(1, most + 1)} - set(NOT_USED)
    assert set(CORPUS) == expected


def test_a_rule_cites_invariants_that_exist() -> None:
    assert {invariant for rule in RULES.values() for invariant in rule.corpus} <= SENTENCES.keys()


@pytest.mark.parametrize("coverage", CORPUS.values(), ids=lambda coverage: coverage.id)
def test_an_invariant_is_covered_or_out_for_a_reason(coverage) -> None:
    assert set(coverage.rules) <= RULES.keys()
    assert (coverage.way in (Way.RULES, Way.LEMMA)) == bool(coverage.rules)
    assert coverage.way is not Way.LEMMA or (coverage.tests and coverage.remark), "a lemma has a reason and a test"
    assert coverage.way is not Way.OUT or coverage.remark, "what is out has a reason"
    assert re.fullmatch(r"[A-Z].*[^.]\.", coverage.sentence)


@pytest.mark.parametrize("name", sorted({name for names in TESTS.values() for name in names}))
def test_a_test_that_the_corpus_names_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert (ROOT / path).exists(), path
    assert re.search(rf"^def {function}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), function


def test_what_is_said_of_invariants_is_said_of_ones_that_exist() -> None:
    assert LEMMAS.keys() | TESTS.keys() | REMARKS.keys() <= SENTENCES.keys()
    assert not [i for i in LEMMAS if CORPUS[i].way is not Way.LEMMA], "it is a rule by now"


def test_p12_every_block_is_of_one_of_four_kinds() -> None:
    """It follows from ALLOC-1 and ALLOC-3: free or held, cached or not, and no block twice."""
    judged = [s for s in (*sound_states(6), *FAULTY) if all(RULES[i].holds(s) for i in LEMMAS["P12"])]
    for s in judged:
        kinds: list[list[BlockId]] = [
            [b for b in s.free if b not in s.cached],
            [b for b in s.free if b in s.cached],
            [b for b in all_blocks(s) if s.ref_count[b] and b not in s.cached],
            [b for b in all_blocks(s) if s.ref_count[b] and b in s.cached],
        ]
        assert sorted(b for kind in kinds for b in kind) == list(all_blocks(s))
    assert len(judged) > 100


def test_x8_an_aborted_request_holds_nothing() -> None:
    """It follows from TABLE-4, API-4 and ALLOC-3: without a live sequence there is no table, and no holder."""
    s = initial_state(Config(num_blocks=4, block_size=2))
    s = step(s, Add(Request(0, (1, 2, 3), 2, (0, 1))))
    events = [Begin(0), Admit(0), Allocate(0, 3, (2, 0)), Submit(0), Write(0, 0, (4, 5, 0)), Fork(0, 1)]
    for event in events:
        s = step(s, event)
    assert s.ref_count == (2, 0, 2, 0)
    s = step(s, Abort(0))
    assert not s.block_tables and not s.seqs and not s.requests
    assert {b: n for b, n in enumerate(s.ref_count) if n} == {b: 1 for b in s.flights[0].holds}
    assert not list(broken_state_rules(s)), "only the step in flight holds what it may still read"


# The size

MOST_LINES = 2000


def lines_of_code(path: Path) -> int:
    """The lines that are neither blank, nor a comment, nor a docstring."""
    text = path.read_text(encoding="utf-8")
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def what_a_verdict_depends_on(module: str = "replay") -> set[str]:
    """The modules of the specification that one needs, to follow an engine and to judge it."""
    needed, left = set[str](), [module]
    while left:
        name = left.pop()
        needed.add(name)
        for node in ast.walk(ast.parse((ROOT / "spec" / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "spec":
                names = (
                    [(node.module or "").partition(".")[2]] if node.module != "spec" else [a.name for a in node.names]
                )
                left += [each for each in names if each not in needed]
    return needed


def test_what_a_verdict_depends_on_is_small_enough_to_be_read() -> None:
    needed = what_a_verdict_depends_on()
    assert {"rules", "scheduler", "vocabulary"} <= needed
    assert not {"broken", "explore", "ledger", "picture", "proofs", "trace"} & needed
    lengths = {name: lines_of_code(ROOT / "spec" / f"{name}.py") for name in sorted(needed)}
    assert sum(lengths.values()) < MOST_LINES, lengths


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.id)
def test_a_predicate_has_at_most_six_lines(rule: Rule) -> None:
    body = rule.source.split('"""')[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 6
