"""Each limit of a server has its flag, its environment variable and its answer, and ``doctor`` says where it comes from."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimized import SamplingParams
from optimized.checkpoint import Checkpoint
from optimized.cli import app
from optimized.cli.serve import keys_of
from optimized.cli.settings import settings_of, variable_of
from optimized.server.body import is_deeper
from optimized.server.limits import MOST, Limits
from spec.engine import InvalidField
from spec.vocabulary import InvalidConfig
from tests.server.conftest import RunningServer, held, running, waited_for

SMALL = Limits(
    max_head_bytes=1000,
    max_header_count=10,
    max_body_bytes=2000,
    max_json_depth=4,
    max_prompts=2,
    max_n=3,
    max_choices=4,
    max_logprobs=2,
    max_stop_strings=1,
    max_stop_characters=3,
    max_logit_biases=1,
    max_bad_words=1,
    max_num_queued_tokens=8,
    max_per_key=1,
)


@pytest.fixture(scope="module")
def small(tiny: Checkpoint) -> Iterator[RunningServer]:
    started = running(tiny, SMALL)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def hasty(tiny: Checkpoint) -> Iterator[RunningServer]:
    """One that waits for a second only: nobody else is to be asked anything that a busy machine may be late with."""
    started = running(tiny, replace(SMALL, head_timeout=1, body_timeout=1))
    yield started
    started.stop()


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"prompt": ["a"] * 3}, "max_prompts"),
        ({"n": 4}, "max_n"),
        ({"prompt": ["a", "b"], "n": 3}, "max_choices"),
        ({"logprobs": 3}, "max_logprobs"),
        ({"prompt_logprobs": 3}, "max_logprobs"),
        ({"stop": ["a", "b"]}, "max_stop_strings"),
        ({"stop": "abcd"}, "max_stop_characters"),
        ({"logit_bias": {"1": 1, "2": 1}}, "max_logit_biases"),
        ({"bad_words": ["a", "b"]}, "max_bad_words"),
        ({"metadata": {"a": {"b": {"c": {}}}}}, "max_json_depth"),
    ],
    ids=str,
)
def test_a_request_over_a_limit_is_told_which(small: RunningServer, body: dict[str, object], limit: str) -> None:
    found = small.complete(max_tokens=2, **body)
    assert found.status == 400
    assert f"({limit})" in found.json["error"]["message"]
    assert small.complete(max_tokens=2).status == 200


def test_a_file_without_keys_opens_nothing(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n \n")
    with pytest.raises(InvalidConfig, match="a file with a key on each line, at least one"):
        keys_of([], tmp_path / "keys")
    (tmp_path / "keys").write_bytes(b"key\xff\n")
    for path, why in ((tmp_path / "keys", "a text in UTF-8"), (Path("/dev/zero"), "at most 1,048,576 bytes")):
        with pytest.raises(InvalidConfig, match=why):
            keys_of([], path)


def test_a_salt_is_of_printable_characters(small: RunningServer) -> None:
    for salt in ("", "a" * 129, "\n", "é"):
        assert small.complete(cache_salt=salt).json["error"]["param"] == "cache_salt"
    assert small.complete(cache_salt="mine", max_tokens=2).status == 200


def said(server: RunningServer, *parts: bytes) -> bytes:
    """What the server answers to these bytes before it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            found = b""
            while more := connection.recv(1 << 16):
                found += more
        except ConnectionResetError:
            pass
        return found


POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"


@pytest.mark.slow
def test_who_takes_too_long_to_ask_is_told_so(hasty: RunningServer) -> None:
    late = said(hasty, b"GET /health HTTP/1.1\r\nhost:")
    assert late.startswith(b"HTTP/1.1 408 ")
    assert b"(head_timeout)" in late
    late = said(hasty, POST + b"content-length: 9\r\n\r\n{")
    assert late.startswith(b"HTTP/1.1 408 ")
    assert b"(body_timeout)" in late
    assert said(hasty) == b""  # who says nothing at all is only hung up on


