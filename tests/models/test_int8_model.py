"""The forward pass with weights in int8: that of the rounded weights, the same bits in every batch, and refused where it is not to be had."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from optimized.checkpoint import ModelConfig, random_arrays, random_checkpoint
from optimized.cpu_path import CpuPath, cpu_path, demand_narrow
from optimized.llama import LlamaModel
from spec.vocabulary import InvalidConfig
from tests.kernels.test_int8 import needs_int8, rounded
from tests.models.test_llama import CONFIG, dense_logits
from tests.models.test_vector_model import (
    MODELS,
    PROMPTS,
    assert_same_bits_however_served,
    logits_of,
    vector_model,
)

WIDE = {"hidden_size": 96, "intermediate_size": 150}
"""More than one group in a row, and a part of one."""


@pytest.mark.slow
@needs_int8
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_rounded_weights_within_the_bound_of_bfloat16(name: str) -> None:
    config = replace(CONFIG, **{**WIDE, **MODELS[name]})
    narrow = {key: torch.tensor(array).bfloat16() for key, array in random_arrays(config, 0).items()}
    whole_of = {key: tensor.double().numpy() for key, tensor in narrow.items()}
    exact_of = {
        key: rounded(narrow[key]).astype(np.float64) if key.endswith("_proj.weight") else array
        for key, array in whole_of.items()
    }
    prompts = [[prompt] for prompt in PROMPTS]
    whole, exact = ([dense_logits(config, of, prompt, np.float64) for prompt in PROMPTS] for of in (whole_of, exact_of))
    plain = logits_of(LlamaModel(config, random_checkpoint(config, 0).tensors, torch.bfloat16), prompts)
    bound = 2 * max(np.abs(low.numpy() - high).max() for low, high in zip(plain, whole, strict=True))
    for found, expected in zip(logits_of(vector_model(config, in_int8=True), prompts), exact, strict=True):
        assert np.abs(found.numpy() - expected).max() <= bound


@pytest.mark.slow
@needs_int8
@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_in_chunks(name: str) -> None:
    assert_same_bits_however_served(replace(CONFIG, **{**WIDE, **MODELS[name]}), in_int8=True)


@needs_int8
def test_the_layers_take_half_the_memory_and_a_little() -> None:
    config = replace(CONFIG, hidden_size=192, intermediate_size=384)
    narrow, wide = vector_model(config, in_int8=True), vector_model(config)
    matrices = sum(torch.Size(shape).numel() for shape in _matrices(config))
    saved = wide.num_weight_bytes - narrow.num_weight_bytes
    # Of 2 bytes one is saved, but for a scale of 4 for 64 numbers.
    assert 0.85 * matrices < saved < matrices


def _matrices(config: ModelConfig) -> list[tuple[int, ...]]:
    return [array.shape for name, array in random_arrays(config, 0).items() if name.endswith("_proj.weight")]


def test_it_is_refused_by_a_sentence_that_says_why() -> None:
    before = "quantization is 'int8', it must be left out here, only the CPU's vector kernels have it: "
    cases: list[tuple[CpuPath | None, str]] = [
        (None, "a GPU is taken"),
        (cpu_path(CONFIG, "float32", 16, {}), "float32 was asked for, they compute in bfloat16"),
        (cpu_path(CONFIG, "auto", 4, {}), "blocks of 4 tokens, they need a multiple of 16"),
        (cpu_path(CONFIG, "auto", 16, {"KVPROOF_CPU_KERNELS": "torch"}), "KVPROOF_CPU_KERNELS is torch"),
    ]
    for path, why in cases:
        with pytest.raises(InvalidConfig) as refused:
            demand_narrow(path, "int8")
        assert str(refused.value) == before + why


def test_it_is_refused_where_the_processors_kernels_have_no_such_product(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = pytest.importorskip("kernels.cpu.instructions")
    monkeypatch.setattr(instructions, "HERE", instructions.AVX512)
    with pytest.raises(InvalidConfig, match="quantization is 'int8', it must be left out here"):
        demand_narrow(CpuPath(True, "bfloat16", "this processor has it"), "int8")
