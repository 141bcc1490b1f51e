"""A GGUF file's own weights of 4 bits in the forward pass: exactly the file's numbers, the same bits in every batch, refused where there are none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kernels.cpu.packing import FourBits
from optimized import LLM
from optimized.checkpoint import Checkpoint, ModelConfig, load_checkpoint, tensor_shapes
from optimized.cpu_path import CpuPath, cpu_path, demand_narrow
from optimized.gguf_groups import GgufGroups
from optimized.llama import LlamaModel
from optimized.model_store import BadModelFile
from spec.vocabulary import InvalidConfig
from tests.kernels.test_four_bits import needs_four_bits
from tests.models.test_gguf_checkpoint import random_groups
from tests.models.test_llama import CONFIG, dense_logits
from tests.models.test_vector_model import MODELS, PROMPTS, assert_same_bits, logits_of
from tests.models.tiny_files import write_directory, write_gguf

SIZES: dict[str, Any] = {"hidden_size": 96, "num_query_heads": 6, "head_size": 16, "intermediate_size": 160}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Qwen2": ("qwen2", MODELS["Qwen2"] | {"num_query_heads": 2, "o_bias": False}),
    "Qwen3": ("qwen3", {"qk_norm": True, "head_size": 32}),
}


def checkpoint(folder: Path, family: str = "Llama", kind: Kind = Kind.Q4_1) -> Checkpoint:
    architecture, changes = FAMILIES[family]
    config = replace(CONFIG, **{**SIZES, **changes})
    write_gguf(folder / "m.gguf", config, kind=kind, architecture=architecture, with_tokenizer=False)
    return load_checkpoint(folder / "m.gguf")


def model(of: Checkpoint, groups: Any = None, num_threads: int = 2) -> Any:
    from optimized.vector_model import VectorModel

    found = GgufGroups(of.path, of.config) if groups is None else groups
    return VectorModel(of.config, of.tensors, num_threads, groups=found)


class Some(GgufGroups):
    """The groups of a file whose down, keys and gates are something else."""

    def joined(self, *names: str) -> FourBits | None:
        missing = any(part in name for name in names for part in ("down", "k_proj", "gate"))
        return None if missing else super().joined(*names)


def whole(groups: FourBits) -> torch.Tensor:
    scales, minima = (each.float().repeat_interleave(32, 1) for each in (groups.scales, groups.minima))
    return scales * groups.numbers + minima


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_are_the_numbers_of_the_file(family: str, kind: Kind, tmp_path: Path, own_home: Path) -> None:
    of = checkpoint(tmp_path, family, kind)
    groups = GgufGroups(of.path, of.config)
    names = [name for name in tensor_shapes(of.config) if name.endswith("_proj.weight")]
    assert len(groups) == len(names)
    for name in names:
        found = groups.joined(name)
        assert found is not None
        assert torch.equal(whole(found), of.tensors[name]), name
    joined = groups.joined(*names[:2])
    assert joined is not None
    assert torch.equal(whole(joined)[: len(of.tensors[names[0]])], of.tensors[names[0]])
    assert groups.joined("model.embed_tokens.weight") is None


def test_a_scale_of_q4_0_whose_minimum_overflows_is_not_taken(tmp_path: Path, own_home: Path) -> None:
    config = replace(CONFIG, **SIZES)
    draw = np.random.default_rng(0)
    raw = {n: random_groups(Kind.Q4_0, shape, draw) for n, shape in tensor_shapes(config).items() if len(shape) == 2}
    name = "model.layers.0.self_attn.o_proj.weight"
    raw[name][3, :2] = np.array([9000.0], np.float16).view(np.uint8)
    write_gguf(tmp_path / "m.gguf", config, kind=Kind.Q4_0, raw=raw, with_tokenizer=False)
    groups = GgufGroups(tmp_path / "m.gguf", config)
    assert groups.joined(name) is None
    assert groups.joined(name.replace("layers.0", "layers.1")) is not None


@needs_four_bits
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_files_numbers_within_the_bound_of_bfloat16(
    family: str, tmp_path: Path, own_home: Path
) -> None:
    of = checkpoint(tmp_path, family)
    exact = [dense_logits(of.config, of.arrays(), prompt, np.float64) for prompt in PROMPTS]
    prompts = [[prompt] for prompt in PROMPTS]
    plain = logits_of(LlamaModel(of.config, of.tensors, torch.bfloat16), prompts)
    bound = 2 * max(np.abs(low.numpy() - high).max() for low, high in zip(plain, exact, strict=True))
    for groups in (GgufGroups(of.path, of.config), Some(of.path, of.config)):
        for found, expected in zip(logits_of(model(of, groups), prompts), exact, strict=True):
            assert np.abs(found.numpy() - expected).max() <= bound


@needs_four_bits
def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_in_chunks(tmp_path: Path, own_home: Path) -> None:
    of = checkpoint(tmp_path)
    some = Some(of.path, of.config)
    assert_same_bits(lambda threads: model(of, num_threads=threads))
    assert_same_bits(lambda threads: model(of, some, threads))


@needs_four_bits
def test_each_matrix_lies_as_its_file_has_it(tmp_path: Path, own_home: Path) -> None:
    of = checkpoint(tmp_path)
    wide = model(of, Some(of.path, of.config))
    whole_model, in_bf16 = model(of), model(of, NoGroups())
    assert whole_model.num_weight_bytes < wide.num_weight_bytes < in_bf16.num_weight_bytes
    matrices = sum(torch.Size(s).numel() for n, s in tensor_shapes(of.config).items() if n.endswith("_proj.weight"))
    saved = in_bf16.num_weight_bytes - whole_model.num_weight_bytes
    assert saved >= matrices * (2 - 5 / 8)  # and as much of what tiles are padded with


class NoGroups:
    def joined(self, *names: str) -> None:
        return None


def test_it_is_refused_by_a_sentence_that_says_why(tmp_path: Path, own_home: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"^quantization is 'gguf', it must be left out here, .* a GPU is taken$"):
        demand_narrow(None, "gguf")
    with pytest.raises(InvalidConfig, match="float32 was asked for, they compute in bfloat16"):
        demand_narrow(cpu_path(CONFIG, "float32", 16, {}), "gguf")


@needs_four_bits
def test_a_model_whose_file_has_no_such_weights_is_refused(tmp_path: Path, own_home: Path) -> None:
    config = replace(CONFIG, **SIZES, bos_token_id=None, eos_token_ids=())
    write_directory(tmp_path / "folder", config)
    write_gguf(tmp_path / "m.gguf", config, kind=Kind.Q8_0, with_tokenizer=False)
    for name in ("folder", "m.gguf"):
        with pytest.raises(InvalidConfig) as refused:
            LLM(tmp_path / name, quantization="gguf", device="cpu", num_gpu_blocks_override=8)
        assert str(refused.value) == (
            f"quantization is 'gguf', it must be left out here, no weight of a layer in {name} is Q4_0 or Q4_1"
        )


def test_it_is_refused_where_the_processors_kernels_have_no_such_product(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = pytest.importorskip("kernels.cpu.instructions")
    monkeypatch.setattr(instructions, "HERE", instructions.AVX512)
    with pytest.raises(InvalidConfig, match="quantization is 'gguf', it must be left out here"):
        demand_narrow(CpuPath(True, "bfloat16", "this processor has it"), "gguf")


def test_a_file_that_is_not_the_models_is_refused(tmp_path: Path, own_home: Path) -> None:
    of = checkpoint(tmp_path)
    other: ModelConfig = replace(of.config, intermediate_size=96)
    with pytest.raises(BadModelFile, match=r"tensor blk.0.ffn_down.weight has shape \[96, 160\], expected \[96, 96\]"):
        GgufGroups(of.path, other).joined("model.layers.0.mlp.down_proj.weight")
