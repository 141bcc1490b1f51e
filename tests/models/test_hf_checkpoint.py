"""Hugging Face directories: one file or shards, checked before anything is read."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from optimized.checkpoint import ConfigError, ModelConfig, llama3_divisors, load_checkpoint
from optimized.cli import app
from optimized.gguf_checkpoint import config_json, read_gguf
from optimized.hf_checkpoint import load_directory, parse_config, read_header
from optimized.model_store import BadModelFile, ModelUnavailable, resolve
from tests.models.tiny_files import TINY, write_directory, write_gguf


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_directory_comes_out_as_it_was_written(tmp_path: Path, num_shards: int) -> None:
    arrays = write_directory(tmp_path, num_shards=num_shards)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config == TINY
    assert checkpoint.tokenizer is None
    found = checkpoint.arrays()
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tensors_keep_their_type(tmp_path: Path, dtype: torch.dtype) -> None:
    arrays = write_directory(tmp_path)
    save_file({name: torch.from_numpy(a).to(dtype) for name, a in arrays.items()}, tmp_path / "model.safetensors")
    tensors = load_checkpoint(tmp_path).tensors
    for name, array in arrays.items():
        assert torch.equal(tensors[name], torch.from_numpy(array).to(dtype)), name


def test_tied_embeddings_need_no_head_and_ignore_one(tmp_path: Path) -> None:
    arrays = write_directory(tmp_path)
    head = {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    save_file({name: torch.from_numpy(a.copy()) for name, a in (arrays | head).items()}, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in load_checkpoint(tmp_path).tensors


def test_end_tokens_come_from_all_files(tmp_path: Path, own_home: Path) -> None:
    write_directory(tmp_path / "hf", eos_token_id=7)
    write_gguf(tmp_path / "m.gguf")
    tokenizer = read_gguf(tmp_path / "m.gguf").tokenizer
    assert tokenizer is not None
    (tmp_path / "hf" / "tokenizer.json").write_text(tokenizer.backend.to_str())
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}, "chat_template": "x"}')
    checkpoint = load_checkpoint(tmp_path / "hf")
    assert checkpoint.config.eos_token_ids == (7, 9, 261)
    assert checkpoint.tokenizer is not None and checkpoint.tokenizer.eos_token_ids == (7, 9, 261)
    assert checkpoint.chat_template == "x"


def test_a_template_file_goes_before_the_one_in_the_tokenizer_config(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "inner"}]}')
    assert load_checkpoint(tmp_path).chat_template == "inner"
    (tmp_path / "chat_template.jinja").write_text("outer")
    assert load_checkpoint(tmp_path).chat_template == "outer"


# --- config.json ------------------------------------------------------------------------------------------------------


def test_llama_3_scaling_stretches_long_waves_only() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    values = config_json(replace(TINY, head_size=128, rope_theta=500_000.0))
    older = parse_config(values | {"rope_scaling": scaling})
    newer = parse_config(values | {"rope_parameters": scaling | {"rope_theta": 500_000.0}, "rope_theta": None})
    assert older == newer
    assert older.rope_divisors == llama3_divisors(128, 500_000.0, 8.0, 1.0, 4.0, 8192)
    assert older.rope_divisors[0] == 1.0
    assert older.rope_divisors[-1] == 8.0
    assert list(older.rope_divisors) == sorted(older.rope_divisors)
    assert any(1.0 < divisor < 8.0 for divisor in older.rope_divisors)


def test_linear_scaling_stretches_all_waves() -> None:
    values = config_json(TINY) | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert parse_config(values).rope_divisors == (2.0,) * 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, "code of its own (auto_map), which is never run"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"model_type": "mixtral"}, "'mixtral'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_query_heads is 4, not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_size is 7"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 1e300}, "rope_theta is 1e+300"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 8}}, "factor 0.5"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
    ],
)
def test_what_the_configuration_cannot_mean_is_said(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    write_directory(tmp_path, **changes)
    with pytest.raises(BadModelFile, match="config.json") as caught:
        load_checkpoint(tmp_path)
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 7}, 7),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "llama", "sliding_window": 7}, None),
        ({"model_type": "qwen2", "sliding_window": 7}, None),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, 7),
        (
            {"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True, "layer_types": ["full_attention"]},
            None,
        ),
    ],
)
def test_a_window_is_there_where_it_is_switched_on(changes: dict[str, object], window: int | None) -> None:
    assert parse_config(config_json(TINY) | {"architectures": None} | changes).sliding_window == window


def test_layers_of_two_kinds_are_refused() -> None:
    values = config_json(TINY) | {"architectures": None, "model_type": "qwen2", "sliding_window": 7}
    with pytest.raises(ConfigError, match="only some of its layers"):
        parse_config(values | {"use_sliding_window": True, "max_window_layers": 1})


def test_a_missing_number_is_named() -> None:
    values = config_json(TINY)
    del values["vocab_size"]
    with pytest.raises(ConfigError, match="vocab_size is missing"):
        parse_config(values)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000, b"{" + b" " * (1 << 21)])
def test_a_configuration_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    write_directory(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadModelFile, match="config.json"):
        load_checkpoint(tmp_path)


# --- weights ----------------------------------------------------------------------------------------------------------


def rewritten(folder: Path, change: dict[str, np.ndarray | None]) -> None:
    """The single weight file with some tensors replaced, added or taken away."""
    arrays = write_directory(folder)
    merged = arrays | change
    kept = {name: torch.from_numpy(a.copy()) for name, a in merged.items() if a is not None}
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.norm.weight": None}, "tensor model.norm.weight is missing"),
        ({"model.norm.bias": np.zeros(32, np.float32)}, "tensor model.norm.bias is not part of such a model"),
        ({"model.norm.weight": np.zeros(31, np.float32)}, "tensor model.norm.weight has shape [31], expected [32]"),
        ({"model.norm.weight": np.zeros(32, np.int32)}, "tensor model.norm.weight has type I32"),
    ],
)
def test_tensors_are_exactly_those_of_the_configuration(
    tmp_path: Path, change: dict[str, np.ndarray | None], reason: str
) -> None:
    rewritten(tmp_path, change)
    with pytest.raises(BadModelFile) as caught:
        load_checkpoint(tmp_path)
    assert reason in caught.value.reason


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_directory(tmp_path, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadModelFile, match="model-00002-of-00003.safetensors: the file is missing"):
        load_checkpoint(tmp_path)


def test_a_shard_without_the_promised_tensor_is_named(tmp_path: Path) -> None:
    write_directory(tmp_path, num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(
        BadModelFile, match="tensor model.norm.weight is missing, model.safetensors.index.json promises"
    ):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "model.bin", 7])
def test_an_index_names_only_files_beside_it(tmp_path: Path, name: object) -> None:
    write_directory(tmp_path, num_shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(BadModelFile, match="not a safetensors file beside it"):
        load_checkpoint(tmp_path)


def test_a_file_that_is_cut_off_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write_directory(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadModelFile, match="it is cut off or damaged"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 1 << 25, 1 << 62])
def test_an_impossible_header_length_is_refused(tmp_path: Path, length: int) -> None:
    write_directory(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    with pytest.raises(BadModelFile, match=f"its header has {length:,} bytes"):
        load_checkpoint(tmp_path)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in ("a", "b")}
    content = json.dumps(header).encode()
    write_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(content)) + content + bytes(16))
    with pytest.raises(BadModelFile, match="starts at byte 0 of the data, the one before ends at 8"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    write_directory(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(BadModelFile, match="refused: convert them to safetensors") as caught:
        load_checkpoint(tmp_path)
    assert caught.value.path.name == name
    with pytest.raises(BadModelFile, match="refused: convert them to safetensors"):
        resolve(tmp_path / name)


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_name_that_is_nothing_here_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelUnavailable, match=r"no file or folder 'Owner/Model'; Owner/Model at main is not in"):
        resolve("Owner/Model")
    with pytest.raises(ModelUnavailable, match=r"no file or folder 'Model': pass a .gguf file, a folder with"):
        resolve("Model")


def test_other_files_and_folders_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("hello")
    with pytest.raises(BadModelFile, match="this is not a model"):
        resolve(tmp_path / "model.txt")
    os.mkfifo(tmp_path / "model.gguf")
    for endless in (tmp_path / "model.gguf", Path("/dev/zero")):
        with pytest.raises(BadModelFile, match="this is not a model"):
            resolve(endless)
    (tmp_path / "model.gguf").rename(tmp_path / "model.safetensors")
    with pytest.raises(BadModelFile, match="it is a pipe or a device"):
        read_header(tmp_path / "model.safetensors")
    with pytest.raises(BadModelFile, match="the folder has no config.json"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_a_side_file_that_is_none_is_not_passed_over(tmp_path: Path, name: str) -> None:
    write_directory(tmp_path)
    path = tmp_path / name
    path.symlink_to("nothing")
    with pytest.raises(BadModelFile, match=f"{name}: it is a link to nothing"):
        load_directory(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadModelFile, match=f"{name}: it is no file, but a folder, a pipe or a device"):
        load_directory(tmp_path)
    path.unlink()
    path.mkdir()
    result = CliRunner().invoke(app, ["generate", "a", "--model", str(tmp_path)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"{name}: it is no file" in result.stderr


def test_what_a_file_calls_its_tensors_cannot_forge_a_line() -> None:
    error = BadModelFile(Path("m.gguf"), "tensor a\nERROR all is lost\x1b[2J\u202e")
    assert str(error) == r"m.gguf: tensor a\nERROR all is lost\x1b[2J\u202e"


# --- fuzz -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    write_directory(folder / "hf", num_shards=2)
    write_gguf(folder / "m.gguf")
    tokenizer = read_gguf(folder / "m.gguf").tokenizer
    assert tokenizer is not None
    (folder / "hf" / "tokenizer.json").write_text(tokenizer.backend.to_str())
    (folder / "hf" / "tokenizer_config.json").write_text('{"eos_token": "<end>", "chat_template": "{{ x }}"}')
    return {path.name: path.read_bytes() for path in (folder / "hf").iterdir()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_directory_with_changed_bytes_is_read_or_refused(
    whole: dict[str, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    victim = data.draw(st.sampled_from(sorted(whole)), label="file")
    content = bytearray(whole[victim])
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        at = data.draw(st.integers(0, min(4000, len(content) - 1)), label="at")
        content[at] = data.draw(st.sampled_from(b'0189-."{}[],:e\0\x7f\xff') | st.integers(0, 255), label="byte")
    for name, original in whole.items():
        (tmp_path / name).write_bytes(bytes(content) if name == victim else original)
    try:
        checkpoint = load_directory(tmp_path)
        assert sum(tensor.numel() for tensor in checkpoint.tensors.values()) > 0
        assert isinstance(checkpoint.config, ModelConfig)
    except BadModelFile as error:
        assert "\n" not in str(error)
