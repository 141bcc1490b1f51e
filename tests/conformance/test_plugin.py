"""The plugin's options: what they choose, and what is said when they make no sense."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

KERNEL = """
def attend(query, key_cache, value_cache, block_tables, seq_lens, query_start, scale):
    raise NotImplementedError
"""


@dataclass(frozen=True)
class Done:
    """How a run of the suite ended, and what it printed."""

    status: int
    output: str


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the suite from a folder of its user's. The plugin is named: a checkout need not be installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*options: str) -> Done:
        own = ["-p", "spec.conformance.plugin", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", os.devnull]
        status = pytest.main([*own, "--pyargs", "spec.conformance", *options])
        printed = capsys.readouterr()
        return Done(int(status), printed.out + printed.err)

    return run


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
        (["--engine", "json:dumps"], "json:dumps(Config(num_blocks=8)) raises TypeError"),
        (["--conformance-level", "L9"], "'L9' is none of L0, L1, L2, L3, L4, L5"),
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
