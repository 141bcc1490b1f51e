"""Fetch a model from the hub, by Hugging Face's own library, which knows its address, tokens, proxies and resumption.

A name and a revision become one commit, and that a fixed list of files with sizes and hashes: the JSON files that are
read, and the weights, in safetensors; or one GGUF file. Nothing else is fetched, no code and no pickle, and what has come
is compared with the list before the revision is known on this machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimized.hub_cache import (
    FILE,
    MAX_INDEX_BYTES,
    MAX_NAME,
    SIDE_FILES,
    TOKENIZER,
    HubModel,
    cache_folder,
    in_cache,
    known_absent,
    shards_of,
)
from optimized.model_store import CHUNK_BYTES, ModelUnavailable

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FULL_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
MAX_FILES = 10_000
MAX_ANSWER_BYTES = 16 << 20
MAX_ANSWER_S = 60.0
"""Of the listing, and of each answer that is an error or leads elsewhere; of files it is their size that is known."""

MAX_WAIT_S = 600.0
WAITS = re.compile(r"(?:^|t\s*=)\s*(\d+)\s*(?:$|[;,])", re.ASCII)
"""How long an answer asks to wait, in its header Retry-After or RateLimit."""

SLACK_BYTES = 32 << 20
TIMEOUT_S = 30.0
SHOWN_FILES = 8


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it: large ones by SHA-256, small ones by the SHA-1 that git calls them by."""

    name: str
    num_bytes: int
    sha256: str | None
    git_sha1: str | None

    def is_in(self, path: Path) -> bool:
        """Whether a file on this machine is this one, and nothing is wrong with it."""
        if path.stat().st_size != self.num_bytes:
            return False
        digest = hashlib.sha256() if self.sha256 is not None else hashlib.sha1(usedforsecurity=False)
        if self.sha256 is None:
            digest.update(f"blob {self.num_bytes}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest() == (self.sha256 or self.git_sha1)


def fetch(asked: HubModel) -> Path:
    """Fetch what is missing of a model, and say where it is. Raises ``ModelUnavailable``, with one sentence."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # it asks for a model, and tells nobody what asks
    try:
        import huggingface_hub  # noqa: F401  the rest of this imports from it
    except ModuleNotFoundError:
        sentence = f"{_missing(asked)}, and to fetch it needs huggingface_hub: pip install 'kvproof[hub]'"
        raise ModelUnavailable(sentence, path=asked.folder) from None
    try:
        return _fetch(asked)
    except ModelUnavailable:
        raise
    except Exception as error:  # what the library and its HTTP client raise
        sentence = f"{_missing(asked)}, and cannot be fetched: {_reason(error)}"
        raise ModelUnavailable(sentence, path=asked.folder, details=str(error)) from error


def _missing(asked: HubModel) -> str:
    return f"{asked} is not {'in' if in_cache(asked) is None else 'whole in'} {cache_folder()}"


def _fetch(asked: HubModel) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    def check(response: Any) -> None:  # Any: of the library's HTTP client, which is another one in each of its versions
        # The library keeps a file under its tag, and what is there already it takes for that file.
        tags = {response.headers.get(name, "").lstrip("W/").strip('"') for name in ("etag", "x-linked-etag")}
        if any(".." in tag or "\\" in tag or tag.startswith("/") for tag in tags):
            raise _refused(asked, f"the hub gives a file a tag that leads elsewhere, {max(tags)[:80]!r}")
        if not response.is_success:
            waits = [
                each for name in ("retry-after", "ratelimit") for each in WAITS.findall(response.headers.get(name, ""))
            ]
            if any(float(each) > MAX_WAIT_S for each in waits):
                raise _refused(asked, f"the hub asks to wait for longer than {MAX_WAIT_S:g} s")
            _bound(asked, "an answer of the hub's", response, time.monotonic() + MAX_ANSWER_S)

    with _seen_by(check):
        return _fetched(asked, HfApi, hf_hub_download)


@contextmanager
def _seen_by(hook: Callable[[Any], None]) -> Iterator[None]:
    """Show each answer of the hub's to ``hook``, before any of what it says is read.

    The library makes its client anew after a connection that failed, so it is whatever it makes that has the hook.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    factory = _http._GLOBAL_CLIENT_FACTORY  # there is no public way to put back somebody else's

    def made() -> Any:
        client = factory()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks.get("response", []), hook]}
        return client

    set_client_factory(made)
    try:
        yield
    finally:
        set_client_factory(factory)


