"""The command inside this process, and as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from optimized.cli import app
from tests.models.tiny_files import write_gguf

ROOT = Path(__file__).parent.parent.parent

Run = Callable[..., Result]
Process = Callable[..., "subprocess.Popen[str]"]

AS_IF_TYPED = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
"""A child of tests that run in a shell's background is told to ignore what a keyboard sends."""


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 262 tokens, one a byte, and a context of 64."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command with these arguments; models converted here stay here."""
    monkeypatch.setenv("KVPROOF_HOME", str(tmp_path_factory.getbasetemp() / "cli-home"))

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(each) for each in arguments])

    return call


@pytest.fixture
def process(tmp_path_factory: pytest.TempPathFactory) -> Process:
    """Start the command as a process of its own, after some Python of the test's."""

    def start(*arguments: object, before: str = "") -> "subprocess.Popen[str]":
        home = str(tmp_path_factory.getbasetemp() / "cli-home")
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"{AS_IF_TYPED}\n{before}\nfrom optimized.cli import main\nmain()",
                *map(str, arguments),
            ],
            cwd=ROOT,
            env=os.environ | {"KVPROOF_HOME": home, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
