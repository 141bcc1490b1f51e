"""The plugin's options: what they choose, and what is said when they make no sense."""

import json
from pathlib import Path

import pytest

from spec.rules import RuleViolation
from tests.conformance.conftest import Run
from tests.mutants.ahead_zoo import AHEAD_ZOO
from tests.mutants.pool_zoo import POOL_ZOO
from tests.mutants.reference_zoo import REFERENCE_ZOO
from tests.mutants.sabotage import Mutant, sabotaged

KERNEL = """
def attend(query, key_cache, value_cache, block_tables, seq_lens, query_start, scale):
    raise NotImplementedError
"""


@pytest.mark.slow
def test_without_an_engine_every_test_is_skipped_with_one_sentence(run: Run) -> None:
    done = run("-rs")
    assert done.status == 0, done.output
    assert "no engine is given: --engine MODULE:NAME" in done.output
    assert " passed" not in done.output


def test_a_report_says_what_was_judged_and_what_came_of_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KERNEL)
    done = run("--engine", "mine:attend", "--conformance-level", "L2", "--conformance-report", "report.json")
    assert done.status == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["format"] == "kvproof conformance report"
    assert report["targets"] == [{"name": "mine:attend", "kind": "kernel", "profile": None}]
    assert {test["level"] for test in report["tests"]} == {"L2"}
    assert {test["outcome"] for test in report["tests"]} == {"skipped"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--engine", "reference"], "--engine is 'reference', it must be MODULE:NAME"),
        (["--engine", "reference:make_pol"], "the module reference has no make_pol"),
        (["--engine", "json:dumps"], "AdapterFault in json:dumps: raised TypeError"),
        (["--engine", "sys:exit"], "AdapterFault in sys:exit: raised SystemExit: Config(num_blocks=8"),
        (["--engine", "this_is:nowhere"], "its import raises ModuleNotFoundError: No module named 'this_is'"),
        (["--engine", "reference:make_engine", "--engine", "optimized:make_engine"], "names an engine twice"),
        (["--conformance-level", "L9"], "'L9' is none of L0, L1, L2, L3, L4, L5, SECURITY"),
        (["--conformance-time-budget", "nan"], "must be a number of seconds above 0"),
        (["--conformance-max-examples", "0"], "must be a whole number above 0"),
        (["--conformance-url", "localhost"], "it must be like http://host:port/v1"),
        (["--conformance-skips", "none.txt"], "none.txt cannot be read"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_an_option_that_makes_no_sense_is_refused(options: list[str], sentence: str, run: Run) -> None:
    done = run(*options)
    assert done.status == pytest.ExitCode.USAGE_ERROR
    assert sentence in done.output
    assert "Traceback" not in done.output


FAULTY = "tests.conformance.faulty"
ORDER = "test_l2_scheduler.py::test_requests_are_served_in_their_order"
FORKS = "test_l2_scheduler.py::test_samples_and_forks_share_blocks"


@pytest.mark.slow
def test_a_failure_shows_the_rule_the_story_and_a_test_that_replays_it(run: Run) -> None:
    done = run("--engine", f"{FAULTY}:CountsSharedBlocksOnce", "-k", "forks_share", "--conformance-max-examples", "20")
    assert done.status == pytest.ExitCode.TESTS_FAILED
    assert "ALLOC-2 does not hold: A block's reference count is the number of its holders." in done.output
    assert "  1. add(Request(request_id=0, prompt=(0,), max_tokens=2, seq_ids=(0, 1)))" in done.output
    assert "     block   0 x2   1" in done.output
    assert done.tests[FORKS]["rule"] == "ALLOC-2"
    pasted: dict[str, object] = {}
    exec(done.tests[FORKS]["test"], pasted)  # noqa: S102  it is meant to be run
    replayed = pasted["test_alloc_2_holds"]
    assert callable(replayed)
    with pytest.raises(RuleViolation, match="^ALLOC-2 does not hold"):
        replayed()


def test_what_an_adapter_raises_is_shown_and_blamed_on_no_rule(run: Run) -> None:
    done = run("--engine", f"{FAULTY}:Raises", "-k", "given_up", "--conformance-max-examples", "20")
    assert done.status == pytest.ExitCode.TESTS_FAILED
    [test] = done.tests.values()
    assert (test["rule"], test["method"], test["sentence"]) == (
        None,
        "abort",
        "AdapterFault in abort: raised KeyError: 0",
    )
    assert "    raise KeyError(request_id)" in done.output


@pytest.mark.slow
def test_a_capability_that_is_lacking_skips_its_chapter_by_name(run: Run) -> None:
    done = run("--engine", f"{FAULTY}:PreemptsInSecret", "-rs", "--conformance-level", "L3", "--collect-only")
    assert done.status == pytest.ExitCode.OK
    done = run("--engine", f"{FAULTY}:PreemptsInSecret", "-rs", "-k", "host_memory and preempted")
    assert "the profile of reference does not declare PREEMPTION" in done.output
    assert set(done.outcomes().values()) == {"skipped"}


@pytest.mark.slow
def test_a_test_that_time_cuts_off_is_incomplete_and_no_pass(run: Run, tmp_path: Path) -> None:
    (tmp_path / "fail.txt").write_text(ORDER)
    options = ["--conformance-time-budget", "0.001", "--conformance-xfails", "fail.txt"]
    done = run(
        "--engine", "reference:make_engine", "--engine", "reference:make_pool", "-k", "order or small_pool", *options
    )
    assert done.status == pytest.ExitCode.TESTS_FAILED
    assert set(done.outcomes().values()) == {"incomplete"}
    assert "2 incomplete" in done.output
    assert "is incomplete: the time budget of 0.001 s is spent, after 0 stories" in done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "outcome", "status"),
    [("CountsSharedBlocksOnce", "xfailed", pytest.ExitCode.OK), ("Adapter", "failed", pytest.ExitCode.TESTS_FAILED)],
)
def test_an_expected_failure_must_fail(engine: str, outcome: str, status: int, run: Run, tmp_path: Path) -> None:
    (tmp_path / "fail.txt").write_text(f"somewhere/spec/conformance/{FORKS}  # counts\n")
    options = ["--conformance-max-examples", "20", "--conformance-xfails", "fail.txt"]
    done = run("--engine", f"{FAULTY}:{engine}", "-k", "forks_share_blocks and not while", *options)
    assert (done.outcomes(), done.status) == ({FORKS: outcome}, status)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--conformance-skips", "--conformance-xfails"])
