"""Obligations for CrossHair: bounded lemmas, and equality of functions of the specification with an engine's twins.

Each is a function of plain numbers and tuples with a ``pre`` and a ``post`` line (PEP 316). CrossHair tries every path
through it within the bounds, which are literals; ``tests/test_obligations.py`` demands that it confirms each.
"""