def _bound(asked: HubModel, what: str, response: Any, ends: float) -> None:
    """Let an answer end that is too long, as it comes or unpacked, or that is not whole at ``ends``."""

    def bounded(chunks: Iterable[bytes]) -> Iterator[bytes]:
        num_bytes = 0
        for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > MAX_ANSWER_BYTES:
                raise _refused(asked, f"{what} has more than {MAX_ANSWER_BYTES:,} bytes")
            if time.monotonic() > ends:
                raise _refused(asked, f"{what} is not there after {MAX_ANSWER_S:g} s")
            yield chunk

    raw, unpacked = response.iter_raw, response.iter_bytes
    response.iter_raw = lambda *args, **kwargs: bounded(raw(*args, **kwargs))
    response.iter_bytes = lambda *args, **kwargs: bounded(unpacked(*args, **kwargs))


def _fetched(asked: HubModel, api: Any, download: Any) -> Path:
    endpoint = os.environ.get("HF_ENDPOINT") or None  # the library's own, unless said
    ends = time.monotonic() + MAX_ANSWER_S
    with _seen_by(lambda response: _bound(asked, "the hub's listing", response, ends)):
        info = api(endpoint=endpoint).model_info(
            asked.name, revision=asked.revision, files_metadata=True, timeout=TIMEOUT_S
        )
    commit, listed = _listed(asked, info)

    def get(file: HubFile) -> Path:
        counting = _counting(asked, file)
        where = {"revision": commit, "cache_dir": cache_folder(), "endpoint": endpoint}
        found = Path(download(asked.name, file.name, **where, tqdm_class=counting))
        if not file.is_in(found):
            if (content := found.resolve()).is_relative_to(asked.folder.resolve()):
                content.unlink()
            found.unlink(missing_ok=True)
            raise _refused(asked, f"{file.name} came damaged, and was removed: run again")
        return found

    wanted = _wanted(asked, listed, get)
    cache_folder().mkdir(parents=True, exist_ok=True)
    num_bytes = sum(file.num_bytes for file in wanted if not (asked.folder / "snapshots" / commit / file.name).exists())
    room = shutil.disk_usage(cache_folder()).free
    if num_bytes > room:
        raise _refused(asked, f"it has {num_bytes:,} bytes, and {cache_folder()} has room for {room:,}")
    for file in wanted:
        get(file)
    if asked.file is None and TOKENIZER not in listed:
        absent = known_absent(asked.at(commit), TOKENIZER)
        absent.parent.mkdir(parents=True, exist_ok=True)
        absent.touch()
    if asked.revision != commit:
        _remember(asked.folder / "refs" / asked.revision, commit)
    return asked.at(commit)


