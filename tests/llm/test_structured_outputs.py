"""Answers that look as asked: every kind, several at once, through preemption, the cache, and whatever was asked before."""

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimized import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from optimized.checkpoint import Checkpoint
from optimized.grammar import BYTES_OF_ONE, GrammarLimits, Grammars
from optimized.model_core import EngineArgs
from optimized.structured_outputs import TooComplex
from spec.engine import InvalidField, InvalidRequest

SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "n": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["on", "n"],
    "additionalProperties": False,
}


def asking(structure: StructuredOutputsParams, **params: object) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 1.0, "seed": 7, "max_tokens": 40, "structured_outputs": structure} | params)  # type: ignore[arg-type]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        (StructuredOutputsParams(regex="[ab]{3}-[0-9]+!"), "[ab]{3}-[0-9]+!"),
        (StructuredOutputsParams(choice=["yes", 'a "b"\n', "no", "né"]), '(yes|a "b"\n|no|né)'),
        (StructuredOutputsParams(grammar='start: "x" WORD "y"\nWORD: /[a-c]{2}/'), "x[abc]{2}y"),
        (StructuredOutputsParams(grammar='root ::= "x" [a-c] [a-c] "y"'), "x[abc]{2}y"),
        (StructuredOutputsParams(json={"enum": ["red", 3, None]}), '("red"|3|null)'),
    ],
)
def test_every_answer_looks_as_asked(llm: LLM, structure: StructuredOutputsParams, pattern: str) -> None:
    [answer] = llm.generate("hello", asking(structure, n=8, temperature=1.5), use_tqdm=False)
    for output in answer.outputs:
        assert re.fullmatch(pattern, output.text), output.text
        assert output.finish_reason == "stop"
    assert len({output.text for output in answer.outputs}) > 1


def test_an_answer_follows_its_schema_and_the_likeliest_token_is_one_that_may_come(llm: LLM) -> None:
    params = asking(StructuredOutputsParams(json=json.dumps(SCHEMA)), temperature=0.0, logprobs=0, max_tokens=48)
    [answer] = llm.generate("hello", params, use_tqdm=False)
    [output] = answer.outputs
    found = json.loads(output.text)
    assert list(found) == ["on", "n"] and 10 <= found["n"] <= 99
    # What the model thinks is told as it thinks it: without a grammar it would have said something else.
    assert output.logprobs is not None
    assert any(entry[token].rank > 1 for token, entry in zip(output.token_ids, output.logprobs, strict=True))


@pytest.mark.slow
def test_neither_preemption_nor_the_cache_nor_neighbours_change_an_answer(tiny: Checkpoint) -> None:
    params = [asking(StructuredOutputsParams(regex="[ab]{20}c*d"), seed=seed, max_tokens=30) for seed in range(4)]
    params.append(SamplingParams(temperature=1.0, seed=9, max_tokens=30, ignore_eos=True))
    roomy = LLM(tiny, block_size=4, max_num_seqs=16)
    alone = [roomy.generate("hello", each, use_tqdm=False)[0].outputs[0].text for each in params]
    assert all(re.fullmatch("[ab]{20}c*d?", text) for text in alone[:4]) and len(set(alone)) == 5
    for extra in ({"preemption_mode": "recompute"}, {"preemption_mode": "swap"}):
        tight = LLM(tiny, block_size=4, max_num_seqs=16, num_gpu_blocks_override=12, **extra)
        answers = tight.generate(["hello"] * 5, params, use_tqdm=False)
        assert sum(answer.num_preemptions for answer in answers) > 0
        assert [answer.outputs[0].text for answer in answers] == alone