@pytest.mark.slow
@pytest.mark.parametrize("rest", [b"{", b"{" + b" " * 8], ids=["a byte of the body", "the whole body"])
def test_an_answered_request_whose_body_still_comes_does_not_keep_its_connection(
    hasty: RunningServer, rest: bytes
) -> None:
    head = b"POST /health HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n"
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=20) as connection:
        connection.sendall(head)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 415 ")
        connection.sendall(rest)
        while connection.recv(1 << 16):
            pass


def test_who_says_too_much_is_told_so(small: RunningServer) -> None:
    assert said(small, b"GET /health HTTP/1.1\r\nx: " + b"y" * 4000).startswith(b"HTTP/1.1 400 ")
    assert small.ask("GET", "/health", headers={f"x-{i}": "1" for i in range(11)}).status == 431
    chunk = b"800\r\n" + b"a" * 2048 + b"\r\n"
    assert said(small, POST + b"transfer-encoding: chunked\r\n\r\n" + chunk).startswith(b"HTTP/1.1 413 ")
    assert small.complete(prompt="a" * 3000).status == 413


def test_a_depth_is_counted_outside_of_strings_and_in_linear_time() -> None:
    assert not is_deeper(b"[" * 4 + b"]" * 4, 4)
    assert is_deeper(b"[" * 5 + b"]" * 5, 4)
    assert is_deeper(b'{"a":[' * 3 + b"]}" * 3, 4)
    assert not is_deeper(json.dumps({"a": "[" * 99, "b": '"]}{["'}).encode(), 4)
    assert not is_deeper(b"[" + b"[1]," * 99 + b"1]", 4)
    for hostile in (b"[" * (1 << 20), b"[]" * (1 << 19), b'"' + b'\\"[' * (1 << 19), b'"[' * (1 << 19)):
        is_deeper(hostile, 64)


def test_a_queue_is_bounded_in_tokens_too_but_for_who_is_alone(tiny: Checkpoint) -> None:
    server = running(tiny, replace(SMALL, max_per_key=0))
    try:
        ids = [5] * 20
        assert server.complete(prompt=ids, max_tokens=1).status == 200
        gate = held(server)
        waiting = threading.Thread(target=server.complete, kwargs={"prompt": ids, "max_tokens": 1})
        waiting.start()
        assert waited_for(lambda: server.engine._engine.num_waiting_tokens == 20)
        refused = server.complete(prompt=ids, max_tokens=1)
        gate.set()
        waiting.join()
        assert (refused.status, refused.json["error"]["code"]) == (503, "queue_full")
        assert "20 tokens of prompts have no answer yet" in refused.json["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert waited_for(lambda: server.engine.health.num_unfinished == 0)
        assert server.complete(prompt=[ids[:4], ids[:4]], max_tokens=1).status == 200
    finally:
        server.stop()


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_limits_allow_is_taken_by_a_server_that_is_idle(tiny: Checkpoint, stream: bool) -> None:
    limits = replace(SMALL, max_per_key=0, max_num_queued_reqs=1, max_prompts=8, max_choices=8)
    server = running(tiny, limits)
    try:
        many = {"prompt": [[5] * 20] * 8, "max_tokens": 1, "stream": stream}
        assert server.complete(**many).status == 200
        assert waited_for(lambda: server.engine.health.num_unfinished == 0)
        gate = held(server)
        first = threading.Thread(target=server.complete, kwargs=many)
        first.start()
        assert waited_for(lambda: server.engine._engine.num_waiting_tokens == 160)
        refused = server.complete(prompt="a")
        assert (refused.status, refused.json["error"]["code"]) == (503, "queue_full")
        gate.set()
        first.join()
        assert waited_for(lambda: server.engine.health.num_unfinished == 0)
        assert server.engine._engine.num_waiting_tokens == 0
        assert server.complete(**many).status == 200
    finally:
        server.stop()


def test_two_requests_of_several_prompts_do_not_both_stand_in_each_others_way(tiny: Checkpoint) -> None:
    server = running(tiny, replace(SMALL, max_per_key=0))
    try:
        gate, seen = held(server), list[int]()
        both = [
            threading.Thread(target=lambda: seen.append(server.complete(prompt=[[5] * 20] * 2, max_tokens=1).status))
            for _ in range(2)
        ]
        for each in both:
            each.start()
        assert waited_for(lambda: len(seen) == 1)
        gate.set()
        for each in both:
            each.join()
        assert sorted(seen) == [200, 503]
        rejected = [
            line
            for line in server.ask("GET", "/metrics").body.decode().splitlines()
            if line.startswith("vllm:admission_rejections_total{")
        ]
        assert [line.split()[-1] for line in rejected] == ["0.0", "1.0"]  # a request, however many prompts it has
    finally:
        server.stop()


def test_callers_share_cached_blocks_only_with_their_own_key(tiny: Checkpoint) -> None:
    server = running(tiny, keys=("one", "two"))
    try:

        def hits(key: str, **more: object) -> int:
            before = server.engine.stats().hit_tokens
            body = {"prompt": "a prompt of several blocks", "max_tokens": 1, **more}
            assert server.ask("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"}).status == 200
            return server.engine.stats().hit_tokens - before

        assert (hits("one"), hits("two")) == (0, 0)
        assert hits("one") == hits("two") == 24
        assert (hits("two", cache_salt="x"), hits("two", cache_salt="x")) == (0, 24)
    finally:
        server.stop()


