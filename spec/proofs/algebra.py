"""The small algebra that the core is written in; what its words mean is up to the one who reads it.

Four readings exist: ``Prove`` and ``Scope`` (``symbolic.py``), ``Run`` (here) and ``Print`` (``text.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Protocol, TypeAlias

# A z3 expression, a plain value or a text, as the reading decides: the border to the untyped solvers.
Term: TypeAlias = Any
Fn: TypeAlias = Callable[..., Term]
Sort: TypeAlias = str
Signature: TypeAlias = tuple[Sort, ...]
"""The sorts of the arguments, then the sort of the result."""

UNINTERPRETED: tuple[Sort, ...] = ("Seq", "Block", "HostBlock", "Step", "Value", "Key")


class Algebra(Protocol):
    """The words: connectives, two quantifiers, and three things that every statement may speak of."""

    @property
    def block_size(self) -> Term:
        """Tokens per block, at least 1."""
        ...

    @property
    def window(self) -> tuple[Term, Term]:
        """How many tokens before its own a token reads, as full blocks and a rest below ``block_size``."""
        ...

    def cached_value(self, key: Term, offset: Term) -> Term:
        """The prefix that a block with this key holds at this offset: keys are free of collisions."""
        ...

    def And(self, *terms: Term) -> Term: ...

    def Or(self, *terms: Term) -> Term: ...

    def Not(self, term: Term) -> Term: ...

    def Implies(self, condition: Term, term: Term) -> Term: ...

    def If(self, condition: Term, then: Term, otherwise: Term) -> Term: ...

    def all(self, sort: Sort, statement: Fn) -> Term:
        """The statement holds for everything of the sort."""
        ...

    def upto(self, stop: Term, statement: Fn) -> Term:
        """The statement holds for every integer from 0 up to, and without, ``stop``."""
        ...


class Run:
    """The algebra over plain Python values: the same functions execute."""

    def __init__(
        self,
        block_size: int,
        elements: Mapping[Sort, Sequence[Term]],
        cached_value: Fn,
        window: tuple[int, int] = (1 << 30, 0),
    ) -> None:
        self.block_size = block_size
        self.elements = elements
        self.cached_value = cached_value
        self.window = window

    def And(self, *terms: Term) -> bool:
        return all(terms)

    def Or(self, *terms: Term) -> bool:
        return any(terms)

    def Not(self, term: Term) -> bool:
        return not term

    def Implies(self, condition: Term, term: Term) -> bool:
        return bool(not condition or term)

    def If(self, condition: Term, then: Term, otherwise: Term) -> Term:
        return then if condition else otherwise

    def all(self, sort: Sort, statement: Fn) -> bool:
        return all(statement(element) for element in self.elements[sort])

    def upto(self, stop: Term, statement: Fn) -> bool:
        return all(statement(number) for number in range(stop))

    def arguments(self, signature: Signature, integers: Sequence[int]) -> list[tuple[Term, ...]]:
        """Every tuple of arguments that a function of this signature can get, integers from the given range."""
        return list(product(*[integers if sort == "Int" else self.elements[sort] for sort in signature[:-1]]))
