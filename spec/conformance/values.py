"""What an adapter answers, taken over value by value: copies of our own, of exactly the types that the protocol names."""

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TypeAlias, cast, get_args, get_origin, get_type_hints

Take: TypeAlias = Callable[[object], object]
"""Makes a copy that shares nothing with the value. Raises ``Nonsense``."""


class Nonsense(ValueError):
    """A value has another type than the protocol says: what stands there, and what must. ``place`` is where."""

    def __init__(self, value: object, hint: object) -> None:
        self.value = value
        self.hint = hint
        self.place = ""
        super().__init__(value, hint)

    def inside(self, place: str) -> "Nonsense":
        """The same, seen from outside."""
        self.place = place + self.place
        return self

    def __str__(self) -> str:
        return f"{self.place} is {shown(self.value)}, it must be {_words(self.hint)}"


def shown(value: object) -> str:
    """A value of somebody else's as short text, whatever it is."""
    try:
        text = reprlib.repr(value)
    except Exception:  # noqa: BLE001  a repr may do anything
        return f"a {type(value).__name__}"
    return text if type(value).__module__ == "builtins" else f"{text} of type {type(value).__name__}"


@cache
def taker(hint: object) -> Take:
    """How a value of this type is taken over."""
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(hint, UnionType):
        return _union(hint)
    if origin is tuple:
        return _kept(tuple, arguments[0], _tuple(hint, taker(arguments[0])))
    if origin is frozenset:
        return _kept(frozenset, arguments[0], _frozenset(hint, taker(arguments[0])))
    if origin is Mapping:
        return _mapping(hint, taker(arguments[0]), taker(arguments[1]))
    if isinstance(hint, type) and is_dataclass(hint):
        return _record(hint)
    return _plain(hint)


def _plain(hint: object) -> Take:
    """Numbers, texts and choices, which nobody can change."""

    def take(value: object) -> object:
        if type(value) is not hint:
            raise Nonsense(value, hint)
        return value

    return take


def _kept(kind: type, item: object, otherwise: Take) -> Take:
    """A collection of numbers or texts is its own copy: nobody can change it. Most are, and it is seen at once."""
    if item not in (int, str):
        return otherwise

    def take(value: object) -> object:
        if type(value) is kind and {item}.issuperset(map(type, cast(Iterable[object], value))):
            return value
        return otherwise(value)

    return take


def _tuple(hint: object, each: Take) -> Take:
    def take(value: object) -> object:
        if not isinstance(value, tuple):
            raise Nonsense(value, hint)
        copies: list[object] = []
        try:
            for item in value:
                copies.append(each(item))
        except Nonsense as nonsense:
            raise nonsense.inside(f"[{len(copies)}]") from None
        return tuple(copies)

    return take


def _frozenset(hint: object, each: Take) -> Take:
    def take(value: object) -> object:
        if not isinstance(value, frozenset):
            raise Nonsense(value, hint)
        return frozenset([each(item) for item in value])

    return take


def _mapping(hint: object, key: Take, item: Take) -> Take:
    def take(value: object) -> object:
        if not isinstance(value, Mapping):
            raise Nonsense(value, hint)
        copy: dict[object, object] = {}
        for name, entry in value.items():
            try:
                copy[key(name)] = item(entry)
            except Nonsense as nonsense:
                raise nonsense.inside(f"[{shown(name)}]") from None
        return copy

    return take


def _record(kind: type) -> Take:
    fields = {name: taker(hint) for name, hint in get_type_hints(kind).items()}

    def take(value: object) -> object:
        if not isinstance(value, kind):
            raise Nonsense(value, kind)
        copies: dict[str, object] = {}
        for name, field in fields.items():
            try:
                copies[name] = field(getattr(value, name))
            except Nonsense as nonsense:
                raise nonsense.inside(f".{name}") from None
        return kind(**copies)

    return take


def _union(hint: UnionType) -> Take:
    takers = {(get_origin(kind) or kind): taker(kind) for kind in get_args(hint)}

    def take(value: object) -> object:
        found = takers.get(type(value))
        if found is None:
            found = next((each for kind, each in takers.items() if isinstance(value, kind)), None)
        if found is None:
            raise Nonsense(value, hint)
        return found(value)

    return take


def _words(hint: object) -> str:
    if isinstance(hint, UnionType):
        kinds = [_words(kind) for kind in get_args(hint)]
        return "an event" if len(kinds) > 12 else " or ".join(kinds)
    if hint is NoneType:
        return "None"
    if get_origin(hint) is not None:
        inside = ", ".join("..." if each is Ellipsis else _words(each) for each in get_args(hint))
        return f"{getattr(get_origin(hint), '__name__', hint)}[{inside}]"
    return getattr(hint, "__name__", str(hint))