def test_an_id_that_is_unknown_is_an_error(option: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text(f"{ORDER}\ntest_l2_scheduler.py::test_gone\n")
    done = run("--engine", "reference:make_engine", option, "ids.txt")
    assert done.status == pytest.ExitCode.USAGE_ERROR
    assert f"{option} names test_l2_scheduler.py::test_gone, and there is no such test" in done.output


def test_a_test_that_is_to_be_skipped_is_not_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "skip.txt").write_text(ORDER)
    done = run("--engine", "reference:make_engine", "--conformance-skips", "skip.txt", "-k", "in_their_order")
    assert done.outcomes() == {ORDER: "skipped"}


@pytest.mark.slow
def test_the_ids_of_the_tests_are_those_that_were_published(run: Run) -> None:
    """Somebody's lists of skips and of expected failures name them: an id is added here, and never changed."""
    done = run("--conformance-max-examples", "1")
    assert set(done.tests) >= set((Path(__file__).parent / "published_ids.txt").read_text().splitlines())
    assert {test["outcome"] for test in done.tests.values()} == {"skipped"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "chosen", "rule", "method", "words"),
    [
        ("RaisesOnRelease", "small_pool", None, "release", "raised KeyError: "),
        ("TakesChances", "small_pool", None, None, "the same calls on a new pool lead elsewhere"),
        (
            "NeverSwaps",
            "with_host",
            None,
            "swap_out",
            "the profile declares SWAP, and with room for everything it says",
        ),
        ("SharesTheLastBlockOnly", "state_with_forks and not prefix", "ALLOC-2", None, "is the number of its holders"),
    ],
)
def test_a_pool_is_judged_in_the_same_way(
    pool: str, chosen: str, rule: str | None, method: str | None, words: str, run: Run
) -> None:
    done = run("--engine", f"{FAULTY}:{pool}", "-k", chosen)
    assert done.status == pytest.ExitCode.TESTS_FAILED
    [test] = done.tests.values()
    assert (test["rule"], test["method"]) == (rule, method)
    assert words in test["sentence"]


SAMPLE = [
    (REFERENCE_ZOO, "the last in the queue is admitted first", ":make_engine", "L2"),
    (AHEAD_ZOO, "a step computes the token after the one that is being drawn", ".model_engine:make_engine_ahead", "L3"),
    (POOL_ZOO, "a key that the cache has is published again", ":make_pool", "L1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("zoo", "name", "factory", "level"), SAMPLE, ids=[name for _, name, _, _ in SAMPLE])
def test_a_mutant_dies_by_its_rule_through_the_plugin(
    run: Run, tmp_path: Path, zoo: list[Mutant], name: str, factory: str, level: str
) -> None:
    """Three of the zoo; ``python -m tests.mutants.by_the_suite`` sends all of it."""
    [mutant] = [mutant for mutant in zoo if mutant.name == name]
    with sabotaged(mutant, tmp_path) as package:
        done = run("--engine", f"{package.__name__}{factory}", "--conformance-level", level, "-x", "-q")
    assert done.status == 1, done.output
    assert mutant.rule in {test.get("rule") for test in done.tests.values()}
