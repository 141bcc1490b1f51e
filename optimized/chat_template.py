"""Chat templates: messages to the text that a model was trained on.

A template is a program that came with a model file. It runs in MiniJinja, which has no way out to Python, with a budget
of steps and a limit on the size of what it makes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from optimized.fault_points import FaultPoint, reach
from spec.engine import InvalidRequest

MAX_TEMPLATE_CHARACTERS = 1 << 20
MAX_INPUT_CHARACTERS = 4 << 20
MAX_MESSAGES = 10_000
MAX_DEPTH = 64

Message = Mapping[str, Any]
"""A message is JSON with a ``role`` and usually a ``content``."""


@dataclass(frozen=True)
class TemplateLimits:
    """What a template may spend: steps, and characters of text."""

    fuel: int = 500_000
    max_characters: int = 4 << 20


class BadTemplate(InvalidRequest):
    """A chat template cannot be applied to these messages; the sentence says why."""


class _Raised(Exception):
    """What the template itself said with ``raise_exception``."""


def render(
    messages: Sequence[Message],
    template: str,
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    limits: TemplateLimits | None = None,
    **variables: Any,
) -> str:
    """The text of a conversation, with the helpers that ``transformers`` gives to templates.

    >>> template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<ai>{% endif %}"
    >>> render([{"role": "user", "content": "Hi"}], template)
    '<user>Hi<ai>'
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise BadTemplate(
            f"the chat template has {len(template):,} characters, at most {MAX_TEMPLATE_CHARACTERS:,} are allowed"
        )
    _check_messages(messages)
    _check_size((messages, variables))
    import minijinja

    reach(FaultPoint.RENDER_TEMPLATE)
    limits = limits or TemplateLimits()
    said: list[str] = []
    try:
        text: str = _environment(said, limits.fuel).render_str(
            template,
            messages=_frozen(messages),
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
            **{name: _frozen(value) for name, value in variables.items()},
        )
    except Exception as error:  # the library lets through whatever a helper raised
        if said:
            raise BadTemplate(f"the chat template refuses these messages: {said[0]}") from error
        reason = error.message if isinstance(error, minijinja.TemplateError) else str(error)
        raise BadTemplate(f"the chat template cannot be rendered: {_one_line(reason)}") from error
    if len(text) > limits.max_characters:
        raise BadTemplate(
            f"the chat template makes {len(text):,} characters, at most {limits.max_characters:,} are allowed"
        )
    return text


def _environment(said: list[str], fuel: int) -> Any:  # minijinja's class is untyped where it matters
    """A sandbox with the helpers; ``said`` gets what the template raises."""
    import minijinja

    def raise_exception(message: object = "") -> str:
        said.append(_one_line(str(message)))
        raise _Raised

    def strftime_now(layout: str) -> str:
        return datetime.now().strftime(layout)

    environment = minijinja.Environment(
        debug=False,
        fuel=fuel,
        filters={"tojson": _to_json},
        globals={"raise_exception": raise_exception, "strftime_now": strftime_now},
        auto_escape_callback=_no_escape,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment


def _refuse(self: object, *arguments: object, **named: object) -> NoReturn:
    raise TypeError("a template cannot change its input")


class FrozenDict(dict[str, Any]):
    """A mapping that a template can read and nothing else."""

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = copy = _refuse


class FrozenList(list[Any]):
    """A list that a template can read and nothing else; it is a list, since those can be joined with ``+``."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = extend = insert = remove = pop = clear = _refuse
    sort = reverse = copy = _refuse


def _frozen(value: Any) -> Any:
    """The same JSON, unchangeable: templates can call methods, and a list extended by itself soon fills the memory."""
    if isinstance(value, Mapping):
        return FrozenDict({key: _frozen(part) for key, part in value.items()})
    if isinstance(value, list | tuple):
        return FrozenList(_frozen(part) for part in value)
    return value


def _no_escape(name: str) -> None:
    return None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as ``transformers`` writes it: characters stay what they are, nothing is escaped for HTML."""
    if indent is not None and not 0 <= indent <= 16:
        raise ValueError(f"tojson has an indent of {indent}, at most 16 is allowed")
    pair = None if separators is None else tuple(separators)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=pair, sort_keys=sort_keys)


def _check_messages(messages: object) -> None:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise BadTemplate(f"messages is a {type(messages).__name__}, expected a list of messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadTemplate(f"there are {len(messages):,} messages, 1 to {MAX_MESSAGES:,} are allowed")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadTemplate(f"message {place} has no role, expected a mapping with 'role' and 'content'")


def _check_size(value: Any) -> None:
    """What a template gets is JSON of bounded size and depth."""
    room, stack = MAX_INPUT_CHARACTERS, [(value, 0)]
    while stack:
        item, depth = stack.pop()
        room -= len(item) if isinstance(item, str) else 1
        if room < 0:
            raise BadTemplate(f"the messages have more than {MAX_INPUT_CHARACTERS:,} characters")
        if depth > MAX_DEPTH:
            raise BadTemplate(f"the messages are nested deeper than {MAX_DEPTH}")
        if isinstance(item, Mapping):
            stack += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            stack += [(part, depth + 1) for part in item]
        elif item is not None and not isinstance(item, str | bool | int | float):
            raise BadTemplate(f"the messages have a {type(item).__name__}, expected JSON")


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:197] + "..."
