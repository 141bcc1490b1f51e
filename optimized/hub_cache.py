"""Models of the hub by name and revision, in the folder where Hugging Face's tools keep them; ``hub_fetch`` fetches.

All files of a model come from the folder of one commit, so no file can be of another revision than the rest. What is
there is used as it is, and nobody is asked whether a branch has gone on since.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from optimized.model_store import ModelUnavailable

NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
REVISION = re.compile(r"\w[\w.-]*(/[\w.-]+)*", re.ASCII)
COMMIT = re.compile(r"\w[\w.-]*", re.ASCII)
FILE = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
DEFAULT_REVISION = "main"
TOKENIZER = "tokenizer.json"
SIDE_FILES = ("config.json", "generation_config.json", TOKENIZER, "tokenizer_config.json", "chat_template.jinja")
"""What is read of a model besides its weights."""

MAX_INDEX_BYTES = 32 << 20
MAX_NAME = 200
"""Characters of a revision or a file, which are names in a file system, too."""


@dataclass(frozen=True)
class HubModel:
    """A model on the hub at a branch, a tag or a commit: all that a server needs of it, or one GGUF file."""

    name: str
    revision: str = DEFAULT_REVISION
    file: str | None = None

    def __post_init__(self) -> None:
        if not is_hub_name(self.name):
            sentence = f"a revision is that of a model on the hub, ORG/NAME, and {self.name!r} is none"
            raise ModelUnavailable(sentence, path=cache_folder())
        if REVISION.fullmatch(self.revision) is None or ".." in self.revision or len(self.revision) > MAX_NAME:
            sentence = f"{self.revision[:MAX_NAME]!r} is no name of a branch, a tag or a commit"
            raise ModelUnavailable(sentence, path=self.folder)
        if self.file is not None and (
            FILE.fullmatch(self.file) is None or not self.file.lower().endswith(".gguf") or len(self.file) > MAX_NAME
        ):
            raise ModelUnavailable(f"{self.file[:MAX_NAME]!r} is no name of a GGUF file on the hub", path=self.folder)

    @staticmethod
    def read(text: str) -> HubModel | None:
        """``ORG/NAME``, ``ORG/NAME@REVISION``, and either with ``:FILE.gguf``; None for what is no such name.

        >>> HubModel.read("org/name@v1:tiny.gguf")
        HubModel(name='org/name', revision='v1', file='tiny.gguf')
        """
        named, colon, file = text.partition(":")
        name, at, revision = named.partition("@")
        if not is_hub_name(name):
            return None
        return HubModel(name, revision if at else DEFAULT_REVISION, file if colon else None)

    def __str__(self) -> str:
        return f"{self.name} at {self.revision}" + ("" if self.file is None else f", {self.file}")

    @property
    def folder(self) -> Path:
        """Where all its revisions are."""
        return cache_folder() / f"models--{self.name.replace('/', '--')}"

    def at(self, commit: str) -> Path:
        """Where it is, or would be, at a commit: a folder, or its GGUF file."""
        snapshot = self.folder / "snapshots" / commit
        return snapshot if self.file is None else snapshot / self.file


def is_hub_name(model: str) -> bool:
    """Whether it may be the name of a model on the hub, ORG/NAME."""
    return NAME.fullmatch(model) is not None and not model.startswith(".") and ".." not in model


def located(asked: HubModel, *, with_tokenizer: bool = True) -> Path:
    """Where a model is on this machine, where it is fetched to unless it is there. Raises ``ModelUnavailable``.

    Without ``with_tokenizer`` another one is there, and a model that lacks its own is not fetched for it.
    """
    found = in_cache(asked)
    if found is not None and is_whole(found, with_tokenizer=with_tokenizer):
        return found
    if is_offline():
        if found is not None and is_whole(found, with_tokenizer=False):
            raise ModelUnavailable(
                f"{asked} is in {cache_folder()} without its {TOKENIZER}, and HF_HUB_OFFLINE forbids to fetch it: unset "
                f"that, name one (kvproof serve --tokenizer), or name {found} for token ids only",
                path=found,
            )
        if found is not None:
            return found  # who reads it says what else it lacks
        raise ModelUnavailable(
            f"{asked} is not in {cache_folder()}, and HF_HUB_OFFLINE forbids to fetch it: unset that, or put it there "
            f"with 'hf download {asked.name} --revision {asked.revision}'",
            path=asked.folder,
        )
    from optimized.hub_fetch import fetch

    return fetch(asked)


def in_cache(asked: HubModel) -> Path | None:
    """The folder or file of a model on this machine, whole or not."""
    named = asked.folder / "refs" / asked.revision
    is_named = named.is_file()
    commit = named.read_text(encoding="utf-8", errors="replace").strip() if is_named else asked.revision
    found = asked.at(commit)
    return found if COMMIT.fullmatch(commit) is not None and found.exists() else None


def is_whole(found: Path, *, with_tokenizer: bool = True) -> bool:
    """Whether nothing is left to be fetched: a download that was broken off leaves files out, and none in part.

    transformers fetches a model and its tokenizer apart, so a model that may have a tokenizer lacks it.
    """
    if not found.is_dir():
        return found.is_file()
    index = found / "model.safetensors.index.json"
    try:
        weights = shards_of(index.read_bytes()) if index.is_file() else {"model.safetensors"}
    except (OSError, ValueError):
        return False
    has_words = (found / TOKENIZER).is_file() or known_absent(found, TOKENIZER).is_file()
    return all((found / name).is_file() for name in {"config.json", *weights}) and (has_words or not with_tokenizer)


def known_absent(snapshot: Path, name: str) -> Path:
    """The empty file by which Hugging Face's tools know that a commit has no file of this name."""
    return snapshot.parent.parent / ".no_exist" / snapshot.name / name


def shards_of(index: bytes) -> set[str]:
    """The files that an index names. Raises ``ValueError`` for what is no index, and for names that lead elsewhere."""
    try:
        said = json.loads(index) if len(index) <= MAX_INDEX_BYTES else None
    except RecursionError:
        said = None
    named = said.get("weight_map") if isinstance(said, dict) else None
    names = set(map(str, named.values())) if isinstance(named, dict) else set()
    if not names or not all(FILE.fullmatch(each) and each.endswith(".safetensors") for each in names):
        raise ValueError("it names no safetensors files")
    return names


def is_offline() -> bool:
    """Whether whoever started this process wants nothing to be fetched: ``HF_HUB_OFFLINE``, as its library reads it."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in ("1", "ON", "YES", "TRUE")


def cache_folder() -> Path:
    """Where Hugging Face's tools keep models."""
    if chosen := os.environ.get("HF_HUB_CACHE"):
        return Path(chosen).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface") / "hub"


def commit_of(path: Path) -> str | None:
    """The commit of a folder of the hub's, or of a file below it.

    >>> commit_of(Path("hub/models--org--name/snapshots/4f1c/tiny.gguf"))
    '4f1c'
    """
    for each in (path, *path.parents):
        if each.parent.name == "snapshots" and each.parent.parent.name.startswith("models--"):
            return each.name
    return None


def name_of(path: Path) -> str:
    """What a model is called: ORG/NAME for a folder of the hub's, whose own name is a commit, else its file or folder.

    >>> name_of(Path("hub/models--org--name/snapshots/4f1c"))
    'org/name'
    """
    models = path.parent.parent.name
    if path.parent.name == "snapshots" and models.startswith("models--"):
        return models.removeprefix("models--").replace("--", "/", 1)
    return path.name
