"""A hub on this machine, as far as Hugging Face's library asks it for models: a listing, and files by commit."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

COMMIT, OLDER = "c" * 40, "0" * 40
ERRORS = {
    "org/gated": (403, "GatedRepo"),
    "org/broken": (400, ""),
}


@dataclass
class FakeHub:
    """One model, ``org/name``: its files at each commit, and what was asked."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(
        default_factory=lambda: {"main": COMMIT, "v1": OLDER, COMMIT: COMMIT, OLDER: OLDER}
    )
    lies: dict[str, bytes] = field(default_factory=dict)
    """What comes instead of a file that is listed."""
    tags: dict[str, str] = field(default_factory=dict)
    """What a file is said to be known by, instead of its hash."""
    endless: dict[str, tuple[int, dict[str, str], Iterable[bytes]]] = field(default_factory=dict)
    """The status, headers and parts of an answer to GET that may go on until the caller hangs up, by how its path begins."""
    asked: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                """Nothing."""

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def fetched(self) -> list[str]:
        """The files that were fetched, each once."""
        return sorted({each.partition("/resolve/")[2].partition("/")[2] for each in self.asked if "GET /org" in each})

    def answer(self, handler: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = handler.path.partition("?")[0].lstrip("/")
        self.asked.append(f"{handler.command} /{path}")
        status, headers, content = self._found(path)
        more: dict[str, str] = {}
        chunks: Iterable[bytes] = [content]
        for start, said in self.endless.items():
            if with_body and path.startswith(start):
                status, more, chunks = said
        handler.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content)), **more}.items():
            handler.send_header(name, value)
        handler.end_headers()
        with contextlib.suppress(ConnectionError):
            for chunk in chunks if with_body else ():
                handler.wfile.write(chunk)

    def _found(self, path: str) -> tuple[int, dict[str, str], bytes]:
        listing = path.startswith("api/models/")
        name, _, rest = path.removeprefix("api/models/").partition("/revision/" if listing else "/resolve/")
        if name in ERRORS:
            return ERRORS[name][0], {"X-Error-Code": ERRORS[name][1]}, b"{}"
        if name != "org/name":
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revision, _, file = (rest, "", "") if listing else rest.partition("/")
        if revision not in self.revisions:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        commit = self.revisions[revision]
        if listing:
            siblings = [_entry(each, content) for each, content in self.files.items()]
            made = {"id": name, "sha": commit, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(made).encode()
        if file not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        etag = self.tags.get(file) or hashlib.sha256(self.files[file]).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, self.lies.get(file, self.files[file])


def _entry(name: str, content: bytes) -> dict[str, object]:
    """How the hub lists a file: large ones have an entry ``lfs``."""
    git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git}
    if not name.endswith(".json"):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 100}
    return entry