def _counting(asked: HubModel, file: HubFile) -> Any:
    """The library's own bar, which ends a download that is much more than its file: the library takes what comes."""
    from huggingface_hub import utils

    bar: Any = utils.tqdm  # type: ignore[attr-defined]  # it is there in all versions, and has no types

    class Counting(bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._num_bytes = kwargs.get("initial") or 0
            super().__init__(*args, **kwargs)

        def update(self, n: Any = 1) -> Any:
            self._num_bytes += n or 0
            if self._num_bytes > 2 * file.num_bytes + SLACK_BYTES:  # what comes twice or in parts may count twice
                raise _refused(asked, f"{file.name} has {file.num_bytes:,} bytes, and more and more come")
            return super().update(n)

    return Counting


def _listed(asked: HubModel, info: ModelInfo) -> tuple[str, Mapping[str, HubFile]]:
    """The commit that a revision is, and its files."""
    commit, siblings = info.sha or "", info.siblings or []
    if FULL_COMMIT.fullmatch(commit) is None or (FULL_COMMIT.fullmatch(asked.revision) and commit != asked.revision):
        raise _refused(asked, f"the hub calls it commit {commit[:80]!r}")
    if len(siblings) > MAX_FILES:
        raise _refused(asked, f"it has {len(siblings):,} files, at most {MAX_FILES:,} are looked at")
    listed = {}
    for each in siblings:
        sha256 = None if each.lfs is None else each.lfs.sha256
        is_named = (
            isinstance(each.rfilename, str) and len(each.rfilename) <= MAX_NAME and FILE.fullmatch(each.rfilename)
        )
        if is_named and type(each.size) is int and each.size >= 0 and (sha256 or each.blob_id):
            listed[each.rfilename] = HubFile(each.rfilename, each.size, sha256, each.blob_id)
    return commit, listed


def _wanted(asked: HubModel, listed: Mapping[str, HubFile], get: Callable[[HubFile], Path]) -> list[HubFile]:
    """The files to fetch, small ones first. Raises ``ModelUnavailable`` for a model that is not made of such."""
    ggufs = [name for name in listed if name.lower().endswith(".gguf")]
    if asked.file is not None:
        if asked.file not in listed:
            raise _refused(asked, f"it has no such file, but {_some(ggufs)}")
        return [listed[asked.file]]
    if "config.json" not in listed:
        more = f"; of its GGUF files name one, {asked.name}:FILE: {_some(ggufs)}" if ggufs else ""
        raise _refused(asked, f"it has no config.json{more}")
    weights = {SINGLE}
    if INDEX in listed:
        if listed[INDEX].num_bytes > MAX_INDEX_BYTES:
            raise _refused(
                asked, f"{INDEX} has {listed[INDEX].num_bytes:,} bytes, at most {MAX_INDEX_BYTES:,} are read"
            )
        try:
            weights = shards_of(get(listed[INDEX]).read_bytes())
        except ValueError as error:
            raise _refused(asked, f"{INDEX} is not what it should be ({error})") from None
    if absent := sorted(weights - listed.keys()):
        raise _refused(asked, f"it has no {absent[0]}, and no other weights than safetensors are fetched")
    side = [*SIDE_FILES, INDEX] if INDEX in listed else SIDE_FILES
    return [listed[name] for name in (*side, *sorted(weights)) if name in listed]


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN_FILES]) + (", ..." if len(names) > SHOWN_FILES else "") if names else "none"


def _remember(path: Path, commit: str) -> None:
    """Write down which commit a branch or tag is, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".partial-", delete=False) as file:
        file.write(commit)
    os.replace(file.name, path)


def _refused(asked: HubModel, why: str) -> ModelUnavailable:
    return ModelUnavailable(f"{asked} cannot be fetched: {why}", path=asked.folder)


def _reason(error: Exception) -> str:
    """What went wrong, in words of ours where the library has a kind of error for it."""
    from huggingface_hub import errors

    known: tuple[tuple[Any, str], ...] = (
        (errors.GatedRepoError, "access has to be granted first, and HF_TOKEN has to say who asks"),
        (errors.RepositoryNotFoundError, "the hub shows no such model to whoever has no HF_TOKEN for it"),
        (errors.RevisionNotFoundError, "it has no such revision"),
    )
    for kind, sentence in known:
        if isinstance(error, kind):
            return sentence
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    said = str(error).splitlines()[0][:200] if str(error) else ""
    return f"the hub does not answer as it should ({type(error).__name__}{f': {said}' if said else ''})"
