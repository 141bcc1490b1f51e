"""GGUF files: a bounded check first, then the ``gguf`` library, then a conversion that is kept.

Reading the vocabulary of a GGUF file takes seconds, so it is done once: the file becomes a Hugging Face directory below
``KVPROOF_HOME``, under the SHA-256 of its content, so that a changed file is never answered with an old conversion. The
conversion is exact: quantized tensors become the float32 numbers that the library's dequantizer gives, F32, F16 and
BF16 tensors stay what they are. Where nothing can be stored, the file is read directly, with the same result.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimized.checkpoint import (
    MAX_CONTEXT,
    Checkpoint,
    ConfigError,
    LazyTensors,
    ModelConfig,
    check_tensors,
    yarn_divisors,
    yarn_scale,
)
from optimized.gguf_guard import precheck
from optimized.hf_checkpoint import INDEX, MODELS, SINGLE, load_directory
from optimized.model_store import (
    BadModelFile,
    check_default,
    default_path,
    home,
    progress_bar,
    scratch_folder,
    sha256_of,
)
from optimized.tokenizer import BEGINS_BY_DEFAULT, Tokenizer, UnsupportedTokenizer, byte_level_bpe

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CONVERSION = 1
"""Raised whenever a conversion would come out differently, so that old ones are left alone."""

SHARD_BYTES = 2 << 30

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""What a GGUF file may be; Mistral's are called llama."""


def load_gguf(path: Path) -> Checkpoint:
    """The model in a GGUF file, from its conversion when there is one: then its content has passed the check before."""
    digest = _digest(path)
    if path == default_path():
        check_default(path, digest)
    folder = home() / "converted" / f"{digest}-{CONVERSION}"
    if folder.is_dir():
        try:
            return load_directory(folder, name=path)
        except BadModelFile as error:
            logger.warning("a damaged conversion is made anew: %s", error)
            shutil.rmtree(folder, ignore_errors=True)
    precheck(path)
    source = read_gguf(path)
    try:
        convert(source, folder)
        return load_directory(folder, name=path)
    except OSError as error:
        logger.warning("the conversion of %s cannot be stored: %s", path.name, error)
        return source


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise BadModelFile(path, f"it cannot be read ({error.strerror or error})") from error


# --- reading ---------------------------------------------------------------------------------------------------------


class GgufTensors(LazyTensors):
    """Tensors of a GGUF file under their canonical names, dequantized when they are asked for.

    ``in_pairs`` says that the rows of a head are in rotary pairs, which only Llama's files have.
    """

    def __init__(self, path: Path, sources: dict[str, Any], config: ModelConfig, in_pairs: bool = True) -> None:
        super().__init__(sources)
        self._path = path
        self._sources = sources  # name -> gguf.ReaderTensor, which has no types
        self._config = config
        self._in_pairs = in_pairs

    def read(self, name: str) -> torch.Tensor:
        """The tensor as the library dequantizes it, with rotary pairs in halves."""
        import gguf
        import numpy as np
        import torch

        source = self._sources[name]
        kind = source.tensor_type.name
        if kind == "BF16":
            tensor = torch.from_numpy(np.array(source.data)).view(torch.bfloat16)
        elif kind in ("F32", "F16"):
            tensor = torch.from_numpy(np.array(source.data))
        else:
            with np.errstate(
                all="ignore"
            ):  # scales that are not finite give numbers that are not, and the sampler says so
                tensor = torch.from_numpy(gguf.quants.dequantize(source.data, source.tensor_type))
        if self._in_pairs and ".q_proj." in name:
            return in_halves(tensor, self._config.num_query_heads)
        if self._in_pairs and ".k_proj." in name:
            return in_halves(tensor, self._config.num_kv_heads)
        return tensor

    def bytes_of(self, name: str) -> int:
        """The size of the tensor when it is read."""
        source = self._sources[name]
        return int(source.n_elements) * (2 if source.tensor_type.name in ("F16", "BF16") else 4)


