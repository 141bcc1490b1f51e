"""What a request may cost before it comes to the engine: grammars, templates, words that must not come."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from optimized.checkpoint import load_checkpoint
from optimized.server.limits import Limits
from tests.models.tiny_files import TINY, write_gguf
from tests.server.conftest import RunningServer, running

LIMITS = Limits(
    max_stop_token_ids=2,
    max_bad_words=8,
    max_bad_word_tokens=12,
    max_cache_salt=8,
    max_regex_bytes=20,
    max_grammar_bytes=40,
    max_schema_bytes=100,
    max_schema_depth=3,
    template_fuel=1000,
    max_template_characters=200,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    write_gguf(path, replace(TINY, max_model_len=256))
    started = running(load_checkpoint(path), LIMITS)
    yield started
    started.stop()


def nested(depth: int) -> dict[str, Any]:
    """A schema with so many brackets inside each other."""
    return {} if depth == 1 else {"not": nested(depth - 1)}


def structured(**asked: object) -> dict[str, object]:
    return {"structured_outputs": asked}


@pytest.mark.parametrize(
    ("body", "param", "limit", "code"),
    [
        ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids", "max_stop_token_ids", "invalid_value"),
        ({"bad_words": ["abcdefg", "hijklmn"]}, "bad_words", "max_bad_word_tokens", "invalid_value"),
        ({"bad_words": ["x" * 100_000]}, "bad_words", "max_bad_word_tokens", "invalid_value"),
        ({"cache_salt": "123456789"}, "cache_salt", "max_cache_salt", "invalid_value"),
        (structured(regex="a" * 21), "structured_outputs", "max_regex_bytes", "grammar_too_complex"),
        (structured(regex="é" * 11), "structured_outputs", "max_regex_bytes", "grammar_too_complex"),
        (structured(choice=["a" * 40]), "structured_outputs", "max_grammar_bytes", "grammar_too_complex"),
        (
            structured(grammar='start: "' + "a" * 40 + '"'),
            "structured_outputs",
            "max_grammar_bytes",
            "grammar_too_complex",
        ),
        (structured(json={"const": "a" * 90}), "structured_outputs", "max_schema_bytes", "grammar_too_complex"),
        (structured(json=nested(4)), "structured_outputs", "max_schema_depth", "grammar_too_complex"),
        (
            structured(json='{"not":{"not":{"not":{}}}}'),
            "structured_outputs",
            "max_schema_depth",
            "grammar_too_complex",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_costs_too_much_is_told_its_limit(
    server: RunningServer, body: dict[str, object], param: str, limit: str, code: str, stream: bool
) -> None:
    for ask in (server.complete, server.chat):
        found = ask(max_tokens=2, stream=stream, **body)
        error = found.json["error"]
        assert (found.status, error["param"], error["code"]) == (400, param, code), error
        assert error["message"].endswith(f"({limit})")


def test_the_arguments_of_a_tool_are_as_deep_as_a_schema_may_be(server: RunningServer) -> None:
    for parameters, limit in ((nested(4), "max_schema_depth"), ({"const": "a" * 90}, "max_schema_bytes")):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        found = server.chat(max_tokens=2, tools=[tool], tool_choice="required")
        error = found.json["error"]
        assert (found.status, error["param"], error["code"]) == (400, "tools", "grammar_too_complex"), error
        assert error["message"].endswith(f"({limit})")


@pytest.mark.slow
def test_what_costs_as_much_as_it_may_is_answered(server: RunningServer) -> None:
    for body in (
        {"stop_token_ids": [1, 2]},
        {"bad_words": ["abcdef", "hijk"]},
        {"cache_salt": "12345678"},
        structured(regex="[ab]{4}"),
        structured(choice=["yes", "no"]),
        structured(json={"type": "boolean"}),
        structured(json={"enum": ["a" * 80]}),
    ):
        assert server.complete(prompt="a", max_tokens=2, ignore_eos=None, **body).status == 200, body


def test_what_grammars_take_is_told(server: RunningServer) -> None:
    assert server.complete(max_tokens=2, ignore_eos=None, **structured(regex="[cd]{3}")).status == 200
    kept = server.engine.llm.grammars.num_kept_bytes
    assert kept > 0
    assert f'kvproof:grammar_cache_bytes{{engine="0",model_name="tiny"}} {kept:.1f}' in (
        server.ask("GET", "/metrics").body.decode()
    )


def test_a_template_has_its_steps_and_its_length(server: RunningServer) -> None:
    long = server.chat(messages=[{"role": "user", "content": "x" * 230}], max_tokens=2)
    assert (long.status, "at most 200 are allowed" in long.json["error"]["message"]) == (400, True)
    many = server.chat(messages=[{"role": "user", "content": ""}] * 400, max_tokens=2)
    assert (many.status, "fuel" in many.json["error"]["message"]) == (400, True)
    assert server.chat(max_tokens=2).status == 200
