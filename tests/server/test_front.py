"""How a server shows itself: behind a proxy, on a socket, over TLS, in a log; and what its flags come to."""

import asyncio
import json
import logging
import resource
import signal
import socket
import ssl
import threading
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner

from optimized import LLM
from optimized.checkpoint import Checkpoint
from optimized.cli import app
from optimized.cli.settings import settings_of
from optimized.engine_thread import EngineStopped
from optimized.server import serve
from optimized.server.app import make_app
from optimized.server.errors import RequestError
from optimized.server.front import Front
from optimized.server.guard import Guard
from optimized.server.limits import Limits
from optimized.server.request_log import brief
from optimized.server.serve import Address, allow_open_files, bound_handshakes, make_engine, uvicorn_config
from optimized.server.service import begun_late
from optimized.server.stream import DONE, KEEP_ALIVE, kept_alive
from spec.vocabulary import InvalidConfig
from tests.server.conftest import held, running, waited_for

CERTIFICATE = str(Path(__file__).with_name("localhost.pem"))
"""A certificate for localhost, signed by itself, and its key: for these tests only."""

OF_VLLM = [
    "host",
    "port",
    "uds",
    "root-path",
    "api-key",
    "served-model-name",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "block-size",
    "num-gpu-blocks-override",
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "kv-cache-dtype",
    "enable-prefix-caching",
    "prefix-caching-hash-algo",
    "enable-chunked-prefill",
    "scheduling-policy",
    "seed",
    "dtype",
    "tensor-parallel-size",
    "tokenizer",
    "revision",
    "chat-template",
    "max-logprobs",
    "max-num-queued-reqs",
    "max-num-queued-tokens",
    "shutdown-timeout",
    "sse-keep-alive-interval",
    "enable-request-id-headers",
    "disable-fastapi-docs",
    "enable-log-requests",
    "max-log-len",
    "ssl-keyfile",
    "ssl-certfile",
    "ssl-ca-certs",
    "ssl-cert-reqs",
    "config",
    "kv-cache-metrics",
    "kv-cache-metrics-sample",
]
"""Flags that the server takes under vLLM's names."""


def test_the_flags_of_vllm_are_there_and_the_page_names_every_flag() -> None:
    found = {each.name for each in settings_of(app, "serve", [])} - {"model"}
    assert [name for name in OF_VLLM if name not in found] == []
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [name for name in found if f"`--{name}`" not in page and f"--{name} " not in page] == []


