"""The forward pass and the draws as a GPU does them: the same code with the Triton kernels, here in the interpreter."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

import kernels
from kernels import bench_step
from kernels.bench_step import StepShape
from kernels.roofline import Heads
from optimized import kernel_draws, llama
from optimized.checkpoint import ModelConfig, random_arrays, random_checkpoint
from optimized.engine import EngineCore
from optimized.kernel_draws import drawn
from optimized.llama import LlamaModel
from optimized.sampling import Draw, SamplingParams, sample_rows
from optimized.torch_device import SeqSampling, TorchDevice
from spec.vocabulary import Config, Request
from tests.models.test_llama import Paged, dense_logits, logits_bound

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=48,
    intermediate_size=80,
    num_query_heads=4,
    num_kv_heads=2,
    head_size=32,
    vocab_size=101,
    max_model_len=64,
)
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"qkv_bias": True},
    "Qwen3": {"qk_norm": True, "rope_scale": 1.2},
}
OPERATIONS = ("rms_norm", "add_rms_norm", "silu_mul", "rotate_write", "paged_attention")


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPERATIONS:
        monkeypatch.setattr(llama, name, getattr(kernels, f"triton_{name}"))
    monkeypatch.setattr(kernel_draws, "draw_tokens", kernels.triton_draw_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("by_triton")
def test_logits_by_the_kernels_are_those_of_dense_attention(kind: str) -> None:
    config = replace(CONFIG, **KINDS[kind])
    arrays, checkpoint = random_arrays(config, 3), random_checkpoint(config, 3)
    prompts = [np.random.default_rng(seq).integers(0, config.vocab_size, 8).tolist() for seq in range(2)]
    paged = Paged(LlamaModel(config, checkpoint.tensors), 2, 4, 4)
    steps = [{0: prompts[0][:7], 1: prompts[1][:3]}, {0: prompts[0][7:], 1: prompts[1][3:]}]
    found: list[list[torch.Tensor]] = [[], []]
    for chunks in steps:  # a prefill, and then a decode beside the rest of a prompt
        parts = paged.step(chunks, every_row=True).split([len(chunk) for chunk in chunks.values()])
        for seq, part in zip(chunks, parts, strict=True):
            found[seq].append(part)
    exact = [dense_logits(config, arrays, prompt, np.float64) for prompt in prompts]
    bound = logits_bound(config, arrays, prompts, exact)
    for seq, expected in enumerate(exact):
        error = np.abs(torch.cat(found[seq]).numpy() - expected).max()
        assert error <= bound, f"sequence {seq} is off by {error}, the bound is {bound}"


# --- draws ------------------------------------------------------------------------------------------------------------

HOW = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=1.0, top_k=-1, top_p=0.8),
    SamplingParams(temperature=2.0, min_p=0.2, top_k=3, top_p=0.9),
]


@pytest.mark.slow
@pytest.mark.parametrize("draw_tokens", [kernels.cpu_draw_tokens, kernels.triton_draw_tokens], ids=["twin", "triton"])
def test_a_kernel_draws_the_tokens_of_the_definition(monkeypatch: pytest.MonkeyPatch, draw_tokens: Any) -> None:
    monkeypatch.setattr(kernel_draws, "draw_tokens", draw_tokens)
    draws = [Draw(params, seed=(1 << 64) - 1 - i, sequence=i, position=7) for i in range(2) for params in HOW]
    logits = torch.randn(len(draws), 300, generator=torch.Generator().manual_seed(0)) * 3
    logits[4, 5] = math.nan
    logits[8] = -math.inf
    expected = [each if isinstance(each, int) else None for each in sample_rows(logits.numpy(), draws)]
    assert [row for row, token in enumerate(expected) if token is None] == [4, 8]
    assert drawn(logits, draws) == expected


REQUESTS = [
    *HOW,
    SamplingParams(temperature=1.0, logprobs=2),
    SamplingParams(temperature=0.9, repetition_penalty=1.5),
    SamplingParams(temperature=0.0, logit_bias={7: 50.0}),
]


@pytest.mark.parametrize("is_broken", [False, True], ids=["numbers", "one without numbers"])
def test_an_engine_that_draws_by_the_kernel_says_the_same(is_broken: bool) -> None:
    limits = Config(num_blocks=64, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=32)
    model = LlamaModel(CONFIG, random_checkpoint(CONFIG, 0).tensors)

    def said(draws_by_kernel: bool) -> list[object]:
        core = EngineCore(limits, device := TorchDevice(model, limits, lambda seq: core.scheduler.seqs[seq].tokens))
        device.draws_by_kernel = draws_by_kernel
        for index, params in enumerate(REQUESTS):
            core.add(Request(index, (index, 2, 3), max_tokens=5, seq_ids=(index,)))
            device.sampling[index] = SeqSampling(params, seed=index, ordinal=0, num_prompt_tokens=3)
        found: list[object] = []
        while core.has_work:
            if is_broken and len(found) == 2:
                device.kv_caches[0][0][list(core.scheduler.seqs[1].table)] = math.nan
            outcome = core.step()
            found.append((outcome.seq_ids, outcome.tokens, device.logprobs, outcome.failed))
        return found

    assert said(True) == said(False)


# --- launches ---------------------------------------------------------------------------------------------------------


class Launches(TorchDispatchMode):
    """What a GPU would be sent: each of our kernels, and each of torch's operations that gives more than another look at
    memory or room for numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.kernels: list[tuple[Any, ...]] = []  # name, grid and constants
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        results = made if isinstance(made, tuple | list) else (made,)
        known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        news = [
            each
            for each in results
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in known
        ]
        is_launch = (news and news[0].numel() and not name.startswith(("empty", "new_empty"))) or name.endswith("_")
        if is_launch and not self.is_inside:
            self.names.append(name)
        return made


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, by_triton: None) -> Launches:
    monkeypatch.setenv("KVPROOF_UNCHECKED_KERNELS", "1")  # looking at values is work for the device too
    counted = Launches()

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        """It computes nothing: what is launched does not depend on what comes out."""
        counted.names.append(self.fn.__name__)
        counted.kernels.append((self.fn.__name__, grid, constants))

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    return counted


