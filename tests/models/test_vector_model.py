"""The forward pass by the vector kernels: within the bound of its precision, and the same bits in every batch."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.team import usable_processors, why_not
from optimized.checkpoint import (
    ModelConfig,
    llama3_divisors,
    random_arrays,
    random_checkpoint,
    yarn_divisors,
    yarn_scale,
)
from optimized.cpu_path import cpu_path, num_threads
from optimized.engine import EngineCore
from optimized.llama import LlamaModel
from optimized.sampling import Draw, SamplingParams, sample_rows
from optimized.torch_device import TorchDevice
from spec.vocabulary import Config, InvalidConfig, Recovery, Request
from tests.models.test_llama import CONFIG, Paged, chunks_of, dense_logits
from tests.optimized.test_batch_tensors import NUM_SEQS, lists_made_arrays
from tests.optimized.test_torch_device import generate

NO_VECTORS = why_not()
needs_vectors = pytest.mark.skipif(NO_VECTORS is not None, reason=f"no vector kernels: {NO_VECTORS}")

MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"rope_divisors": llama3_divisors(16, 10_000.0, 4.0, 1.0, 4.0, 32)},
    "Llama, tied, odd sizes": {"tie_word_embeddings": True, "hidden_size": 50, "intermediate_size": 70},
    "Mistral": {"sliding_window": 7},
    "Qwen2": {"qkv_bias": True, "o_bias": True, "head_size": 32, "num_query_heads": 7, "num_kv_heads": 1},
    "Qwen3": {"qk_norm": True, "head_size": 80, "num_query_heads": 2},
    "YaRN": {"rope_divisors": yarn_divisors(16, 10_000.0, 4.0, 64), "rope_scale": yarn_scale(4.0)},
}
PROMPTS = ([5, 3, 9], list(range(40)), [7])


def vector_model(config: ModelConfig, num_threads: int = 2, seed: int = 0, in_int8: bool = False) -> Any:
    from optimized.vector_model import VectorModel

    return VectorModel(config, random_checkpoint(config, seed).tensors, num_threads, in_int8=in_int8)


def logits_of(model: Any, chunks: list[list[list[int]]], together: bool = True) -> list[torch.Tensor]:
    """Logits after every token of each prompt, which comes in these chunks."""
    paged = Paged(model, len(chunks), 4, 16)
    found: list[list[torch.Tensor]] = [[] for _ in chunks]
    for turn in range(max(map(len, chunks))):
        step = {seq: parts[turn] for seq, parts in enumerate(chunks) if turn < len(parts)}
        for batch in [step] if together else [{seq: part} for seq, part in step.items()]:
            parts = paged.step(batch, every_row=True).clone().split([len(part) for part in batch.values()])
            for seq, part in zip(batch, parts, strict=True):
                found[seq].append(part)
    return [torch.cat(parts) for parts in found]


def assert_same_bits_however_served(config: ModelConfig, in_int8: bool = False) -> None:
    assert_same_bits(lambda num_threads: vector_model(config, num_threads, in_int8=in_int8))


def assert_same_bits(make: Callable[[int], Any]) -> None:
    """Alone, in a batch, in chunks, and by one thread, of the model with so many threads."""
    model = make(2)
    together = logits_of(model, [[prompt] for prompt in PROMPTS])
    alone = logits_of(model, [[prompt] for prompt in PROMPTS], together=False)
    cut = logits_of(model, [chunks_of(prompt, [1, 2, 11, 30]) for prompt in PROMPTS])
    one_thread = logits_of(make(1), [[prompt] for prompt in PROMPTS])
    for expected, *others in zip(together, alone, cut, one_thread, strict=True):
        assert all(torch.equal(expected, other) for other in others)


@needs_vectors
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_within_the_bound_of_bfloat16(name: str) -> None:
    config = replace(CONFIG, **MODELS[name])
    exact_of = {key: torch.tensor(array).bfloat16().double().numpy() for key, array in random_arrays(config, 0).items()}
    exact = [dense_logits(config, exact_of, prompt, np.float64) for prompt in PROMPTS]
    whole = [[prompt] for prompt in PROMPTS]
    plain = logits_of(LlamaModel(config, random_checkpoint(config, 0).tensors, torch.bfloat16), whole)
    bound = 2 * max(np.abs(low.numpy() - high).max() for low, high in zip(plain, exact, strict=True))
    for found, expected in zip(logits_of(vector_model(config), whole), exact, strict=True):
        assert np.abs(found.numpy() - expected).max() <= bound


@pytest.mark.slow
@needs_vectors
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_in_chunks(name: str) -> None:
    assert_same_bits_however_served(replace(CONFIG, **MODELS[name]))


@needs_vectors
def test_likeliest_is_the_first_largest_logit_and_nothing_where_there_is_none() -> None:
    model = vector_model(replace(CONFIG, vocab_size=2500))
    x = torch.randn(9, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    x[3], x[4, 5] = 0.0, math.nan
    logits = model.logits(x)
    expected = logits.argmax(dim=1)
    assert model.likeliest.tolist() == [*expected[:3].tolist(), 0, -1, *expected[5:].tolist()]
    assert model.logits(x[:0]).shape == (0, 2500)
    assert model.likeliest.tolist() == []


@needs_vectors
@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 3.0, 50.0])
def test_who_wins_a_draw_is_among_the_contenders(temperature: float) -> None:
    model = vector_model(replace(CONFIG, vocab_size=5001))
    logits = model.logits(torch.randn(40, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))).numpy()
    params = SamplingParams(temperature=temperature)
    draws = [Draw(params, seed=3, sequence=row, position=7) for row in range(len(logits))]
    found = model.contenders([(row, draw.key, temperature) for row, draw in enumerate(draws)])
    assert sample_rows(logits, draws, model.likeliest, dict(enumerate(found))) == sample_rows(logits, draws)
    assert max(len(each) for each in found if each is not None) < 50


@needs_vectors
def test_what_is_not_in_the_tables_is_refused() -> None:
    paged = Paged(vector_model(CONFIG), 1, 4, 16)
    with pytest.raises(IndexError, match=r"token id 101 is outside of 0 to 100"):
        paged.step({0: [1, 101]})
    paged.block_tables += 4
    with pytest.raises(IndexError, match=r"slot \d+ is outside of 0 to 63"):
        paged.step({0: [1]})


@needs_vectors
def test_logits_of_narrow_numbers_are_those_of_the_same_numbers_wide() -> None:
    """A device that asks whether it is alive gives hidden states in the model's own type."""
    model = vector_model(replace(CONFIG, **MODELS["Llama"]))
    narrow = torch.linspace(-2, 2, 2 * CONFIG.hidden_size).view(2, -1).to(torch.bfloat16)
    wide = model.logits(narrow.float()).clone()
    assert torch.equal(model.logits(narrow), wide)
    TorchDevice(model, Config(4, block_size=16)).demand_alive()


