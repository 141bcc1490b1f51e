"""Memory maps in the book: ``.. memory-map::`` replays events through the model and draws where they lead.

The content is Python, one event or several with commas between them a line, with the words of ``spec.vocabulary``; the
options ``num_blocks`` and so on are those of ``Config``, and ``changes`` marks what the last line changed. A story that
breaks a rule breaks the build.
"""

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import spec.vocabulary
from spec.picture import Map, mark_changes, memory_map, svg
from spec.replay import replay
from spec.rules import RuleViolation
from spec.vocabulary import Config


class MemoryMap(SphinxDirective):
    """A figure: the pool after the events, and its caption."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar = {
        "num_blocks": directives.positive_int,
        "block_size": directives.positive_int,
        "num_host_blocks": directives.nonnegative_int,
        "changes": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        figure = nodes.figure("", drawing(self.map(), self.arguments[0]), classes=["memory-map"])
        figure += nodes.caption("", "", *self.parse_inline(self.arguments[0])[0])
        return [figure]

    def map(self) -> Map:
        limits = {name: number for name, number in self.options.items() if name != "changes"}
        config = Config(**{"num_blocks": 6, "block_size": 4, **limits})
        try:
            lines = [eval(f"({line.rstrip(', ')},)", vars(spec.vocabulary)) for line in self.content if line.strip()]
            drawn = memory_map(replay(config, chain(*lines)))
            if "changes" not in self.options:
                return drawn
            return mark_changes(memory_map(replay(config, chain(*lines[:-1]))), drawn)
        except (RuleViolation, NameError, SyntaxError, TypeError) as mistake:
            raise self.error(str(mistake)) from mistake


def drawing(maps: Map | Sequence[Map], title: str) -> nodes.Node:
    """Memory maps as they stand in a page."""
    return nodes.raw("", svg(maps, title), format="html")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("memory-map", MemoryMap)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
