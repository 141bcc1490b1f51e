"""Hugging Face directories: config.json, safetensors in one file or in shards, tokenizer.json, chat template.

Everything is checked before anything large is allocated: sizes of the JSON files, ranges of the numbers, the headers of
the safetensors files against their length, names and shapes against the configuration. Code and pickles are refused.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimized.checkpoint import (
    MAX_CONTEXT,
    Checkpoint,
    ConfigError,
    LazyTensors,
    ModelConfig,
    check_tensors,
    llama3_divisors,
    yarn_divisors,
    yarn_scale,
)
from optimized.model_store import PICKLES, BadModelFile
from optimized.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

MAX_CONFIG_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 128 << 20
MAX_INDEX_BYTES = 32 << 20
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 100_000
MAX_DIMS = 4
MAX_SHARDS = 10_000
MAX_TEMPLATE_BYTES = 1 << 20

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Older checkpoints store the rotary frequencies, which follow from the configuration.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"


def load_directory(folder: Path, *, name: Path | None = None) -> Checkpoint:
    """The model in a folder; ``name`` is the path to show when the folder is a conversion of something else."""
    values = read_json(folder / "config.json", MAX_CONFIG_BYTES)
    side = _optional_json(folder / "tokenizer_config.json", MAX_TEMPLATE_BYTES * 4)
    generation = _optional_json(folder / "generation_config.json", MAX_CONFIG_BYTES)
    tokenizer = _tokenizer(folder)
    extra = _eos_of(generation, "eos_token_id") + _named_eos(side, tokenizer)
    files = _weight_files(folder)
    found = _headers(files)
    try:
        config = parse_config(values, extra_eos=extra)
    except (ConfigError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadModelFile(folder / "config.json", _sentence(error)) from error
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    check_tensors(folder, config, {tensor: place.shape for tensor, place in found.items()})
    tensors = SafetensorsTensors(found)
    if tokenizer is not None:
        tokenizer = tokenizer.with_special_ids(config.bos_token_id, config.eos_token_ids)
    template = _chat_template(folder, side)
    return Checkpoint(name or folder, config, tensors, tokenizer, template, generation_config=generation)


# --- config.json -----------------------------------------------------------------------------------------------------


MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""The ``model_type`` of each model that is known, and its class in transformers."""