def test_a_key_has_so_many_requests_at_once(tiny: Checkpoint) -> None:
    server = running(tiny, replace(SMALL, max_num_queued_tokens=0), keys=("one", "two"))
    try:
        head = b"authorization: Bearer one\r\ncontent-length: 9\r\n\r\n{"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(POST + head)
            body, one = {"prompt": "a", "max_tokens": 1}, {"authorization": "Bearer one"}
            while (found := server.ask("POST", "/v1/completions", body, one)).status == 200:
                pass
            assert (found.status, found.json["error"]["code"]) == (429, "too_many_requests")
            assert found.headers["retry-after"]
            two = {"authorization": "Bearer two"}
            assert server.ask("POST", "/v1/completions", body, two).status == 200
        while server.ask("POST", "/v1/completions", body, one).status != 200:
            pass
    finally:
        server.stop()


# --- settings ---------------------------------------------------------------------------------------------------------


def origins(*flags: str) -> dict[str, tuple[str, str]]:
    return {each.name: (each.value, each.origin) for each in settings_of(app, "serve", flags)}


def test_the_command_line_beats_the_environment_and_that_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(
        'port = 1\nmax-num-seqs = 2\nseed = 3\nserved-model-name = ["a", "b"]\nenable_prefix_caching = false'
    )
    monkeypatch.setenv("KVPROOF_PORT", "11")
    monkeypatch.setenv("KVPROOF_SEED", "12")
    monkeypatch.setenv("KVPROOF_API_KEY", "secret")
    found = origins("--config", str(path), "--port", "21")
    assert found["port"] == ("21", "command line")
    assert found["seed"] == ("12", "environment")
    assert found["max-num-seqs"] == ("2", "file")
    assert found["served-model-name"] == ("a, b", "file")
    assert found["enable-prefix-caching"] == ("False", "file")
    assert found["host"] == ("127.0.0.1", "default")
    assert found["self-check"] == ("off", "default")
    assert found["api-key"] == ("set, and not shown", "environment")
    shown = CliRunner().invoke(app, ["doctor", "--", "--config", str(path)]).stdout
    assert re.search(r"max-num-seqs +2 +file", shown)
    assert "secret" not in shown


def test_a_file_in_yaml_says_the_same(tmp_path: Path) -> None:
    """What YAML would make of a text does not count: the flag reads it."""
    lines = ["port: 1", "max_num_seqs: 2", "served-model-name: [a, b]", "enable_prefix_caching: off", "host: '::1'"]
    path = tmp_path / "serve.yaml"
    path.write_text("\n".join(["# settings", *lines, "root-path: no", "model: &m 007", "tokenizer: *m"]))
    found = {name: value for name, (value, origin) in origins("--config", str(path)).items() if origin == "file"}
    assert found == {
        "port": "1",
        "max-num-seqs": "2",
        "served-model-name": "a, b",
        "enable-prefix-caching": "False",
        "host": "::1",
        "root-path": "no",
        "model": "007",
        "tokenizer": "007",
    }
    path.write_text("")
    assert origins("--config", str(path))["port"] == ("8000", "default")


