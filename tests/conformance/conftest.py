"""Runs the suite as its user does, inside of this process."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Done:
    """How a run of the suite ended, what it printed, and its report by the ids of the tests."""

    status: int
    output: str
    tests: dict[str, dict[str, Any]]

    def outcomes(self) -> dict[str, str]:
        return {name: test["outcome"] for name, test in self.tests.items()}


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the suite from a folder of its user's. The plugin is named: a checkout need not be installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*options: str) -> Done:
        own = ["-p", "spec.conformance.plugin", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", os.devnull]
        kept = ["--conformance-report", "kept.json"] if options else []
        status = pytest.main([*own, "--pyargs", "spec.conformance", *kept, *options])
        printed = capsys.readouterr()
        kept_at = tmp_path / "kept.json"
        tests = json.loads(kept_at.read_text())["tests"] if kept_at.exists() else []
        return Done(int(status), printed.out + printed.err, {test["id"]: test for test in tests})

    return run
