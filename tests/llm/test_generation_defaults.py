"""Defaults of sampling: a request's own value beats those of the model's generation_config.json, and these beat ours."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from optimized import LLM, SamplingParams
from optimized.checkpoint import Checkpoint, load_checkpoint
from optimized.cli import app
from optimized.generation_defaults import checked_override, defaults_of, read_override
from optimized.model_store import BadModelFile
from spec.vocabulary import InvalidConfig
from tests.models.tiny_files import SMALL, write_directory
from tests.server.conftest import running

FILE = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 7, "top_p": None, "do_sample": True, "pad_token_id": 0}
READ = {"temperature": 0.6, "top_k": 20, "max_tokens": 7}
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer, whose file says something."""
    path = tmp_path_factory.mktemp("model")
    write_directory(path, SMALL)
    (path / "generation_config.json").write_text(json.dumps(FILE))
    return path


def test_the_file_is_read_and_can_be_left_out_or_be_another(folder: Path, tmp_path: Path) -> None:
    found = load_checkpoint(folder)
    assert defaults_of(found) == READ
    assert defaults_of(found, "vllm") == {}
    assert defaults_of(found, override={"temperature": None, "min_p": 0.1}) == {
        "top_k": 20,
        "max_tokens": 7,
        "min_p": 0.1,
    }
    assert defaults_of(found, "vllm", {"top_p": 0.5}) == {"top_p": 0.5}
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.9}')
    for other in (tmp_path, tmp_path / "generation_config.json"):
        assert defaults_of(found, str(other)) == {"top_p": 0.9}
    with pytest.raises(BadModelFile, match="nowhere: it cannot be read"):
        defaults_of(found, "nowhere")


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_k", 1.5), ("min_p", True), ("max_new_tokens", 0)]
    + [("temperature", 10**400), ("top_k", 10**400), ("top_p", "a" * 100_000), ("min_p", [[0.5] * 9] * 9)],
    ids=lambda value: repr(value)[:20],
)
def test_a_value_that_no_request_could_have_is_refused(tiny: Checkpoint, key: str, value: object) -> None:
    sentence = "generation_config.json: .* is .*--generation-config vllm leaves this file out"
    with pytest.raises(BadModelFile, match=sentence) as raised:
        defaults_of(replace(tiny, generation_config={key: value}))
    assert len(raised.value.reason) < 300
    assert defaults_of(replace(tiny, generation_config={key: value}), "vllm") == {}
    with pytest.raises(InvalidConfig, match="override_generation_config is .*possible for a request"):
        checked_override({key: value})


@pytest.mark.parametrize("text", ["", "[]", "1", "{", '{"do_sample": true}', "[" * 100_000, "null"])
def test_an_override_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="override_generation_config is .* an object of temperature") as raised:
        read_override(text)
    assert len(str(raised.value)) < 300
    assert read_override(None) is None


def test_parameters_that_are_not_given_are_the_models(folder: Path) -> None:
    llm = LLM(folder, block_size=4)
    [asked] = llm.generate(PROMPT, SamplingParams(temperature=0.6, top_k=20, max_tokens=7), use_tqdm=False)
    again = LLM(folder, block_size=4)
    [left_out] = again.generate(PROMPT, use_tqdm=False)
    assert left_out.outputs[0].token_ids == asked.outputs[0].token_ids
    assert again.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20, max_tokens=None)
    # Whoever gives parameters has said everything but for how long the answer is.
    [whole] = again.generate(PROMPT, SamplingParams(ignore_eos=True, max_tokens=None), use_tqdm=False)
    assert len(whole.outputs[0].token_ids) == 7
    [longer] = again.generate(PROMPT, SamplingParams(min_tokens=9, max_tokens=None), use_tqdm=False)
    assert len(longer.outputs[0].token_ids) == 9
    [none] = LLM(folder, block_size=4, generation_config="vllm").generate(PROMPT, use_tqdm=False)
    assert len(none.outputs[0].token_ids) > 7


def test_a_default_that_has_no_room_is_cut(folder: Path) -> None:
    llm = LLM(folder, block_size=4, override_generation_config={"max_new_tokens": 1000, "temperature": 0})
    [output] = llm.generate([PROMPT * 20], use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 4


def test_a_request_beats_the_file_and_that_our_defaults(tiny: Checkpoint) -> None:
    """Greedy by the file, greedy by the request, and hot by the request, which is something else."""
    said: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 9}
    server = running(replace(tiny, generation_config=said))
    try:
        ask = {"prompt": "hello", "ignore_eos": True, "seed": 1}
        left, own, hot = (
            server.ask("POST", "/v1/completions", {**ask, **more}).json["choices"][0]["text"]
            for more in ({}, {"temperature": 0, "max_tokens": 9}, {"temperature": 2.0, "max_tokens": 9})
        )
        assert left == own != hot
        body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
        for more, count in (({}, 9), ({"max_tokens": 3}, 3)):
            chat = server.ask("POST", "/v1/chat/completions", {**body, **more}).json
            assert chat["usage"]["completion_tokens"] == count
        card = server.ask("GET", "/v1/models/tiny").json
        assert card["default_sampling_params"] == {"temperature": 0.0, "max_tokens": 9}
    finally:
        server.stop()


def test_a_command_takes_the_defaults_and_says_so(tiny: Checkpoint) -> None:
    asked = ["generate", "hello", "--raw", "--json", "--model", str(tiny.path)]
    override = ["--override-generation-config", '{"temperature": 1.5, "max_new_tokens": 3}']

    def answer(*more: str) -> tuple[list[int], str]:
        done = CliRunner().invoke(app, [*asked, *more])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["outputs"][0]["token_ids"], done.stderr

    ours, silent = answer("--max-tokens", "3")
    theirs, told = answer(*override)
    assert theirs == answer("--temperature", "1.5", "--max-tokens", "3")[0] != ours
    assert answer(*override, "--temperature", "0")[0] == ours
    assert "sampling, where a request does not say: temperature 1.5, max_tokens 3" in told
    assert "sampling" not in silent
    chat = ["chat", str(tiny.path), "--override-generation-config", '{"max_new_tokens": 2}']
    assert CliRunner().invoke(app, chat, input="Hi\n").exit_code == 0
    refused = CliRunner().invoke(app, [*asked, "--override-generation-config", '{"heat": 1}'])
    assert refused.exit_code == 2
    assert "override_generation_config is ['heat']" in refused.stderr
