"""What happens to every request before anything else: an id, the key, and limits on its size. Pure ASGI."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from optimized.server.errors import ErrorBody, RequestError
from optimized.server.limits import Limits

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What anybody may ask, key or not. Everything else is denied without a key, if there are keys."""


class Guard:
    """Stands in front of the application. Routes do not know of keys, so none can forget to ask for one."""

    def __init__(self, app: App, limits: Limits, keys: Iterable[str] = ()) -> None:
        self.app = app
        self.limits = limits
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, _bounded(receive, self.limits.max_body_bytes), named_send)
        except RequestError as error:
            await answer(error, named_send)

    def _check(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if len(headers) > self.limits.max_header_count:
            limit = self.limits.max_header_count
            raise RequestError(431, "too_many_headers", f"there are {len(headers)} headers, at most {limit} are read")
        # The path that the router uses, not one that is made from the Host header.
        if self._digests and scope["path"] not in OPEN_PATHS and not self._is_known(headers):
            raise RequestError(401, "invalid_api_key", "no valid key: send Authorization: Bearer KEY")
        given = [value for name, value in headers if name == b"content-length"]
        if given and given[0].isdigit() and int(given[0]) > self.limits.max_body_bytes:
            raise _too_large(self.limits.max_body_bytes)
        if scope["method"] == "POST":
            kinds = [value.split(b";")[0].strip().lower() for name, value in headers if name == b"content-type"]
            if kinds != [b"application/json"]:
                raise RequestError(
                    415, "unsupported_media_type", "the body must have the content type application/json"
                )

    def _is_known(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether a key of ours is given. Every key is compared, whatever the first ones say."""
        found = False
        for name, value in headers:
            kind, _, key = value.partition(b" ")
            if name == b"authorization" and kind.lower() == b"bearer":
                digest = hashlib.sha256(key.strip()).digest()
                for known in self._digests:
                    found |= hmac.compare_digest(digest, known)
        return found


def _bounded(receive: Receive, most: int) -> Receive:
    """A body that ends with an error where it becomes too long, whatever its length was said to be."""
    total = 0

    async def bounded_receive() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > most:
            raise _too_large(most)
        return message

    return bounded_receive


def _too_large(most: int) -> RequestError:
    return RequestError(413, "request_too_large", f"the body is larger than {most:,} bytes")


async def answer(error: RequestError, send: Send) -> None:
    """Send an error as a whole response."""
    body = ErrorBody(error=error.detail).model_dump_json().encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