STEP = StepShape(2, 48, 80, 101, Heads(4, 2, 32), batch=3, seq_len=20, block_size=4)
BEFORE = ["arange", "mul", "polar", "to", "embedding", "rms_norm_kernel"]
ATTENTION = ["linear", "rotate_write_kernel", "paged_attention_kernel", "linear", "rms_norm_kernel"]
LAYER = [*ATTENTION, "linear", "silu_mul_kernel", "linear", "rms_norm_kernel"]
AFTER = ["index", "linear", "to", "draw_tokens_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_is_nine_launches_a_layer_and_ten_more(launches: Launches, kind: str) -> None:
    """docs/compiled-kernels.md says so."""
    config = replace(CONFIG, **KINDS[kind])
    model = LlamaModel(config, random_checkpoint(config, 0).tensors, torch.bfloat16)
    plan, draws = bench_plan(config.sliding_window), [Draw(SamplingParams(), 1, 0, 20)] * STEP.batch
    slots, tables = torch.arange(3) * 20 + 19, torch.arange(15, dtype=torch.int32).view(3, 5)
    lens = torch.full((3,), 20, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    tokens, positions, caches = torch.arange(3), torch.full((3,), 19), model.new_kv_caches(15, STEP.block_size)
    with launches:
        x = model.forward(tokens, positions, caches, slots, tables, *lens, plan)
        logits = model.logits(x[tokens])
    drawn(logits, draws)
    assert launches.names == [*BEFORE, *LAYER * config.num_layers, *AFTER]


def bench_plan(window: int | None = None) -> kernels.AttentionPlan:
    lens, heads = ([1] * STEP.batch, [STEP.seq_len] * STEP.batch), STEP.heads
    sizes = {"num_query_heads": heads.num_query_heads, "num_kv_heads": heads.num_kv_heads, "head_size": heads.head_size}
    return kernels.plan_attention(*lens, **sizes, dtype=torch.bfloat16, device=torch.device("cpu"), window=window)


def test_the_step_that_is_measured_launches_what_the_engine_launches(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``kernels.bench`` may not import an engine, so it has a step of its own: the same kernels, grids and constants."""
    test_a_decode_step_is_nine_launches_a_layer_and_ten_more(launches, "Llama")
    engine, launches.kernels = launches.kernels, []
    for name in (*OPERATIONS, "draw_tokens"):
        monkeypatch.setattr(bench_step, name, getattr(kernels, f"triton_{name}"))
    bench_step.DecodeStep(STEP, torch.device("cpu"))()
    assert launches.kernels == engine
