"""The table of what is proved, clause by transition, as data for the book and as text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spec.proofs.clauses import CLAUSES, STEP_CLAUSES, Clause
from spec.proofs.ledger import RULE_OF_CLAUSE
from spec.proofs.solvers import Result
from spec.proofs.text import clause_text, transition_text
from spec.proofs.transitions import TRANSITIONS, Transition

START = "start of the engine"
"""The column of the base case."""


@dataclass(frozen=True)
class Row:
    """A clause: its sentence, its formula, the rules of the specification that it stands for."""

    clause: str
    sentence: str
    formula: str
    is_step: bool
    rule_ids: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """A transition: its sentence, its guard, and what it changes."""

    transition: str
    sentence: str
    guard: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows, columns, and for each pair whether every solver that was asked proved it; None if nobody was asked."""

    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    cells: Mapping[tuple[str, str], bool | None]

    def text(self) -> str:
        """The matrix for a terminal: a line for each clause, a column for each transition, ``#`` where proved."""
        width = max(len(row.clause) for row in self.rows)
        names = [column.transition for column in self.columns]
        height = max(map(len, names))
        marks = {True: "#", False: "?", None: " "}
        head = [" " * (width + 1) + " ".join(name.rjust(height)[line] for name in names) for line in range(height)]
        body = [
            f"{row.clause:{width}} " + " ".join(marks[self.cells[row.clause, name]] for name in names)
            for row in self.rows
        ]
        return "\n".join(line.rstrip() for line in [*head, *body])


def matrix(results: Iterable[Result] = ()) -> Matrix:
    """The matrix of these results; without any it has all rows and columns, and empty cells."""
    proved: dict[tuple[str, str], bool] = {}
    for result in results:
        place = result.clause, result.transition or START
        proved[place] = proved.get(place, True) and result.is_proved
    rows = tuple(_row(clause) for clause in (*CLAUSES.values(), *STEP_CLAUSES.values()))
    first = Column(START, "Nothing has happened yet.", "", ())
    columns = (first, *(_column(transition) for transition in TRANSITIONS.values()))
    places = ((row.clause, column.transition) for row in rows for column in columns)
    return Matrix(rows, columns, {place: proved.get(place) for place in places})


def _row(clause: Clause) -> Row:
    return Row(
        clause.name,
        clause.sentence,
        clause_text(clause.name),
        clause.name in STEP_CLAUSES,
        RULE_OF_CLAUSE.get(clause.name, ()),
    )


def _column(transition: Transition) -> Column:
    guard, changes = transition_text(transition.name)
    return Column(transition.name, transition.sentence, guard, tuple(changes.values()))
