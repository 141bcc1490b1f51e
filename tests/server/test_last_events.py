"""A rule that is broken while nobody writes a trace: what led there is in a file, as far as it is kept."""

import json
import re
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimized.checkpoint import Checkpoint
from optimized.cli import app
from optimized.cli.last_events import MOST_FILES, SHOWN, Violations
from optimized.cli.watch import SelfCheck, Watch
from optimized.engine import SymbolicEngine
from optimized.pool import BlockPool
from spec.rules import RuleViolation
from spec.vocabulary import Config, Request
from tests.server.conftest import running, waited_for

CONFIG = Config(
    num_blocks=12, block_size=2, max_model_len=16, max_num_seqs=4, max_num_batched_tokens=16, prefix_cache=True
)
HOW = (SelfCheck.SAMPLED, SelfCheck.EVERY_STEP)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool forgets that a second table entry is a second holder."""
    monkeypatch.setattr("optimized.pool.BlockPool.share", lambda pool, table: None)


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """While blocks are shared, block 0 is handed out, whoever holds it."""
    take = BlockPool.take_many
    monkeypatch.setattr(
        BlockPool, "take_many", lambda pool, count: (take(pool, count), (0,) * count)[pool.num_shared > 0]
    )


def broken(how: SelfCheck, violations: Violations, num_sound: int = 0) -> RuleViolation:
    """What breaks when a request with two samples comes after so many that have one."""
    engine = SymbolicEngine(CONFIG, Watch("optimized", how, None, violations=violations).make_observer(CONFIG))
    with pytest.raises(RuleViolation) as raised:
        for number in range(num_sound + 1):
            seq_ids = (2 * number, 2 * number + 1)[: 1 + number // num_sound if num_sound else 2]
            engine.add(Request(number, (1, 2, 3, 4, 5), 4, seq_ids))
            while engine.core.has_work:
                engine.step(lambda seq_id, prefix: 0)
    first = raised.value
    while isinstance(first.__context__, RuleViolation):  # whoever looks at an engine that is broken sees more of it
        first = first.__context__
    return first


@pytest.mark.parametrize("how", HOW)
@pytest.mark.usefixtures("careless")
def test_the_events_that_led_there_are_a_log_that_can_be_judged(how: SelfCheck, tmp_path: Path) -> None:
    violation = broken(how, Violations(folder=tmp_path / "in" / "here"), num_sound=3)
    [file] = (tmp_path / "in" / "here").iterdir()
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)
    assert violation.__notes__ == [f"Its events are in {file}, prompts included: kvproof trace check {file}"]
    checked = CliRunner().invoke(app, ["trace", "check", str(file)])
    assert checked.exit_code == 1
    assert checked.stderr.startswith(f"{violation.rule.id} does not hold: ")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.usefixtures("careless")
def test_a_log_whose_beginning_is_gone_says_so(how: SelfCheck, tmp_path: Path) -> None:
    violation = broken(how, Violations(most_events=20, folder=tmp_path), num_sound=3)
    [file] = tmp_path.iterdir()
    assert file.name.endswith(".jsonl.part") and stat.S_IMODE(file.stat().st_mode) == 0o600
    [note] = violation.__notes__
    assert note.startswith("The last ") and f" events are in {file}, " in note
    _, gap, *events = map(json.loads, file.read_text().splitlines())
    assert gap["gap"].endswith("events, and 20 follow")
    assert 4 < len(events) <= 20 and all("event" in each or "events" in each for each in events)
    checked = CliRunner().invoke(app, ["trace", "check", str(file)])
    assert checked.exit_code == 2
    assert "line 2: events are missing from here on" in checked.stderr


def test_what_the_engine_shows_is_in_no_log(forgetful: None, tmp_path: Path) -> None:
    [note] = broken(SelfCheck.SAMPLED, Violations(folder=tmp_path)).__notes__
    [file] = tmp_path.iterdir()
    assert note.startswith(f"{SHOWN} Its events are in {file}, ")
    assert CliRunner().invoke(app, ["trace", "check", str(file)]).exit_code == 0


@pytest.mark.usefixtures("careless")
def test_what_is_told_at_length_counts_by_its_numbers(tmp_path: Path) -> None:
    broken(SelfCheck.SAMPLED, Violations(folder=tmp_path, most_numbers=10), num_sound=3)
    [file] = tmp_path.iterdir()
    _, gap, *events = map(json.loads, file.read_text().splitlines())
    num_gone, num_kept = map(int, re.findall(r"\d+", gap["gap"]))
    assert num_gone > num_kept >= len(events) > 0


@pytest.mark.usefixtures("careless")
def test_a_process_writes_no_more_than_so_many_and_none_where_it_can_not(tmp_path: Path) -> None:
    violations = Violations(folder=tmp_path)
    said = [broken(SelfCheck.SAMPLED, violations).__notes__[0] for _ in range(MOST_FILES + 1)]
    assert len([*tmp_path.iterdir()]) == MOST_FILES
    assert said[-1] == f"Its events are not written: there are {MOST_FILES} files of this process."
    (tmp_path / "file").touch()
    [note] = broken(SelfCheck.SAMPLED, Violations(folder=tmp_path / "file" / "folder")).__notes__
    assert note.startswith("Its events can not be written: ")


def test_a_server_says_in_its_log_where_they_are(
    tiny: Checkpoint, tmp_path: Path, careless: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPROOF_HOME", str(tmp_path))
    server = running(tiny, make_observer=Watch("optimized", SelfCheck.SAMPLED, None).make_observer)
    try:
        server.complete(n=2, max_tokens=5)
        assert waited_for(lambda: "kvproof trace check" in caplog.text)
        path = caplog.text.partition("kvproof trace check ")[2].split()[0]
        assert Path(path).parent == tmp_path / "violations"
        assert waited_for(lambda: server.ask("GET", "/ready").status == 200)
        assert server.complete(max_tokens=5).status == 200
    finally:
        server.stop()
    assert CliRunner().invoke(app, ["trace", "check", path]).exit_code == 1
