"""The two readings for z3: ``Prove``, where every size is arbitrary, and ``Scope``, where everything is finite."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import z3

from spec.proofs.algebra import UNINTERPRETED, Fn, Signature, Sort, Term
from spec.proofs.core import Core, build, used

_scopes = count()


class _Symbolic:
    """What both readings share: connectives, sorts, and functions without a definition."""

    def __init__(self) -> None:
        # z3 has no types: its sorts and terms are Any from here on.
        self.sorts: dict[Sort, Any] = {"Bool": z3.BoolSort(), "Int": z3.IntSort()}
        self._names = count()
        self._cached_value: Fn | None = None

    def cached_value(self, key: Term, offset: Term) -> Term:
        if self._cached_value is None:
            self._cached_value = self.function("cached_value", ("Key", "Int", "Value"))
        return self._cached_value(key, offset)

    def And(self, *terms: Term) -> Term:
        return z3.And(*terms) if terms else z3.BoolVal(True)

    def Or(self, *terms: Term) -> Term:
        return z3.Or(*terms) if terms else z3.BoolVal(False)

    def Not(self, term: Term) -> Term:
        return z3.Not(term)

    def Implies(self, condition: Term, term: Term) -> Term:
        return z3.Implies(condition, term)

    def If(self, condition: Term, then: Term, otherwise: Term) -> Term:
        return z3.If(condition, then, otherwise)

    def function(self, name: str, signature: Signature) -> Fn:
        """A function, or a constant if it takes nothing, of which only the sorts are known."""
        if len(signature) == 1:
            return z3.Const(name, self.sorts[signature[0]])  # type: ignore[no-any-return]
        return z3.Function(name, *[self.sorts[sort] for sort in signature])  # type: ignore[no-any-return]

    def state(self) -> Core:
        """Any state at all."""
        return build(self.function)

    def choice(self, name: str, sort: Sort | Signature) -> Term:
        """Any choice at all that a transition leaves open."""
        return self.function(f"choice.{name}", (sort,) if isinstance(sort, str) else sort)


class Prove(_Symbolic):
    """Uninterpreted sorts, any block size, any window: what is proved here holds for every size."""

    def __init__(self) -> None:
        super().__init__()
        # "Seq" alone is a word of the solvers' own language.
        self.sorts.update({sort: z3.DeclareSort(f"{sort}Sort") for sort in UNINTERPRETED})
        self.block_size: Term = z3.Int("block_size")
        self.window: tuple[Term, Term] = (z3.Int("window_blocks"), z3.Int("window_rest"))

    @property
    def axioms(self) -> list[Term]:
        """What is known of the sizes: next to nothing."""
        blocks, rest = self.window
        return [self.block_size >= 1, blocks >= 0, rest >= 0, rest < self.block_size]

    def all(self, sort: Sort, statement: Fn) -> Term:
        bound = z3.Const(f"{sort.lower()}!{next(self._names)}", self.sorts[sort])
        return z3.ForAll([bound], statement(bound))

    def upto(self, stop: Term, statement: Fn) -> Term:
        bound = z3.Int(f"i!{next(self._names)}")
        return z3.ForAll([bound], z3.Implies(z3.And(0 <= bound, bound < stop), statement(bound)))


class Scope(_Symbolic):
    """A finite number of everything, quantifiers written out: here z3 finds every counterexample there is."""

    def __init__(
        self,
        sizes: Mapping[Sort, int],
        block_size: int = 2,
        window: tuple[int, int] = (0, 1),
        max_blocks: int = 3,
    ) -> None:
        super().__init__()
        scope = next(_scopes)
        self.block_size = block_size
        self.window = window
        self.max_blocks = max_blocks
        self.elements: dict[Sort, Sequence[Term]] = {}
        for sort, size in sizes.items():
            names = [f"{sort}{i}@{scope}" for i in range(size)]
            self.sorts[sort], self.elements[sort] = z3.EnumSort(f"{sort}@{scope}", names)

    def all(self, sort: Sort, statement: Fn) -> Term:
        return z3.And(*[statement(element) for element in self.elements[sort]])

    def upto(self, stop: Term, statement: Fn) -> Term:
        """Exact while ``stop`` is at most one more than ``max_blocks``, which ``bounds`` sees to."""
        numbers = range(self.max_blocks + 1)
        return z3.And(*[z3.Implies(i < stop, statement(z3.IntVal(i))) for i in numbers])

    def bounds(self, S: Core, slack: int = 0) -> Term:
        """The counts of a state lie in the scope, or by ``slack`` beyond it."""
        most = self.max_blocks + slack
        tables = [
            z3.Implies(used(self, S, s), z3.And(S.num_blocks(s) <= most, S.token_blocks(s) < most))
            for s in self.elements["Seq"]
        ]
        blocks = [
            z3.And(
                S.device.filled(b) <= self.block_size + slack,
                S.device.entries(b) <= most,
                S.held(b) <= most,
                *[S.reach(k, b) <= self.block_size + slack for k in self.elements["Step"]],
            )
            for b in self.elements["Block"]
        ]
        host = [
            z3.And(S.host.filled(h) <= self.block_size + slack, S.host.entries(h) <= most)
            for h in self.elements["HostBlock"]
        ]
        return z3.And(*tables, *blocks, *host)
