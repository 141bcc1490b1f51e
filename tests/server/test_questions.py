"""Prompts that are cut, begin without a special token, or end within a message; and what is told of the server's load."""

from collections.abc import Iterator
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest

from optimized.checkpoint import load_checkpoint
from optimized.server.limits import Limits
from tests.models.tiny_files import TINY, write_gguf
from tests.server.conftest import RunningServer, held, running, waited_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One whose texts begin with a special token, 260."""
    path = tmp_path_factory.mktemp("begins") / "begins.gguf"
    write_gguf(path, replace(TINY, max_model_len=96), pre_type="llama-bpe")
    started = running(load_checkpoint(path))
    yield started
    started.stop()


def prompt_of(server: RunningServer, **body: object) -> list[list[int]]:
    """The tokens of the prompts that the engine was asked."""
    found = server.complete(max_tokens=1, return_token_ids=True, **body)
    assert found.status == 200, found.body
    return [choice["prompt_token_ids"] for choice in found.json["choices"]]


def test_a_text_may_begin_without_a_special_token(server: RunningServer) -> None:
    [[begin, *rest]] = prompt_of(server, prompt="xyz")
    assert begin == 260
    assert prompt_of(server, prompt="xyz", add_special_tokens=True) == [[260, *rest]]
    assert prompt_of(server, prompt=["xyz", "xyz"], add_special_tokens=False) == [rest, rest]
    assert prompt_of(server, prompt=[[5, 6]], add_special_tokens=False) == [[5, 6]]
    empty = server.complete(prompt="", add_special_tokens=False)
    assert (empty.status, empty.json["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_prompt_that_is_cut_the_end_is_left(server: RunningServer, stream: bool) -> None:
    [[begin, *rest]] = prompt_of(server, prompt="uvwxyz")
    assert prompt_of(server, prompt="uvwxyz", truncate_prompt_tokens=3) == [rest[-3:]]
    assert prompt_of(server, prompt=["uvwxyz", [1, 2, 3, 4]][1:], truncate_prompt_tokens=3) == [[2, 3, 4]]
    assert prompt_of(server, prompt="uvwxyz", truncate_prompt_tokens=50) == [[begin, *rest]]
    [long] = prompt_of(server, prompt=[[7] * 200], truncate_prompt_tokens=-1)
    assert len(long) == 95
    assert server.complete(prompt=[[7] * 200], max_tokens=1, stream=stream).status == 400
    assert server.complete(prompt=[[7] * 200], max_tokens=1, truncate_prompt_tokens=9, stream=stream).status == 200
    for wrong in (0, -2, 1.5):
        refused = server.complete(prompt="x", truncate_prompt_tokens=wrong)
        assert (refused.status, refused.json["error"]["param"]) == (400, "truncate_prompt_tokens")
    said = server.complete(prompt="uvwxyz", truncate_prompt_tokens=3, echo=True, max_tokens=1, logprobs=0)
    assert said.json["choices"][0]["text"].startswith("xyz")
    assert len(said.json["choices"][0]["logprobs"]["tokens"]) == 4


def asked(server: RunningServer, messages: list[dict[str, str]], **body: object) -> Any:
    """A chat, and the text that the engine was asked to go on with."""
    seen: list[Any] = []
    read = server.engine.llm.prompt_of

    def watched(prompt: Any) -> Any:
        seen.append(prompt)
        return read(prompt)

    server.engine.llm.prompt_of = watched  # type: ignore[method-assign]
    try:
        answer = server.chat(messages=messages, max_tokens=1, **body)
    finally:
        server.engine.llm.prompt_of = read  # type: ignore[method-assign]
    assert answer.status == 200, answer.body
    return server.engine.llm.decode(seen[0]["prompt_token_ids"])


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": " a b "}]


def test_the_last_message_may_be_gone_on_with(server: RunningServer) -> None:
    whole = asked(server, CHAT)
    going_on = asked(server, CHAT, continue_final_message=True)
    assert going_on.endswith("assistant:  a b") and whole.startswith(going_on)
    assert asked(server, CHAT, continue_final_message=False, add_generation_prompt=False) == whole
    assert asked(server, CHAT, truncate_prompt_tokens=4) == whole[-4:]
    for messages, more in (
        (CHAT, {"add_generation_prompt": True}),
        (CHAT[:1], {}),
        ([CHAT[0], {"role": "assistant", "content": " "}], {}),
    ):
        refused = server.chat(messages=messages, continue_final_message=True, **more)
        assert (refused.status, refused.json["error"]["param"]) == (400, "continue_final_message")
    server.engine.llm.checkpoint = replace(
        shown := server.engine.llm.checkpoint, chat_template="{{ messages[1].content | upper }}"
    )
    refused = server.chat(messages=CHAT, continue_final_message=True)
    assert (refused.status, refused.json["error"]["param"]) == (400, "continue_final_message")
    twice = "{{ messages[1].content }} {{ messages[1].content }}"
    server.engine.llm.checkpoint = replace(shown, chat_template=twice)
    assert server.chat(messages=CHAT, continue_final_message=True).status == 400
    server.engine.llm.checkpoint = shown


@pytest.mark.parametrize("said", ["e", "end", "<|im_end|>", "> "])
def test_words_that_the_template_writes_too_may_be_gone_on_with(server: RunningServer, said: str) -> None:
    shown = server.engine.llm.checkpoint
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    server.engine.llm.checkpoint = replace(shown, chat_template=template)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}]
    try:
        assert asked(server, messages, continue_final_message=True) == f"q<|im_end|>{said.rstrip()}"
    finally:
        server.engine.llm.checkpoint = shown


def test_the_load_is_what_waits_or_runs(server: RunningServer) -> None:
    assert server.ask("GET", "/load").json == {"server_load": 0}
    assert server.ask("GET", "/ping").status == 200
    busy = running(server.engine.llm.checkpoint, Limits(stall_seconds=1))
    gate = held(busy)
    try:
        caller = Thread(target=lambda: busy.complete(prompt=["x", "y"], max_tokens=1))
        caller.start()
        assert waited_for(lambda: busy.ask("GET", "/load").json == {"server_load": 2})
        assert waited_for(lambda: busy.ask("GET", "/ping").status == 503)
        gate.set()
        caller.join()
    finally:
        gate.set()
        busy.stop()
