"""GGUF files: what is in them comes out exactly, and a damaged one is refused in one sentence."""

import json
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimized import gguf_checkpoint
from optimized.checkpoint import ModelConfig, load_checkpoint, tensor_shapes
from optimized.gguf_checkpoint import CONVERSION, GgufTensors, read_gguf
from optimized.gguf_guard import precheck
from optimized.model_store import BadModelFile, sha256_of
from tests.models.tiny_files import FAMILIES, TEMPLATE, TINY, YARN, interleaved, write_directory, write_gguf

WIDE = replace(TINY, num_layers=1, hidden_size=256, intermediate_size=256, num_query_heads=4, head_size=64)
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
QUANTS = (Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K)


# --- the formats, written down once more ------------------------------------------------------------------------------


def half(raw: bytes) -> np.float32:
    return np.float32(np.frombuffer(raw, np.float16)[0])


def numbers_of_q8_0(raw: bytes) -> list[np.float32]:
    return [half(raw[:2]) * np.float32(q) for q in np.frombuffer(raw[2:], np.int8)]


def numbers_of_q4_0(raw: bytes) -> list[np.float32]:
    nibbles = [q & 15 for q in raw[2:]] + [q >> 4 for q in raw[2:]]
    return [half(raw[:2]) * np.float32(q - 8) for q in nibbles]


def numbers_of_q4_1(raw: bytes) -> list[np.float32]:
    nibbles = [q & 15 for q in raw[4:]] + [q >> 4 for q in raw[4:]]
    return [half(raw[:2]) * np.float32(q) + half(raw[2:4]) for q in nibbles]


