"""The default model answers; both engines say what transformers says, but where the numbers are too close to tell."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from optimized import LLM, SamplingParams
from optimized.checkpoint import Checkpoint
from optimized.cli import app
from optimized.llama import LlamaModel
from reference import ReferenceModelEngine
from spec.vocabulary import Config, Request
from tests.kernels.test_four_bits import needs_four_bits
from tests.kernels.test_int8 import needs_int8
from tests.models.test_llama import Paged, dense_logits
from tests.models.test_vector_model import needs_vectors

RECORDED = json.loads((Path(__file__).parent.parent / "models" / "smollm2_greedy.json").read_text())
CASES: list[dict[str, Any]] = RECORDED["cases"]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.mark.slow
def test_the_capital_of_france_is_paris(smollm2_llm: LLM) -> None:
    [answer] = smollm2_llm.chat(QUESTION, GREEDY)
    [output] = answer.outputs
    assert (output.text, output.finish_reason) == ("The capital of France is Paris.", "stop")
    assert output.token_ids == CASES[0]["token_ids"]
    assert answer.prompt == CASES[0]["rendered"]


@pytest.mark.slow
def test_four_samples_store_their_prompt_once(smollm2: Checkpoint) -> None:
    llm = LLM(smollm2, num_gpu_blocks_override=24)
    [answer] = llm.chat(QUESTION, SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=4))
    assert len({tuple(output.token_ids) for output in answer.outputs}) > 1
    stats = llm.stats()
    assert len(answer.prompt_token_ids) == 37
    assert (stats.blocks_prompt_shared, stats.blocks_copied) == (3, 3)


@pytest.mark.slow
def test_streaming_ends_in_the_text_that_comes_at_once(smollm2_llm: LLM) -> None:
    smollm2_llm.add_request("a", smollm2_llm.chat_prompt(QUESTION), GREEDY)
    texts = []
    while smollm2_llm.has_unfinished_requests():
        texts += [answer.outputs[0].text for answer in smollm2_llm.step()]
    assert texts[:2] == ["The", "The capital"]
    assert texts[-1] == "The capital of France is Paris."


@pytest.mark.slow
def test_a_stop_string_that_spans_tokens_is_never_shown(smollm2_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=["France is Par"])
    [output] = smollm2_llm.chat(QUESTION, params)[0].outputs
    assert (output.text, output.stop_reason) == ("The capital of ", "France is Par")


@pytest.mark.slow
def test_preemption_changes_no_text(smollm2: Checkpoint, smollm2_llm: LLM) -> None:
    prompts = [case["prompt_token_ids"] for case in CASES[7:10]]  # 9, 13 and 17 tokens
    params = SamplingParams(temperature=0.0, max_tokens=7)
    tight = LLM(smollm2, block_size=4, num_gpu_blocks_override=13)
    answers = tight.generate(prompts, params)
    assert tight.stats().num_preemptions > 0
    expected = smollm2_llm.generate(prompts, params)
    assert [answer.outputs for answer in answers] == [answer.outputs for answer in expected]


@pytest.mark.slow
def test_the_command_says_the_same_when_it_has_to_swap(smollm2: Checkpoint) -> None:
    """Eight questions fill a cache of 40 blocks, and their answers do not fit any more."""
    words = "Tell me in a few plain words why the sky is blue in the day, red in the evening and black in the night"
    prompts = [
        f"Number {n}. {words}, and what the moon has to do with it, if it has to do with it at all." for n in range(8)
    ]

    def answer(*options: str) -> dict[str, Any]:
        arguments = ["generate", *prompts, "--model", str(smollm2.path), "--max-tokens", "24", "--json", *options]
        found: dict[str, Any] = json.loads(CliRunner().invoke(app, arguments).stdout)
        return found

    tight, roomy = answer("--preemption-mode", "swap", "--num-gpu-blocks-override", "40"), answer()
    assert tight["num_preemptions"] > 0 == roomy["num_preemptions"]
    assert tight["blocks_swapped_out"] > 0
    assert tight["outputs"] == roomy["outputs"]


# --- two engines and transformers -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def optimized_tokens(smollm2_llm: LLM) -> list[list[int]]:
    """What the optimized engine says to all prompts in one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=RECORDED["num_tokens"])
    answers = smollm2_llm.generate([case["prompt_token_ids"] for case in CASES], params)
    return [answer.outputs[0].token_ids for answer in answers]


@pytest.fixture(scope="module")
def reference_tokens(smollm2: Checkpoint) -> list[list[tuple[int, float]]]:
    """What the reference engine says, and before each token the margin of its two best logits in float64."""
    engine = ReferenceModelEngine(smollm2.arrays(), smollm2.config, Config(num_blocks=64, max_num_batched_tokens=128))
    for index, case in enumerate(CASES):
        prompt = tuple(case["prompt_token_ids"])
        engine.add(Request(index, prompt, RECORDED["num_tokens"], (index,), smollm2.config.eos_token_ids))
    said: list[list[tuple[int, float]]] = [[] for _ in CASES]
    while engine.engine.has_work:
        for event in engine.step().emitted:
            second, first = np.partition(engine.device.last_logits[event.seq], -2)[-2:]
            said[event.seq].append((event.tokens[0], float(first - second)))
    return said


