"""The sabotaged engines and kernels in the book: ``.. kill-matrix::`` is the rule that each of them must die by,
``.. by-the-suite::`` the test of the plugin that fails,
``.. kernel-mutants::`` the check, ``.. bugs::`` what catches each public bug. Their files are read and not run."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ledger import Words, links, literals, table
from sphinx.application import Sphinx

import spec.replay  # noqa: F401  it loads the chapters, which enter their rules
from spec.bugs import BUGS, CLASSES, Bug, is_covered
from spec.corpus import CORPUS
from spec.rules import RULES

TESTS = Path(__file__).parents[2] / "tests"
RECORDED = Path(__file__).parents[1] / "by_the_suite.json"


@dataclass(frozen=True)
class Sabotage:
    """A mutant: its name, what was sabotaged, the rule or the check that it dies by, the bug that it is like."""

    name: str
    package: str
    killer: str
    row: str


@cache
def zoo() -> tuple[Sabotage, ...]:
    """The mutants of engines and pools, in the order of their files, which are read once."""
    return tuple(
        Sabotage(words[0], package_of(path), killer, row)
        for path in sorted((TESTS / "mutants").glob("*_zoo.py"))
        for call in calls(path, "_fault")
        for words in [plain(call)]
        for killer in [next(word for word in words[1:] if word in RULES)]
        for row in [next((word for word in words if re.fullmatch(r"B-\d+", word)), "")]
    )


@cache
def kernel_zoo() -> tuple[Sabotage, ...]:
    """The mutants of kernels."""
    return tuple(
        Sabotage(words[0], "kernels", check, row)
        for call in calls(TESTS / "kernels" / "test_mutants.py", "Mutant")
        for words in [plain(call)]
        for check in [next(each.id for each in call.args if isinstance(each, ast.Name))]
        for row in [next((word for word in words if re.fullmatch(r"B-\d+", word)), "")]
    )


def package_of(path: Path) -> str:
    """The package that the mutants of a file are copies of: the second argument of the ``Mutant`` that it makes."""
    made = next(
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Mutant"
    )
    return str(ast.literal_eval(made.args[1]))


def calls(path: Path, name: str) -> Iterator[ast.Call]:
    """The calls of a function in a file whose first argument is plain text, in order."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        if is_call and node.args and isinstance(node.args[0], ast.Constant):
            yield node


def plain(call: ast.Call) -> list[str]:
    """The plain texts among the arguments, in order."""
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [each.value for each in arguments if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def source(reference: str) -> str:
    """A public reference as a link."""
    if (issue := re.fullmatch(r"([\w.-]+/[\w.-]+)#(\d+)", reference)) is not None:
        return f"`{reference} <https://github.com/{issue[1]}/issues/{issue[2]}>`__"
    return reference


class KillMatrix(Words):
    """Every mutant under the rule that it must die by."""

    def text(self) -> str:
        mutants = zoo()
        rows = [
            (f":rule:`{rule_id}`", each.name, each.package, of_bug(each))
            for rule_id in RULES
            for each in mutants
            if each.killer == rule_id
        ]
        classes = {BUGS[each.row].bug_class for each in mutants if each.row in BUGS}
        counts = (
            f"{len(mutants)} mutants, {len({m.killer for m in mutants})} of {len(RULES)} rules, {len(classes)} classes."
        )
        return f"{counts}\n\n{table(('dies by', 'mutant', 'of', 'like'), rows, (12, 50, 12, 26))}"


def of_bug(mutant: Sabotage) -> str:
    return f"{mutant.row}, {source(BUGS[mutant.row].sources[0])}" if mutant.row in BUGS else ""


class BySuite(Words):
    """What the plugin makes of each mutant, as it was recorded."""

    def text(self) -> str:
        recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
        known = {(each["package"], each["mutant"]): each for each in recorded["mutants"]}
        deaths = [(each, known.get((each.package, each.name))) for each in zoo()]
        found = [death for _, death in deaths if death is not None]
        named = [death for death in found if death["test"] is not None]
        at_once = sum(len(death["killers"]) == 1 for death in named)
        others = sum(death["test"] is None and bool(death["killers"]) for death in found)
        counts = (
            f"{len(found)} of {len(deaths)} mutants were sent through the plugin. {len(named)} die by the rule that the zoo names, "
            f"{at_once} of them by nothing before it; {others} by another; {len(found) - len(named) - others} had not died when "
            "their time was over, or when there were no more tests."
        )
        made = f"Recorded on {recorded['date']} at commit {recorded['commit']}: ``{recorded['command']}``."
        why = recorded["no_door"]
        rows = [
            (f":rule:`{m.killer}`", m.name, m.package, why.get(m.name) or fate(death, m.killer)) for m, death in deaths
        ]
        return f"{counts} {made}\n\n{table(('rule', 'mutant', 'of', 'there'), rows, (12, 42, 10, 36))}"


def fate(death: dict | None, rule: str) -> str:
    """What became of a mutant in the suite. What an engine shows may break another rule than what another judge is told."""
    if death is None:
        return "not recorded"
    before = ", ".join(f"``{killer}``" for killer in death["killers"] if killer != death["rule"])
    if death["test"] is not None:
        test = death["test"].partition("::")[2]
        fails = "fails" if death["rule"] == rule else f"fails by {links([death['rule']])}"
        return f"``{test}`` {fails}" + (f", after failures by {before}" if before else "")
    return f"dies by {before}" if before else "its time was over" if death["is_cut"] else "survives"


class KernelMutants(Words):
    """Every mutant of a kernel with the check that catches it."""

    def text(self) -> str:
        rows = [(each.killer.replace("_", " "), each.name, of_bug(each)) for each in kernel_zoo()]
        return f"{len(rows)} mutants.\n\n{table(('check', 'mutant', 'like'), rows, (20, 44, 36))}"


class Bugs(Words):
    """Every public bug, class by class."""

    def text(self) -> str:
        parts = []
        for number, (title, _) in CLASSES.items():
            bugs = [bug for bug in BUGS.values() if bug.bug_class == number]
            rows = [(bug.id, ", ".join(map(source, bug.sources)), bug.seen, caught(bug)) for bug in bugs]
            heading = f"**Class {number}: {title}** ({len(bugs)})"
            parts.append(f"{heading}\n\n{table(('bug', 'told in', 'seen', 'here'), rows, (8, 24, 30, 38))}")
        return "\n\n".join(parts)


@cache
def mutants_of(row: str) -> tuple[Sabotage, ...]:
    """The mutants that are like a bug."""
    return tuple(each for each in [*zoo(), *kernel_zoo()] if each.row == row)


def caught(bug: Bug) -> str:
    """The mutants that are like it with what they die by; else the rules; else the tests; else why it is out."""
    if mutants := mutants_of(bug.id):
        return "; ".join(f"{link(each)} kills “{each.name}”" for each in mutants)
    if bug.out or not is_covered(bug):
        return f"out of scope. {bug.out or CORPUS[bug.invariants[0]].remark}"
    if bug.rules:
        return f"its invariants are {links(bug.rules)}"
    return f"tested: {literals(test.rpartition('/')[2].replace('.py::', ': ') for test in bug.tests)}"


def link(mutant: Sabotage) -> str:
    return links([mutant.killer]) if mutant.killer in RULES else f"the check *{mutant.killer.replace('_', ' ')}*"


def setup(app: Sphinx) -> dict[str, bool]:
    directives = {"kill-matrix": KillMatrix, "by-the-suite": BySuite, "kernel-mutants": KernelMutants, "bugs": Bugs}
    for name, directive in directives.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