@needs_vectors
def test_the_model_counts_its_bytes() -> None:
    model = vector_model(replace(CONFIG, tie_word_embeddings=True))
    plain = LlamaModel(model.config, random_checkpoint(model.config, 0).tensors, torch.bfloat16)
    embedding = plain.embedding.nbytes
    assert plain.num_weight_bytes < model.num_weight_bytes < 2 * (plain.num_weight_bytes + embedding)


ROOMY = Config(num_blocks=64, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=64)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield vector_model(CONFIG)


@pytest.mark.slow
@needs_vectors
@pytest.mark.parametrize(
    "config",
    [
        replace(ROOMY, max_num_batched_tokens=3),
        replace(ROOMY, max_num_seqs=1),
        replace(ROOMY, block_size=32),
        replace(ROOMY, num_blocks=4),
        replace(ROOMY, num_blocks=4, prefix_cache=True),
        replace(ROOMY, num_blocks=4, num_host_blocks=16, recovery=Recovery.SWAP),
    ],
    ids=["chunks", "alone", "larger blocks", "pressure", "pressure and cache", "pressure and swap"],
)
def test_tokens_do_not_depend_on_the_schedule(model: Any, config: Config) -> None:
    """With NaN in every cell that nobody has written."""
    said, core = generate(model, config)
    assert said == generate(model, ROOMY)[0]
    assert core.scheduler.counters.num_preemptions > 0 or config.num_blocks > 8
    assert core.scheduler.counters.num_blocks_swapped_out > 0 or config.recovery is Recovery.RECOMPUTE


