"""Callers who ask again as soon as they are answered or refused, ten times as many as there are places."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

NUM_TOKENS = 20


@dataclass
class Seen:
    """What callers saw: whole answers, refusals, whatever is neither, and how long a refusal took."""

    num_whole: int = 0
    num_refused: int = 0
    others: list[str] = field(default_factory=list)
    refusal_s: list[float] = field(default_factory=list)


async def call(port: int, seen: Seen, until: float) -> None:
    """One caller on one connection, which is opened again where the server closes it."""
    body = json.dumps({"prompt": "a", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < until:
        began = time.perf_counter()
        writer.write(head.encode() + b"\r\n\r\n" + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:-2])
        if "content-length" in headers:
            answer = await reader.readexactly(int(headers["content-length"]))
        else:
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += await reader.read(1 << 16) or b"0\r\n\r\n"
        if lines[0].split()[1] == "200":
            is_whole = answer.count(b'"finish_reason":"length"') == 1 and b"data: [DONE]" in answer
            seen.num_whole += is_whole
            seen.others += [] if is_whole else [answer[-300:].decode()]
        elif lines[0].split()[1] == "503" and headers.get("retry-after") and b"queue_full" in answer:
            seen.num_refused += 1
            seen.refusal_s.append(time.perf_counter() - began)
            await asyncio.sleep(0.2)  # all together ask for about ten times what can be served
        else:
            seen.others.append(f"{lines[0]} {answer[:300]!r}")
    writer.close()


async def call_all(port: int, num_callers: int, seconds: float) -> Seen:
    """All of them at once."""
    seen, until = Seen(), time.monotonic() + seconds
    await asyncio.gather(*[call(port, seen, until) for _ in range(num_callers)])
    return seen


def tell(pipe: Connection, port: int, num_callers: int, seconds: float) -> None:
    """In a process of its own: what the callers saw, or why they saw nothing."""
    try:
        pipe.send(asyncio.run(call_all(port, num_callers, seconds)))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
