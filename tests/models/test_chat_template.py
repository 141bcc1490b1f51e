"""Chat templates: the text that a model was trained on, from a template that can do no harm."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from optimized import chat_template
from optimized.chat_template import BadTemplate, TemplateLimits, render
from optimized.checkpoint import Checkpoint, random_checkpoint
from spec.engine import InvalidRequest
from tests.models.tiny_files import TINY

HELLO = [{"role": "user", "content": "Hi <b>& 'you'"}]
RECORDED = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text())


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0]['content'] }}", "Hi <b>& 'you'"),
        ("{{ messages[0].content | upper }}", "HI <B>& 'YOU'"),
        ("{{ messages[-1].content.split('b')[-1].strip() }}", ">& 'you'"),
        ("{{ messages | tojson }}", """[{"role": "user", "content": "Hi <b>& 'you'"}]"""),
        ("{{ {'a': 'é'} | tojson(indent=1) }}", '{\n "a": "é"\n}'),
        ("{{ bos_token }}|{{ eos_token }}|{{ custom }}", "<s>|</s>|7"),
        ("{% if add_generation_prompt %}yes{% endif %}", "yes"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("a\n{% if true %}\n  b\n  {% endif %}\nc", "a\n  b\nc"),
        ("{% set ns = namespace(found=false) %}{% set ns.found = true %}{{ ns.found }}", "True"),
        ("{%- macro f(x) -%}[{{ x }}]{%- endmacro -%}{{ f(1) }}", "[1]"),
        ("{{ (messages[1:] | length) }} {{ (messages + [1]) | length }} {{ messages[0].items() | length }}", "0 2 2"),
        (
            "{{ messages[0].get('no', 'none') }} {{ 'role' in messages[0] }} {{ messages is sequence }}",
            "none True True",
        ),
        ("{{ messages | map(attribute='role') | join(',') }} {{ messages[0].keys() | list | length }}", "user 2"),
        ("{% for k, v in messages[0] | items %}{{ k }};{% endfor %}", "role;content;"),
        ("{% for x in tools %}{{ x | tojson }}{{ x.function.name }}{% endfor %}", '{"function": {"name": "f"}}f'),
        ("{{ messages is iterable }} {{ messages[0] is mapping }} {{ missing is defined }}", "True True False"),
    ],
)
def test_templates_say_what_jinja_says(template: str, text: str) -> None:
    assert (
        render(HELLO, template, bos_token="<s>", eos_token="</s>", custom=7, tools=[{"function": {"name": "f"}}])
        == text
    )


def test_the_date_is_todays() -> None:
    assert render(HELLO, "{{ strftime_now('%Y-%m-%d') }}") in {time.strftime("%Y-%m-%d"), time.strftime("%Y-%m-%d")}


def test_what_a_template_refuses_is_passed_on() -> None:
    with pytest.raises(BadTemplate) as caught:
        render(HELLO, "{{ raise_exception('roles must\nalternate') }}")
    assert str(caught.value) == "the chat template refuses these messages: roles must alternate"
    assert isinstance(caught.value, InvalidRequest)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{{ 'a' * 100000000 }}",
        "{% set ns = namespace(x='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ range(1000000000) | list }}",
        "{%- macro f(x) -%}{{ f(x) }}{{ f(x) }}{%- endmacro -%}{{ f(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ missing.attribute }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{% if",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing() }}",
        "(" * 100_000,
        "{{" + "(" * 100_000,
        "{{ strftime_now(1) }}",
    ],
)
def test_a_hostile_or_broken_template_costs_little_and_is_one_sentence(template: str) -> None:
    start = time.process_time()
    try:
        render(HELLO, template)
    except BadTemplate as error:
        assert "\n" not in str(error)
        assert str(error).startswith("the chat template")
    else:
        assert template == "(" * 100_000, "only plain text is no error"
    assert time.process_time() - start < 20.0  # and not hours


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadTemplate, match="makes 12 characters, at most 10 are allowed"):
        render(HELLO, "x" * 12, limits=TemplateLimits(max_characters=10))
    with pytest.raises(BadTemplate, match="fuel"):
        render(HELLO, "{% for i in range(100) %}x{% endfor %}", limits=TemplateLimits(fuel=50))
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_CHARACTERS", 5)
    with pytest.raises(BadTemplate, match="has 6 characters, at most 5 are allowed"):
        render(HELLO, "x" * 6)
    monkeypatch.setattr(chat_template, "MAX_INPUT_CHARACTERS", 10)
    with pytest.raises(BadTemplate, match="more than 10 characters"):
        render(HELLO, "x")


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("hello", "messages is a str, expected a list of messages"),
        ([], "there are 0 messages, 1 to 10,000 are allowed"),
        (["hello"], "message 0 has no role"),
        ([{"content": "hello"}], "message 0 has no role"),
        ([{"role": "user", "content": deep(100)}], "nested deeper than 64"),
        ([{"role": "user", "content": object()}], "the messages have a object, expected JSON"),
        ([{"role": "user", "content": b"bytes"}], "the messages have a bytes, expected JSON"),
    ],
)
def test_messages_are_a_list_of_json_with_roles(messages: Any, reason: str) -> None:
    with pytest.raises(BadTemplate) as caught:
        render(messages, "{{ messages[0].content }}")
    assert reason in str(caught.value)


def test_lone_surrogates_become_replacement_characters() -> None:
    assert render([{"role": "user", "content": "\ud83dx"}], "{{ messages[0].content }}") == "\ufffd\ufffd\ufffdx"


@pytest.mark.parametrize("call", ["append(1)", "extend(messages)", "insert(0, 1)", "clear()", "sort()"])
def test_a_template_cannot_grow_or_change_its_list(call: str) -> None:
    with pytest.raises(BadTemplate):
        render(HELLO, "{% for i in range(40) %}{{ messages." + call + " }}{% endfor %}")


@pytest.mark.parametrize("call", ["update({'a': 1})", "setdefault('a', 1)", "pop('role')", "clear()", "copy()"])
def test_a_template_cannot_change_a_message(call: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(BadTemplate, match="a template cannot change its input"):
        render(messages, "{{ messages[0]." + call + " }}")
    assert messages == [{"role": "user", "content": "x"}]


def test_a_template_reaches_nothing_of_python() -> None:
    reaching = ("strftime_now.__globals__", "messages[0].__init__", "messages.__class__", "raise_exception.__self__")
    assert [render(HELLO, "{{ " + each + " }}") for each in reaching] == [""] * 4


@pytest.mark.parametrize("case", [case for case in RECORDED["cases"] if case["chat"]], ids=lambda case: case["prompt"])
def test_smollm2_is_asked_as_transformers_asks(smollm2: Checkpoint, case: dict[str, Any]) -> None:
    assert smollm2.chat_text([{"role": "user", "content": case["prompt"]}]) == case["rendered"]


def test_a_model_without_a_template_says_so() -> None:
    checkpoint = random_checkpoint(TINY, 0)
    with pytest.raises(BadTemplate, match="random-0 has no chat template"):
        checkpoint.chat_text(HELLO)
