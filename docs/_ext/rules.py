"""Rules in the book: ``.. rules:: COW`` prints an area's rules out of the code, the role ``rule`` links to one."""

import ast
import inspect
import re
import textwrap
from dataclasses import fields
from pathlib import Path

from docutils import nodes
from ledger import entries, where
from memory_maps import drawing
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import spec
from spec.broken import BROKEN, Broken, BrokenState, BrokenStep
from spec.picture import mark_changes, memory_map
from spec.rules import AREAS, RULES, WITHDRAWN, Kind, Rule, RuleViolation, describe, report
from spec.vocabulary import State, initial_state

ROOT = Path(spec.__file__).parent.parent
TESTS = ROOT / "tests"


def anchor(rule_id: str) -> str:
    """The anchor that the report of a violation names."""
    return f"rule-{rule_id}"


def predicate_source(rule: Rule) -> str:
    """The predicate as it stands in the code, without the decorator and the docstring, which the page shows apart."""
    return source_without_docstring(rule.source)


def source_without_docstring(source: str) -> str:
    """The source of a function or a class, without its decorators of rules and its docstring."""
    source = textwrap.dedent(source)
    [thing] = ast.parse(source).body
    lines = source.splitlines()
    first = thing.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        after = lines[first.end_lineno :]
        lines = lines[: first.lineno - 1] + (after if any(line.strip() for line in after) else ["    ..."])
    while lines[0].startswith(("@state_rule", "@step_rule")):
        del lines[0]
    text = "\n".join(lines)
    return re.sub(r"(:|\n)\n\n+(?=    )", r"\1\n", text, count=1)


def named_tests(rule_id: str) -> list[str]:
    """The tests that are named after the rule, as ``path::name``."""
    pattern = re.compile(rf"^\s*def (test_{rule_id.lower().replace('-', '_')}_\w+)", re.MULTILINE)
    return [
        f"{path.relative_to(ROOT)}::{name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for name in pattern.findall(path.read_text())
    ]


def broken_example(broken: Broken) -> list[nodes.Node]:
    """The smallest state or step that breaks the rule, in its own words."""
    step = [nodes.Text(" "), nodes.literal("", short(repr(broken.event)))] if isinstance(broken, BrokenStep) else []
    return [nodes.Text(broken.story), *step]


def broken_picture(broken: Broken) -> list[nodes.Node]:
    """The same as memory maps and as a report, folded away until somebody wants to see it."""
    if isinstance(broken, BrokenState):
        maps = [memory_map(broken.state)]
        words = in_words(broken.state)
    else:
        before, after = memory_map(broken.before, "before"), memory_map(broken.after, "after")
        maps = [before, mark_changes(before, after)]
        words = report(RuleViolation(RULES[broken.rule_id], broken.before, broken.event, broken.after))
    return [
        nodes.raw("", '<details class="broken"><summary>Show it</summary>', format="html"),
        drawing(maps, f"What breaks {broken.rule_id}: {broken.story}"),
        nodes.literal_block(words, words, language="text"),
        nodes.raw("", "</details>", format="html"),
    ]


def in_words(state: State) -> str:
    """The fields in which the state is not that of an engine that has just started, and the free list."""
    start = initial_state(state.config)
    names = [f.name for f in fields(State) if f.name == "free" or getattr(state, f.name) != getattr(start, f.name)]
    return "\n".join(f"{name:12}  {describe(name, state, start)}" for name in names)


def short(text: str, most: int = 90) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


