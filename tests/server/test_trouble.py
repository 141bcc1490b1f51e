"""What goes wrong: bad bodies, bad keys, too much, clients that go away. One sentence, the right status, nothing left."""

import http.client
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from optimized.checkpoint import Checkpoint
from optimized.server.guard import OPEN_PATHS
from optimized.server.limits import MOST, Limits
from optimized.server.serve import Address
from spec.vocabulary import InvalidConfig
from tests.server.conftest import RunningServer, running, slowed, waited_for


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"prompt": "a", "foo": 1}, "unsupported_parameter", "foo"),
        ({"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
        ({"prompt": "a", "best_of": 3}, "unsupported_parameter", "best_of"),
        ({"prompt": "a", "echo": True, "stream": True}, "unsupported_parameter", "echo"),
        ({}, "missing_parameter", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": [""] * 65}, "too_many_prompts", "prompt"),
        ({"prompt": ["a"] * 64, "n": 3}, "too_many_choices", "n"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": [300]}, "invalid_value", "prompt"),
        ({"prompt": [-1]}, "invalid_value", "prompt"),
        ({"prompt": "a", "n": 10**9}, "invalid_value", "n"),
        ({"prompt": "a", "n": 60}, "invalid_value", "n"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**6}, "context_length_exceeded", "max_tokens"),
        ({"prompt": "a", "min_tokens": 99, "max_tokens": 3}, "invalid_value", "min_tokens"),
        ({"prompt": "a", "temperature": -1}, "invalid_value", "temperature"),
        ({"prompt": "a", "logprobs": 21}, "invalid_value", "logprobs"),
        ({"prompt": "a", "stop_token_ids": [999]}, "invalid_value", "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {"AI": -100}}, "invalid_value", "logit_bias"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "invalid_value", "logit_bias"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "invalid_value", "response_format"),
    ],
)
def test_what_makes_no_sense_is_400_with_the_field_and_changes_nothing(
    server: RunningServer, body: dict[str, object], code: str, param: str
) -> None:
    for more in ({}, {"stream": True}) if "stream_options" not in body else ({},):
        answer = server.ask("POST", "/v1/completions", {**body, **more})
        error = answer.json["error"]
        assert (answer.status, error["code"], error["param"]) == (400, code, param), error
        assert error["type"] == "invalid_request_error"
        assert answer.headers["x-should-retry"] == "false"
        assert answer.headers["x-request-id"]
    assert server.engine.health.num_unfinished == 0


def test_numbers_that_json_does_not_have_are_refused(server: RunningServer) -> None:
    for text in (
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "top_p": Infinity}',
        b"{",
        b"[1]",
        b"\xff\xfe",
    ):
        assert server.ask("POST", "/v1/completions", text).status == 400
    deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert server.ask("POST", "/v1/completions", deep).status == 400


def test_other_errors_have_their_status(server: RunningServer) -> None:
    assert server.ask("GET", "/nothing").json["error"]["code"] == "not_found"
    assert server.ask("GET", "/v1/completions").json["error"]["code"] == "method_not_allowed"
    text = {"content-type": "text/plain"}
    assert server.ask("POST", "/v1/completions", b"{}", text).status == 415
    assert server.ask("POST", "/v1/completions", b'"' + b"x" * (5 << 20) + b'"').status == 413
    assert server.ask("GET", "/health", headers={f"x-{i}": "1" for i in range(101)}).status == 431
    assert (
        server.chat(tools=[{"type": "function", "function": {"name": "f"}}]).json["error"]["code"]
        == "unsupported_parameter"
    )
    assert server.chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]).status == 400


def test_every_route_but_two_wants_a_key(tiny: Checkpoint) -> None:
    server = running(tiny, keys=("secret", "another"))
    try:
        paths = server.ask("GET", "/openapi.json", headers={"authorization": "Bearer another"}).json["paths"]
        assert len(paths) >= 9
        for path in (*paths, "/openapi.json", "/nothing", "/v1/completions?x=/health"):
            for method in ("GET", "POST"):
                expected = {200, 405, 415} if path in OPEN_PATHS else {401}
                assert server.ask(method, path.replace("{model_id}", "tiny")).status in expected, path
        for header in ("Bearer wrong", "Bearer ", "Basic secret", "secret", "Bearer s\xe9cret"):
            assert server.ask("GET", "/v1/models", headers={"authorization": header}).status == 401
        for host in ("a/?x=", "evil/#", "/health"):
            assert server.ask("GET", "/v1/models", headers={"host": host}).status in (400, 401)
        assert server.ask("GET", "/v1/models", headers={"authorization": "Bearer secret"}).status == 200
    finally:
        server.stop()