def parse_config(values: Mapping[str, Any], *, extra_eos: tuple[int, ...] = ()) -> ModelConfig:
    """The configuration of a model out of config.json, or a ``ConfigError``."""
    if "auto_map" in values:
        raise ConfigError("it asks for code of its own (auto_map), which is never run")
    kind = values.get("model_type", "llama")
    if kind not in MODELS or (values.get("architectures") or [MODELS[kind]]) != [MODELS[kind]]:
        raise ConfigError(
            f"it is a {kind!r} model of class {values.get('architectures')}, only {', '.join(MODELS.values())} are "
            "supported"
        )
    if values.get("quantization_config") is not None:
        raise ConfigError("its weights are quantized, only F32, F16 and BF16 are supported")
    if values.get("mlp_bias"):
        raise ConfigError("it has mlp_bias, which is not supported")
    if values.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"its activation is {values['hidden_act']!r}, only 'silu' is supported")
    query_heads = _integer(values, "num_attention_heads")
    hidden = _integer(values, "hidden_size")
    if query_heads < 1:
        raise ConfigError(f"num_attention_heads is {query_heads}, at least 1 is needed")
    head_size = hidden // query_heads if values.get("head_dim") is None else _integer(values, "head_dim")
    rope = _rope(values)
    theta = _number(rope, "rope_theta", 10_000.0)
    # Qwen2 has these biases whatever its configuration says; Mistral has none.
    attention_bias = kind in ("llama", "qwen3") and bool(values.get("attention_bias"))
    vocab_size = _integer(values, "vocab_size")
    eos = dict.fromkeys((*_eos_of(values, "eos_token_id"), *extra_eos))
    bos = values.get("bos_token_id")
    return ModelConfig(
        num_layers=_integer(values, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_integer(values, "intermediate_size"),
        num_query_heads=query_heads,
        num_kv_heads=query_heads
        if values.get("num_key_value_heads") is None
        else _integer(values, "num_key_value_heads"),
        head_size=head_size,
        vocab_size=vocab_size,
        max_model_len=_longest(values, rope),
        rope_theta=theta,
        rope_divisors=_divisors(rope, head_size, theta),
        rope_scale=_rope_scale(rope),
        rms_norm_eps=_number(values, "rms_norm_eps", 1e-6),
        tie_word_embeddings=values.get("tie_word_embeddings", False) is True,
        bos_token_id=bos if type(bos) is int and 0 <= bos < vocab_size else None,
        eos_token_ids=tuple(token_id for token_id in eos if 0 <= token_id < vocab_size),
        sliding_window=_window(values, kind),
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=attention_bias,
        qk_norm=kind == "qwen3",
    )


def _rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """All rotary settings in one mapping: newer files have ``rope_parameters``, older ones two entries."""
    newer = values.get("rope_parameters")
    if isinstance(newer, dict):
        return {"rope_theta": values.get("rope_theta"), **newer}
    older = values.get("rope_scaling")
    if older is not None and not isinstance(older, dict):
        raise ConfigError("rope_scaling is not a mapping")
    return {**(older or {}), "rope_theta": values.get("rope_theta")}


def _window(values: Mapping[str, Any], kind: str) -> int | None:
    """The sliding window, if every layer has it. Qwen has a size that counts only where it is switched on."""
    window = values.get("sliding_window")
    if kind == "llama" or window is None or (kind != "mistral" and not values.get("use_sliding_window")):
        return None
    layers = values.get("layer_types") or ["sliding_attention"]
    if kind != "mistral" and "layer_types" not in values and values.get("max_window_layers", 28) != 0:
        layers = ["full_attention", "sliding_attention"]
    if set(layers) == {"full_attention"}:
        return None
    if set(layers) != {"sliding_attention"}:
        raise ConfigError("only some of its layers have a sliding window, which is not supported")
    return _integer(values, "sliding_window")


def _rope_kind(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def _longest(values: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """The context: with YaRN what the stretched rotary embedding reaches, which older files do not say twice."""
    longest = _integer(values, "max_position_embeddings", 2048)
    if _rope_kind(rope) == "yarn" and rope.get("original_max_position_embeddings") is not None:
        return max(longest, int(_integer(rope, "original_max_position_embeddings") * _number(rope, "factor")))
    return longest


def _rope_scale(rope: Mapping[str, Any]) -> float:
    if _rope_kind(rope) == "divisors":
        return _number(rope, "scale", 1.0)
    if _rope_kind(rope) != "yarn":
        return 1.0
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise ConfigError("rope scaling 'yarn' with mscale is not supported")
    return _number(rope, "attention_factor", yarn_scale(max(1.0, _number(rope, "factor"))))


def _divisors(rope: Mapping[str, Any], head_size: int, theta: float) -> tuple[float, ...]:
    kind = _rope_kind(rope)
    if not 2 <= head_size <= 1024 or not 1.0 <= theta <= 1e12:
        return ()  # ModelConfig refuses both, with its own sentence.
    if kind == "default":
        return ()
    if kind == "linear":
        return (_number(rope, "factor"),) * (head_size // 2)
    if kind == "divisors":  # Ours: a GGUF file stores the divisors themselves, and so do its conversions.
        listed = rope.get("divisors")
        if not isinstance(listed, list) or len(listed) > head_size:
            raise ConfigError("rope divisors are not a list of one number per rotary pair")
        return tuple(_number({"divisor": divisor}, "divisor") for divisor in listed)
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        factor = _number(rope, "factor")
        if not 0.0 < low < high or factor < 1.0:
            raise ConfigError(f"rope_scaling has factor {factor}, low_freq_factor {low}, high_freq_factor {high}")
        original = _integer(rope, "original_max_position_embeddings")
        return llama3_divisors(head_size, theta, factor, low, high, original)
    if kind == "yarn":
        factor, original = _number(rope, "factor"), _integer(rope, "original_max_position_embeddings")
        fast, slow = _number(rope, "beta_fast", 32.0), _number(rope, "beta_slow", 1.0)
        if factor < 1.0 or not 0.0 < slow < fast or not 0 < original <= MAX_CONTEXT or theta <= 1.0:
            raise ConfigError(
                f"rope scaling 'yarn' has factor {factor}, beta_slow {slow}, beta_fast {fast}, "
                f"original_max_position_embeddings {original}, rope_theta {theta}"
            )
        return yarn_divisors(head_size, theta, factor, original, fast, slow, rope.get("truncate", True) is not False)
    raise ConfigError(f"rope scaling {kind!r} is not supported, only 'default', 'linear', 'llama3' and 'yarn'")


def _integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if type(value) is not int:
        raise ConfigError(f"{key} is {value!r}, a whole number is needed" if key in values else f"{key} is missing")
    return value


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = default if values.get(key) is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{key} is {value!r}, a number is needed")
    return float(value)


def _eos_of(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """End tokens as files give them: one, a list, or none."""
    given = values.get(key)
    listed = given if isinstance(given, list) else [given]
    return tuple(token_id for token_id in listed[:64] if type(token_id) is int)


def _named_eos(side: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The end token that tokenizer_config.json names by its text."""
    named = side.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if tokenizer is None or not isinstance(text, str):
        return ()
    token_id = tokenizer.token_id(text)
    return () if token_id is None else (token_id,)


# --- JSON, tokenizer, template ---------------------------------------------------------------------------------------


def read_json(path: Path, most: int) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    values = _parse(path, _read_bounded(path, most))
    if not isinstance(values, dict):
        raise BadModelFile(path, "it is not a JSON object")
    return values


def _optional_json(path: Path, most: int) -> dict[str, Any]:
    return read_json(path, most) if _is_there(path) else {}


def _is_there(path: Path) -> bool:
    """Whether a model has a file that it can do without. Raises ``BadModelFile`` for something else of that name."""
    if path.is_file():
        return True
    if os.path.lexists(path):
        is_lost = path.is_symlink() and not path.exists()
        raise BadModelFile(
            path, "it is a link to nothing" if is_lost else "it is no file, but a folder, a pipe or a device"
        )
    return False


def _read_bounded(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise BadModelFile(path, f"it cannot be read ({error.strerror or error})") from error
    if len(content) > most:
        raise BadModelFile(path, f"it has more than {most:,} bytes")
    return content


def _parse(path: Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadModelFile(path, f"it is not valid JSON ({_sentence(error)})") from error


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__


def _tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not _is_there(path):
        return None
    return Tokenizer.from_json(_read_bounded(path, MAX_TOKENIZER_BYTES), path)


def _chat_template(folder: Path, side: Mapping[str, Any]) -> str | None:
    """The template from its own file, else from tokenizer_config.json, where it may be a list of named ones."""
    path = folder / "chat_template.jinja"
    if _is_there(path):
        try:
            return _read_bounded(path, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise BadModelFile(path, "it is not UTF-8 text") from error
    given = side.get("chat_template")
    if isinstance(given, list):
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


# --- safetensors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a tensor is, and what its header says about it; ``start`` counts bytes of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsTensors(LazyTensors):
    """Tensors of safetensors files, each mapped by itself when it is asked for.

    So what was read leaves memory with its tensor: of a file mapped as a whole all pages would stay, beside the weights
    that are made of them.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        super().__init__(places)
        self.places = dict(places)

    def read(self, name: str) -> torch.Tensor:
        """The tensor in the type that the file has; its memory is the file's."""
        import torch

        place = self.places[name]
        dtype: torch.dtype = getattr(torch, TORCH_NAMES[place.dtype])
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=dtype)
        # A mapping begins at a whole page.
        first = place.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        before = place.start - first
        try:
            with place.file.open("rb") as file:
                # Private and writable, since torch knows no tensors that can not be written.
                mapped = mmap.mmap(
                    file.fileno(), before + count * dtype.itemsize, access=mmap.ACCESS_COPY, offset=first
                )
        except (OSError, ValueError) as error:
            raise BadModelFile(place.file, f"tensor {name} cannot be read ({_sentence(error)})") from error
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=before).view(place.shape)


def _weight_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """The safetensors files of a model, each with the tensors that the index promises in it, if there is an index."""
    if _is_there(folder / INDEX):
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return {others[0]: None}
    if others:
        raise BadModelFile(folder, f"it has {len(others)} safetensors files but no {INDEX}")
    pickled = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICKLES)
    if pickled:
        raise BadModelFile(
            pickled[0], "pickled weights can run code and are refused: convert them to safetensors (save_pretrained)"
        )
    raise BadModelFile(folder, f"it has no {SINGLE}")


def _indexed(folder: Path) -> dict[Path, frozenset[str] | None]:
    path = folder / INDEX
    weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or len(weight_map) > MAX_TENSORS:
        raise BadModelFile(path, f"its weight_map is not a mapping of 1 to {MAX_TENSORS:,} tensors")
    shards: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or Path(name).suffix != ".safetensors":
            raise BadModelFile(
                path, f"tensor {tensor[:100]} is said to be in {name!r}, not a safetensors file beside it"
            )
        shards.setdefault(name, set()).add(tensor)
    if len(shards) > MAX_SHARDS:
        raise BadModelFile(path, f"it names {len(shards):,} files, at most {MAX_SHARDS:,} are allowed")
    for name in sorted(shards):
        if not (folder / name).is_file():
            raise BadModelFile(folder / name, f"the file is missing, {INDEX} names it")
    return {folder / name: frozenset(tensors) for name, tensors in sorted(shards.items())}


def _headers(files: Mapping[Path, frozenset[str] | None]) -> dict[str, Place]:
    """Every tensor of all files; the rotary frequencies of old checkpoints are left out."""
    found: dict[str, Place] = {}
    for file, promised in files.items():
        places = read_header(file)
        if promised is not None and (absent := sorted(promised - places.keys())):
            raise BadModelFile(file, f"tensor {absent[0]} is missing, {INDEX} promises it")
        for tensor, place in places.items():
            if tensor in found:
                raise BadModelFile(file, f"tensor {tensor} is also in {found[tensor].file.name}")
            if not tensor.endswith(IGNORED_SUFFIX):
                found[tensor] = place
    return found


def read_header(file: Path) -> dict[str, Place]:
    """The tensors that a safetensors file has, checked against its length."""
    try:
        size = file.stat().st_size
        if not file.is_file() and not file.is_dir():
            raise BadModelFile(file, "it is a pipe or a device")  # to open one may wait for ever
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise BadModelFile(
                    file, f"its header has {length:,} bytes, the file {size:,}, the limit is {MAX_HEADER_BYTES:,}"
                )
            header = _parse(file, opened.read(length))
    except OSError as error:
        raise BadModelFile(file, f"it cannot be read ({error.strerror or error})") from error
    if not isinstance(header, dict) or len(header) > MAX_TENSORS + 1:
        raise BadModelFile(file, f"its header is not a mapping of at most {MAX_TENSORS:,} tensors")
    header.pop("__metadata__", None)
    spans: list[tuple[int, int]] = []
    places = {str(name): _place(file, str(name), entry, 8 + length, spans) for name, entry in header.items()}
    _check_spans(file, spans, size - 8 - length)
    return places


def _place(file: Path, name: str, entry: Any, data_start: int, spans: list[tuple[int, int]]) -> Place:
    """One entry of a header; its byte range within the data is appended to ``spans``."""
    values = entry if isinstance(entry, dict) else {}
    dtype, shown = values.get("dtype"), name[:200]
    shape, span = _naturals(values.get("shape")), _naturals(values.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise BadModelFile(
            file, f"tensor {shown} has type {str(dtype)[:40]}, only {', '.join(DTYPE_BYTES)} are supported"
        )
    if shape is None or len(shape) > MAX_DIMS or span is None or len(span) != 2:
        raise BadModelFile(file, f"tensor {shown} has no valid shape and offsets")
    num_bytes = span[1] - span[0]
    if num_bytes != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise BadModelFile(file, f"tensor {shown} of shape {list(shape)} and type {dtype} has {num_bytes:,} bytes")
    spans.append((span[0], span[1]))
    return Place(file, dtype, shape, data_start + span[0])


def _naturals(value: Any) -> tuple[int, ...] | None:
    """A list of natural numbers of a size that any file could mean, else nothing."""
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value):
        return tuple(value)
    return None


def _check_spans(file: Path, spans: list[tuple[int, int]], data_bytes: int) -> None:
    """Byte ranges cover the data from its start to its end, without gaps and overlaps."""
    position = 0
    for start, stop in sorted(spans):
        if start != position:
            raise BadModelFile(
                file, f"a tensor starts at byte {start:,} of the data, the one before ends at {position:,}"
            )
        position = stop
    if position != data_bytes:
        raise BadModelFile(
            file, f"its tensors need {position:,} bytes, the file has {data_bytes:,}: it is cut off or damaged"
        )
