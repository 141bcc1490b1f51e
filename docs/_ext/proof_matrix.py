"""What is proved, clause by transition: ``.. proof-matrix::``, proved anew while the book is built if z3 is there.

Without z3 the page shows what was recorded. To record it again:

    python docs/_ext/proof_matrix.py
"""

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

RECORDED = Path(__file__).parent.parent / "proof_matrix.json"


def prove() -> dict[str, object]:
    """Rows, columns and cells as plain data. The obligations of the matrix alone take z3 some ten seconds."""
    from spec.proofs.matrix import matrix
    from spec.proofs.obligations import base_case, inductive
    from spec.proofs.solvers import Solver, check

    return as_data(matrix(check(obligation, Solver.Z3) for obligation in chain(base_case(), inductive())))


def as_data(proved) -> dict[str, object]:
    """A ``spec.proofs.matrix.Matrix`` as JSON can hold it."""
    return {
        "rows": [vars(row) | {"rule_ids": list(row.rule_ids)} for row in proved.rows],
        "columns": [vars(column) | {"changes": list(column.changes)} for column in proved.columns],
        "proved": {
            row.clause: [column.transition for column in proved.columns if proved.cells[row.clause, column.transition]]
            for row in proved.rows
        },
    }


def read() -> dict[str, object]:
    """What was recorded."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def table_lines(rows: Sequence[Mapping], columns: Sequence[Mapping], proved: Mapping[str, Sequence[str]]) -> str:
    """The matrix as HTML: what is proved has a mark, what no solver was asked about is empty."""
    from html import escape

    names = [column["transition"] for column in columns]
    head = "".join(f"<th scope='col'><span>{escape(name.replace('_', ' '))}</span></th>" for name in names)
    lines = [f"<tr><td></td>{head}</tr>"]
    for row in rows:
        cells = "".join(
            f"<td title='{escape(row['clause'])}, {escape(name)}'>{mark(row, name, proved)}</td>" for name in names
        )
        lines.append(f"<tr><th scope='row'>{escape(row['clause'].replace('_', ' '))}</th>{cells}</tr>")
    return f"<div class='proof-matrix'><table>{''.join(lines)}</table></div>"


def mark(row: Mapping, name: str, proved: Mapping[str, Sequence[str]]) -> str:
    """A step clause says nothing about the start, where nothing has happened."""
    if name in proved[row["clause"]]:
        return "●"
    return "" if row["is_step"] and name == "start of the engine" else "?"


def is_ghost(change: str) -> bool:
    """Whether the change is one of a function that no engine has."""
    name = change.partition("'")[0].rpartition(".")[2]
    return name in {"entries", "pos", "rank", "own", "idx", "hold_rank", "hold_own", "seen"}


def setup(app) -> dict[str, bool]:
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class ProofMatrix(SphinxDirective):
        """The matrix, then every clause and every transition in words and as a formula."""

        def run(self) -> list[nodes.Node]:
            self.env.note_dependency(str(RECORDED))
            is_new = find_spec("z3") is not None
            data = prove() if is_new else read()
            rows, columns, proved = data["rows"], data["columns"], data["proved"]
            count = sum(map(len, proved.values()))
            asked = len(rows) * len(columns) - sum(row["is_step"] for row in rows)
            how = "proved by z3 while this page was made" if is_new else "proved by z3, as recorded"
            text = [f"{count} of {asked} pairs are {how}.", "", "The clauses", "^^^^^^^^^^^", ""]
            for row in rows:
                rules = ", ".join(f":rule:`{rule_id}`" for rule_id in row["rule_ids"])
                kind = "of every step" if row["is_step"] else "of every state"
                text += [
                    f"``{row['clause']}`` ({kind}{f'; see {rules}' if rules else ''})",
                    f"   {row['sentence']}",
                    "",
                ]
                text += ["   .. code-block:: text", "", f"      {row['formula']}", ""]
            text += ["The transitions", "^^^^^^^^^^^^^^^", ""]
            for column in columns:
                text += [f"``{column['transition']}``", f"   {column['sentence']}", ""]
                if column["guard"]:
                    text += ["   .. code-block:: text", "", f"      if {column['guard']}"]
                    text += [*(f"      {change}" for change in column["changes"] if not is_ghost(change)), ""]
            table = nodes.raw("", table_lines(rows, columns, proved), format="html")
            first, *rest = self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)
            return [first, table, *rest]

    app.add_directive("proof-matrix", ProofMatrix)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    sys.path.insert(0, str(RECORDED.parent.parent))
    RECORDED.write_text(json.dumps(prove(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {RECORDED}")
