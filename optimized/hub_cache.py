"""Models that Hugging Face's tools have put on this machine, found by name and revision. Nothing is ever fetched here.

All files of a model come from the folder of one commit, so no file can be of another revision than the rest.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from optimized.model_store import ModelUnavailable

NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
REVISION = re.compile(r"\w[\w.-]*(/[\w.-]+)*", re.ASCII)
COMMIT = re.compile(r"\w[\w.-]*", re.ASCII)
DEFAULT_REVISION = "main"


def is_hub_name(model: str) -> bool:
    """Whether it may be the name of a model on the hub, ORG/NAME."""
    return NAME.fullmatch(model) is not None and not model.startswith(".") and ".." not in model


def revision_folder(model: str, revision: str = DEFAULT_REVISION) -> Path:
    """The folder of a model at a branch, a tag or a commit. Raises ``ModelUnavailable`` if it is not on this machine."""
    folder = cache_folder() / f"models--{model.replace('/', '--')}"
    if not is_hub_name(model):
        raise ModelUnavailable(
            f"a revision is that of a model on the hub, ORG/NAME, and {model!r} is none", path=folder
        )
    if REVISION.fullmatch(revision) is None or ".." in revision:
        raise ModelUnavailable(f"{revision!r} is no name of a branch, a tag or a commit", path=folder)
    named = folder / "refs" / revision
    commit = named.read_text(encoding="utf-8", errors="replace").strip() if named.is_file() else revision
    found = folder / "snapshots" / commit
    if COMMIT.fullmatch(commit) is None or not found.is_dir():
        raise ModelUnavailable(
            f"{model} at {revision} is not in {cache_folder()}, from where nothing is fetched: "
            f"'hf download {model} --revision {revision}' puts it there",
            path=folder,
        )
    return found


def cache_folder() -> Path:
    """Where Hugging Face's tools keep models."""
    if chosen := os.environ.get("HF_HUB_CACHE"):
        return Path(chosen).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface") / "hub"