@needs_vectors
def test_samples_share_and_copy_blocks(model: Any) -> None:
    expected, roomy = generate(model, ROOMY, temperature=1.0, num_samples=3)
    said, tight = generate(model, replace(ROOMY, num_blocks=8), temperature=1.0, num_samples=3)
    assert said == expected
    assert roomy.scheduler.counters.num_blocks_copied > 0
    assert tight.scheduler.counters.num_preemptions > 0


@needs_vectors
def test_a_request_without_numbers_ends_alone(model: Any) -> None:
    for which in (0, 1):  # keys, values
        device = TorchDevice(model, ROOMY)
        core = EngineCore(ROOMY, device)
        core.add(Request(0, (1, 2, 3), max_tokens=4, seq_ids=(0,)))
        core.add(Request(1, (4, 5, 6), max_tokens=4, seq_ids=(1,)))
        core.step()
        device.kv_caches[0][which][list(core.scheduler.seqs[0].table)] = torch.nan
        outcome = core.step()
        assert [request_id for request_id, _ in outcome.failed] == [0]
        assert outcome.seq_ids == [1]


@needs_vectors
def test_a_steady_step_makes_no_array_of_a_list(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(ROOMY, TorchDevice(model, ROOMY))
    for number in range(NUM_SEQS):
        core.add(Request(number, (number, 1, 2), max_tokens=8, seq_ids=(number,)))
    for _ in range(2):
        core.step()
    lists = lists_made_arrays(monkeypatch)
    assert len(core.step().seq_ids) == NUM_SEQS
    assert lists == []


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_path_says_why_it_is_not_the_vector_kernels() -> None:
    cases = [
        (CONFIG, "float32", 16, {}, "float32 was asked for, they compute in bfloat16"),
        (CONFIG, "auto", 4, {}, "blocks of 4 tokens, they need a multiple of 16"),
        (replace(CONFIG, head_size=8), "auto", 16, {}, "heads of 8, they need a multiple of 16"),
        (CONFIG, "auto", 16, {"KVPROOF_CPU_KERNELS": "torch"}, "KVPROOF_CPU_KERNELS is torch"),
    ]
    for config, dtype, block_size, environment, reason in cases:
        path = cpu_path(config, dtype, block_size, environment)
        assert (path.is_vector, path.dtype, path.reason) == (False, "float32", reason)
        assert path.sentence == f"torch and the CPU twins of the Triton kernels: {reason}"
    assert cpu_path(CONFIG, "bfloat16", 4, {}).dtype == "bfloat16"
    assert cpu_path(CONFIG, "auto", 16, {}, kv_cache_dtype="fp8").reason.startswith("a cache in fp8 was asked for")


def test_the_path_is_the_vector_kernels_where_the_processor_can() -> None:
    path = cpu_path(CONFIG, "auto", 16, {})
    assert (path.is_vector, path.dtype) == ((True, "bfloat16") if NO_VECTORS is None else (False, "float32"))
    first, second = (
        "AVX-512 for bf16, this processor has it",
        ("AVX2 with FMA, weights as whole numbers of 12 bits, this processor has no AVX-512 for bf16"),
    )
    assert NO_VECTORS or path.reason in (first, second) or path.reason.endswith("NUMBA_CPU_FEATURES asks for it")


def test_what_was_asked_for_and_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"^KVPROOF_CPU_KERNELS is 'fast', it must be one of auto, vector, torch$"):
        cpu_path(CONFIG, "auto", 16, {"KVPROOF_CPU_KERNELS": "fast"})
    with pytest.raises(InvalidConfig, match=r"something else here: blocks of 4 tokens"):
        cpu_path(CONFIG, "auto", 4, {"KVPROOF_CPU_KERNELS": "vector"})


def test_threads_are_those_asked_for_or_of_the_environment_or_one_a_core() -> None:
    most = usable_processors()
    assert num_threads(most, {"OMP_NUM_THREADS": "1"}) == most
    assert num_threads(None, {"OMP_NUM_THREADS": "1,2"}) == 1
    assert num_threads(None, {"OMP_NUM_THREADS": "100000"}) == most
    assert num_threads(None, {"OMP_NUM_THREADS": "no"}) == num_threads(None, {}) >= 1
    for asked in (0, most + 1):
        with pytest.raises(InvalidConfig, match=rf"^threads is {asked}, it must be from 1 to {most}, the processors"):
            num_threads(asked, {})