def test_the_choices_of_a_front_are_flags_of_their_names() -> None:
    found = {each.name: each.value for each in settings_of(app, "serve", [])}
    choices = fields(Front)
    for each in choices[[choice.name for choice in choices].index("root_path") :]:
        assert found[each.name.replace("_", "-")] == str(each.default), each.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--prefix-caching-hash-algo", "xxhash"), "prefix_caching_hash_algo is 'xxhash', it must be sha256"),
        (("--no-enable-chunked-prefill",), "enable_chunked_prefill is False, it must be True"),
        (("--tensor-parallel-size", "2"), "tensor_parallel_size is 2, it must be 1"),
        (("--root-path", "api"), "root_path is 'api'"),
        (("--root-path", "/api/"), "root_path is '/api/'"),
        (("--sse-keep-alive-interval", "-1"), "sse_keep_alive_interval is -1.0"),
        (("--max-log-len", "-1"), "max_log_len is -1"),
        (("--kv-cache-metrics", "--kv-cache-metrics-sample", "2"), "kv_cache_metrics_sample is 2.0"),
        (("--ssl-certfile", CERTIFICATE), "ssl_keyfile is None"),
        (("--ssl-certfile", "no", "--ssl-keyfile", "no"), "ssl_keyfile is 'no', it must be a file"),
        (("--ssl-ca-certs", CERTIFICATE), "ssl_ca_certs is"),
        (("--ssl-cert-reqs", "3"), "ssl_cert_reqs is 3"),
        (("--ssl-cert-reqs", "2", "--ssl-certfile", CERTIFICATE, "--ssl-keyfile", CERTIFICATE), "ssl_cert_reqs is 2"),
        (("--uds", "socket", "--port", "1"), "uds is 'socket'"),
        (("--uds", CERTIFICATE), "a socket, or a name that nothing has"),
        (("--uds", "/"), "a socket, or a name that nothing has"),
        (("--uds", "no/folder/socket"), "in a folder that is there"),
        (("--served-model-name", " "), "served_model_name is '', it must be not empty"),
        (("--override-generation-config", "null"), "override_generation_config is None"),
        (("--revision", "main"), "a revision is that of a model on the hub"),
        (("owner/name", "--revision", "../x"), "no name of a branch"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    flags: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimized.server.logs.start_logging", lambda *_: None)
    done = CliRunner().invoke(app, ["serve", *flags])
    assert done.exit_code != 0
    assert sentence in done.stderr, done.stderr


def test_ids_are_sent_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimized.server.logs.start_logging", lambda *_: None)
    done = CliRunner().invoke(app, ["serve"], env={"KVPROOF_ENABLE_REQUEST_ID_HEADERS": "false"})
    assert done.exit_code != 0
    assert "enable_request_id_headers is False, it must be True" in done.stderr, done.stderr


def test_a_key_in_the_process_list_and_an_open_door_are_warned_of(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimized.server.serve.serve", lambda *_: None)
    monkeypatch.setattr("optimized.server.logs.start_logging", lambda *_: None)
    command = ["serve", str(tiny.path), "--num-gpu-blocks-override", "20"]
    warned = [
        "process list" in CliRunner().invoke(app, [*command, *more], env=environment).stderr
        for more, environment in (([], {}), ([], {"KVPROOF_API_KEY": "k"}), (["--api-key", "k"], {}))
    ]
    assert warned == [False, False, True]
    addresses = (Address(), Address("0.0.0.0", keys=("k",)), Address("0.0.0.0", allow_unauthenticated=True))
    assert [each.is_open for each in addresses] == [False, False, True]


def test_as_many_files_may_be_open_as_there_are_connections() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        for count, most in ((400, 512), (1000, 1000), (1 << 30, before[1])):
            allow_open_files(count)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(most, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_behind_a_proxy_paths_begin_with_its_own(tiny: Checkpoint) -> None:
    server = running(tiny, keys=("secret",), front=Front(root_path="/llm", metrics_public=True))
    key = {"authorization": "Bearer secret"}
    try:
        for path in ("/health", "/llm/health", "/metrics", "/llm/metrics"):
            assert server.ask("GET", path).status == 200, path
        for path in ("/v1/models", "/llm/v1/models", "/llm", "/llm/llm/health", "/llmhealth", "/llm//health"):
            assert server.ask("GET", path).status == 401, path
        for path, status in (("/v1/models", 200), ("/llm/v1/models", 200), ("/llm/llm/v1/models", 404), ("/llm", 404)):
            assert server.ask("GET", path, headers=key).status == status, path
        answer = server.ask("POST", "/llm/v1/completions", {"prompt": "a", "max_tokens": 1}, key)
        assert answer.status == 200
        assert server.ask("GET", "/openapi.json", headers=key).json["servers"] == [{"url": "/llm"}]
    finally:
        server.stop()


def test_there_may_be_no_schema(tiny: Checkpoint) -> None:
    server = running(tiny, front=Front(disable_fastapi_docs=True))
    assert server.ask("GET", "/openapi.json").status == 404
    assert server.ask("GET", "/health").status == 200
    server.stop()


def test_callers_share_blocks_only_if_they_may(tiny: Checkpoint) -> None:
    hits = []
    for shared in (False, True):
        server = running(tiny, keys=("a", "b"), front=Front(shared_prefix_cache=shared))
        for key in ("a", "b"):
            body = {"prompt": list(range(5, 16)), "max_tokens": 1}
            assert server.ask("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"}).status == 200
        hits.append(server.engine.stats().hit_tokens)
        server.stop()
    assert hits == [0, 8]


def test_the_log_has_what_a_request_asks_for_if_it_is_told_to(
    tiny: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = running(tiny, front=Front(enable_log_requests=True, max_log_len=40))
    try:
        found = server.complete(prompt=["CANARY\n1", "CANARY 2"], max_tokens=3)
        name = found.headers["x-request-id"]
        [line] = [each for each in caplog.messages if f"{name} asks" in each]
        assert line.startswith(f"{name} asks with 2 prompts: SamplingParams(")
        assert len(line.partition(": ")[2]) == 40
        assert "CANARY" not in caplog.text
        caplog.set_level(logging.DEBUG)
        assert server.complete(prompt="CANARY\n" + "x" * 50, max_tokens=3, stream=True).status == 200
        assert server.chat(messages=[{"role": "user", "content": "CANARY"}]).status == 200
        said = [each for each in caplog.messages if " says: " in each]
        assert len(said) == 2
        assert all("CANARY" in each and "\n" not in each and len(each.partition(": ")[2]) <= 40 for each in said)
    finally:
        server.stop()


def test_the_form_of_tools_which_are_in_the_prompt_is_no_line_at_info(
    tiny: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = running(tiny, front=Front(enable_log_requests=True))
    call = {"name": "CANARY", "parameters": {"type": "object", "properties": {"CANARY": {"type": "string"}}}}
    asked: dict[str, object] = {"tools": [{"type": "function", "function": call}], "tool_choice": "required"}
    try:
        server.chat(**asked)
        [line] = [each for each in caplog.messages if "asks with" in each]
        assert "structured_outputs='grammar'" in line and "CANARY" not in caplog.text
        caplog.set_level(logging.DEBUG)
        server.chat(**asked)
        assert any("says: " in each and "CANARY" in each for each in caplog.messages)
    finally:
        server.stop()


def test_of_what_is_long_no_more_is_read_than_the_log_has() -> None:
    read: list[int] = []

    class Token(int):
        def __repr__(self) -> str:
            read.append(self)
            return "7"

    assert brief([Token()] * 1000, 9) == "[7, 7, 7,"
    assert len(read) == 9
    assert brief("x" * 1000, 5) == "'xxxx" and brief(None, 9) == "None"


def test_nobody_takes_the_socket_of_one_who_listens(tmp_path: Path) -> None:
    place = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(place)
        other.listen(0)
        for _ in range(3):  # also when as many wait as may
            with pytest.raises(InvalidConfig, match="a socket on which nobody listens"):
                Address(uds=place)
    assert Address(uds=place).uds == place  # it was left behind
    assert Address(uds=str(tmp_path / "new")).uds is not None
    for wrong, why in ((f"{place}/socket", "Not a directory"), ("x" * 200, "path too long")):
        with pytest.raises(InvalidConfig, match=why):
            Address(uds=wrong)


async def _slow(pauses: list[float]) -> AsyncIterator[bytes]:
    for pause in pauses:
        await asyncio.sleep(pause)
        yield b"x"


def test_a_stream_without_news_says_that_it_is_still_there() -> None:
    async def heard() -> bytes:
        return b"".join([each async for each in kept_alive(_slow([0.0, 0.35, 0.0]), 0.1)])

    found = asyncio.run(heard())
    assert found.replace(KEEP_ALIVE, b"") == b"xxx"
    assert found.startswith(b"x: keep-alive\n\n") and found.endswith(b"xx")
    closed = []

    async def watched() -> AsyncIterator[bytes]:
        try:
            yield b"x"
            await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def leave() -> None:
        events: Any = kept_alive(watched(), 0.01)
        assert [await anext(events), await anext(events)] == [b"x", KEEP_ALIVE]
        await events.aclose()

    asyncio.run(leave())
    assert closed == [True]


def test_a_request_that_waits_is_told_that_it_does(tiny: Checkpoint) -> None:
    server = running(tiny, front=Front(sse_keep_alive_interval=0.05))
    gate = held(server)
    try:
        plain = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True, "temperature": 0, "stream": True}
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as caller:
            body = json.dumps(plain).encode()
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            caller.sendall(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            early = caller.recv(4096)
            while KEEP_ALIVE not in early:
                early += caller.recv(4096)
            assert early.startswith(b"HTTP/1.1 200 ") and b"data: " not in early
            gate.set()
            rest = b""
            while more := caller.recv(4096):
                rest += more
        assert b"data: [DONE]" in rest and b'"finish_reason":"length"' in rest
        refused = server.complete(prompt="", stream=True)  # what is wrong at once has a status of its own
        assert refused.status == 400
        gate.clear()
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as caller:
            caller.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            early = b""
            while KEEP_ALIVE not in early:
                early += caller.recv(4096)
            assert server.engine.health.num_unfinished == 1
        gate.set()
        assert waited_for(lambda: server.engine.health.num_unfinished == 0)  # it went away before its first token
    finally:
        gate.set()
        server.stop()


def test_what_goes_wrong_with_a_request_that_waited_is_told_in_its_stream(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(error: Exception) -> AsyncIterator[bytes]:
        raise error

    async def heard(error: Exception) -> list[bytes]:
        return [each async for each in begun_late(asyncio.ensure_future(fails(error)), "its-id")]

    for error, code in (
        (TimeoutError(), "timeout"),
        (RequestError(503, "aborted", "gone"), "aborted"),
        (EngineStopped("0xdead"), "engine_stopped"),
        (RuntimeError("0xdead"), "internal_error"),
    ):
        told, done = asyncio.run(heard(error))
        assert json.loads(told.removeprefix(b"data: "))["error"]["code"] == code
        assert done == DONE and b"0xdead" not in told
    [ours] = [each for each in caplog.records if "its-id" in each.getMessage()]
    assert ours.exc_info is not None and isinstance(ours.exc_info[1], RuntimeError)


def _served(app: Any, address: Address) -> uvicorn.Server:
    """A server at this address, in a thread."""
    served = uvicorn.Server(uvicorn_config(app, address, Limits()))
    threading.Thread(target=lambda: asyncio.run(served.serve()), daemon=True).start()
    assert waited_for(lambda: served.started)
    return served


def test_whoever_does_not_shake_hands_leaves_as_soon_as_one_without_a_head() -> None:
    async def nobody(*_: object) -> None:
        raise AssertionError

    async def ended() -> bytes:
        address = Address(port=0, ssl_keyfile=CERTIFICATE, ssl_certfile=CERTIFICATE)
        served = uvicorn.Server(uvicorn_config(Guard(nobody, Limits()), address, Limits()))
        bound_handshakes(asyncio.get_running_loop(), 0.2)
        serving = asyncio.ensure_future(served.serve())
        while not served.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.servers[0].sockets[0].getsockname()[1])
        try:
            return await asyncio.wait_for(reader.read(), 30)  # asyncio's own bound is 60
        finally:
            writer.close()
            served.should_exit = True
            await serving

    assert asyncio.run(ended()) == b""


def test_it_listens_on_a_socket_and_over_tls(tiny: Checkpoint, tmp_path: Path) -> None:
    server = running(tiny)
    place = tmp_path / "socket"
    local = _served(server.app, Address(uds=str(place)))
    secret = _served(server.app, Address(port=0, ssl_keyfile=CERTIFICATE, ssl_certfile=CERTIFICATE))
    strict = _served(
        server.app,
        Address(port=0, ssl_keyfile=CERTIFICATE, ssl_certfile=CERTIFICATE, ssl_ca_certs=CERTIFICATE, ssl_cert_reqs=2),
    )
    try:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(place))
            caller.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert caller.recv(4096).startswith(b"HTTP/1.1 200 ")
        trusting = ssl.create_default_context(cafile=CERTIFICATE)
        for served, is_shown, expected in ((secret, False, 200), (strict, True, 200), (strict, False, None)):
            if is_shown:
                trusting.load_cert_chain(CERTIFICATE)
            elif expected is None:
                trusting = ssl.create_default_context(cafile=CERTIFICATE)
            url = f"https://localhost:{served.servers[0].sockets[0].getsockname()[1]}/health"
            try:
                with urllib.request.urlopen(url, timeout=30, context=trusting) as answer:
                    assert answer.status == expected
            except (OSError, ssl.SSLError):
                assert expected is None
    finally:
        for each in (local, secret, strict):
            each.should_exit = True
        server.stop()


def test_a_socket_goes_with_its_server(tiny: Checkpoint, tmp_path: Path) -> None:
    llm, limits, address = LLM(tiny, block_size=4), Limits(), Address(uds=str(tmp_path / "socket"))

    async def lived() -> bool:
        app, service = make_app(make_engine(llm, limits), ["tiny"], limits)
        server = serve._Server(uvicorn_config(app, address, limits), service)
        running = asyncio.ensure_future(serve._run(server, service, address, limits, lambda _: None))
        while not server.started:
            await asyncio.sleep(0.01)
        was_there = Path(str(address.uds)).is_socket()
        server.handle_exit(signal.SIGTERM, None)
        await running
        return was_there

    assert asyncio.run(lived())
    assert not list(tmp_path.iterdir())
    with socket.socket(socket.AF_UNIX) as other:  # who has taken the place keeps it
        other.bind(str(address.uds))
        other.listen()
        serve._leave(str(address.uds))
        assert list(tmp_path.iterdir())
    serve._leave(str(tmp_path / "nothing"))