def test_what_may_come_depends_on_the_output_alone(tiny: Checkpoint) -> None:
    grammar = Grammars(tiny).grammar(StructuredOutputsParams(regex="(ab|ba)*c"))
    assert tiny.tokenizer is not None
    outputs = [tiny.tokenizer.encode(text, add_special_tokens=False) for text in ("", "a", "ab", "abba", "b", "abbac")]
    fresh = [np.flatnonzero(grammar.progress().allowed(output)).tolist() for output in outputs]
    assert fresh[0] == sorted(tiny.tokenizer.encode("abc", add_special_tokens=False))
    assert fresh[-1] == list(tiny.config.eos_token_ids)
    one = grammar.progress()
    for index in (3, 1, 5, 0, 4, 2, 2, 5, 3, 0):
        assert np.flatnonzero(one.allowed(outputs[index])).tolist() == fresh[index]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "None, it must be exactly one of json, regex"),
        ({"regex": "a", "json_object": True}, "'regex and json_object', it must be exactly one"),
        ({"choice": []}, "1 to 1024 texts"),
        ({"regex": ""}, "a text that is not empty, if it has regex"),
        ({"grammar": ""}, "a text that is not empty, if it has grammar"),
        ({"grammar": 5}, "a text that is not empty, if it has grammar"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"json": "{"}, "a JSON schema, if it has json as text"),
        ({"json": "[" * 10_000}, "a JSON schema, if it has json as text"),
        ({"json": {"a": float("nan")}}, "what JSON has"),
        ({"json": 5}, "an object"),
        ({"regex": "a" * 65_537}, "65,537 characters long', it must be at most 65,536"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(given: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidField) as error:
        StructuredOutputsParams(**given, asked_as="response_format")  # type: ignore[arg-type]
    assert words in str(error.value) and str(error.value).startswith("response_format is ")


def test_depth_is_counted_without_depth() -> None:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidField, match="nested at most 64 deep"):
        StructuredOutputsParams(json=schema)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (StructuredOutputsParams(regex="(["), "a regex that can be followed: .*unclosed character class"),
        (StructuredOutputsParams(grammar="start: nobody"), 'unknown name: "nobody"'),
        (StructuredOutputsParams(json={"type": "banana"}), "Invalid type: banana"),
        (StructuredOutputsParams(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (StructuredOutputsParams(json={"$ref": "http://127.0.0.1:1/a.json"}), "not present in a registry"),
        (StructuredOutputsParams(json={"$ref": "#"}), "something that has an answer"),
        (StructuredOutputsParams(regex=r"[^\s\S]"), "something that has an answer"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused_and_changes_nothing(
    llm: LLM, structure: StructuredOutputsParams, words: str
) -> None:
    with pytest.raises(InvalidField, match=words) as error:
        llm.add_request("bad", "hello", asking(structure))
    assert "<unknown>" not in str(error.value) and "\n" not in str(error.value)
    assert not llm.has_unfinished_requests()


@pytest.mark.slow
def test_a_grammar_that_takes_too_much_to_make_is_refused(llm: LLM) -> None:
    hours = {"anyOf": [{"type": "integer", "multipleOf": prime} for prime in (4001, 4003, 4007, 4013, 4019, 4021)]}
    with pytest.raises(InvalidField, match="less time and memory"):
        llm.grammar_of(asking(StructuredOutputsParams(json=hours)))


@pytest.mark.parametrize(
    "other",
    [
        {"min_tokens": 2},
        {"ignore_eos": True},
        {"allowed_token_ids": [5]},
        {"bad_words": ["a"]},
        {"forced_token_ids": [5]},
    ],
)
def test_what_could_leave_no_token_is_refused_beside_a_grammar(other: dict[str, object]) -> None:
    with pytest.raises(InvalidField) as error:
        asking(StructuredOutputsParams(regex="a", asked_as="tools"), **other)
    assert error.value.field == next(iter(other)) and "with tools" in str(error.value)


def test_a_model_without_an_end_or_texts_has_no_structured_outputs(tiny: Checkpoint) -> None:
    asked = asking(StructuredOutputsParams(json_object=True))
    endless = replace(tiny, config=replace(tiny.config, eos_token_ids=()))
    for checkpoint, words in ((endless, "no token that ends"), (replace(tiny, tokenizer=None), "no tokenizer")):
        with pytest.raises(InvalidRequest, match=words):
            LLM(checkpoint, block_size=4, num_gpu_blocks_override=8).grammar_of(asked)


def test_one_grammar_that_stops_ends_its_own_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from optimized.grammar import GrammarStopped, Progress

    allowed = Progress.allowed

    def stops(self: Progress, output: list[int]) -> object:
        if len(output) == 2:
            raise GrammarStopped("it has more states than it may")
        return allowed(self, output)

    monkeypatch.setattr(Progress, "allowed", stops)
    params = [asking(StructuredOutputsParams(regex="[ab]{9}")), SamplingParams(temperature=0, max_tokens=9)]
    stopped, other = llm.generate(["hello"] * 2, params, use_tqdm=False)
    assert (stopped.outputs[0].finish_reason, len(stopped.outputs[0].token_ids)) == ("error", 2)
    assert stopped.outputs[0].stop_reason == "the answer's grammar stopped: it has more states than it may"
    assert other.outputs[0].finish_reason in ("stop", "length")


def test_an_async_engine_makes_grammars_beside_its_thread(tiny: Checkpoint) -> None:
    async def run() -> Iterator[str]:
        async with AsyncLLM(LLM(tiny, block_size=4, max_num_seqs=16)) as engine:
            good = engine.generate("hello", asking(StructuredOutputsParams(regex="[ab]{5}"), n=2))
            bad = engine.generate("hello", asking(StructuredOutputsParams(regex="(")))
            with pytest.raises(InvalidField, match="regex"):
                await anext(bad)
            last = [output async for output in good][-1]
            assert engine.health.num_unfinished == 0
            return (output.text for output in last.outputs)

    assert all(re.fullmatch("[ab]{5}", text) for text in asyncio.run(run()))


def test_the_reference_engine_says_that_it_has_no_grammars(tiny: Checkpoint) -> None:
    from optimized.cli.reference_core import ReferenceCore

    llm = LLM(tiny, block_size=4, num_gpu_blocks_override=16, make_core=ReferenceCore)
    assert EngineArgs().block_size != llm.config.block_size
    with pytest.raises(InvalidField, match="the reference engine knows no other"):
        llm.add_request("one", "hello", asking(StructuredOutputsParams(json_object=True)))


@pytest.mark.slow
def test_grammars_are_kept_as_far_as_there_is_room(tiny: Checkpoint) -> None:
    grammars = Grammars(tiny)
    one = grammars.grammar(StructuredOutputsParams(regex="a{1}"))
    grammars.limits = GrammarLimits(cache_bytes=2 * one.num_bytes)
    assert BYTES_OF_ONE < one.num_bytes == grammars.num_kept_bytes
    first, second = (grammars.grammar(StructuredOutputsParams(regex=f"a{{{n}}}")) for n in (1, 2))
    assert first is one and grammars.num_kept_bytes == 2 * one.num_bytes
    grammars.grammar(StructuredOutputsParams(regex="a{1}"))
    third = grammars.grammar(
        StructuredOutputsParams(regex="a{3}")
    )  # the second one goes, which was used before the first
    assert grammars.num_kept_bytes == 2 * one.num_bytes
    assert grammars.grammar(StructuredOutputsParams(regex="a{1}")) is one
    assert grammars.grammar(StructuredOutputsParams(regex="a{3}")) is third
    assert grammars.grammar(StructuredOutputsParams(regex="a{2}")) is not second
    grammars.limits = GrammarLimits(cache_bytes=0)
    grammars.grammar(StructuredOutputsParams(regex="a{2}"))
    assert grammars.num_kept_bytes == 0


def test_a_grammar_that_may_take_minutes_is_waited_for(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def late(command: object, **asked: Any) -> None:
        waited.append(asked["timeout"])
        raise subprocess.TimeoutExpired("trial", asked["timeout"])

    monkeypatch.setattr(subprocess, "run", late)
    grammars = Grammars(tiny)
    grammars.limits = GrammarLimits(cpu_ms=90_000)
    with pytest.raises(TooComplex, match="less time and memory"):
        grammars.grammar(StructuredOutputsParams(regex="abc"))
    assert waited[0] > 90


def test_a_grammar_has_its_time_to_be_made_in(tiny: Checkpoint) -> None:
    slow = StructuredOutputsParams(regex="(a|b)*a(a|b){60}c" * 3)
    grammars = Grammars(tiny)
    grammars.limits = GrammarLimits(cpu_ms=1)
    with pytest.raises(TooComplex, match="less time and memory"):
        grammars.grammar(slow)
    grammars.limits = GrammarLimits(cpu_ms=20_000)
    assert grammars.grammar(StructuredOutputsParams(regex="ab")).num_bytes > 0
