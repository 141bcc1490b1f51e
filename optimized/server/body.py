"""The body of a request, read whole before anybody looks at it: in time, not too long, not too deep, and JSON."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import msgspec

from optimized.fault_points import FaultPoint, reach
from optimized.server.errors import RequestError
from optimized.server.limits import Limits

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A string of JSON, or what is there of one that has no end: so no start is tried in vain, and all take linear time."""

NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
ONE_KIND = bytes.maketrans(b"{}", b"[]")


async def read_body(receive: Receive, limits: Limits) -> bytes | None:
    """The body; None if its client goes away before its end. Raises ``RequestError``."""
    reach(FaultPoint.READ_BODY)
    parts, total = [], 0
    try:
        async with asyncio.timeout(limits.body_timeout):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return None
                parts.append(message.get("body", b""))
                total += len(parts[-1])
                if total > limits.max_body_bytes:
                    raise too_large(limits)
                if not message.get("more_body"):
                    break
    except TimeoutError:
        most = limits.body_timeout
        raise RequestError(408, "timeout", f"the body did not come within {most} s (body_timeout)") from None
    body = b"".join(parts)
    if is_deeper(body, limits.max_json_depth):
        limit = f"deeper than {limits.max_json_depth} brackets (max_json_depth)"
        raise RequestError(400, "invalid_json", f"the body is nested {limit}")
    if body and not is_json(body):
        raise RequestError(400, "invalid_json", "the body is not valid JSON, which is Unicode in UTF-8")
    return body


def too_large(limits: Limits) -> RequestError:
    """A body that is not read to its end."""
    return RequestError(413, "request_too_large", f"the body is larger than {limits.max_body_bytes:,} bytes")


def is_json(body: bytes) -> bool:
    """Whether it is JSON and nothing else. Python's own parser, which reads it next, also takes UTF-16 and UTF-32, in which
    brackets can hide from whoever counts them, numbers that are none, and halves of characters.
    """
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError):
        return False
    return True


def is_deeper(body: bytes, depth: int) -> bool:
    """Whether brackets are inside each other more than ``depth`` times. A parser that recurses must not see such a body.

    Of text that is no JSON at all it may say either. O(bytes times depth), by whole passes over the bytes.
    """
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    left = STRING.sub(b"", body).translate(ONE_KIND, NO_BRACKETS)
    for passed in range(depth):
        inner = left.replace(b"[]", b"")
        if len(inner) == len(left):  # nothing closes what is open here
            return passed + left.count(b"[") > depth
        left = inner
    return bool(left)


def replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, and then what else there is to hear of the client."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again
