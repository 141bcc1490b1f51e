"""The shapes of some published models, so that a plan can be made without their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from optimized.checkpoint import ConfigError, ModelConfig
from optimized.model_store import BadModelFile
from optimized.simulated_device import ModelCost
from spec.vocabulary import InvalidConfig


def _shape(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, context: int) -> ModelConfig:
    return ModelConfig(layers, hidden, inner, heads, kv_heads, hidden // heads, vocab, context)


SHAPES = {
    "smollm2-135m": replace(_shape(30, 576, 1536, 9, 3, 49_152, 8_192), tie_word_embeddings=True),
    "llama-2-7b": _shape(32, 4096, 11_008, 32, 32, 32_000, 4_096),
    "llama-2-13b": _shape(40, 5120, 13_824, 40, 40, 32_000, 4_096),
    "llama-3-8b": _shape(32, 4096, 14_336, 32, 8, 128_256, 8_192),
    "llama-3-70b": _shape(80, 8192, 28_672, 64, 8, 128_256, 8_192),
    "mistral-7b": _shape(32, 4096, 14_336, 32, 8, 32_768, 32_768),
    "qwen3-8b": replace(_shape(36, 4096, 12_288, 32, 8, 151_936, 40_960), qk_norm=True),
}
"""As their config.json files say."""


def cost_of(model: str) -> ModelCost:
    """The cost of a model by its name, or of the one whose config.json is given, alone or in its folder."""
    if model.lower() in SHAPES:
        return ModelCost.of(SHAPES[model.lower()], model.lower())
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if not model or not path.is_file():
        raise InvalidConfig("model", model, f"one of {', '.join(SHAPES)}, or a config.json")
    from optimized.hf_checkpoint import MAX_CONFIG_BYTES, parse_config, read_json

    try:
        return ModelCost.of(parse_config(read_json(path, MAX_CONFIG_BYTES)), path.resolve().parent.name)
    except ConfigError as error:
        raise BadModelFile(path, str(error)) from error
