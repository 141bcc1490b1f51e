"""A caller of a server that speaks OpenAI's completions: what it asks, and what it is shown, nothing else.

``POST {url}/completions``, whole or streamed as server-sent events; ``GET {url}/models``.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from spec.conformance.text import Usage

Json: TypeAlias = Mapping[str, Any]  # Any: what a server sends

DONE = "[DONE]"


class ServerFault(Exception):
    """A server that does not answer, or whose answer is none. That is no broken rule."""


class NotOffered(Exception):
    """The server does not have what would be judged."""


@dataclass(frozen=True)
class TokenLogprobs:
    """A token of an answer with its log-probability and those of the likeliest, as the server reports them."""

    token: str
    logprob: float
    top: Mapping[str, float]

    @property
    def margin(self) -> float:
        """By how much the likeliest token is likelier than the next, infinite if only one is reported."""
        first, *rest = sorted(self.top.values(), reverse=True) or [0.0]
        return first - rest[0] if rest else float("inf")


@dataclass(frozen=True)
class Choice:
    """One answer: its text, the pieces in which it came, why it ended, and its tokens, if they were asked for."""

    text: str
    pieces: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    offsets: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Reply:
    """All answers to a request, by their index, and what it used."""

    choices: Mapping[int, Choice]
    usage: Usage | None
    total_tokens: int | None = None
    is_done: bool = True  # a stream ended with ``data: [DONE]``


@dataclass(frozen=True)
class Refusal:
    """The server turned a request down."""

    status: int
    body: str


class Server:
    """A server, by the address below which its endpoints lie. Each call has a connection of its own."""

    def __init__(self, url: str, *, timeout_s: float = 60.0, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._key = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.timeout_s = timeout_s
        self._model: str | None = None
        self._has_logprobs: bool | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether it takes the field ``logprobs``."""
        if self._has_logprobs is None:
            self._has_logprobs = isinstance(self.offer("a", max_tokens=1, logprobs=1), Reply)
        return self._has_logprobs

    @property
    def model(self) -> str:
        """The first model that the server offers."""
        if self._model is None:
            with self._ask("GET", "/models") as answer:
                models = _json(answer.read())
            try:
                self._model = str(models["data"][0]["id"])
            except (LookupError, TypeError) as error:
                raise ServerFault(f"GET {self.url}/models names no model: {json.dumps(models)[:200]}") from error
        return self._model

    def complete(self, prompt: object, **fields: object) -> Reply:
        """The whole answer at once. Raises ``ServerFault`` for a refusal too."""
        reply = self.offer(prompt, **fields)
        if isinstance(reply, Refusal):
            raise ServerFault(f"{self.url} answers {reply.status} to a legal request: {reply.body[:200]}")
        return reply

    def extra(self, prompt: object, **fields: object) -> Reply:
        """An answer to a request with something that not every server has. Raises ``NotOffered`` if it is turned down."""
        reply = self.offer(prompt, **fields)
        if isinstance(reply, Refusal):
            raise NotOffered(f"{self.url} answers {reply.status}: {reply.body[:200]}")
        return reply

    def offer(self, prompt: object, **fields: object) -> Reply | Refusal:
        """A request that may be turned down."""
        with self._ask("POST", "/completions", self._body(prompt, fields)) as answer:
            text = answer.read()
            if answer.status >= 500:
                raise ServerFault(f"{self.url} answers {answer.status}: {text[:200]!r}")
            if answer.status != 200:
                return Refusal(answer.status, text.decode(errors="replace"))
        return _reply([_json(text)], is_done=True)

    def stream(self, prompt: object, **fields: object) -> Reply:
        """The same in pieces."""
        fields = {**fields, "stream": True, "stream_options": {"include_usage": True}}
        with self._ask("POST", "/completions", self._body(prompt, fields)) as answer:
            if answer.status != 200:
                raise ServerFault(f"{self.url} answers {answer.status} to a stream: {answer.read()[:200]!r}")
            data = list(_events(answer))
        return _reply([_json(each) for each in data if each != DONE], is_done=DONE in data[-1:])

    def leave(self, prompt: object, **fields: object) -> None:
        """Asks for a stream and goes away after its first piece."""
        connection = self._connection()
        try:
            connection.request(
                "POST", self._path("/completions"), self._body(prompt, {**fields, "stream": True}), self._key | JSON
            )
            next(_events(connection.getresponse()), None)
        except (OSError, HTTPException) as error:
            raise ServerFault(f"{self.url} does not answer: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _body(self, prompt: object, fields: Json) -> bytes:
        return json.dumps({"model": self.model, "prompt": prompt, **fields}).encode()

    def _path(self, path: str) -> str:
        return urlsplit(self.url).path + path

    def _connection(self) -> HTTPConnection:
        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        return kind(parts.netloc, timeout=self.timeout_s)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> "_Answer":
        connection = self._connection()
        try:
            connection.request(method, self._path(path), body, self._key | JSON if body else self._key)
            return _Answer(self.url, connection, connection.getresponse())
        except (OSError, HTTPException) as error:
            connection.close()
            raise ServerFault(f"{self.url} does not answer: {type(error).__name__}: {error}") from error


JSON = {"Content-Type": "application/json"}


class _Answer:
    """An answer that closes its connection, and whose broken end is the server's fault."""

    def __init__(self, url: str, connection: HTTPConnection, response: HTTPResponse) -> None:
        self.url, self.connection, self.response = url, connection, response

    def __enter__(self) -> HTTPResponse:
        return self.response

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.connection.close()
        if isinstance(error, OSError | HTTPException):
            raise ServerFault(f"{self.url} breaks off: {type(error).__name__}: {error}") from error


def _events(response: HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event."""
    for line in response:
        if line.startswith(b"data:"):
            yield line[5:].decode().strip()


def _json(text: str | bytes) -> Json:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ServerFault(f"this is no JSON: {text[:200]!r}") from error
    if not isinstance(found, dict):
        raise ServerFault(f"this is no JSON object: {text[:200]!r}")
    return found


def _reply(chunks: list[Json], *, is_done: bool) -> Reply:
    """The chunks of a stream, or the one of a whole answer, put together."""
    pieces: dict[int, list[Json]] = {}
    usage, total = None, None
    try:
        for chunk in chunks:
            for choice in chunk.get("choices") or ():
                pieces.setdefault(int(choice["index"]), []).append(choice)
            if chunk.get("usage"):
                counts = chunk["usage"]
                usage = Usage(int(counts["prompt_tokens"]), int(counts.get("completion_tokens", 0)))
                total = int(counts["total_tokens"])
        return Reply({i: _choice(parts) for i, parts in sorted(pieces.items())}, usage, total, is_done)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        shown = json.dumps(chunks)[:200]
        raise ServerFault(f"an answer lacks what a completion has: {type(error).__name__} {error}: {shown}") from error


def _choice(parts: list[Json]) -> Choice:
    texts = tuple(str(part["text"]) for part in parts)
    given = [part["logprobs"] for part in parts if part.get("logprobs")]
    logprobs = [
        TokenLogprobs(str(token), float(logprob), top or {})
        for each in given
        for token, logprob, top in zip(
            each["tokens"],
            each["token_logprobs"],
            each.get("top_logprobs") or [{}] * len(each["tokens"]),
            strict=True,
        )
    ]
    offsets = [int(at) for each in given for at in each.get("text_offset") or ()]
    reasons = tuple(str(part["finish_reason"]) for part in parts if part.get("finish_reason"))
    return Choice("".join(texts), texts, reasons, tuple(logprobs) if given else None, tuple(offsets) if given else None)
