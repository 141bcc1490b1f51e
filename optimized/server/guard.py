"""What happens to every request before anything else: an id, the key, limits on its size and number. Pure ASGI."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from optimized.server.body import Message, Receive, read_body, replayed, too_large
from optimized.server.errors import ErrorBody, RequestError, told
from optimized.server.limits import Limits
from optimized.server.readers import Readers

Scope: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("kvproof.server")

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What anybody may ask, key or not. Everything else is denied without a key, if there are keys."""


TO_THE_ENGINE = frozenset({"/v1/completions", "/v1/chat/completions"})

UNLOGGED = OPEN_PATHS | {"/metrics", "/ping", "/load"}
"""What machines ask all the time."""


class Guard:
    """Stands in front of the application. Routes do not know of keys, so none can forget to ask for one."""

    def __init__(
        self,
        app: App,
        limits: Limits,
        keys: Iterable[str] = (),
        demand_room: Callable[[], None] = lambda: None,
        open_paths: frozenset[str] = OPEN_PATHS,
        root_path: str = "",
        readers: Readers | None = None,
    ) -> None:
        """``demand_room`` raises ``RequestError`` if there is no room for one more request to the engine; ``root_path`` is
        taken from the front of every path that has it, before anything else looks at it."""
        self.app = app
        self._open_paths = open_paths
        self._root_path = root_path
        self._demand_room = demand_room
        self.limits = limits
        self.readers = readers or Readers()
        """Those to whom it is said, for whoever makes their connections."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._num_of_key: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._root_path and scope["path"].startswith(f"{self._root_path}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root_path)}
        request_id = uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"], state["key"] = request_id, b""

        started = time.monotonic()
        is_head, inner = scope["method"] == "HEAD", scope
        if is_head:  # what GET would say, but for the body
            inner = {**scope, "method": "GET"}

        async def named_send(message: Message) -> None:
            begins = message["type"] == "http.response.start"
            if begins:
                state["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            if begins or not is_head:
                await send(message)
            if begins and is_head:
                await send({"type": "http.response.body", "body": b""})

        try:
            state["key"] = key = self._check(scope) or b""
            if scope["method"] != "POST":
                await self.app(inner, receive, named_send)
                return
            self._num_of_key[key] += 1
            try:
                body = await read_body(receive, self.limits)
                if body is not None:
                    await self.app(scope, replayed(body, receive), named_send)
            finally:
                self._num_of_key[key] -= 1
        except RequestError as error:
            await answer(error, named_send)
        except Exception as error:
            if "status" in state:  # it has begun, and can not be taken back
                raise
            logger.exception("request %s failed", request_id)
            await answer(told(error), named_send)
        finally:
            if scope["path"] not in UNLOGGED:
                _log(scope, time.monotonic() - started)

    def _check(self, scope: Scope) -> bytes | None:
        """The digest of the key that it came with. Raises ``RequestError``."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if len(headers) > self.limits.max_header_count:
            limit = self.limits.max_header_count
            raise RequestError(431, "too_many_headers", f"there are {len(headers)} headers, at most {limit} are read")
        names = {name for name, _ in headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            # Somebody before us may have read the other one, and what is a body to us may be a request to them.
            error = RequestError(400, "invalid_value", "a body has a length or comes in chunks, this one says both")
            error.ends_connection = True
            raise error
        # The path that the router uses, not one that is made from the Host header.
        key = self._key_of(headers)
        if self._digests and scope["path"] not in self._open_paths and key is None:
            raise RequestError(401, "invalid_api_key", "no valid key: send Authorization: Bearer KEY")
        given = [value for name, value in headers if name == b"content-length"]
        if given and given[0].isdigit() and int(given[0]) > self.limits.max_body_bytes:
            raise too_large(self.limits)
        if scope["method"] == "POST":
            most = self.limits.max_per_key
            if most and key is not None and self._num_of_key[key] >= most:
                raise RequestError(429, "too_many_requests", f"this key has {most} requests at once (max_per_key)")
            kinds = [value.split(b";")[0].strip().lower() for name, value in headers if name == b"content-type"]
            if kinds != [b"application/json"]:
                raise RequestError(
                    415, "unsupported_media_type", "the body must have the content type application/json"
                )
            if scope["path"] in TO_THE_ENGINE:
                self._demand_room()  # before its body is read: who is refused is refused soon, whatever he sends
        return key

    def _key_of(self, headers: list[tuple[bytes, bytes]]) -> bytes | None:
        """The digest of the key that is given, if it is one of ours. Every key is compared, whatever the first ones say."""
        found = None
        for name, value in headers:
            kind, _, key = value.partition(b" ")
            if name == b"authorization" and kind.lower() in (b"bearer", b"basic"):
                said = key.strip() if kind.lower() == b"bearer" else _password(key)
                digest = hashlib.sha256(said).digest()
                for known in self._digests:
                    found = digest if hmac.compare_digest(digest, known) else found
        return found


def _log(scope: Scope, seconds: float) -> None:
    """A line for each request, with nothing in it that its caller has written but what can not break a line."""
    state, path = scope["state"], scope["path"].encode("unicode_escape").decode()[:100]
    said = {
        "request_id": state["request_id"],
        "method": scope["method"][:20],
        "path": path,
        "seconds": round(seconds, 4),
    }
    said["status"] = state.get("status", 499)
    text = "%(request_id)s %(method)s %(path)s: %(status)d in %(seconds).3f s"
    logger.info(text, said, extra=said)


def _password(encoded: bytes) -> bytes:
    """The key as a browser sends it that has asked for it: as the password of any user."""
    try:
        return base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


async def answer(error: RequestError, send: Send) -> None:
    """Send an error as a whole response."""
    body = ErrorBody(error=error.detail).model_dump_json().encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    if error.ends_connection:
        headers["connection"] = "close"
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
