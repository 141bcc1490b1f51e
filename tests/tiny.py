"""A tiny random Llama that every engine can run: two layers, a vocabulary of 32, tied embeddings."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TinyConfig:
    """The numbers of the model, under the names that ``reference.model.ModelConfig`` and ``optimized`` use."""

    num_layers: int = 2
    hidden_size: int = 16
    intermediate_size: int = 24
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    vocab_size: int = 32
    max_model_len: int = 64
    rope_theta: float = 10_000.0
    rope_divisors: tuple[float, ...] = ()
    rope_scale: float = 1.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True


def tiny_model(seed: int, config: TinyConfig | None = None) -> tuple[TinyConfig, dict[str, npt.NDArray[np.float32]]]:
    """The configuration and its weights, which depend on the seed alone."""
    config = config or TinyConfig()
    draw = np.random.Generator(np.random.PCG64(seed))

    def matrix(num_rows: int, num_columns: int) -> npt.NDArray[np.float32]:
        return (draw.standard_normal((num_rows, num_columns)) / np.sqrt(num_columns)).astype(np.float32)

    def norm() -> npt.NDArray[np.float32]:
        return (1.0 + 0.1 * draw.standard_normal(config.hidden_size)).astype(np.float32)

    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.num_query_heads * config.head_size, config.num_kv_heads * config.head_size
    weights = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden), "model.norm.weight": norm()}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": norm(),
            f"{prefix}.self_attn.q_proj.weight": 2.0 * matrix(query_size, hidden),
            f"{prefix}.self_attn.k_proj.weight": 2.0 * matrix(kv_size, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_size, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, query_size),
            f"{prefix}.post_attention_layernorm.weight": norm(),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = matrix(config.vocab_size, hidden)
    return config, weights
