"""Cells that nobody has written are poison, if that is asked for: it changes no answer, and no stale read stays unseen."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import LLM, SamplingParams
from optimized.batch_tensors import StepTensors
from optimized.checkpoint import Checkpoint, random_checkpoint
from optimized.engine import EngineCore
from optimized.llama import LlamaModel
from optimized.model_core import TorchCore
from optimized.plan import Plan
from optimized.poison import VARIABLE, is_asked_for, unwritten_blocks
from optimized.torch_device import TorchDevice
from spec.vocabulary import Config, InvalidConfig, Recovery, Request, SeqId, Token
from tests.models.test_llama import CONFIG
from tests.models.test_vector_model import needs_vectors, vector_model

PROMPTS = [f"the same prompt {'x' * (index % 7)}{index}" for index in range(6)]
PARAMS = [
    SamplingParams(n=1 + index % 3, temperature=index % 2, seed=index, max_tokens=12, ignore_eos=True)
    for index in range(6)
]
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"dtype": "float32"},
    "swap": {"dtype": "bfloat16", "preemption_mode": "swap"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "ahead": {"overlap_steps": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_poison_changes_no_answer(tiny: Checkpoint, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for said in ("0", "1"):
        monkeypatch.setenv(VARIABLE, said)
        llm = LLM(
            tiny, block_size=4, max_num_seqs=8, max_num_batched_tokens=24, num_gpu_blocks_override=30, **WAYS[way]
        )
        answers = [llm.generate(PROMPTS, PARAMS) for _ in range(2)]  # the second time the cache has the prompts
        stats = llm.stats()
        assert stats.num_preemptions > 0 and stats.hit_tokens > 0 and stats.blocks_copied > 0
        assert (stats.blocks_swapped_out > 0) == (way == "swap")
        assert isinstance(llm._core, TorchCore)
        assert len(llm._core.device.kv_caches[0][0]) == 30 + (said == "1")
        found.append([(each.token_ids, each.finish_reason) for some in answers for one in some for each in one.outputs])
    assert found[0] == found[1]
    assert {reason for _, reason in found[1]} == {"length"}


Tables = tuple[Tensor, Tensor]


def a_key_too_many() -> Callable[[Tables], Tables]:
    return lambda given: (torch.nn.functional.pad(given[0], (0, 1), value=LIMITS.num_blocks), given[1] + 1)


def the_tables_of_the_step_before() -> Callable[[Tables], Tables]:
    before: list[Tensor] = []

    def change(given: Tables) -> Tables:
        before.append(given[0].clone())
        return (before[-2] if len(before) > 1 and before[-2].shape == before[-1].shape else given[0]), given[1]

    return change


def the_table_of_another_row() -> Callable[[Tables], Tables]:
    return lambda given: (given[0].roll(1, 0).contiguous(), given[1])


MISTAKES = (a_key_too_many, the_tables_of_the_step_before, the_table_of_another_row)
LIMITS = Config(num_blocks=24, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
MODELS: dict[str, Callable[[], Any]] = {
    "torch": lambda: LlamaModel(CONFIG, random_checkpoint(CONFIG, 0).tensors),
    "vector": lambda: vector_model(CONFIG),
    "window": lambda: LlamaModel(windowed := replace(CONFIG, sliding_window=7), random_checkpoint(windowed, 0).tensors),
    "vector, window": lambda: vector_model(replace(CONFIG, sliding_window=7)),
}


def told(
    model: Any, limits: Config, *, poisons: bool, change: Callable[[Tables], Tables] | None = None
) -> tuple[dict[SeqId, list[Token]], int]:
    """What each sequence says, and how many requests fail."""
    device = TorchDevice(model, limits, poisons=poisons)
    forward = device._forward
    if change is not None:

        def mistaken(plan: Plan, tensors: StepTensors) -> Tensor:
            tables, lengths = change((tensors.block_tables, tensors.seq_lens))
            return forward(plan, tensors._replace(block_tables=tables, seq_lens=lengths))

        device._forward = mistaken  # type: ignore[method-assign]
    core = EngineCore(limits, device)
    for index in range(6):
        core.add(Request(index, tuple(range(1, 8 + 5 * index)), max_tokens=20, seq_ids=(index,)))
    said, num_failed = dict[SeqId, list[Token]](), 0
    while core.has_work:
        outcome = core.step()
        num_failed += len(outcome.failed)
        for seq_id, token in zip(outcome.seq_ids, outcome.tokens, strict=True):
            said.setdefault(seq_id, []).append(token)
    return said, num_failed


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_vectors if "vec" in name else ()) for name in MODELS])
def test_a_stale_read_is_an_error_of_its_request_and_nothing_else_is(name: str) -> None:
    model = MODELS[name]()
    window = model.config.sliding_window
    tight = replace(LIMITS, num_blocks=10, prefix_cache=True, num_host_blocks=20, recovery=Recovery.SWAP, window=window)
    limits = replace(LIMITS, window=window)
    expected = told(model, limits, poisons=False)
    assert told(model, limits, poisons=True) == told(model, tight, poisons=True) == expected
    assert expected[1] == 0
    for mistake in MISTAKES:
        assert told(model, limits, poisons=True, change=mistake())[1] > 0, mistake.__name__
    assert told(model, limits, poisons=False, change=the_tables_of_the_step_before())[1] == 0


@pytest.mark.parametrize("keeps", [True, False])
def test_what_nobody_can_find_is_poisoned_when_it_is_given_back(
    tiny: Checkpoint, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    llm = LLM(tiny, block_size=4, num_gpu_blocks_override=8, dtype="float32", enable_prefix_caching=keeps)
    core = llm._core
    assert isinstance(core, TorchCore)
    llm.generate([[1] * 9], SamplingParams(max_tokens=2))
    for layer in core.device.kv_caches:
        for cache in layer:
            has_nan = cache.isnan().flatten(1).all(1).tolist()
            # Two full blocks and a third one that was not filled; five that were never used, and nobody's.
            assert has_nan == [not keeps, not keeps, True, *[False] * 5, True]


def test_blocks_that_a_step_begins_are_poisoned_and_no_others() -> None:
    plan = Plan(
        0,
        seq_ids=(0, 1, 2),
        query_start=(0, 5, 6, 7),
        positions=(4, 5, 6, 7, 8, 6, 9),
        block_tables=((7, 8, 9), (1, 2), (3, 4)),
        num_dropped_blocks=(0, 0, 0),
    )
    assert unwritten_blocks(plan, 4) == [8, 9]
    assert unwritten_blocks(replace(plan, num_dropped_blocks=(0, 0, 2)), 4) == [8, 9, 4]
    assert unwritten_blocks(replace(plan, num_dropped_blocks=()), 4) == [8, 9]


def test_poison_is_asked_for_by_0_or_1() -> None:
    assert [is_asked_for(said) for said in ({}, {VARIABLE: "0"}, {VARIABLE: "1"})] == [False, False, True]
    with pytest.raises(InvalidConfig, match="KVPROOF_POISON is 'yes', it must be 0 or 1"):
        is_asked_for({VARIABLE: "yes"})
