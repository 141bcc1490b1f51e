"""Model files small enough to make by the thousand: GGUF files and Hugging Face directories of random models.

``python -m tests.models.tiny_files FOLDER`` writes one directory for each family of models.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from optimized.checkpoint import ModelConfig, random_arrays
from optimized.gguf_checkpoint import LAYER_NAMES, OUTER_NAMES, config_json
from optimized.tokenizer import byte_characters

TINY = ModelConfig(
    num_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_query_heads=4,
    num_kv_heads=2,
    head_size=8,
    vocab_size=262,
    max_model_len=64,
    rope_theta=1000.0,
    tie_word_embeddings=True,
    bos_token_id=260,
    eos_token_ids=(261,),
)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges: 256 bytes, four joined tokens, a begin and an end."""
    characters = sorted(byte_characters(), key=byte_characters().__getitem__)
    tokens = [*characters, "he", "ll", "hell", "hello", "<begin>", "<end>"]
    types = [1] * 260 + [3, 3]
    return tokens, types, ["h e", "l l", "he ll", "hell o"]


def gguf_name(name: str) -> str:
    """The name that a canonical tensor has in a GGUF file."""
    inner = {theirs: ours for ours, theirs in LAYER_NAMES.items()}
    outer = {theirs: ours for ours, theirs in OUTER_NAMES.items()}
    stem, _, kind = name.rpartition(".")
    if stem in outer:
        return f"{outer[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{inner[part]}.{kind}"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as the converter of GGUF files orders them: rotary pairs are neighbours."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: ModelConfig = TINY,
    *,
    seed: int = 0,
    kind: Kind = Kind.F32,
    raw: dict[str, np.ndarray] | None = None,
    divisors: np.ndarray | None = None,
    pre_type: str = "smollm",
    with_tokenizer: bool = True,
    architecture: str = "llama",
    yarn: dict[str, object] | None = None,
) -> dict[str, np.ndarray]:
    """A GGUF file; matrices are stored as ``kind``, or as the raw bytes given. The arrays that it was made from."""
    arrays = random_arrays(config, seed)
    writer = gguf.GGUFWriter(path, architecture)
    if yarn is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(yarn["factor"])
        writer.add_rope_scaling_orig_ctx_len(yarn["original_max_position_embeddings"])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_query_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if with_tokenizer:
        tokens, types, merges = vocabulary()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_type)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(260)
        writer.add_eos_token_id(261)
        writer.add_chat_template(TEMPLATE)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    for name, array in arrays.items():
        heads = {"q": config.num_query_heads, "k": config.num_kv_heads}.get(name.split(".")[-2].removesuffix("_proj"))
        stored = interleaved(array, heads) if heads and architecture == "llama" else array
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), stored)
        elif raw is not None:
            writer.add_tensor(gguf_name(name), raw[name], raw_dtype=kind)
        elif kind in (Kind.F32, Kind.F16):
            writer.add_tensor(gguf_name(name), stored.astype(np.float16 if kind == Kind.F16 else np.float32))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def write_directory(
    folder: Path, config: ModelConfig = TINY, *, seed: int = 0, num_shards: int = 1, **changes: object
) -> dict[str, np.ndarray]:
    """A Hugging Face directory; ``changes`` go into config.json. The arrays that it was made from."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = random_arrays(config, seed)
    (folder / "config.json").write_text(json.dumps(config_json(config) | changes))
    if num_shards == 1:
        save_file(arrays, folder / "model.safetensors")
        return arrays
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {tensor: array for place, (tensor, array) in enumerate(arrays.items()) if place % num_shards == shard}
        weight_map |= dict.fromkeys(part, name)
        save_file(part, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return arrays


SMALL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_query_heads=4,
    num_kv_heads=2,
    head_size=16,
    vocab_size=61,
    max_model_len=64,
    rope_theta=1000.0,
    eos_token_ids=(60,),
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, tuple[ModelConfig, dict[str, object]]] = {
    "llama": (SMALL, {}),
    "llama3": (replace(SMALL, tie_word_embeddings=True), {"rope_scaling": LLAMA3}),
    "llama-biased": (replace(SMALL, qkv_bias=True, o_bias=True), {}),
    "mistral": (SMALL, {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}),
    "mistral-window": (replace(SMALL, sliding_window=5), {}),
    "qwen2": (replace(SMALL, qkv_bias=True, tie_word_embeddings=True), {}),
    "qwen2-yarn": (replace(SMALL, qkv_bias=True), {"rope_scaling": YARN}),
    "qwen3": (replace(SMALL, qk_norm=True, head_size=8), {}),
}
"""Random models of each family: what they are made of, and what config.json says besides."""


if __name__ == "__main__":
    for name, (made_of, changes) in FAMILIES.items():
        write_directory(Path(sys.argv[1]) / name, made_of, **changes)
