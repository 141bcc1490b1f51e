"""What is installed: every module of the four packages and nothing else, under a version that other tools tolerate."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("spec", "reference", "optimized", "kernels")


def folders_with_modules() -> set[str]:
    """The folders of the four packages that hold Python modules, as dotted names."""
    return {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the project: a build in place would leave its folders behind, and find them next time."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*PACKAGES, "tests", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", target, copy],
        check=True,
        timeout=120,
    )
    [path] = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_packages_listed_are_the_folders_found() -> None:
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert len(set(listed)) == len(listed)
    assert set(listed) == folders_with_modules()


@pytest.mark.slow
def test_the_wheel_has_every_module(wheel: zipfile.ZipFile) -> None:
    on_disk = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert {name for name in wheel.namelist() if name.endswith(".py")} == on_disk


def test_the_wheel_says_that_it_is_typed(wheel: zipfile.ZipFile) -> None:
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel.namelist())


def test_the_wheel_installs_the_four_packages_only(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_wheel_brings_the_command_and_the_licence(wheel: zipfile.ZipFile) -> None:
    [entry_points] = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    assert "kvproof = optimized.cli:main" in wheel.read(entry_points).decode()
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())


def test_the_version_is_a_date_and_none_that_transformers_refuses() -> None:
    """transformers takes our package ``kernels`` for Hugging Face's, and fails if its version is 0.17.something."""
    version = PROJECT["project"]["version"]
    assert re.fullmatch(r"20\d\d\.(1[0-2]|[1-9])\.\d+", version), version
    assert not version.startswith("0.17.")


def test_the_base_needs_four_packages() -> None:
    names = [re.split(r"[<>=\[ ]", each)[0] for each in PROJECT["project"]["dependencies"]]
    assert names == ["numpy", "typer", "rich", "tqdm"]


def requirement_names() -> set[str]:
    """What pyproject.toml asks for, extras too, in the spelling of the index."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    asked = [*PROJECT["project"]["dependencies"], *(each for extra in extras for each in extra)]
    names = {re.split(r"[<>=\[; ]", each)[0] for each in asked}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in names} - {"kvproof"}


def constraints() -> dict[str, str]:
    lines = [line for line in (ROOT / ".ci/constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines)}


def test_every_requirement_has_an_exact_version() -> None:
    assert requirement_names() <= constraints().keys()


def test_torch_is_named_exactly() -> None:
    """No local label: the same line takes the build for CPUs where pip finds it, and the one for CUDA elsewhere."""
    assert constraints()["torch"] == "2.13.0"


def readme_command(name: str) -> str:
    """The command below the line ``<!-- name -->`` of the README."""
    found = re.search(
        rf"^<!-- {name} -->\n```sh\n(.*?)\n```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert found, f"README.md has no command {name}"
    return found[1]


def test_ci_runs_the_two_commands_of_the_readme() -> None:
    """It reads them out of the README, so here it is asked what it read."""
    script = (ROOT / ".ci/run").read_text()
    [reader] = re.findall(r"^readme\(\) \{\n.*?^\}$", script, re.MULTILINE | re.DOTALL)
    for name in ("main-job", "tests"):
        assert f'"$(readme {name})"' in script
        read = subprocess.run(
            ["bash", "-c", f"venv=.venv; {reader}; readme {name}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert read.stdout.strip() == readme_command(name)


@pytest.mark.parametrize("name", ["main-job", "tests"])
def test_a_readme_command_is_one_line_with_the_constraints(name: str) -> None:
    command = readme_command(name)
    assert "\n" not in command
    assert "-c .ci/constraints.txt" in command


def test_the_budgets_of_ci_add_up_to_half_an_hour() -> None:
    budgets = re.findall(r"^stage '[^']+' (\d+) ", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert sum(int(budget) for budget in budgets) <= 1800


@pytest.mark.slow
def test_the_wheel_judges_an_engine_outside_of_the_repository(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Its plugin is found by its entry point, and the tests of the suite are in it."""
    site, folder = tmp_path / "site", tmp_path / "elsewhere"
    wheel.extractall(site)
    folder.mkdir()
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "--pyargs",
        "spec.conformance",
        "--engine",
        "reference:make_engine",
    ]
    done = subprocess.run(
        [*command, "-k", "in_their_order", "--conformance-max-examples", "3", "-v"],
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    version = PROJECT["project"]["version"]
    assert f"kvproof {version}: judging reference:make_engine (an engine called reference)" in done.stdout
