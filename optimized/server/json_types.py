"""The values of a body's fields: exactly what JSON calls so, and nothing that could be read as it."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

T = TypeVar("T")

Whole = Annotated[int, Field(strict=True)]
"""A whole number: neither ``true`` nor a text with digits."""
Flag = Annotated[bool, Field(strict=True)]
"""True or false: neither 1 nor ``"yes"``."""
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list of which only the first thing that is wrong is told: a body has room for millions."""


def whole(value: object) -> object:
    """The value, 3 if it is 3.0: to JSON Schema they are one number, and some clients know no other.

    >>> whole(3.0), whole(0.5), whole("3"), whole(True)
    (3, 0.5, '3', True)
    """
    return int(value) if type(value) is float and value.is_integer() else value