def test_beyond_this_machine_only_with_a_key_or_a_word() -> None:
    with pytest.raises(InvalidConfig, match="host is '0.0.0.0'"):
        Address("0.0.0.0")
    assert Address("0.0.0.0", keys=("k",)).port == 8000
    assert Address("::1").host == "::1"
    assert "secret" not in repr(Address(keys=("secret",)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_nothing(tiny: Checkpoint, stream: bool) -> None:
    server = running(tiny, enable_prefix_caching=False)
    try:
        free = server.free_blocks()
        held = slowed(server)
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        body = {"prompt": "hello", "max_tokens": 50, "ignore_eos": True, "stream": stream, "n": 2}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        assert waited_for(lambda: server.engine.health.num_unfinished == 1 and server.free_blocks() < free)
        if stream:
            connection.getresponse().read(20)
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        assert waited_for(lambda: server.engine.health.num_unfinished == 0)
        held.clear()
        assert server.complete(max_tokens=2).status == 200
        assert waited_for(lambda: server.free_blocks() == free)
    finally:
        server.stop()


def test_a_full_queue_says_so_and_when_to_come_again(tiny: Checkpoint) -> None:
    server = running(tiny, Limits(max_num_queued_reqs=1))
    try:
        pause = slowed(server)
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        body = {"prompt": "hello", "max_tokens": 50, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        refused = server.complete(max_tokens=1)
        assert (refused.status, refused.json["error"]["code"]) == (503, "queue_full")
        assert refused.headers["retry-after"] == "1"
        pause.clear()
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert server.complete(max_tokens=1).status == 200
        assert "vllm:admission_rejections_total" in server.ask("GET", "/metrics").body.decode()
    finally:
        server.stop()


def test_whose_text_is_still_read_has_a_place_in_the_queue(tiny: Checkpoint) -> None:
    """A conversation is read before it is a request: callers of long ones waited in a line of their own, without an end."""
    server = running(tiny, Limits(max_num_queued_reqs=1))
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    is_free, read = threading.Event(), server.engine.llm.chat_prompt

    def held(*arguments: Any) -> Any:
        is_free.wait(60)
        return read(*arguments)

    try:
        server.engine.llm.chat_prompt = held  # type: ignore[method-assign]
        with ThreadPoolExecutor() as pool:
            first = pool.submit(server.ask, "POST", "/v1/chat/completions", chat)
            assert waited_for(lambda: server.engine.num_reading == 1)
            refused = server.ask("POST", "/v1/chat/completions", chat)
            is_free.set()
            assert first.result().status == 200
        assert (refused.status, refused.json["error"]["code"]) == (503, "queue_full")
        assert server.engine.num_reading == 0
    finally:
        is_free.set()
        server.stop()


def test_a_server_that_drains_is_healthy_and_not_ready(tiny: Checkpoint) -> None:
    server = running(tiny)
    try:
        assert server.ask("GET", "/ready").status == 200
        server.service.is_draining = True
        assert server.ask("GET", "/ready").status == 503
        assert server.ask("GET", "/health").status == 200
        assert server.complete().json["error"]["code"] == "draining"
    finally:
        server.stop()


def test_a_dead_engine_is_seen(tiny: Checkpoint) -> None:
    server = running(tiny)
    try:

        def broken() -> Any:
            raise RuntimeError("the device at 0xdeadbeef is gone")

        server.engine.llm.step = broken  # type: ignore[method-assign]
        answer = server.complete()
        assert (answer.status, answer.json["error"]["code"]) == (503, "engine_stopped")
        assert "deadbeef" not in answer.body.decode()
        assert server.ask("GET", "/health").status == 503
    finally:
        server.stop()


@pytest.mark.slow
def test_the_schema_says_what_is_answered(server: RunningServer) -> None:
    schema = server.ask("GET", "/openapi.json").json
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert {"200", "400", "401", "503"} <= operation["responses"].keys(), path
            assert "422" not in operation["responses"]
    assert "text/event-stream" in schema["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]


def test_the_page_names_every_code_and_every_limit() -> None:
    root = Path(__file__).parent.parent.parent
    page = (root / "docs" / "serving.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in (root / "optimized" / "server").glob("*.py")]
    codes = {code for source in sources for code in re.findall(r'RequestError\(\s*\d+, "(\w+)"', source)}
    codes |= {"context_length_exceeded", "unsupported_parameter", "not_found", "method_not_allowed"}
    assert len(codes) > 15
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []
    for each in fields(Limits):
        most = each.metadata["most"]
        text = f"{each.metadata['help'].removesuffix('.')}{'' if most == MOST else f'. At most {most}'}"
        assert f"| `--{each.name.replace('_', '-')}` | {each.default} | {text} |" in page.replace(
            "`--trace` that", "--trace that"
        ), each.name
