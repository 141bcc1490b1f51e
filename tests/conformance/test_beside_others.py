"""The plugin in a process of its own: beside plugins with options of the same words, and without asserts."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEIGHBOURS = {
    "pytest_base_url.plugin": """
def pytest_addoption(parser):
    parser.addoption("--base-url", metavar="url", dest="base_url")
    parser.addini("base_url", help="base url")
""",
    "pytest_profiling": """
def pytest_addoption(parser):
    group = parser.getgroup("Profiling")
    group.addoption("--profile", action="store_true")
    group.addoption("--profile-svg", action="store_true")
    group.addoption("--pstats-dir", nargs=1)
    group.addoption("--element-number", action="store", type=int, default=20)
    group.addoption("--strip-dirs", action="store_true")
""",
}
"""What two plugins register that many people have, by the names under which they are found; theirs or these."""


def pytest_in(folder: Path, *options: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ["-p", "spec.conformance.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, *flags, "-m", "pytest", *plugins, *options]
    return subprocess.run(command, check=False, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_it_lives_beside_plugins_with_options_of_the_same_words(tmp_path: Path) -> None:
    for name, text in NEIGHBOURS.items():
        if find_spec(name.partition(".")[0]) is not None:
            continue
        path = tmp_path / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "test_mine.py").write_text("def test_mine(request):\n    assert request.config.getoption('base_url')\n")
    sought = [part for name in NEIGHBOURS for part in ("-p", name)]
    done = pytest_in(tmp_path, *sought, "--base-url", "http://host", "--profile", "test_mine.py")
    assert done.returncode == 0, done.stdout + done.stderr
    done = pytest_in(
        tmp_path, *sought, "--pyargs", "spec.conformance", "--engine", "reference:make_pool", "-k", "small_pool"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_without_its_options_it_loads_nothing_of_the_suite(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import sys\n\n\ndef test_mine():\n"
        "    loaded = {name for name in sys.modules if name.startswith('spec.conformance.')}\n"
        "    assert loaded == {'spec.conformance.plugin'}\n"
        "    assert not {'hypothesis', 'numpy', 'torch', 'reference', 'optimized'} & sys.modules.keys()\n"
    )
    done = pytest_in(tmp_path, "test_mine.py")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_it_judges_the_same_without_asserts(tmp_path: Path) -> None:
    options = ["--pyargs", "spec.conformance", "--conformance-max-examples", "10", "-k", "forks_share"]
    broken = "tests.conformance.faulty:CountsSharedBlocksOnce"
    done = pytest_in(tmp_path, *options, "--engine", broken, flags=("-O",))
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "ALLOC-2 does not hold" in done.stdout
    done = pytest_in(tmp_path, *options, "--engine", "reference:make_engine", flags=("-O",))
    assert done.returncode == pytest.ExitCode.OK, done.stdout
