"""Answers of a form: JSON, patterns, choices and tool calls, whole and streamed; and what is refused of them, by name."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import openai
import pydantic
import pytest

from optimized.checkpoint import load_checkpoint
from optimized.server.tools import GrowingCall, tool_call
from tests.models.tiny_files import TINY, write_gguf
from tests.server.conftest import RunningServer, running

SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "n": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["on", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
LAMP = {"type": "function", "function": {"name": "lamp", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop"}}
WARM = {"temperature": 1.0, "seed": 5, "max_tokens": 90}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One whose model has room for a call, byte by byte."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    write_gguf(path, replace(TINY, max_model_len=256))
    started = running(load_checkpoint(path))
    yield started
    started.stop()


def ask(server: RunningServer, **body: object) -> dict[str, Any]:
    answer = server.chat(**(WARM | body))
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"response_format": FORMAT}, r'\{ ?"on" ?: ?(true|false) ?, ?"n" ?: ?\d\d ?\}'),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{ ?"on" ?: ?(true|false) ?, ?"n" ?: ?\d\d ?\}'),
        ({"structured_outputs": {"regex": "[ab]{4}"}}, "[ab]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, "x|y"),
        ({"response_format": {"type": "text"}}, "(?s).*"),
    ],
)
def test_every_answer_has_the_form_that_was_asked_for_whole_and_streamed(
    server: RunningServer, asked: dict[str, object], pattern: str
) -> None:
    choices = ask(server, **asked, n=3)["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    streamed = ["", "", ""]
    for event in server.chat(**WARM, **asked, n=3, stream=True).events:
        [choice] = event["choices"]
        streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == texts
    [completion] = server.complete(**WARM, **asked, ignore_eos=False).json["choices"]
    assert re.fullmatch(pattern, completion["text"])


def test_a_json_object_is_one(server: RunningServer) -> None:
    # A random model ends its strings when it likes: a bias towards the brackets makes it like to.
    bias = {str(ord("}")): 100, str(ord("{")): 100}
    asked = {"response_format": {"type": "json_object"}, "logit_bias": bias}
    assert json.loads(ask(server, **asked)["choices"][0]["message"]["content"]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "lamp"}}, "required"])
def test_a_tool_is_called_whole_and_streamed(server: RunningServer, choice: object) -> None:
    asked: dict[str, object] = {"tools": [LAMP, STOP], "tool_choice": choice, "n": 6, "temperature": 9.0, "seed": 6}
    called = []
    for each in ask(server, **asked)["choices"]:
        assert (each["finish_reason"], each["message"]["content"]) == ("tool_calls", None)
        [call] = each["message"]["tool_calls"]
        assert call["type"] == "function" and call["id"].startswith("call_")
        called.append((call["function"]["name"], call["function"]["arguments"]))
    for name, arguments in called:
        assert list(json.loads(arguments)) == {"lamp": ["on", "n"], "stop": []}[name]
    assert {name for name, _ in called} == ({"lamp"} if choice != "required" else {"lamp", "stop"})
    streamed = [["", ""] for _ in called]
    ends: dict[int, str] = {}
    for event in server.chat(**(WARM | asked), stream=True).events:
        [each] = event["choices"]
        for call in each["delta"].get("tool_calls", ()):
            assert ("id" in call) == ("name" in call["function"])
            streamed[each["index"]][0] += call["function"].get("name", "")
            streamed[each["index"]][1] += call["function"]["arguments"]
        if each["finish_reason"] is not None:
            ends[each["index"]] = each["finish_reason"]
    assert [tuple(pair) for pair in streamed] == called
    assert ends == dict.fromkeys(range(6), "tool_calls")


def test_a_call_that_is_cut_off_says_so(server: RunningServer) -> None:
    asked = {"tools": [LAMP], "tool_choice": "required"}
    [short] = ask(server, **asked, max_tokens=9)["choices"]
    assert (short["finish_reason"], short["message"]["tool_calls"]) == ("length", None)
    [longer] = ask(server, **asked, max_tokens=36)["choices"]
    [call] = longer["message"]["tool_calls"]
    assert longer["finish_reason"] == "length" and call["function"]["arguments"].startswith("{")


def test_a_growing_call_is_the_whole_one_in_pieces() -> None:
    text = '{"name": "lamp", "arguments": {"a": {"b": "}"}}}'
    for size in (1, 2, 7, 100):
        growing, pieces = GrowingCall(), [text[start : start + size] for start in range(0, len(text), size)]
        arguments = "".join(growing.add(piece, index == len(pieces) - 1) for index, piece in enumerate(pieces))
        assert (growing.name, arguments, growing.is_whole) == ("lamp", '{"a": {"b": "}"}}', True)
    call, is_cut = tool_call(text[:-2])
    assert call is not None and is_cut and call.function.arguments == '{"a": {"b": "}"}'


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [LAMP]}, "tool_choice", "which means auto"),
        ({"tools": [LAMP], "tool_choice": "auto"}, "tool_choice", "is auto, only none, required"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [LAMP, LAMP], "tool_choice": "required"}, "tools", "the same name"),
        ({"tools": [LAMP], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "names 'x'"),
        ({"tools": [LAMP], "tool_choice": "required", "stop": "x"}, "tool_choice", "no other end"),
        ({"tools": [LAMP], "tool_choice": "required", "response_format": FORMAT}, "tool_choice", "no other form"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs", "two things"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "is missing"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex that can be followed"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "not supported"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "banana"}}}},
            "response_format",
            "Invalid type: banana",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "required"},
            "tools",
            "function.name",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "banana"}}}],
                "tool_choice": "required",
            },
            "tools",
            "banana",
        ),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens", "with structured_outputs"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(
    server: RunningServer, body: dict[str, object], param: str, words: str
) -> None:
    answer = server.chat(**body)
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, param) and words in error["message"], error
    assert answer.headers["x-should-retry"] == "false"


def test_tools_that_are_not_to_be_called_are_text(server: RunningServer) -> None:
    [choice] = ask(server, tools=[LAMP], tool_choice="none")["choices"]
    assert choice["message"]["content"] is not None and choice["message"]["tool_calls"] is None


@pytest.mark.slow
def test_openai_python_parses_answers_and_calls(server: RunningServer) -> None:
    class Lamp(pydantic.BaseModel):
        on: bool
        colour: Literal["red", "blue"]

    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    parsed = client.chat.completions.parse(
        model="tiny", messages=messages, response_format=Lamp, temperature=1, seed=3, max_tokens=50
    )
    assert isinstance(parsed.choices[0].message.parsed, Lamp)
    tool: Any = openai.pydantic_function_tool(Lamp, name="f")
    called = client.chat.completions.parse(
        model="tiny", messages=messages, tools=[tool], tool_choice="required", temperature=1, seed=3, max_tokens=90
    )
    [call] = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Lamp)
    # And what is said back to the model of a call that was made.
    more = [*messages, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
    answer = client.chat.completions.create(model="tiny", messages=more, max_tokens=3)
    assert answer.choices[0].message.role == "assistant"
    with client.chat.completions.stream(
        model="tiny", messages=messages, response_format=Lamp, temperature=1, seed=3, max_tokens=50
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
