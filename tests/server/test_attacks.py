"""What somebody sends who wants to do harm: each is told no in a sentence, at once, and others notice nothing."""

import json
import socket
import threading
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError

from optimized.async_llm import LONG_TEXT
from optimized.checkpoint import Checkpoint
from optimized.server.body import is_deeper, is_json
from optimized.server.requests import MOST_ERRORS, ChatRequest, CompletionRequest, DetokenizeRequest
from tests.server.conftest import JSON, Answer, RunningServer, running

HIDDEN = '{"prompt": "a", "metadata": {"\u2241": ' + "[" * 100 + "]" * 100 + "}}"
"""The low byte of this sign is that of a quotation mark: in UTF-16, a string seems to begin."""


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "\\udfff": 1}',
        b'{"prompt": "a", "max_tokens": 1, "metadata": {"a": NaN}}',
        b'{"prompt": "a", "max_tokens": 1, "metadata": {"a": -Infinity}}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a"} {}',
        b"\xef\xbb\xbf{}",
        json.dumps({"prompt": "a"}).encode("utf-16"),
        json.dumps({"prompt": "a"}).encode("utf-16-le"),
        json.dumps({"prompt": "a"}).encode("utf-32-be"),
        HIDDEN.encode("utf-16-le"),
    ],
)
def test_what_is_not_json_in_utf_8_is_refused_before_it_is_read(server: RunningServer, body: bytes) -> None:
    answer = server.ask("POST", "/v1/completions", body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json")


def test_brackets_can_not_hide_in_another_encoding() -> None:
    assert not is_deeper(HIDDEN.encode("utf-16-le"), 64)  # that it is not what it seems is another one's business
    assert not is_json(HIDDEN.encode("utf-16-le"))
    assert is_deeper(HIDDEN.encode(), 64)
    assert is_json(json.dumps({"a": "\U0001f600 \u0000"}).encode())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": "a", "stop": [1] * 100_000}),
        (CompletionRequest, {"prompt": [1.5] * 100_000}),
        (CompletionRequest, {"prompt": [[None] * 100_000]}),
        (CompletionRequest, {"prompt": [{}] * 100_000}),
        (CompletionRequest, {"prompt": "a", "bad_words": [1] * 100_000}),
        (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * 100_000}}),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(100_000)), "x")}),
        (CompletionRequest, {"prompt": "a", **dict.fromkeys(map(str, range(100_000)), 1)}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 100_000}]}),
        (DetokenizeRequest, {"tokens": ["x"] * 100_000}),
    ],
)
def test_a_hundred_thousand_wrong_things_are_not_listed(kind: type[BaseModel], body: dict[str, object]) -> None:
    """To describe them all held up everybody for a minute."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    assert raised.value.error_count() <= MOST_ERRORS


def test_a_few_wrong_things_are_told_by_the_first_ones_name(server: RunningServer) -> None:
    wrong = server.complete(temperature=-1, top_p=7)
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "temperature")
    many = server.complete(**{f"x{i}": 1 for i in range(MOST_ERRORS + 1)})
    assert (many.status, many.json["error"]["code"]) == (400, "invalid_value")
    assert f"{MOST_ERRORS + 1} things are wrong with it" in many.json["error"]["message"]


def test_a_name_is_not_said_back_at_full_length(server: RunningServer) -> None:
    answer = server.complete(**{"x" * 100_000: 1})
    assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_parameter")
    assert len(answer.body) < 1000


def said(server: RunningServer, request: bytes) -> bytes:
    """Everything that is answered until the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(request)
        found = b""
        while more := connection.recv(1 << 16):
            found += more
        return found


def test_a_body_with_two_lengths_is_refused_and_nothing_after_it_is_believed(server: RunningServer) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    inner = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
    answer = said(server, head + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + inner)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"this one says both" in answer
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_head_is_answered_like_a_get_without_its_body(server: RunningServer) -> None:
    for path in ("/health", "/v1/models", "/nowhere"):
        head, whole = (server.ask(method, path) for method in ("HEAD", "GET"))
        assert (head.status, head.body) == (whole.status, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert server.ask("HEAD", "/v1/completions").status == 405


def test_a_method_that_is_not_allowed_is_told_which_is(server: RunningServer) -> None:
    for method, path, allowed in (
        ("OPTIONS", "/health", "GET"),
        ("GET", "/v1/completions", "POST"),
        ("FOO", "/tokenize", "POST"),
    ):
        answer = server.ask(method, path)
        assert (answer.status, answer.headers["allow"]) == (405, allowed)


def test_nobody_is_sent_elsewhere_by_the_host_that_he_names(server: RunningServer) -> None:
    for path in ("/tokenize/", "/health/", "//v1/models", "/v1/completions/"):
        answer = server.ask("GET", path, headers={"host": "evil.example"})
        assert (answer.status, "location" in answer.headers) == (404, False)


@pytest.fixture(scope="module")
def locked(tiny: Checkpoint) -> Iterator[RunningServer]:
    started = running(tiny, keys=("secret",))
    yield started
    started.stop()


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1/../metrics",
        "/health/../metrics",
        "/health%2f..%2fmetrics",
        "/%6detrics",
        "/health/",
        "/health;/metrics",
        "http://evil.example/metrics",
        "/ready%00",
        "/HEALTH",
    ],
)
def test_no_way_of_writing_a_path_leads_around_the_key(locked: RunningServer, path: str) -> None:
    answer: Answer = locked.ask("GET", path)
    assert answer.status == 401
    assert locked.ask("HEAD", path).status == 401


def test_requests_in_a_row_are_answered_in_their_order(server: RunningServer) -> None:
    body = b'{"prompt": "a"}'
    post = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    last = b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    answer = said(server, post + body + b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" + last)
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.index(b'"tokens"') < answer.index(b'"status"') < answer.index(b'"version"')


def test_nobody_waits_for_a_text_of_megabytes_that_somebody_else_sent(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, gate, is_reading = server.engine.llm, threading.Event(), threading.Event()
    encode = llm.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > LONG_TEXT:
            is_reading.set()
            gate.wait()
        return encode(text, add_special_tokens)

    monkeypatch.setattr(llm, "encode", slow)
    long = "a" * (LONG_TEXT + 1)
    seen: list[int] = []
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/tokenize", {"prompt": long}),
        ("/v1/completions", {"prompt": long}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
    ]
    callers = [
        threading.Thread(target=lambda each=each: seen.append(server.ask("POST", *each).status)) for each in bodies
    ]
    try:
        for caller in callers:
            caller.start()
        assert is_reading.wait(20)
        assert server.complete(max_tokens=1).status == 200
        assert server.chat(max_tokens=1).status == 200
        assert server.ask("POST", "/tokenize", {"prompt": "a"}).status == 200
    finally:
        gate.set()
    for caller in callers:
        caller.join()
    assert sorted(seen) == [200, 400, 400]


def test_an_old_client_gets_a_stream_without_chunks(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True, "stream": True}).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in {**JSON, "content-length": len(body)}.items())
    answer = said(server, b"POST /v1/completions HTTP/1.0\r\n" + head.encode() + b"\r\n" + body)
    head_of, _, stream = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head_of.lower()
    assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")
