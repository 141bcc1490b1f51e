"""The ledger in the book: ``.. ledger::`` and ``.. corpus::`` are tables of what ``spec.ledger`` and ``spec.corpus`` say.

``.. open-rules::`` lists what a proof leaves open, ``.. assumed-rules::`` what it starts from, ``.. capabilities::`` what
the engines can do, and ``.. story::`` shows a golden story.
"""

import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import optimized
import reference
from optimized.cli.specification import read_ledger
from spec.corpus import CORPUS, NOT_USED, Coverage, Way
from spec.engine import ENGINE_CAPABILITIES, POOL_CAPABILITIES, Capability
from spec.ledger import Entry, Strength
from spec.proofs.ledger import RULE_OF_GUARD
from spec.vocabulary import Config

STORIES = Path(__file__).parents[2] / "tests" / "transcripts"

WORDS = {
    Way.RULES: "is a rule",
    Way.LEMMA: "follows from",
    Way.TESTS: "is tested",
    Way.OUT: "out",
}


@cache
def entries() -> dict[str, Entry]:
    """The ledger, made once a build."""
    return read_ledger()


def table(head: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int]) -> str:
    """A table with these cells, in the words of reStructuredText."""
    lines = [".. list-table::", "   :header-rows: 1", "   :class: ledger"]
    lines += [f"   :widths: {' '.join(map(str, widths))}", ""]
    for row in [head, *rows]:
        first, *rest = (textwrap.indent(cell or "\\ ", "       ").strip() for cell in row)
        lines += [f"   * - {first}", *(f"     - {cell}" for cell in rest)]
    return "\n".join(lines)


def literals(names: Iterable[str]) -> str:
    return ", ".join(f"``{name}``" for name in names)


def links(rule_ids: Iterable[str]) -> str:
    return ", ".join(f":rule:`{rule_id}`" for rule_id in rule_ids)


class Words(SphinxDirective):
    """A directive whose content is text that code makes."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(self.text())

    def text(self) -> str:
        raise NotImplementedError


class Ledger(Words):
    """Every rule: how strongly it is known, where, and which sabotaged engines it catches."""

    def text(self) -> str:
        rows = [
            (f":rule:`{e.rule.id}`", e.rule.sentence, e.strength.value, where(e), str(len(e.mutants) or ""))
            for e in entries().values()
        ]
        counts = [f"{sum(e.strength is s for e in entries().values())} {s.value}" for s in Strength]
        head = ("rule", "sentence", "strength", "where", "mutants")
        return f"{len(rows)} rules: {', '.join(counts)}.\n\n{table(head, rows, (10, 44, 10, 28, 8))}"


def where(entry: Entry) -> str:
    """What the strength rests on."""
    match entry.strength:
        case Strength.PROVED:
            return f"clauses {literals(entry.clauses)}"
        case Strength.EXPLORED:
            return f"wherever the explorer goes; at stake under ``{entry.explored}``"
    return "its broken example, its test, every judged run"


class Corpus(Words):
    """Every invariant of the corpus, and what covers it."""

    def text(self) -> str:
        rows = [(each.id, each.sentence, WORDS[each.way], covered_by(each)) for each in CORPUS.values()]
        counts = [f"{sum(each.way is way for each in CORPUS.values())} {way.value}" for way in Way]
        summary = f"{len(rows)} invariants: {', '.join(counts)}. The numbers {', '.join(NOT_USED)} are not used."
        return f"{summary}\n\n{table(('id', 'invariant', 'how', 'where'), rows, (6, 40, 12, 42))}"


def covered_by(coverage: Coverage) -> str:
    """Rules, tests and remark."""
    tests = literals(name.rpartition("/")[2].replace(".py::", ": ") for name in coverage.tests)
    return ". ".join(part.rstrip(".") for part in (links(coverage.rules), tests, coverage.remark) if part)


class OpenRules(Words):
    """The rules of which a proof says a part only."""

    def text(self) -> str:
        return "\n".join(f"* :rule:`{e.rule.id}`: {e.remark}" for e in entries().values() if e.remark)


class AssumedRules(Words):
    """The rules that the guard of each transition stands for."""

    def text(self) -> str:
        return "\n".join(f"* ``{name}``: {links(rule_ids)}" for name, rule_ids in RULE_OF_GUARD.items())


class Capabilities(Words):
    """What each engine and each pool declares, what is off, and of what it can have no opinion."""

    def text(self) -> str:
        config, rows = Config(num_blocks=4), []
        for each in Capability:
            cells = []
            for package in (reference, optimized):
                for made, can_be in (
                    (package.make_engine(config), ENGINE_CAPABILITIES),
                    (package.make_pool(config), POOL_CAPABILITIES),
                ):
                    cells.append("on" if made.profile.can(each) else "**off**" if each in can_be else "\N{EN DASH}")
            rows.append((each.value.replace("_", " "), *cells))
        head = ("capability", "reference, engine", "reference, pool", "optimized, engine", "optimized, pool")
        return table(head, rows, (28, 18, 18, 18, 18))


class Story(SphinxDirective):
    """A golden story, as every engine tells it: its comments as text, what an engine says as it stands."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = STORIES / f"{self.arguments[0]}.txt"
        self.env.note_dependency(str(path))
        shown: list[nodes.Node] = []
        for is_comment, lines in paragraphs(path.read_text(encoding="utf-8")):
            text = "\n".join(lines)
            shown.append(nodes.paragraph("", text) if is_comment else nodes.literal_block(text, text, language="text"))
        return shown


def paragraphs(story: str) -> list[tuple[bool, list[str]]]:
    """The story cut where comments begin and end, and at empty comments. The limits and needs are no part of it."""
    found: list[tuple[bool, list[str]]] = []
    for line in story.splitlines():
        is_comment = line.startswith("#")
        text = line.lstrip("# ").rstrip() if is_comment else line
        if not text or line.startswith(("config ", "needs ")):
            found.append((is_comment, []))
        elif found and found[-1][0] == is_comment:
            found[-1][1].append(text)
        else:
            found.append((is_comment, [text]))
    return [(is_comment, lines) for is_comment, lines in found if lines]


def setup(app: Sphinx) -> dict[str, bool]:
    for name, directive in {
        "ledger": Ledger,
        "corpus": Corpus,
        "open-rules": OpenRules,
        "assumed-rules": AssumedRules,
        "capabilities": Capabilities,
        "story": Story,
    }.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