def prefixes(reference_tokens: list[list[tuple[int, float]]]) -> Iterator[tuple[list[int], int]]:
    """Of each case the tokens before which, and after which, the reference chose; and how many it chose."""
    for case, said in zip(CASES, reference_tokens, strict=True):
        yield [*case["prompt_token_ids"], *(token for token, _ in said[:-1])], len(said)


@pytest.fixture(scope="module")
def exact_logits(smollm2: Checkpoint, reference_tokens: list[list[tuple[int, float]]]) -> list[np.ndarray]:
    """The logits in float64, with dense attention, from which the reference chose."""
    arrays = smollm2.arrays()
    return [
        dense_logits(smollm2.config, arrays, token_ids, np.float64)[-count:]
        for token_ids, count in prefixes(reference_tokens)
    ]


@pytest.fixture(scope="module")
def logit_bound(
    smollm2: Checkpoint, reference_tokens: list[list[tuple[int, float]]], exact_logits: list[np.ndarray]
) -> float:
    """Twice the largest difference that float32 makes to a logit, with dense attention, over the same positions."""
    arrays, largest = smollm2.arrays(), 0.0
    for (token_ids, count), exact in zip(prefixes(reference_tokens), exact_logits, strict=True):
        rounded = dense_logits(smollm2.config, arrays, token_ids, np.float32)[-count:]
        largest = max(largest, float(np.abs(rounded - exact).max()))
    return 2 * largest


@pytest.fixture(scope="module")
def bfloat16_bound(
    smollm2: Checkpoint, reference_tokens: list[list[tuple[int, float]]], exact_logits: list[np.ndarray]
) -> float:
    """The same for bfloat16, as torch multiplies it."""
    model, largest = LlamaModel(smollm2.config, smollm2.tensors, torch.bfloat16), 0.0
    for (token_ids, count), exact in zip(prefixes(reference_tokens), exact_logits, strict=True):
        rounded = Paged(model, 1, 16, 16).step({0: token_ids}, every_row=True)[-count:]
        largest = max(largest, float(np.abs(rounded.numpy() - exact).max()))
    return 2 * largest


def unexplained(
    said: list[list[int]], reference: list[list[tuple[int, float]]], bound: float
) -> Iterator[tuple[str, int, float]]:
    """Where an answer first leaves the reference's although the margin there is beyond the bound."""
    for case, tokens, expected in zip(CASES, said, reference, strict=True):
        for position, (token, margin) in enumerate(expected):
            if position >= len(tokens) or tokens[position] != token:
                if margin > bound:
                    yield case["prompt"], position, margin
                break


@pytest.mark.slow
def test_both_engines_say_the_same(
    optimized_tokens: list[list[int]], reference_tokens: list[list[tuple[int, float]]], logit_bound: float
) -> None:
    assert 0.0 < logit_bound < 0.01  # a bound that explains everything would show nothing
    assert list(unexplained(optimized_tokens, reference_tokens, logit_bound)) == []


@pytest.mark.slow
def test_transformers_says_the_same(
    optimized_tokens: list[list[int]], reference_tokens: list[list[tuple[int, float]]], logit_bound: float
) -> None:
    recorded = [case["token_ids"] for case in CASES]
    assert list(unexplained(recorded, reference_tokens, logit_bound)) == []
    smallest = min(margin for said in reference_tokens for _, margin in said)
    assert smallest > logit_bound, "some margin lies within the bound: the next line is too strict"
    assert optimized_tokens == recorded


@pytest.mark.slow
@needs_vectors
@pytest.mark.parametrize("quantization", [None, pytest.param("gguf", marks=needs_four_bits)])
def test_the_vector_kernels_say_the_same_but_where_bfloat16_cannot_tell(
    quantization: str | None,
    smollm2: Checkpoint,
    reference_tokens: list[list[tuple[int, float]]],
    bfloat16_bound: float,
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=RECORDED["num_tokens"])
    llm = LLM(smollm2, dtype="bfloat16", quantization=quantization)
    answers = llm.generate([case["prompt_token_ids"] for case in CASES], params)
    said = [answer.outputs[0].token_ids for answer in answers]
    # A bound that explained everything would show nothing.
    assert any(margin > bfloat16_bound for each in reference_tokens for _, margin in each)
    assert list(unexplained(said, reference_tokens, bfloat16_bound)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantization", [pytest.param("int8", marks=needs_int8), pytest.param("gguf", marks=needs_four_bits)]
)
def test_with_narrow_weights_the_capital_of_france_is_paris(quantization: str, smollm2: Checkpoint) -> None:
    asked = ("generate", QUESTION[0]["content"], "--max-tokens", "12", "--quantization", quantization, "--model")
    result = CliRunner().invoke(app, [*asked, str(smollm2.path)])
    assert (result.exit_code, result.stdout) == (0, "The capital of France is Paris.\n")
