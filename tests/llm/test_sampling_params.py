"""What the parameters of sampling do to whole answers of a tiny random model, however they are scheduled."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from optimized import LLM, SamplingParams
from optimized.checkpoint import Checkpoint
from optimized.cli.reference_core import ReferenceCore
from optimized.llama import LlamaModel
from optimized.sampling import logprobs
from spec.engine import InvalidField

PROMPTS = ["hello", "a much longer prompt than that", "x"]
COUNTED = SamplingParams(
    temperature=0.8,
    seed=3,
    max_tokens=12,
    ignore_eos=True,
    repetition_penalty=1.2,
    frequency_penalty=0.5,
    presence_penalty=0.3,
    min_tokens=4,
    logit_bias={100: 2.0},
    logprobs=2,
)


def dense_logits(tiny: Checkpoint, token_ids: list[int]) -> np.ndarray:
    """Logits after every token, in one prefill without a neighbour."""
    model, count = LlamaModel(tiny.config, tiny.tensors), len(token_ids)
    rows = model.forward(
        torch.tensor(token_ids),
        torch.arange(count),
        model.new_kv_caches(1, count),
        torch.arange(count),
        torch.zeros((1, 1), dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        torch.tensor([0, count], dtype=torch.int32),
    )
    return model.logits(rows).numpy()


def test_log_probabilities_are_those_of_the_model_before_anything_else(llm: LLM, tiny: Checkpoint) -> None:
    [answer] = llm.generate("hello", COUNTED)
    [output] = answer.outputs
    logits = dense_logits(tiny, answer.prompt_token_ids + output.token_ids)[len(answer.prompt_token_ids) - 1 :]
    assert output.logprobs is not None
    assert len(output.logprobs) == 12
    for row, token, found in zip(logits, output.token_ids, output.logprobs, strict=False):
        expected = logprobs(row, token, 2)
        assert list(found) == list(expected)
        for each, there in zip(found.values(), expected.values(), strict=True):
            assert math.isclose(each.logprob, there.logprob, abs_tol=1e-4)
            assert isinstance(each.decoded_token, str)
    total = sum(found[token].logprob for token, found in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_what_depends_on_earlier_tokens_does_not_depend_on_the_schedule(tiny: Checkpoint) -> None:
    """Alone, together, in chunks, under preemption and with forks the same tokens come."""
    answers = []
    for limits in (
        {},
        {"max_num_batched_tokens": 3},
        {"num_gpu_blocks_override": 12},
        {"max_num_seqs": 1},
    ):
        llm = LLM(tiny, block_size=4, max_num_seqs=limits.pop("max_num_seqs", 8), **limits)
        answers.append([[o.token_ids for o in each.outputs] for each in llm.generate(PROMPTS, COUNTED)])
    assert all(later == earlier for earlier, later in pairwise(answers))
    llm = LLM(tiny, block_size=4, max_num_seqs=8)
    samples = SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=8, ignore_eos=True, frequency_penalty=1.0)
    [together] = llm.generate("hello", samples)
    assert len({tuple(output.token_ids) for output in together.outputs}) == 3
    assert [o.token_ids for o in llm.generate(["x", "hello"], samples)[1].outputs] == [
        output.token_ids for output in together.outputs
    ]


def test_prompt_log_probabilities_are_whole_even_where_the_prefix_is_cached(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4, max_num_seqs=8, enable_prefix_caching=True, max_num_batched_tokens=7)
    text = "a much longer prompt than that"
    llm.generate(text, SamplingParams(temperature=0, max_tokens=2))
    asked = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, n=2)
    for _ in range(2):
        [answer] = llm.generate(text, asked)
        assert answer.prompt_logprobs is not None
        assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
        assert answer.prompt_logprobs[0] is None
        logits = dense_logits(tiny, answer.prompt_token_ids)
        for position, found in enumerate(answer.prompt_logprobs[1:], start=1):
            assert found is not None
            expected = logprobs(logits[position - 1], answer.prompt_token_ids[position], 1)
            assert list(found) == list(expected)
            assert math.isclose(
                found[answer.prompt_token_ids[position]].logprob,
                expected[answer.prompt_token_ids[position]].logprob,
                abs_tol=1e-4,
            )


def test_x9_zero_log_probabilities_are_the_chosen_ones_and_none_are_none(llm: LLM) -> None:
    [output] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=3, logprobs=0))[0].outputs
    assert output.logprobs is not None
    assert [list(each) for each in output.logprobs] == [[token] for token in output.token_ids]
    [output] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=3))[0].outputs
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


def test_nothing_ends_an_answer_below_min_tokens(llm: LLM) -> None:
    free = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    first = free.token_ids[0]
    [output] = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[first]))[0].outputs
    assert (output.token_ids, output.finish_reason) == ([first], "stop")
    asked = SamplingParams(temperature=0, max_tokens=8, min_tokens=5, stop_token_ids=[first])
    [output] = llm.generate("hello", asked)[0].outputs
    assert len(output.token_ids) >= 5
    assert first not in output.token_ids[:5]


def test_a_forced_token_that_would_end_an_answer_below_min_tokens_is_refused(llm: LLM, tiny: Checkpoint) -> None:
    end = tiny.config.eos_token_ids[0]
    forced = {"temperature": 0, "max_tokens": 5, "forced_token_ids": [97, 98, end]}
    with pytest.raises(
        InvalidField, match=r"forced_token_ids is \[97, 98, 261\], it must be without a token that ends"
    ):
        llm.generate("hello", SamplingParams(**forced, min_tokens=3))
    assert llm.generate("hello", SamplingParams(**forced, min_tokens=2))[0].outputs[0].token_ids == [97, 98, end]
    ignored = SamplingParams(**forced, min_tokens=3, ignore_eos=True)
    assert len(llm.generate("hello", ignored)[0].outputs[0].token_ids) == 5


def test_a_stop_string_below_min_tokens_is_text_and_one_after_it_ends_the_answer(llm: LLM) -> None:
    forced = list(b"abXcdXef")
    stop = {"temperature": 0, "max_tokens": 8, "forced_token_ids": forced, "stop": "X", "ignore_eos": True}
    assert llm.generate("hello", SamplingParams(**stop))[0].outputs[0].text == "ab"
    assert llm.generate("hello", SamplingParams(**stop, min_tokens=4))[0].outputs[0].text == "abXcd"
    [output] = llm.generate("hello", SamplingParams(**stop, include_stop_str_in_output=True))[0].outputs
    assert (output.text, output.stop_reason) == ("abX", "X")


def test_bad_words_do_not_come(llm: LLM, tiny: Checkpoint) -> None:
    free = llm.generate("hello", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    assert tiny.tokenizer is not None
    word = tiny.tokenizer.decode(free.token_ids[2:4])
    if not word.isascii() or not word.strip():
        word = "".join(chr(token) for token in range(97, 99))
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=[word])
    assert word not in llm.generate("hello", asked)[0].outputs[0].text
    allowed = SamplingParams(temperature=1, seed=1, max_tokens=12, ignore_eos=True, allowed_token_ids=[97, 98])
    assert set(llm.generate("hello", allowed)[0].outputs[0].token_ids) <= {97, 98}


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "forced_token_ids", "logit_bias"])
def test_x2_token_ids_are_checked_against_the_vocabulary_before_anything_happens(llm: LLM, field: str) -> None:
    value = {300: 1.0} if field == "logit_bias" else [300]
    with pytest.raises(InvalidField, match=f"{field} is 300, it must be made of token ids from 0 to 261"):
        llm.generate("hello", SamplingParams(**{field: value}))
    assert not llm.has_unfinished_requests()


def test_a_request_whose_parameters_leave_no_token_ends_alone(llm: LLM) -> None:
    good = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    none = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[97], bad_words=["a"])
    first, bad, last = llm.generate(["hello", "hello", "x"], [good, none, good])
    assert [each.outputs[0].finish_reason for each in (first, bad, last)] == ["length", "error", "length"]
    assert "leave no token" in str(bad.outputs[0].stop_reason)
    assert first.outputs[0].token_ids == llm.generate("hello", good)[0].outputs[0].token_ids


def test_the_reference_engine_refuses_by_name_what_it_does_not_have(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4, make_core=ReferenceCore)
    with pytest.raises(InvalidField, match="frequency_penalty is 0.5"):
        llm.generate("hello", SamplingParams(frequency_penalty=0.5))
