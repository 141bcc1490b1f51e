"""An engine with a cache of 8 bits: its size, and that its scales go where its blocks go."""

import torch

from optimized import LLM, SamplingParams
from optimized.checkpoint import Checkpoint
from optimized.model_core import TorchCore
from optimized.plan import BlockCopy, Plan, Swap

PROMPTS = [f"prompt {index} {'x' * index}" for index in range(5)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def engine(tiny: Checkpoint, **args: object) -> LLM:
    return LLM(tiny, block_size=4, kv_cache_dtype="fp8", **args)


def tokens(llm: LLM, params: SamplingParams) -> list[list[tuple[int, ...]]]:
    return [[tuple(output.token_ids) for output in answer.outputs] for answer in llm.generate(PROMPTS, params)]


def core_of(llm: LLM) -> TorchCore:
    assert isinstance(llm._core, TorchCore)
    return llm._core


def test_a_block_is_sized_with_its_scales(tiny: Checkpoint) -> None:
    layers, heads, head_size = tiny.config.num_layers, tiny.config.num_kv_heads, tiny.config.head_size
    block_bytes = 4 * layers * heads * 2 * (head_size + 2)
    llm = engine(tiny, kv_cache_memory_bytes=block_bytes * 10 + block_bytes - 1)
    assert llm.config.num_blocks == 10
    caches = core_of(llm).device.kv_caches
    assert {tuple(each.dtype for each in layer) for layer in caches} == {
        (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)
    }
    assert sum(each.nbytes for layer in caches for each in layer) == 10 * block_bytes
    assert len(LLM(tiny, num_gpu_blocks_override=3)._core.device.kv_caches[0]) == 2  # type: ignore[attr-defined]


def test_what_is_swapped_out_comes_back_with_its_scales(tiny: Checkpoint) -> None:
    roomy = engine(tiny)
    tight = engine(tiny, num_gpu_blocks_override=11, preemption_mode="swap")
    assert tokens(tight, GREEDY) == tokens(roomy, GREEDY)
    assert tight.stats().blocks_swapped_out > 0 == roomy.stats().num_preemptions


def test_a_copied_block_and_a_swapped_one_bring_their_scales(tiny: Checkpoint) -> None:
    device = core_of(engine(tiny, num_gpu_blocks_override=4, preemption_mode="swap")).device
    before = []
    for layer in device.kv_caches:
        for each in layer:
            each.view(torch.uint8).random_(0, 0x70)
            before.append(each.view(torch.uint8).clone())
    device.run(Plan(0, swaps=(Swap(True, 0, (0,), (3,)),), copies=(BlockCopy(1, 0, source=1, target=2),)))
    device.run(Plan(1, swaps=(Swap(False, 0, (3,), (3,)),)))
    now = [each.view(torch.uint8) for layer in device.kv_caches for each in layer]
    for each, then in zip(now, before, strict=True):
        assert torch.equal(each, then[[0, 1, 1, 0]])


def test_a_hit_in_the_prefix_cache_brings_the_scales(tiny: Checkpoint) -> None:
    llm, plain = engine(tiny), engine(tiny, enable_prefix_caching=False)
    for _ in range(2):
        assert tokens(llm, GREEDY) == tokens(plain, GREEDY)
    assert llm.stats().hit_tokens > 0 == plain.stats().hit_tokens
