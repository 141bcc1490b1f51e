"""Lives in the book: ``.. life:: block`` and ``.. life:: request`` search a small scope and draw what moved, and by what."""

from functools import cache

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import reference
from spec.life import BLOCK_PLACES, REQUEST_LOADS, REQUEST_PLACES, life_of_a_block, life_of_a_request, svg


@cache
def drawing(whose: str) -> str:
    """The picture, made once a build."""
    title = f"The life of a {whose}"
    if whose == "block":
        return svg(life_of_a_block(), BLOCK_PLACES, title)
    return svg(life_of_a_request(REQUEST_LOADS, reference.make_engine), REQUEST_PLACES, title)


class Life(SphinxDirective):
    """A figure: the places there are, and the events that move between them. The content is its caption."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        [whose] = self.arguments
        if whose not in ("block", "request"):
            raise self.error(f"{whose!r} has no life, it must be block or request")
        figure = nodes.figure("", nodes.raw("", drawing(whose), format="html"), classes=["memory-map"])
        figure += nodes.caption("", "", *self.parse_inline(" ".join(self.content))[0])
        return [figure]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("life", Life)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
