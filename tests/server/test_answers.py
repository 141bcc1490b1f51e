"""What clients are answered: whole, in pieces, with log probabilities, and the same whoever asks beside them."""

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import jsonschema_rs
import openai
import pytest

from optimized import LLM, SamplingParams
from optimized.checkpoint import Checkpoint
from optimized.sampling import Logprob
from optimized.server.answers import completion_logprobs
from optimized.server.limits import Limits
from tests.server.conftest import RunningServer, running


def test_an_answer_is_that_of_the_engine(server: RunningServer, tiny: Checkpoint) -> None:
    found = server.complete(max_tokens=6).json
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [expected] = LLM(tiny, block_size=4).generate("hello", params)[0].outputs
    [choice] = found["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (expected.text, "length", 0)
    assert found["usage"] == {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7}
    assert (found["object"], found["model"]) == ("text_completion", "tiny")


def test_a_prompt_has_four_shapes(server: RunningServer, tiny: Checkpoint) -> None:
    assert tiny.tokenizer is not None
    ids = tiny.tokenizer.encode("hello")
    texts = [
        [c["text"] for c in server.complete(prompt=p).json["choices"]] for p in ("hello", ["hello"], ids, [ids, ids])
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3][:1] == texts[3][1:]


def test_answers_to_several_prompts_are_numbered_prompt_by_prompt(server: RunningServer) -> None:
    body = {"prompt": ["hello", "x"], "n": 3, "temperature": 1, "seed": 5, "max_tokens": 4}
    found = server.complete(**body).json
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    assert found["usage"]["completion_tokens"] == 24
    alone = server.complete(**(body | {"prompt": "x"})).json
    assert [choice["text"] for choice in found["choices"][3:]] == [choice["text"] for choice in alone["choices"]]


@pytest.mark.parametrize("body", [{}, {"n": 2, "temperature": 1, "seed": 3}, {"prompt": ["hello", "x"], "logprobs": 2}])
def test_a_stream_is_the_whole_in_pieces(server: RunningServer, body: dict[str, object]) -> None:
    whole = server.complete(**body, max_tokens=7).json
    answer = server.complete(**body, max_tokens=7, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = answer.events
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == "length"
        assert {part["finish_reason"] for part in parts[:-1]} <= {None}
        if "logprobs" in body:
            for name in ("tokens", "text_offset"):
                assert [x for part in parts for x in part["logprobs"][name]] == choice["logprobs"][name]
            numbers = [x for part in parts for x in part["logprobs"]["token_logprobs"]]
            # Matrix products of another batch may differ in their last places.
            assert numbers == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


def test_a_chat_has_a_role_text_and_an_end(server: RunningServer) -> None:
    whole = server.chat(ignore_eos=True).json
    [choice] = whole["choices"]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    events = server.chat(ignore_eos=True, stream=True, stream_options={"continuous_usage_stats": True}).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == choice["message"]["content"]
    assert events[-1]["usage"] == whole["usage"]
    tops = server.chat(logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
    assert all(len(each["top_logprobs"]) == 2 for each in tops)
    assert all(each["top_logprobs"][0]["logprob"] >= each["logprob"] for each in tops)


def test_an_echo_has_the_log_probabilities_of_the_prompt(server: RunningServer, tiny: Checkpoint) -> None:
    assert tiny.tokenizer is not None
    ids = tiny.tokenizer.encode("a longer prompt")
    for _ in range(2):  # the second time its prefix could be found in the cache
        found = server.complete(prompt=[ids], max_tokens=1, logprobs=1, echo=True).json
        [choice] = found["choices"]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith("a longer prompt")
        assert (
            len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(ids) + 1
        )
        assert logprobs["token_logprobs"][0] is None
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
        [direct] = LLM(tiny, block_size=4).generate([ids], params)
        assert direct.prompt_logprobs is not None
        for place, token in enumerate(ids[1:], start=1):
            entry = direct.prompt_logprobs[place]
            assert entry is not None
            assert logprobs["token_logprobs"][place] == pytest.approx(entry[token].logprob, abs=1e-4)
        assert max(logprobs["top_logprobs"][-1].values()) == logprobs["token_logprobs"][-1]


def test_tokens_and_texts_go_both_ways(server: RunningServer) -> None:
    tokens = server.ask("POST", "/tokenize", {"prompt": "hello x"}).json
    assert tokens["count"] == len(tokens["tokens"])
    assert server.ask("POST", "/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": "hello x"}


def test_of_tokens_that_look_alike_the_likeliest_is_told() -> None:
    """Whoever compares the chosen token with the best one does so by its log probability, as lm-eval does."""
    entry = {7: Logprob(-0.5, 1, "\ufffd"), 8: Logprob(-3.0, 2, "\ufffd"), 9: Logprob(-4.0, 3, "a")}
    found = completion_logprobs([7], [entry])
    assert found.top_logprobs == [{"\ufffd": -0.5, "a": -4.0}]
    assert found.token_logprobs == [-0.5]


def test_a_tokenizer_is_introduced(server: RunningServer, tiny: Checkpoint) -> None:
    told = server.ask("GET", "/tokenizer_info").json
    assert told.keys() == {"bos_token", "eos_token", "chat_template"}
    assert told["chat_template"] == tiny.chat_template
    [end] = server.ask("POST", "/tokenize", {"prompt": told["eos_token"], "add_special_tokens": False}).json["tokens"]
    assert end in tiny.config.eos_token_ids


def test_models_are_named(server: RunningServer) -> None:
    assert [each["id"] for each in server.ask("GET", "/v1/models").json["data"]] == ["tiny", "alias"]
    assert server.ask("GET", "/v1/models/alias").json["id"] == "alias"
    assert server.complete(model="alias").status == 200
    assert server.complete(model="gpt-5").json["error"]["code"] == "model_not_found"


def test_the_openai_client_works(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    assert client.models.list().data[0].id == "tiny"
    asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    asked["messages"] = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    for said in (whole.choices[0].message, whole.choices[0].message.model_dump()):
        messages: Any = [*asked["messages"], said, {"role": "user", "content": "more"}]
        assert client.chat.completions.create(**{**asked, "messages": messages}).choices
    messages[1] = {**messages[1], "annotations": [{"type": "url_citation"}]}
    with pytest.raises(openai.BadRequestError, match="messages.1.annotations"):
        client.chat.completions.create(**{**asked, "messages": messages})
    legacy = client.completions.create(model="tiny", prompt="hello", max_tokens=3, logprobs=1)
    assert legacy.choices[0].logprobs is not None
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="hello", max_tokens=1000)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.request_id


def test_metrics_have_the_names_that_dashboards_know(server: RunningServer) -> None:
    server.complete(max_tokens=3)
    page = server.ask("GET", "/metrics").body.decode()
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
    ):
        assert f'\n{name}{{engine="0",' in page, name


@pytest.mark.slow
@pytest.mark.parametrize("level", ["L5", "security"])
def test_the_suite_finds_nothing_at_the_served_levels(tiny: Checkpoint, level: str) -> None:
    longer = replace(tiny, config=replace(tiny.config, max_model_len=512))
    server = running(longer, Limits(head_timeout=1), keys=("one-key", "two-keys"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "spec.conformance.plugin", "-p", "no:cacheprovider"]
    command += ["--pyargs", "spec.conformance", "--rootdir", "/", "-c", os.devnull]
    options = ["--conformance-level", level, "--conformance-url", server.url]
    options += ["--conformance-key", "one-key", "--conformance-key", "two-keys"]
    try:
        # The plugin is named: a checkout need not be installed, and one that is must not bring it twice.
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        run = subprocess.run([*command, *options], check=False, capture_output=True, text=True, env=env)
    finally:
        server.stop()
    assert run.returncode == 0, run.stdout[-3000:]
    # Ours says nothing of cached tokens, so what it might say of another key's cannot be judged.
    assert ("1 skipped" if level == "security" else "") in run.stdout.splitlines()[-1]
    assert run.stdout.count("SKIPPED") <= (level == "security")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_event_of_a_stream_is_what_the_schema_says(server: RunningServer, path: str) -> None:
    schema = server.ask("GET", "/openapi.json").json
    said = schema["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    events = jsonschema_rs.validator_for(said)
    more = {"stream": True, "n": 2, "max_tokens": 3, "stream_options": {"include_usage": True}}
    found = server.complete(**more) if "chat" not in path else server.chat(**more)
    lines = found.body.decode().split("\n\n")[:-1]
    assert len(lines) > 3 and lines[-1] == "data: [DONE]"
    for line in lines:
        events.validate({"event": "message", "data": line.removeprefix("data: ")})
    for wrong in ({"data": "[done]"}, {"data": "text"}, {}, {"data": "{}", "event": "error"}):
        assert not events.is_valid(wrong)
