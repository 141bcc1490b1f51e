"""How Sphinx makes the book out of the docstrings of ``spec`` and the pages of this folder. Works offline."""

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

project = "kvproof"
copyright = "2026, the kvproof developers"
version = release = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "sphinx.ext.autodoc",
    "myst_parser",
    "rules",
    "chapters",
    "memory_maps",
    "lives",
    "ledger",
    "proof_matrix",
    "kill_matrix",
    "profiles",
    "capacity",
    "capacity_explorer",
    "vllm_runs",
    "bookkeeping",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "literal"
nitpicky = True
nitpick_ignore_regex = [("py:class", r"collections\.abc\.\w+")]  # of the standard library, in the docstrings of aliases
add_module_names = False
toc_object_entries_show_parents = "hide"

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}

html_theme = "furo"
html_title = "kvproof"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_show_sourcelink = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