def test_every_setting_has_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in fields(Limits):
        monkeypatch.setenv(variable_of(each.name), "777")
    found = origins()
    assert {found[each.name.replace("_", "-")] for each in fields(Limits)} == {("777", "environment")}
    for name in found:
        monkeypatch.setenv(variable_of(name.replace("-", "_")), "sampled" if name == "self-check" else "1")
    monkeypatch.delenv("KVPROOF_CONFIG")
    assert {name for name, (_, origin) in origins().items() if origin != "environment"} == {"config"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("por = 1", "por is no setting of serve"),
        ("port = 1.5", "Invalid value for '--port'"),
        ("[port]", "port is {}, not one value"),
        ("port", "is not TOML"),
        (None, "No such file"),
        ("port = [1]", "port is ['1'], not one value"),
        ("max-num-seqs = 1\nmax_num_seqs = 2", "max_num_seqs stands there twice"),
        ("#" * 65_537, "it has more than 65,536 bytes"),
        ("seed: 1\npor: 1", "c.yaml, line 2: por is no setting of serve"),
        ("port: 1\nport: 2", "c.yaml, line 2: port stands there twice, also in line 1"),
        ("max-num-seqs: 1\n\nmax_num_seqs: 2", "line 3: max_num_seqs stands there twice, also in line 1"),
        ("port: {a: 1}", "line 1: port is not one value"),
        ("port:", "line 1: port is not one value; leave it out"),
        ("port: [1]", "line 1: port is ['1'], not one value"),
        ("a: &a 1\nport: *b", "line 2: it is not YAML: found undefined alias"),
        ("- port", "line 1: it has no keys"),
        ("? [port]\n: 1", "line 1: a key is the name of a setting"),
        ("port: '", "line 1: it is not YAML"),
        ("port: !!python/object/apply:os.getpid []", "line 1: port is not one value"),
        ("port: !!python/name:os.getpid ''", "line 1: port is not one value"),
        ("port:\n" + "- " * 20_000, "c.yaml, line 2: too much is inside each other"),
        ("port: " + "[" * 60_000, "c.yaml, line 1: too much is inside each other"),
        ('port: "\\ud800"', "line 1: port has half a character"),
        ('"po\\e[31m": 1', "line 1: po\\x1b[31m is no setting"),
        ("port = " + "[" * 60_000, "it is not TOML of settings: too much is inside each other"),
        ("a" + ".a" * 30_000 + " = 1", "line 1: it has more than 100 dots"),
        ("port = " + "9" * 5_000, "it is not TOML: Exceeds the limit"),
        ("port = 0x" + "f" * 60_000, "it is not TOML: Exceeds the limit"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / (
        "c.yaml" if text and ":" in text.partition("\n")[0] or text in ("- port", "? [port]\n: 1") else "c"
    )
    if text is not None:
        path.write_text(text)
    found = CliRunner().invoke(app, ["serve", "--config", str(path)], env={"COLUMNS": "500"})
    assert found.exit_code == 2
    assert sentence in " ".join(re.sub("[│╭╮╰╯─]", "", found.stderr).split())


def test_a_model_goes_by_its_files_name_and_by_default(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("optimized.server.serve.serve", lambda llm, names, *_: seen.append(list(names)))
    monkeypatch.setattr("optimized.server.logs.start_logging", lambda *_: None)
    for more in ([], ["--served-model-name", "a", "--served-model-name", "b"]):
        done = CliRunner().invoke(app, ["serve", str(tiny.path), "--num-gpu-blocks-override", "20", *more])
        assert done.exit_code == 0, done.output
    assert seen == [["tiny.gguf", "default"], ["a", "b"]]


def test_a_limit_is_a_whole_number() -> None:
    for value in (0, -1, 1.5, True, 1 << 40):
        with pytest.raises(InvalidConfig, match="max_body_bytes is"):
            Limits(max_body_bytes=value)  # type: ignore[arg-type]
    assert Limits(shutdown_timeout=0).shutdown_timeout == 0


@pytest.mark.slow
def test_an_answer_has_its_time(tiny: Checkpoint) -> None:
    server = running(tiny, Limits(max_request_seconds=1))
    gate = held(server)
    try:
        late = server.complete(max_tokens=5)
        assert (late.status, late.json["error"]["code"]) == (408, "timeout")
        assert waited_for(lambda: server.engine.health.num_unfinished == 1)  # it is ended before the next step
        gate.set()
        assert waited_for(lambda: server.engine.health.num_unfinished == 0)
        gate.clear()
        server.service.limits = replace(server.service.limits, max_request_seconds=60)
        release = threading.Timer(0.3, gate.set)
        release.start()
        assert server.complete(max_tokens=5, stream=True).status == 200
    finally:
        gate.set()
        server.stop()


BEYOND = {
    "max_n": {"n": 1},
    "max_logprobs": {"logprobs": 1},
    "max_stop_strings": {"stop": ["a"]},
    "max_stop_token_ids": {"stop_token_ids": [1]},
    "max_logit_biases": {"logit_bias": [(1, 1.0)]},
    "max_bad_words": {"bad_words": ["a"]},
}
"""Limits that an engine has too, and a parameter that counts as one."""


@pytest.mark.parametrize("name", BEYOND)
def test_a_flag_that_would_change_nothing_is_refused(name: str) -> None:
    [most] = [each.metadata["most"] for each in fields(Limits) if each.name == name]
    Limits(**{name: most})
    with pytest.raises(
        InvalidConfig, match=f"{name} is {most + 1}, it must be .* to {most:,}: nothing behind it takes more"
    ):
        Limits(**{name: most + 1})
    [(field, one)] = BEYOND[name].items()
    SamplingParams(**{field: one * most})  # type: ignore[arg-type, operator]
    with pytest.raises(InvalidField):
        SamplingParams(**{field: one * (most + 1)})  # type: ignore[arg-type, operator]


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": True},
        {"max_tokens": "3"},
        {"max_tokens": 3.5},
        {"n": True},
        {"seed": "1"},
        {"logprobs": False},
        {"temperature": "0"},
        {"temperature": True},
        {"logit_bias": {"5": "1"}},
        {"stream": 1},
        {"stream": "true"},
        {"echo": "yes"},
        {"ignore_eos": 1.0},
        {"stop_token_ids": [5.0]},
        {"prompt": [True]},
        {"stream": True, "stream_options": {"include_usage": 1}},
        {"structured_outputs": {"json_object": "true"}},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_by_its_field(small: RunningServer, body: dict[str, object]) -> None:
    found = small.complete(**{"max_tokens": 2, **body})
    assert (found.status, found.json["error"]["code"]) == (400, "invalid_value")
    assert found.json["error"]["param"] == list(body)[-1]


def test_as_deep_as_a_flag_lets_it_a_body_can_be_read(tiny: Checkpoint) -> None:
    server = running(tiny, Limits(max_json_depth=512))
    try:
        deep: dict[str, object] = {}
        for _ in range(510):
            deep = {"a": deep}
        assert server.complete(max_tokens=1, metadata=deep).status == 200
        assert server.complete(max_tokens=1, metadata={"a": deep}).json["error"]["code"] == "invalid_json"
    finally:
        server.stop()
    with pytest.raises(InvalidConfig, match="max_json_depth is 513"):
        Limits(max_json_depth=513)


def test_three_point_zero_is_three(small: RunningServer) -> None:
    """For JSON Schema, and so for ``/openapi.json``, it is a whole number; some clients write all numbers so."""
    found = small.complete(max_tokens=3.0, n=1.0, seed=-2.0, temperature=0, top_k=4.0, return_token_ids=True)
    assert found.status == 200
    assert found.json["usage"]["completion_tokens"] == 3
    assert found.json["choices"] == small.complete(max_tokens=3, return_token_ids=True).json["choices"]


def test_the_book_has_every_limit_as_it_is() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| (\d+ \| .*) \|$", page.replace("`--trace`", "--trace"), re.MULTILINE))
    for each in fields(Limits):
        most = "" if each.metadata["most"] == MOST else f". At most {each.metadata['most']}"
        said = f"{each.default} | {each.metadata['help'].rstrip('.')}{most}"
        assert rows.get(each.name.replace("_", "-")) == said, each.name