def in_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from neighbouring rotary pairs (GGUF's Llama) to pairs in halves.

    ``[num_heads * head_size, hidden_size]``, or a bias ``[num_heads * head_size]``, both before and after.
    """
    paired = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, -1)
    return paired.transpose(1, 2).reshape(weight.shape).contiguous()


def read_gguf(path: Path) -> Checkpoint:
    """The model in a GGUF file, read directly; call ``precheck`` first."""
    with _refusing(path):
        import gguf

        reader = gguf.GGUFReader(path)
        fields = {name: field for name, field in reader.fields.items()}
        value = _value_reader(path, fields)
        sources = {}
        for tensor in reader.tensors:
            sources[tensor.name] = tensor
        rope = sources.pop(ROPE_FACTORS, None)
        divisors = () if rope is None else tuple(float(number) for number in rope.data.reshape(-1).tolist())
        if rope is not None and rope.tensor_type != gguf.GGMLQuantizationType.F32:
            raise ConfigError(f"tensor {ROPE_FACTORS} has type {rope.tensor_type.name}, expected F32")
        named = {canonical_name(path, name): tensor for name, tensor in sources.items()}
        if len(named) != len(sources):
            raise ConfigError("two of its tensors are the same layer's")
        config = _config(value, divisors, named.keys())
        shapes = {name: tuple(int(length) for length in reversed(tensor.shape)) for name, tensor in named.items()}
        check_tensors(path, config, shapes)
        tokenizer = _tokenizer(value, config)
        template = value("tokenizer.chat_template", str, None)
        in_pairs = value("general.architecture", str) == "llama"
        return Checkpoint(path, config, GgufTensors(path, named, config, in_pairs), tokenizer, template)


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """What goes wrong in parsing a file that passed the check is the file's fault."""
    try:
        yield
    except (ConfigError, UnsupportedTokenizer) as error:
        raise BadModelFile(path, str(error)) from error
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, ArithmeticError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise BadModelFile(path, f"it is damaged ({reason})") from error


def canonical_name(path: Path, name: str) -> str:
    """The canonical name of a GGUF tensor.

    >>> canonical_name(Path("m.gguf"), "blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    parts = name.split(".")
    if len(parts) == 2 and parts[1] == "weight" and parts[0] in OUTER_NAMES:
        return f"{OUTER_NAMES[parts[0]]}.weight"
    if (
        len(parts) == 4
        and parts[0] == "blk"
        and parts[1].isdecimal()
        and parts[2] in LAYER_NAMES
        and parts[3] in ("weight", "bias")
    ):
        return f"model.layers.{int(parts[1])}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise BadModelFile(path, f"tensor {name} is not part of a model of {', '.join(ARCHITECTURES)}")


MISSING = object()
Value = Callable[..., Any]  # metadata has whatever type the file gives it; the reader checks it


def _value_reader(path: Path, fields: dict[str, Any]) -> Value:
    """A function that gives metadata of a wanted type, or refuses the file."""

    def value(key: str, kind: type, default: Any = MISSING) -> Any:
        if key not in fields:
            if default is MISSING:
                raise BadModelFile(path, f"metadata field {key} is missing")
            return default
        found = fields[key].contents()
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind:
            raise BadModelFile(path, f"metadata field {key} is a {type(found).__name__}, expected a {kind.__name__}")
        return found

    return value


def _config(metadata: Value, divisors: tuple[float, ...], tensors: Iterable[str]) -> ModelConfig:
    architecture = metadata("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture[:40]!r} is not supported, only {', '.join(ARCHITECTURES)}")
    names = frozenset(tensors)

    def value(key: str, kind: type, default: Any = MISSING) -> Any:
        """Metadata: a key of the architecture, or one of the tokenizer."""
        return metadata(key if key.startswith("tokenizer.") else f"{architecture}.{key}", kind, default)

    if value("expert_count", int, 0):
        raise ConfigError("mixtures of experts are not supported")
    query_heads, hidden = value("attention.head_count", int), value("embedding_length", int)
    if not 1 <= query_heads <= hidden:
        raise ConfigError(f"head_count is {query_heads}, embedding_length is {hidden}")
    head_size = value("attention.key_length", int, hidden // query_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, int, head_size) != head_size:
            raise ConfigError(f"{architecture}.{key} is {value(key, int)}, expected the head size {head_size}")
    theta = value("rope.freq_base", float, 10_000.0)
    window = value("attention.sliding_window", int, None) or None
    if window is not None and architecture == "llama" and any(name.endswith("proj.bias") for name in names):
        raise ConfigError("a sliding window together with biases is not supported")
    vocabulary = value("tokenizer.ggml.tokens", list, None)
    vocab_size = value("vocab_size", int, 0 if vocabulary is None else len(vocabulary))
    eos = [value(f"tokenizer.ggml.{key}_token_id", int, None) for key in ("eos", "eot", "eom")]
    return ModelConfig(
        num_layers=value("block_count", int),
        hidden_size=hidden,
        intermediate_size=value("feed_forward_length", int),
        num_query_heads=query_heads,
        num_kv_heads=value("attention.head_count_kv", int, query_heads),
        head_size=head_size,
        vocab_size=vocab_size,
        max_model_len=value("context_length", int),
        rope_theta=theta,
        rope_divisors=_scaling(value, divisors, head_size, theta),
        rope_scale=yarn_scale(value("rope.scaling.factor", float)) if _is_yarn(value) else 1.0,
        rms_norm_eps=value("attention.layer_norm_rms_epsilon", float),
        tie_word_embeddings="lm_head.weight" not in names,
        sliding_window=window,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
        o_bias="model.layers.0.self_attn.o_proj.bias" in names,
        qk_norm=architecture == "qwen3",
        bos_token_id=value("tokenizer.ggml.bos_token_id", int, None),
        eos_token_ids=tuple(dict.fromkeys(token_id for token_id in eos if token_id is not None)),
    )


def _is_yarn(value: Value) -> bool:
    return bool(value("rope.scaling.type", str, "none") == "yarn")


def _scaling(value: Value, divisors: tuple[float, ...], head_size: int, theta: float) -> tuple[float, ...]:
    kind = value("rope.scaling.type", str, "none")
    if kind == "none":
        return divisors
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"rope scaling {kind[:40]!r} is not supported, only 'none', 'linear' and 'yarn'")
    factor = value("rope.scaling.factor", float)
    if kind == "linear":
        return (factor,) * (head_size // 2)
    original = value("rope.scaling.original_context_length", int)
    if factor < 1.0 or not 0 < original <= MAX_CONTEXT or not 1.0 < theta <= 1e12 or not 2 <= head_size <= 1024:
        raise ConfigError(f"rope scaling 'yarn' has factor {factor}, original_context_length {original}, base {theta}")
    return yarn_divisors(head_size, theta, factor, original)


def _tokenizer(value: Value, config: ModelConfig) -> Tokenizer | None:
    model = value("tokenizer.ggml.model", str, "none")
    if model in ("none", "no_vocab"):
        return None
    if model != "gpt2":
        raise UnsupportedTokenizer(f"tokenizer model {model[:40]!r} is not supported, only 'gpt2' (byte-level BPE)")
    tokens = value("tokenizer.ggml.tokens", list)
    if len(tokens) != config.vocab_size:
        raise UnsupportedTokenizer(f"it has {len(tokens):,} tokens, its vocabulary {config.vocab_size:,}")
    pre_type = value("tokenizer.ggml.pre", str, "default")
    return byte_level_bpe(
        _strings(tokens),
        value("tokenizer.ggml.token_type", list, [1] * len(tokens)),
        _strings(value("tokenizer.ggml.merges", list)),
        pre_type=pre_type,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        add_bos=value("tokenizer.ggml.add_bos_token", bool, pre_type in BEGINS_BY_DEFAULT),
    )


def _strings(values: list[Any]) -> list[str]:
    if not all(type(entry) is str for entry in values):
        raise UnsupportedTokenizer("its vocabulary has entries that are not text")
    return values


# --- the kept conversion ---------------------------------------------------------------------------------------------


def convert(source: Checkpoint, folder: Path) -> None:
    """Write a checkpoint as a Hugging Face directory: whole or not at all, also when two processes do it at once."""
    with scratch_folder(folder.parent) as scratch:
        made = scratch / "model"
        made.mkdir()
        _write_weights(source, made)
        _write_text(made / "config.json", json.dumps(config_json(source.config), indent=1))
        if source.tokenizer is not None:
            _write_text(made / "tokenizer.json", source.tokenizer.backend.to_str())
        if source.chat_template is not None:
            _write_text(made / "chat_template.jinja", source.chat_template)
        for path in made.iterdir():
            _to_disk(path)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise  # not another process that was faster, but a real failure


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The configuration as ``transformers`` writes it; only rope divisors have an entry of our own."""
    rope: dict[str, Any] = {}
    if config.rope_divisors or config.rope_scale != 1.0:
        divisors = list(config.rope_divisors or (1.0,) * (config.head_size // 2))
        rope = {"rope_scaling": {"rope_type": "divisors", "divisors": divisors, "scale": config.rope_scale}}
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias and not config.o_bias else "llama"
    window: dict[str, Any] = {}
    if config.sliding_window is not None:
        kind = "mistral" if kind == "llama" else kind
        window = {"sliding_window": config.sliding_window}
        if kind != "mistral":
            layers = ["sliding_attention"] * config.num_layers
            window |= {"use_sliding_window": True, "max_window_layers": 0, "layer_types": layers}
    return {
        **rope,
        **window,
        "architectures": [MODELS[kind]],
        "model_type": kind,
        "attention_bias": config.o_bias,
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_model_len,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }


def _write_weights(source: Checkpoint, folder: Path) -> None:
    """The tensors, in shards that bound how much is in memory."""
    from safetensors.torch import save_file

    shards = _shards(source)
    names = (
        [SINGLE] if len(shards) == 1 else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in _from_one(shards)]
    )
    total = sum(size for shard in shards for size in shard.values())
    with progress_bar(total, f"Converting {source.name}") as bar:
        for name, shard in zip(names, shards, strict=True):
            tensors = {}
            for tensor, size in shard.items():
                tensors[tensor] = source.tensors[tensor].contiguous()
                bar.update(size)
            save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_text(folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _from_one(shards: list[dict[str, int]]) -> range:
    return range(1, len(shards) + 1)


def _shards(source: Checkpoint) -> list[dict[str, int]]:
    """Tensor names and sizes, cut into shards of at most ``SHARD_BYTES``."""
    sizes = source.tensors.bytes_of if isinstance(source.tensors, GgufTensors) else _size_in_memory(source)
    shards: list[dict[str, int]] = [{}]
    for name in source.tensors:
        size = sizes(name)
        if shards[-1] and sum(shards[-1].values()) + size > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = size
    return shards


def _size_in_memory(source: Checkpoint) -> Callable[[str], int]:
    return lambda name: source.tensors[name].nbytes


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _to_disk(path: Path) -> None:
    """Have the content on the disk before the folder gets its name, so that a crash leaves no empty files."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