def numbers_of_q4_k(raw: bytes) -> list[np.float32]:
    scale, minimum, packed, quants = half(raw[:2]), half(raw[2:4]), raw[4:16], raw[16:]
    numbers = []
    for group in range(8):
        if group < 4:
            factor, shift = packed[group] & 63, packed[group + 4] & 63
        else:
            factor = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            shift = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        for q in quants[group // 2 * 32 : group // 2 * 32 + 32]:
            nibble = q >> 4 if group % 2 else q & 15
            numbers.append(scale * np.float32(factor) * np.float32(nibble) - minimum * np.float32(shift))
    return numbers


def numbers_of_q6_k(raw: bytes) -> list[np.float32]:
    low, high, scales, scale = raw[:128], raw[128:192], np.frombuffer(raw[192:208], np.int8), half(raw[208:])
    numbers = []
    for place in range(256):
        part, offset = divmod(place, 128)
        quarter, column = divmod(offset, 32)
        four = low[part * 64 + quarter % 2 * 32 + column]
        four = four >> 4 if quarter >= 2 else four & 15
        two = high[part * 32 + column] >> 2 * quarter & 3
        numbers.append(scale * np.float32(scales[place // 16]) * np.float32((four | two << 4) - 32))
    return numbers


NUMBERS_OF = {
    Kind.Q8_0: numbers_of_q8_0,
    Kind.Q4_0: numbers_of_q4_0,
    Kind.Q4_1: numbers_of_q4_1,
    Kind.Q4_K: numbers_of_q4_k,
    Kind.Q6_K: numbers_of_q6_k,
}


def random_groups(kind: Kind, shape: tuple[int, ...], draw: np.random.Generator) -> np.ndarray:
    """Raw bytes ``[rows, bytes per row]`` of random groups with finite scales."""
    group, group_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = draw.integers(0, 256, (shape[0], shape[1] // group, group_bytes), dtype=np.uint8)
    scale = draw.uniform(-2, 2, raw.shape[:2]).astype(np.float16)
    places = {Kind.Q4_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}.get(kind, (0,))
    for place in places:
        raw[..., place : place + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


def dequantized(kind: Kind, raw: np.ndarray) -> np.ndarray:
    """What the written-down format says that raw rows mean."""
    group_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    rows = [
        np.concatenate(
            [NUMBERS_OF[kind](row[at : at + group_bytes].tobytes()) for at in range(0, len(row), group_bytes)]
        )
        for row in raw
    ]
    return np.array(rows, np.float32)


def in_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of the order that the converter of GGUF files makes."""
    order = interleaved(np.arange(len(weight))[:, None], num_heads)[:, 0]
    return weight[np.argsort(order)]


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUANTS, ids=lambda kind: kind.name)
def test_quantized_tensors_come_out_as_their_format_says(kind: Kind, tmp_path: Path, own_home: Path) -> None:
    draw = np.random.default_rng(7)
    config = replace(WIDE, vocab_size=16, bos_token_id=None, eos_token_ids=())
    raw = {name: random_groups(kind, shape, draw) for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    write_gguf(tmp_path / "m.gguf", config, kind=kind, raw=raw, with_tokenizer=False)
    tensors = load_checkpoint(tmp_path / "m.gguf").tensors
    sample = ("model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight")
    for name in sample:
        expected = dequantized(kind, raw[name])
        if "k_proj" in name:
            expected = in_halves(expected, config.num_kv_heads)
        np.testing.assert_array_equal(tensors[name].numpy(), expected, err_msg=f"{name} as {kind.name}")


@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: kind.name)
def test_floating_point_tensors_come_out_unchanged(kind: Kind, tmp_path: Path, own_home: Path) -> None:
    arrays = write_gguf(tmp_path / "m.gguf", kind=kind)
    dtype = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}[kind]
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    assert list(checkpoint.tensors) == list(checkpoint.arrays())
    for name, array in arrays.items():
        tensor = checkpoint.tensors[name]
        assert tensor.dtype == (dtype if array.ndim == 2 else torch.float32), name
        assert torch.equal(tensor.float(), torch.from_numpy(array).to(tensor.dtype).float()), name


def test_the_conversion_reads_the_same_as_the_file(tmp_path: Path, own_home: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, kind=Kind.Q4_1, divisors=np.array([1.0, 1.5, 4.0, 8.0]))
    direct, first, second = read_gguf(path), load_checkpoint(path), load_checkpoint(path)
    assert isinstance(direct.tensors, GgufTensors)
    assert first.config == second.config == direct.config
    assert direct.config.rope_divisors == (1.0, 1.5, 4.0, 8.0)
    assert first.chat_template == direct.chat_template == TEMPLATE
    assert first.name == "m.gguf"
    for name, tensor in direct.tensors.items():
        assert torch.equal(tensor, first.tensors[name]), name
    assert first.tokenizer is not None and direct.tokenizer is not None
    assert first.tokenizer.encode("hello <end>") == direct.tokenizer.encode("hello <end>") == [259, 32, 261]
    assert first.tokenizer.eos_token_ids == (261,)


def test_configuration_comes_from_metadata(tmp_path: Path, own_home: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    found = load_checkpoint(tmp_path / "m.gguf").config
    assert replace(found, rms_norm_eps=TINY.rms_norm_eps) == TINY
    assert np.float32(found.rms_norm_eps) == np.float32(TINY.rms_norm_eps)


def test_untied_embeddings_have_a_head_of_their_own(tmp_path: Path, own_home: Path) -> None:
    config = replace(TINY, tie_word_embeddings=False)
    arrays = write_gguf(tmp_path / "m.gguf", config)
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    assert not checkpoint.config.tie_word_embeddings
    np.testing.assert_array_equal(checkpoint.tensors["lm_head.weight"].numpy(), arrays["lm_head.weight"])


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path, own_home: Path) -> None:
    write_gguf(tmp_path / "m.gguf", with_tokenizer=False)
    assert load_checkpoint(tmp_path / "m.gguf").tokenizer is None


# --- the kept conversion ----------------------------------------------------------------------------------------------


def test_a_changed_file_is_never_answered_with_an_old_conversion(tmp_path: Path, own_home: Path) -> None:
    path = tmp_path / "m.gguf"
    for seed in (1, 2):
        arrays = write_gguf(path, seed=seed)
        found = load_checkpoint(path).tensors["model.norm.weight"].numpy()
        np.testing.assert_array_equal(found, arrays["model.norm.weight"])


def test_a_damaged_conversion_is_made_anew(tmp_path: Path, own_home: Path) -> None:
    path = tmp_path / "m.gguf"
    arrays = write_gguf(path)
    load_checkpoint(path)
    kept = own_home / "converted" / f"{sha256_of(path)}-{CONVERSION}" / "model.safetensors"
    kept.write_bytes(kept.read_bytes()[:-100])
    found = load_checkpoint(path).tensors["model.norm.weight"].numpy()
    np.testing.assert_array_equal(found, arrays["model.norm.weight"])


def test_a_cache_that_cannot_be_written_changes_nothing(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = write_gguf(tmp_path / "m.gguf")
    own_home.write_text("a file where the folder would be")
    found = load_checkpoint(tmp_path / "m.gguf").tensors["model.norm.weight"].numpy()
    np.testing.assert_array_equal(found, arrays["model.norm.weight"])


def test_a_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_checkpoint, "_to_disk", full)
    assert load_checkpoint(tmp_path / "m.gguf").config.num_layers == 2
    assert list((own_home / "converted").iterdir()) == []


def test_conversions_of_large_models_are_sharded(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_checkpoint, "SHARD_BYTES", 20_000)
    arrays = write_gguf(tmp_path / "m.gguf")
    load_checkpoint(tmp_path / "m.gguf")
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    assert len(list(own_home.rglob("model-*-of-*.safetensors"))) > 1
    for name, array in checkpoint.arrays().items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    write_gguf(path, kind=Kind.Q4_1)
    return path.read_bytes()


def read_everything(path: Path) -> None:
    """All that loading does, but without a conversion."""
    precheck(path)
    checkpoint = read_gguf(path)
    for tensor in checkpoint.tensors.values():
        assert tensor.numel() > 0
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("hello 12"))


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(BadModelFile) as caught:
        load_checkpoint(path)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("at", "patch", "reason"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "version 50331648"),
        (8, struct.pack("<Q", 1 << 40), "announces 1,099,511,627,776 tensors"),
        (16, struct.pack("<Q", 65_537), "announces 65,537 metadata fields"),
        (24, struct.pack("<Q", 1 << 63), "a string of 9,223,372,036,854,775,808 bytes"),
    ],
)
def test_a_false_header_is_refused(
    tiny: bytes, tmp_path: Path, own_home: Path, at: int, patch: bytes, reason: str
) -> None:
    assert reason in refused(tmp_path / "m.gguf", tiny[:at] + patch + tiny[at + len(patch) :])


def patched_tensor(content: bytes, name: bytes, dims: int | None = None, offset: int | None = None) -> bytes:
    """The entry of a tensor with another number of dimensions or another offset."""
    at = content.index(name) + len(name)
    changed = bytearray(content)
    num_dims = struct.unpack_from("<I", content, at)[0]
    if dims is not None:
        struct.pack_into("<I", changed, at, dims)
    if offset is not None:
        struct.pack_into("<Q", changed, at + 4 + 8 * num_dims + 4, offset)
    return bytes(changed)


def test_a_tensor_of_a_billion_dimensions_is_refused(tiny: bytes, tmp_path: Path, own_home: Path) -> None:
    content = patched_tensor(tiny, b"blk.0.attn_q.weight", dims=1_000_000_000)
    assert "has 1000000000 dimensions, 1 to 4 are allowed" in refused(tmp_path / "m.gguf", content)


@pytest.mark.parametrize("offset", [1, 32, (1 << 64) - 32, 1 << 40])
def test_a_tensor_that_is_not_where_it_must_be_is_refused(
    tiny: bytes, tmp_path: Path, own_home: Path, offset: int
) -> None:
    content = patched_tensor(tiny, b"output_norm.weight", offset=offset)
    assert "output_norm.weight" in refused(tmp_path / "m.gguf", content)


def test_an_alignment_beyond_the_limit_is_refused(tmp_path: Path, own_home: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("general.alignment", 1 << 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "its alignment is 1,048,576" in refused(path, path.read_bytes())


@pytest.mark.parametrize(
    ("architecture", "family"), [("llama", "llama-biased"), ("qwen2", "qwen2-yarn"), ("qwen3", "qwen3")]
)
def test_a_family_is_the_same_from_a_gguf_file_and_from_a_directory(
    tmp_path: Path, own_home: Path, architecture: str, family: str
) -> None:
    made_of, changes = FAMILIES[family]
    yarn = YARN if "yarn" in family else None
    write_gguf(tmp_path / "m.gguf", made_of, architecture=architecture, with_tokenizer=False, yarn=yarn)
    write_directory(tmp_path / "folder", made_of, **changes)
    there = load_checkpoint(tmp_path / "folder")
    fields = {"eos_token_ids": (), "rms_norm_eps": 1e-5}  # the first is the tokenizer's, the second a float32 there
    for here in (read_gguf(tmp_path / "m.gguf"), load_checkpoint(tmp_path / "m.gguf")):
        assert replace(here.config, **fields) == replace(there.config, **fields)
        assert here.arrays().keys() == there.arrays().keys()
        for name, array in there.arrays().items():
            assert np.array_equal(here.arrays()[name], array), name


def test_other_architectures_are_named(tiny: bytes, tmp_path: Path, own_home: Path) -> None:
    sentence = refused(tmp_path / "m.gguf", tiny.replace(b"llama", b"mamba"))
    assert sentence.endswith("architecture 'mamba' is not supported, only llama, qwen2, qwen3")


def test_an_unknown_pre_type_is_named(tmp_path: Path, own_home: Path) -> None:
    write_gguf(tmp_path / "m.gguf", pre_type="tekken")
    assert "pre-type 'tekken' is not supported" in refused(tmp_path / "m.gguf", (tmp_path / "m.gguf").read_bytes())


def test_a_missing_tensor_is_named(tmp_path: Path, own_home: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    content = path.read_bytes().replace(b"llama.block_count\x04\0\0\0\x02", b"llama.block_count\x04\0\0\0\x03")
    assert "tensor model.layers.2.input_layernorm.weight and 8 more are missing" in refused(path, content)


def test_a_file_cut_off_anywhere_is_refused(tiny: bytes, tmp_path: Path, own_home: Path) -> None:
    path = tmp_path / "m.gguf"
    for length in [*range(200), *range(200, len(tiny), 499), len(tiny) - 1]:
        path.write_bytes(tiny[:length])
        with pytest.raises(BadModelFile):
            read_everything(path)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_changed_bytes_is_read_or_refused(tiny: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(tiny)
    header = tiny.index(b"output_norm.weight") + 64
    for _ in range(data.draw(st.integers(1, 4), label="changes")):
        at = data.draw(st.integers(0, header) | st.integers(0, len(tiny) - 1), label="at")
        content[at] = data.draw(st.sampled_from([0, 1, 2, 8, 0x7F, 0x80, 0xFF]) | st.integers(0, 255), label="byte")
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        read_everything(path)
    except BadModelFile as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 32 << 20, f"{peak:,} bytes for a file of {len(tiny):,}"


# --- the real model ---------------------------------------------------------------------------------------------------


def test_smollm2_is_what_its_makers_say(smollm2) -> None:
    assert smollm2.config == ModelConfig(
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_query_heads=9,
        num_kv_heads=3,
        head_size=64,
        vocab_size=49_152,
        max_model_len=8192,
        rope_theta=100_000.0,
        rms_norm_eps=float(np.float32(1e-5)),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert sum(tensor.numel() for tensor in smollm2.tensors.values()) == 134_515_008


def test_the_recorded_values_are_of_this_very_file(smollm2_path: Path) -> None:
    recorded = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text())
    assert recorded["model_sha256"] == sha256_of(smollm2_path)
