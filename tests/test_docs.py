"""The book and the README are true: their examples run, their links lead somewhere, the words of one stand in the other."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import spec
from spec.replay import replay, step
from spec.rules import RULES, RuleViolation
from spec.vocabulary import Allocate, Config, Fork, Start

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.glob("*.md"))]
NOT_RUN_ALONE = ("spec.proofs", "spec.conformance.adapters")
DOCTESTS = doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block of a page. ``remark`` is the comment on the line above it."""

    page: str
    line: int
    language: str
    text: str
    remark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def code_blocks(language: str) -> list[CodeBlock]:
    """The blocks of one language, of all pages."""
    pattern = re.compile(
        r"(?:^<!-- (?P<remark>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
    )
    return [
        CodeBlock(
            str(page.relative_to(ROOT)),
            page.read_text()[: found.start("text")].count("\n") + 1,
            language,
            found["text"],
            found["remark"] or "",
        )
        for page in PAGES
        for found in pattern.finditer(page.read_text())
        if found["language"] == language
    ]


def spec_modules() -> Iterator[str]:
    """The modules of ``spec`` whose docstrings hold examples."""
    for module in walk_packages(spec.__path__, "spec."):
        if not module.name.startswith(NOT_RUN_ALONE):
            path = ROOT / (module.name.replace(".", "/") + ".py")
            if path.exists() and ">>> " in path.read_text():
                yield module.name


def missing_engine(block: CodeBlock) -> str | None:
    """The package of ours that the block uses and that has no engine to give."""
    for name in ("reference", "optimized"):
        if (
            re.search(rf"^(from|import) {name}\b", block.text, re.MULTILINE)
            and not (ROOT / name / "__init__.py").exists()
        ):
            return name
    return None


@pytest.mark.parametrize("name", list(spec_modules()))
def test_the_examples_of_a_chapter_are_true(name: str) -> None:
    assert doctest.testmod(import_module(name), optionflags=DOCTESTS).failed == 0


@pytest.mark.parametrize("block", [b for b in code_blocks("python") if not b.remark.startswith("not run")], ids=str)
def test_python_on_a_page_runs(block: CodeBlock) -> None:
    if (name := missing_engine(block)) is not None:
        pytest.skip(f"{name} is not there yet")
    if ">>> " in block.text:
        test = doctest.DocTestParser().get_doctest(block.text, {}, str(block), block.page, block.line)
        assert doctest.DocTestRunner(optionflags=DOCTESTS).run(test).failed == 0
    else:
        exec(compile(block.text, str(block), "exec"), {"__name__": "page"})  # noqa: S102  the page is ours


def commands(block: CodeBlock) -> list[str]:
    return [part.strip() for line in block.text.splitlines() for part in line.split(" && ") if part.strip()]


def test_a_command_on_a_page_runs_in_ci_or_says_why_not() -> None:
    """README's two are read by .ci/run itself, the others stand in it or in .ci/soak, or are kvproof's own."""
    ci = (ROOT / ".ci/run").read_text().replace("'", "").replace("$venv/bin/", "")
    for block in code_blocks("sh"):
        if block.remark in ("main-job", "tests"):
            assert f"readme {block.remark})" in ci, f"{block} is not read by .ci/run"
        elif not block.remark.startswith("not run"):
            for command in commands(block):
                known = command in ci or command.startswith("kvproof ") or command == "pytest -n auto"
                assert known, f"{block} has a command that nobody runs: {command}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        c
        for b in code_blocks("sh")
        if not b.remark.startswith("not run")
        for c in commands(b)
        if c.startswith("kvproof ")
    ],
    ids=str,
)
def test_a_kvproof_command_on_a_page_ends_well(command: str) -> None:
    kvproof = Path(sys.executable).parent / "kvproof"
    done = subprocess.run(
        [kvproof, *shlex.split(command)[1:]], check=False, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def violation_on_the_page() -> str:
    """The counterexample that the pages explain, as the code prints it."""
    before = replay(Config(num_blocks=4, block_size=1), trace := [Start(seq=0, tokens=(5, 6)), Allocate(0, 2, (3, 2))])
    event = Fork(parent=0, child=1)
    after = replace(step(before, event), ref_count=(0, 0, 1, 2))
    printed = str(RuleViolation(RULES["ALLOC-2"], before, event, after, engine="optimized", trace=[*trace, event]))
    return re.sub(r"   seqs \{.*\}$", "", printed, flags=re.MULTILINE)  # the page says that it leaves this field out


def test_the_violation_on_the_page_is_what_is_printed() -> None:
    page = "docs/reading-a-counterexample.md"
    [block] = [b for b in code_blocks("text") if b.page == page and "does not hold" in b.text]
    assert block.text.strip() == violation_on_the_page()


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-c", str(DOCS), str(source), str(target)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )


@pytest.mark.slow
def test_a_link_to_a_rule_that_is_not_there_and_a_picture_of_what_is_not_allowed_fail_the_build(tmp_path: Path) -> None:
    page = "Page\n====\n\nSee :rule:`COW-999`.\n\n.. memory-map:: A block that is taken twice\n\n"
    (tmp_path / "index.rst").write_text(f"{page}   Start(0, (5,))\n   Allocate(0, 1, (1, 1))\n")
    done = build(tmp_path, tmp_path / "built")
    assert done.returncode != 0
    assert [
        ("COW-999" in line, "does not hold" in line) for line in done.stderr.splitlines() if "index.rst" in line
    ] == [
        (False, True),
        (True, False),
    ], done.stderr


@pytest.mark.slow
def test_a_rule_has_the_anchor_that_its_report_names(tmp_path: Path) -> None:
    named = ["ALLOC-1", "COW-2"]
    words = [f".. rules:: {rule_id.split('-')[0]}\n\nSee :rule:`{rule_id}`.\n\n" for rule_id in named]
    (tmp_path / "index.rst").write_text(f"Rules\n=====\n\n{''.join(words)}")
    done = build(tmp_path, tmp_path / "built")
    html = (tmp_path / "built/index.html").read_text()
    for rule_id in named:
        assert f'id="rule-{rule_id}"' in html, done.stderr
        assert f'href="#rule-{rule_id}"' in html
        assert RULES[rule_id].sentence.split()[-1] in html


def test_every_area_and_every_chapter_is_in_the_book() -> None:
    areas = {rule.area for rule in RULES.values()}
    assert areas <= set(re.findall(r"^\.\. rules:: (\w+)$", (DOCS / "rules.rst").read_text(), re.MULTILINE))
    chapters = {rule.predicate.__module__ for rule in RULES.values()}
    pages = "".join(path.read_text() for path in (DOCS / "spec").glob("*.rst"))
    assert chapters <= set(re.findall(r"^\.\. rules-of:: ([\w.]+)$", pages, re.MULTILINE))


def test_nothing_names_a_machine_or_an_index() -> None:
    """Where packages come from is for everybody's own settings to say."""
    texts = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "pyproject.toml", *(ROOT / ".ci").iterdir(), *DOCS.rglob("*.rst")]
    for path in texts:
        found = re.findall(r"/(?:root|home|opt)/\w+|index-url", path.read_text())
        assert not found, f"{path.relative_to(ROOT)} names {found}"


def test_the_page_on_searches_counts_the_rules_as_they_are() -> None:
    assert f"every one of {len(RULES)} rules holds" in (DOCS / "explored.md").read_text(encoding="utf-8")
