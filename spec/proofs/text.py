"""The reading that prints: a clause or a transition as a formula for the book."""

from dataclasses import dataclass

from spec.proofs.algebra import Fn, Signature, Sort, Term
from spec.proofs.clauses import CLAUSES, STEP_CLAUSES
from spec.proofs.core import SIGNATURES, Core, build, functions
from spec.proofs.transitions import TRANSITIONS

_LETTERS = {"Seq": "s", "Block": "b", "HostBlock": "h", "Step": "k", "Value": "v", "Key": "c", "Int": "j"}


@dataclass(frozen=True, eq=False)
class Formula:
    """A piece of text that can be computed with; ``level`` says how tightly it binds, 0 the loosest."""

    text: str
    level: int = 9

    def _joined(self, sign: str, other: object, level: int) -> "Formula":
        return Formula(f"{within(self, level)} {sign} {within(other, level + 1)}", level)

    def __eq__(self, other: object) -> "Formula":  # type: ignore[override]
        return self._joined("=", other, 5)

    def __ne__(self, other: object) -> "Formula":  # type: ignore[override]
        return self._joined("≠", other, 5)

    def __lt__(self, other: object) -> "Formula":
        return self._joined("<", other, 5)

    def __le__(self, other: object) -> "Formula":
        return self._joined("≤", other, 5)

    def __gt__(self, other: object) -> "Formula":
        return self._joined(">", other, 5)

    def __ge__(self, other: object) -> "Formula":
        return self._joined("≥", other, 5)

    def __add__(self, other: object) -> "Formula":
        return self._joined("+", other, 6)

    def __sub__(self, other: object) -> "Formula":
        return self._joined("-", other, 6)


def within(part: object, level: int) -> str:
    """The text of a part, in parentheses if it binds less tightly than its place asks for."""
    formula = part if isinstance(part, Formula) else Formula(str(part))
    return formula.text if formula.level >= level else f"({formula.text})"


class Print:
    """Every word of the algebra as text."""

    def __init__(self) -> None:
        self.block_size: Term = Formula("block_size")
        self.window: tuple[Term, Term] = (Formula("window_blocks"), Formula("window_rest"))
        self._used: dict[Sort, int] = {}

    def cached_value(self, key: Term, offset: Term) -> Formula:
        return Formula(f"prefix_of({within(key, 0)}, {within(offset, 0)})")

    def And(self, *terms: Term) -> Formula:
        return self._chain("and", terms, 3, "true")

    def Or(self, *terms: Term) -> Formula:
        return self._chain("or", terms, 2, "false")

    def Not(self, term: Term) -> Formula:
        return Formula(f"not {within(term, 5)}", 4)

    def Implies(self, condition: Term, term: Term) -> Formula:
        return Formula(f"{within(condition, 2)} ⇒ {within(term, 1)}", 1)

    def If(self, condition: Term, then: Term, otherwise: Term) -> Formula:
        return Formula(f"if {within(condition, 1)} then {within(then, 1)} else {within(otherwise, 1)}", 1)

    def all(self, sort: Sort, statement: Fn) -> Formula:
        name = self._fresh(sort)
        return Formula(f"∀ {name.text} ∈ {sort}: {within(statement(name), 0)}", 0)

    def upto(self, stop: Term, statement: Fn) -> Formula:
        name = self._fresh("Int")
        return Formula(f"∀ 0 ≤ {name.text} < {within(stop, 6)}: {within(statement(name), 0)}", 0)

    def state(self, mark: str = "") -> Core:
        """A state, its functions named; a mark tells a later state from an earlier one."""
        return build(lambda name, _: self.applied(name + mark))

    def choice(self, name: str, sort: Sort | Signature) -> Term:
        """A choice of a transition, named."""
        return Formula(name) if isinstance(sort, str) else self.applied(name)

    def applied(self, name: str) -> Fn:
        """A function of this name."""
        return lambda *arguments: Formula(f"{name}({', '.join(within(part, 0) for part in arguments)})")

    def _chain(self, word: str, terms: tuple[Term, ...], level: int, empty: str) -> Formula:
        if len(terms) == 1:
            return Formula(within(terms[0], 0), level) if isinstance(terms[0], Formula) else Formula(str(terms[0]))
        return Formula(f" {word} ".join(within(term, level) for term in terms), level) if terms else Formula(empty)

    def _fresh(self, sort: Sort) -> Formula:
        used = self._used[sort] = self._used.get(sort, 0) + 1
        return Formula(_LETTERS[sort] + (str(used) if used > 1 else ""))


def clause_text(name: str) -> str:
    """A clause as a formula; the primed functions are those after the transition."""
    A = Print()
    if name in CLAUSES:
        return within(CLAUSES[name].holds(A, A.state()), 0)
    return within(STEP_CLAUSES[name].holds(A, A.state(), A.state("'")), 0)


def transition_text(name: str) -> tuple[str, dict[str, str]]:
    """A transition: its guard, and for each function that it changes the value afterwards."""
    A = Print()
    S = A.state()
    transition = TRANSITIONS[name]
    guard, T = transition.step(
        A, S, *[A.choice(n, sort) for n, sort in zip(transition.choice_names, transition.choices, strict=True)]
    )
    before, after = functions(S), functions(T)
    return within(guard, 0), {
        field: _value(field, after[field]) for field in before if after[field] is not before[field]
    }


def _value(field: str, fn: Fn) -> str:
    """What a function gives for arguments with the usual letters."""
    letters: list[str] = []
    for sort in SIGNATURES[field][:-1]:
        letter = "x" if sort in ("Block", "HostBlock") else {"Seq": "t", "Step": "m", "Int": "p"}[sort]
        letters.append(letter if letter not in letters else "o")
    return f"{field}'({', '.join(letters)}) = {within(fn(*[Formula(x) for x in letters]), 0)}"
