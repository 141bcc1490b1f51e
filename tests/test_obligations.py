"""CrossHair confirms every obligation; its exit status is 0 even where it confirms nothing, so its words are read."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "obligations"
MOST_SECONDS = 30
"""For one obligation: three times what the slowest took and more, so that a slow machine confirms it too."""

OBLIGATIONS = {
    "arithmetic.the_blocks_needed_suffice": 1,
    "arithmetic.one_block_less_would_not_do": 1,
    "arithmetic.less_than_a_block_is_wasted": 1,
    "arithmetic.the_engines_need_as_many_blocks": 1,
    "arithmetic.a_block_has_the_bytes_of_its_tokens": 1,
    "arithmetic.the_reference_sees_as_far": 1,
    "arithmetic.a_window_holds_as_many_tokens_as_it_says": 1,
    "arithmetic.the_reference_stores_as_many_tokens": 1,
    "arithmetic.what_is_clamped_keeps_the_budget": 1,
    "slots.the_optimized_slots_are_the_same": 2,
    "slots.the_slots_of_a_table_are_the_same": 1,
    "slots.the_reference_slots_are_the_same": 1,
    "slots.positions_have_slots_of_their_own": 1,
    "admission.the_optimized_door_is_the_same": 1,
    "admission.the_reference_door_is_the_same": 1,
    "admission.as_many_blocks_are_owed": 3,
}
"""Each obligation with the seconds that it took, start of the interpreter included, on one of two busy cores."""


def answers_about(path: Path) -> dict[str, str]:
    """What CrossHair says of each function of a file."""
    command = [sys.executable, "-m", "crosshair", "check", "--report_all"]
    run = subprocess.run(
        [*command, f"--per_condition_timeout={MOST_SECONDS}", str(path)],
        check=False,
        capture_output=True,
        text=True,
        cwd=FOLDER.parents[1],
        timeout=300,
    )
    found = {}
    for line, answer in re.findall(rf"{path.name}:(\d+): (.*)", run.stdout):
        [name] = [f.name for f in functions_of(path) if f.lineno <= int(line) <= (f.end_lineno or 0)]
        found[name] = answer
    return found


def functions_of(path: Path) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted({name.partition(".")[0] for name in OBLIGATIONS}))
def test_every_obligation_is_confirmed(module: str) -> None:
    answers = answers_about(FOLDER / f"{module}.py")
    for name in (name.partition(".")[2] for name in OBLIGATIONS if name.startswith(module + ".")):
        assert "Confirmed" in answers.get(name, "nothing"), f"{name}: {answers.get(name)}"


@pytest.mark.slow
def test_what_is_false_is_not_confirmed(tmp_path: Path) -> None:
    """Blocks that are exactly full have no slot to spare."""
    text = (FOLDER / "arithmetic.py").read_text()
    assert text.count(">= num_tokens\n") == 1
    (tmp_path / "wrong.py").write_text(text.replace(">= num_tokens\n", "> num_tokens\n"))
    assert "false when calling" in answers_about(tmp_path / "wrong.py")["the_blocks_needed_suffice"]


def test_the_list_names_every_obligation() -> None:
    written = {f"{path.stem}.{f.name}" for path in FOLDER.glob("*.py") for f in functions_of(path)}
    assert written == set(OBLIGATIONS)