class Rules(SphinxDirective):
    """All rules of one area, each in a section of its own."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        [area] = self.arguments
        if area not in AREAS:
            raise self.error(f"{area} is no area; the areas are {', '.join(AREAS)}")
        rules = [rule for rule in RULES.values() if rule.area == area]
        if not rules:
            return [nodes.paragraph("", "No rule of this area stands yet.")]
        for path in {inspect.getfile(rule.predicate) for rule in rules} | {str(p) for p in TESTS.rglob("test_*.py")}:
            self.env.note_dependency(path)
        return [self.section(rule) for rule in rules]

    def section(self, rule: Rule) -> nodes.Node:
        section = nodes.section(ids=[anchor(rule.id)], names=[nodes.fully_normalize_name(rule.id)])
        section += nodes.title("", f"{rule.id} · {rule.name.replace('_', ' ')}")
        section += nodes.paragraph("", "", nodes.strong("", rule.sentence), classes=["rule-sentence"])
        section += self.parse_text_to_nodes(rule.reason)
        code = predicate_source(rule)
        section += nodes.literal_block(code, code, language="python")
        section += self.facts(rule)
        section += broken_picture(BROKEN[rule.id])
        self.env.domains.standard_domain.note_object("rule", rule.id, anchor(rule.id), location=section)
        return section

    def facts(self, rule: Rule) -> nodes.Node:
        """What else the code knows about the rule."""
        facts = nodes.field_list(classes=["rule-facts"])
        facts += fact("judges", *self.judged(rule))
        facts += fact("stands in", reference_to("mod", rule.predicate.__module__))
        if rule.corpus:
            facts += fact("covers", nodes.Text(", ".join(rule.corpus)))
        tests = named_tests(rule.id)
        facts += fact("tests", *(separated(nodes.literal("", name) for name in tests) or [nodes.Text("none yet")]))
        facts += fact("broken by", *broken_example(BROKEN[rule.id]))
        entry = entries()[rule.id]
        facts += fact("strength", nodes.Text(f"{entry.strength.value}: "), *self.parse_inline(where(entry))[0])
        if entry.mutants:
            facts += fact("catches", nodes.Text("; ".join(entry.mutants)))
        return facts

    def judged(self, rule: Rule) -> list[nodes.Node]:
        if rule.kind is Kind.STATE:
            return [nodes.Text("every state")]
        if len(rule.events) > 6:
            return [nodes.Text("every step whose event names something")]
        names = (reference_to("class", f"{event.__module__}.{event.__qualname__}") for event in rule.events)
        return [nodes.Text("every step with the event "), *separated(names, " or ")]


def fact(name: str, *what: nodes.Node) -> nodes.Node:
    return nodes.field("", nodes.field_name("", name), nodes.field_body("", nodes.paragraph("", "", *what)))


def separated(things, separator: str = ", ") -> list[nodes.Node]:
    return [each for thing in things for each in (nodes.Text(separator), thing)][1:]


def reference_to(role: str, target: str) -> nodes.Node:
    """What ``:role:`target``` of the Python domain would be."""
    shown = nodes.literal("", target.rsplit(".", 1)[-1] if role != "mod" else target)
    return addnodes.pending_xref("", shown, refdomain="py", reftype=role, reftarget=target, refwarn=True)


class RulesOf(SphinxDirective):
    """The rules of one module, one line each, linked to the page of all rules."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        [module] = self.arguments
        rules = [rule for rule in RULES.values() if rule.predicate.__module__ == module]
        if not rules:
            raise self.error(f"{module} has no rules")
        text = "\n".join(f"* :rule:`{rule.id}`: {rule.sentence}" for rule in rules)
        return self.parse_text_to_nodes(text)


class Withdrawn(SphinxDirective):
    """The ids that were given up, and why, with links to the rules that they follow from."""

    def run(self) -> list[nodes.Node]:
        linked = {each: re.sub(r"[A-Z]+-\d+", r":rule:`\g<0>`", reason) for each, reason in WITHDRAWN.items()}
        return self.parse_text_to_nodes("\n".join(f"* ``{each}``: {reason}" for each, reason in linked.items()))


def show_sentence(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """A link to a rule shows the rule's sentence when the pointer rests on it."""
    for link in doctree.findall(nodes.reference):
        target = str(link.get("refuri", link.get("refid", ""))).partition("rule-")[2]
        if target in RULES:
            link["reftitle"] = RULES[target].sentence


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_crossref_type("rule", "rule", ref_nodeclass=nodes.inline)
    app.add_directive("rules", Rules)
    app.add_directive("rules-of", RulesOf)
    app.add_directive("withdrawn-rules", Withdrawn)
    app.connect("doctree-resolved", show_sentence)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
