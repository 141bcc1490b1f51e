"""Chapters of the book: autodoc shows each definition with its sentence and its source; rules have a page of their own."""

import inspect

from rules import source_without_docstring
from sphinx.application import Sphinx

from spec.rules import RULES


def choose(app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object) -> bool | None:
    """Every public function and class of a module is shown; the members of a class stand in its source."""
    if what == "class":
        return True
    if not getattr(thing, "__module__", "").startswith("spec."):
        return None
    if thing in [rule.predicate for rule in RULES.values()]:
        return True
    if (inspect.isfunction(thing) or inspect.isclass(thing)) and not name.startswith("_"):
        return False
    return None


def leave_out_parameters(
    app: Sphinx, what: str, name: str, thing: object, options: object, args: str | None, returns: str | None
) -> tuple[str, str] | None:
    """The source below says them, with their types."""
    return None if args is None else ("", "")


def add_source(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """The source comes below the docstring."""
    if (inspect.isfunction(thing) or inspect.isclass(thing)) and name == f"{thing.__module__}.{thing.__qualname__}":
        code = source_without_docstring(inspect.getsource(thing))
        lines += ["", ".. code-block:: python", "", *("   " + line for line in code.splitlines()), ""]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-skip-member", choose)
    app.connect("autodoc-process-signature", leave_out_parameters)
    app.connect("autodoc-process-docstring", add_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
