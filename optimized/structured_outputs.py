"""What an answer has to look like, as its caller says it, checked for shape and size before anything is made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optimized.bounds import MAX_CHARACTERS, MAX_DEPTH
from spec.engine import InvalidField

MAX_CHOICES = 1024
KINDS = ("json", "regex", "choice", "grammar", "json_object")


class TooComplex(InvalidField):
    """A grammar is longer or deeper, or takes more to make, than is spent on one."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of five ways to say what every answer looks like; names and meanings are vLLM's.

    ``json`` is a JSON schema, as an object or as text, ``regex`` an expression that the whole answer matches, ``choice`` a
    list of texts of which it is one, ``grammar`` a Lark or GBNF grammar, ``json_object=True`` any JSON object.
    ``asked_as`` is the field under which the caller knows it, for messages. Raises ``InvalidField``.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    asked_as: str = field(default="structured_outputs", compare=False)

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None and getattr(self, kind) is not False]
        if len(given) != 1:
            raise self.refused(" and ".join(given) or None, f"exactly one of {', '.join(KINDS)}")
        if self.json_object not in (None, False, True):
            raise self.refused(self.json_object, "True, if it has json_object")
        for kind in ("regex", "grammar"):
            said: object = getattr(self, kind)
            if said is not None and (not isinstance(said, str) or not said):
                raise self.refused(said, f"a text that is not empty, if it has {kind}")
        if self.choice is not None:
            object.__setattr__(self, "choice", self._checked_choice())
        if self.json is not None:
            object.__setattr__(self, "json", self._checked_schema())
        size = len(self.text)
        if size > MAX_CHARACTERS:
            raise self.too_complex(f"{size:,} characters long", f"at most {MAX_CHARACTERS:,} long")

    @property
    def kind(self) -> str:
        """Which of the five ways it is."""
        return next(kind for kind in KINDS if getattr(self, kind))

    @property
    def text(self) -> str:
        """What the caller says, as one text: choices as a JSON list."""
        said = getattr(self, self.kind)
        return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)

    @property
    def depth(self) -> int:
        """How deep a schema is nested; 0 for what is none."""
        return _depth(json.loads(self.text)) if self.kind == "json" else 0

    def refused(self, value: object, limit: str) -> InvalidField:
        """The error that says so, under the name that the caller knows."""
        return InvalidField(self.asked_as, value, limit)

    def too_complex(self, value: object, limit: str) -> TooComplex:
        """The same, for what would take too much."""
        return TooComplex(self.asked_as, value, limit)

    def _checked_choice(self) -> tuple[str, ...]:
        given: object = self.choice
        if not isinstance(given, list | tuple) or not 1 <= len(given) <= MAX_CHOICES:
            raise self.refused(_short(given), f"1 to {MAX_CHOICES} texts, if it has choice")
        if not all(isinstance(each, str) and each for each in given):
            raise self.refused(_short(given), "texts that are not empty, if it has choice")
        return tuple(given)

    def _checked_schema(self) -> str:
        """The schema as text, whose order of properties is that of the answer."""
        schema: object = self.json
        if isinstance(schema, str):
            if len(schema) > MAX_CHARACTERS:
                raise self.too_complex(f"{len(schema):,} characters long", f"at most {MAX_CHARACTERS:,} long")
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise self.refused(_short(self.json), "a JSON schema, if it has json as text") from error
        if not isinstance(schema, Mapping | bool):
            raise self.refused(_short(schema), "a JSON schema, an object")
        if _depth(schema) > MAX_DEPTH:
            raise self.too_complex("nested deeply", f"nested at most {MAX_DEPTH} deep")
        try:
            return json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise self.refused(_short(schema), "made of what JSON has") from error


def _depth(value: object) -> int:
    """How deep JSON is nested, as far as it matters. O(its parts)."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        parts = [part for each in level for part in _parts(each)]
        level = [part for part in parts if isinstance(part, Mapping | list | tuple)]
    return depth


def _parts(value: object) -> Sequence[object]:
    return list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
