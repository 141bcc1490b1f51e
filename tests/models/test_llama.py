"""The forward pass over a paged cache, against dense attention in NumPy, and against transformers."""

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optimized.chat_template import render
from optimized.checkpoint import (
    Checkpoint,
    ConfigError,
    ModelConfig,
    llama3_divisors,
    load_checkpoint,
    random_arrays,
    random_checkpoint,
    yarn_divisors,
    yarn_scale,
)
from optimized.llama import LlamaModel
from reference.model import Llama
from reference.model import dense_logits as reference_logits
from tests.models.tiny_files import FAMILIES, write_directory

CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=48,
    intermediate_size=80,
    num_query_heads=6,
    num_kv_heads=2,
    head_size=16,
    vocab_size=101,
    max_model_len=256,
)
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_divisors": llama3_divisors(16, 10_000.0, 4.0, 1.0, 4.0, 32)},
    {"rope_divisors": yarn_divisors(16, 10_000.0, 4.0, 64), "rope_scale": yarn_scale(4.0)},
]
TINY_LOGITS = json.loads((Path(__file__).parent / "tiny_logits.json").read_text())
RECORDED = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text())


# --- dense, in NumPy --------------------------------------------------------------------------------------------------


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight


def rotate(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Heads ``[num_tokens, num_heads, head_size]`` of the positions 0, 1, 2, ... turned."""
    out, half = np.empty_like(x), config.head_size // 2
    divisors = config.rope_divisors or (1.0,) * half
    for position in range(len(x)):
        for pair in range(half):
            angle = position * config.rope_theta ** (-2 * pair / config.head_size) / divisors[pair]
            first, second = x[position, :, pair], x[position, :, pair + half]
            cos, sin = x.dtype.type(math.cos(angle)), x.dtype.type(math.sin(angle))
            out[position, :, pair], out[position, :, pair + half] = (
                first * cos - second * sin,
                second * cos + first * sin,
            )
    return out * x.dtype.type(config.rope_scale)


def attend(query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int | None) -> np.ndarray:
    """Causal attention, ``[num_tokens, num_query_heads, head_size]``, head by head."""
    out, group = np.empty_like(query), query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        score = query[:, head] @ key[:, head // group].T / query.dtype.type(math.sqrt(query.shape[2]))
        score[np.triu_indices(len(query), 1)] = -np.inf
        score[np.tril_indices(len(query), -(window or len(query)))] = -np.inf
        weight = np.exp(score - score.max(-1, keepdims=True))
        out[:, head] = weight / weight.sum(-1, keepdims=True) @ value[:, head // group]
    return out


def dense_logits(config: ModelConfig, arrays: dict[str, np.ndarray], token_ids: list[int], dtype: type) -> np.ndarray:
    """Logits ``[num_tokens, vocab_size]`` after every token of one sequence, all arithmetic in ``dtype``."""
    weights = {name: array.astype(dtype) for name, array in arrays.items()}
    x, tokens = weights["model.embed_tokens.weight"][token_ids], len(token_ids)
    for layer in range(config.num_layers):
        w = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in LAYER_PARTS}
        b = {part: weights.get(f"model.layers.{layer}.self_attn.{part}_proj.bias", dtype(0)) for part in "qkvo"}
        y = norm(x, w["input_layernorm"], config.rms_norm_eps)
        query, key, value = (
            (y @ w[f"self_attn.{part}_proj"].T + b[part]).reshape(tokens, -1, config.head_size) for part in "qkv"
        )
        if config.qk_norm:
            norms = [weights[f"model.layers.{layer}.self_attn.{part}_norm.weight"] for part in "qk"]
            query, key = (norm(x, n, config.rms_norm_eps) for x, n in zip((query, key), norms, strict=True))
        mixed = attend(rotate(query, config), rotate(key, config), value, config.sliding_window).reshape(tokens, -1)
        x = x + mixed @ w["self_attn.o_proj"].T + b["o"]
        y = norm(x, w["post_attention_layernorm"], config.rms_norm_eps)
        gate, up = y @ w["mlp.gate_proj"].T, y @ w["mlp.up_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, weights["model.norm.weight"], config.rms_norm_eps) @ head.T


def reordered(config: ModelConfig, arrays: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """The same model with its hidden and its inner units in another order: only the roundings of its sums are others."""
    draw = np.random.default_rng(seed)
    hidden, inner = draw.permutation(config.hidden_size), draw.permutation(config.intermediate_size)
    made = {}
    for name, array in arrays.items():
        if "down_proj" in name:
            array = array[hidden][:, inner]
        elif "gate_proj" in name or "up_proj" in name:
            array = array[inner][:, hidden]
        elif "o_proj" in name or name.endswith("norm.weight") and "self_attn" not in name:
            array = array[hidden]
        elif array.ndim == 2:
            array = array[:, hidden]
        made[name] = np.ascontiguousarray(array)
    return made


def logits_bound(
    config: ModelConfig,
    arrays: dict[str, np.ndarray],
    prompts: list[list[int]],
    exact: list[np.ndarray],
    num_orders: int = 8,
) -> float:
    """Twice the largest error of dense logits in float32, in several orders of their sums: in one of them it is whatever the
    processor's library makes of it, and another one is off by twice as much."""
    orders = [arrays, *(reordered(config, arrays, seed) for seed in range(1, num_orders))]
    errors = [
        np.abs(dense_logits(config, each, prompt, np.float32) - right).max()
        for each in orders
        for prompt, right in zip(prompts, exact, strict=True)
    ]
    return 2 * float(max(errors))


LAYER_PARTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


# --- paged ------------------------------------------------------------------------------------------------------------


@dataclass
class Paged:
    """Sequences that each have shuffled blocks of one cache, and how far each is computed."""

    model: LlamaModel
    num_seqs: int
    num_blocks_each: int
    block_size: int

    def __post_init__(self) -> None:
        num_blocks = self.num_seqs * self.num_blocks_each
        self.kv_caches = self.model.new_kv_caches(num_blocks, self.block_size)
        for key_cache, value_cache in self.kv_caches:
            key_cache.fill_(math.nan)  # a cell that was not written spoils what reads it
            value_cache.fill_(math.nan)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self.block_tables = order.reshape(self.num_seqs, -1).to(torch.int32)
        self.computed = [0] * self.num_seqs

    def step(self, chunks: dict[int, list[int]], every_row: bool = False) -> torch.Tensor:
        """Logits after the last token (or every token) of each sequence's next tokens."""
        token_ids, positions, slots, seq_lens, starts = [], [], [], [], [0]
        for seq, chunk in chunks.items():
            places = torch.arange(self.computed[seq], self.computed[seq] + len(chunk))
            blocks = self.block_tables[seq, places // self.block_size].long()
            token_ids += chunk
            positions.append(places)
            slots.append(blocks * self.block_size + places % self.block_size)
            self.computed[seq] += len(chunk)
            seq_lens.append(self.computed[seq])
            starts.append(starts[-1] + len(chunk))
        rows = range(len(token_ids)) if every_row else [start - 1 for start in starts[1:]]
        hidden_states = self.model.forward(
            torch.tensor(token_ids),
            torch.cat(positions),
            self.kv_caches,
            torch.cat(slots),
            self.block_tables[list(chunks)],
            torch.tensor(seq_lens, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
        )
        return self.model.logits(hidden_states[list(rows)])


def chunks_of(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({cut % len(token_ids) for cut in cuts} - {0}), len(token_ids)]
    return [token_ids[begin:end] for begin, end in pairwise(edges)]


@pytest.mark.slow
@settings(
    max_examples=max(10, settings.default.max_examples // 4)
)  # each is a hundred times the work of another test's
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    block_size=st.sampled_from([1, 3, 16]),
    tied=st.booleans(),
    rope=st.sampled_from(ROPES),
    parts=st.sampled_from([{}, {"qkv_bias": True}, {"qkv_bias": True, "o_bias": True}, {"qk_norm": True}]),
    seed=st.integers(0, 1000),
)
def test_logits_are_those_of_dense_attention(
    lengths: list[int],
    cuts: list[int],
    block_size: int,
    tied: bool,
    rope: dict[str, Any],
    parts: dict[str, bool],
    seed: int,
) -> None:
    config = replace(CONFIG, tie_word_embeddings=tied, **rope, **parts)
    arrays = random_arrays(config, seed)
    draw = np.random.default_rng(seed)
    # Always one long sequence too: the bound is a maximum, which a handful of positions does not show.
    prompts = [draw.integers(0, config.vocab_size, length).tolist() for length in (*lengths, 40)]
    paged = Paged(LlamaModel(config, random_checkpoint(config, seed).tensors), len(prompts), 40, block_size)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    todo = {seq: chunks_of(prompt, cuts) for seq, prompt in enumerate(prompts)}
    while todo:
        chunks = {seq: parts.pop(0) for seq, parts in todo.items()}
        logits = paged.step(chunks, every_row=True).split([len(chunk) for chunk in chunks.values()])
        for seq, part in zip(chunks, logits, strict=True):
            found[seq].append(part)
        todo = {seq: parts for seq, parts in todo.items() if parts}
    exact = [dense_logits(config, arrays, prompt, np.float64) for prompt in prompts]
    bound = logits_bound(config, arrays, prompts, exact, num_orders=3)
    for seq, expected in enumerate(exact):
        error = np.abs(torch.cat(found[seq]).numpy() - expected).max()
        assert error <= bound, f"sequence {seq} is off by {error}, the bound is {bound}"


def test_only_rows_that_sample_get_logits() -> None:
    paged = Paged(LlamaModel(CONFIG, random_checkpoint(CONFIG, 0).tensors), 2, 4, 4)
    assert paged.step({0: [1, 2, 3], 1: [4, 5]}).shape == (2, CONFIG.vocab_size)


def test_nothing_to_sample_gives_no_logits() -> None:
    model = LlamaModel(CONFIG, random_checkpoint(CONFIG, 0).tensors)
    assert model.logits(torch.zeros(0, CONFIG.hidden_size)).shape == (0, CONFIG.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_that_transformers_computes(tmp_path: Path, family: str) -> None:
    recorded, token_ids = TINY_LOGITS["models"][family], TINY_LOGITS["token_ids"]
    write_directory(tmp_path, FAMILIES[family][0], **FAMILIES[family][1])
    checkpoint = load_checkpoint(tmp_path)
    arrays, expected = checkpoint.arrays(), np.array(recorded["logits"])
    exact = dense_logits(checkpoint.config, arrays, token_ids, np.float64)
    bound = logits_bound(checkpoint.config, arrays, [token_ids], [exact])
    reference = reference_logits(Llama(arrays, checkpoint.config), token_ids, checkpoint.config.sliding_window)
    theirs = np.abs(reference - expected).max()  # norms and angles of transformers are float32
    assert theirs <= bound, recorded["class"]
    paged = Paged(LlamaModel(checkpoint.config, checkpoint.tensors), 1, 4, 4)
    logits = paged.step({0: token_ids}, every_row=True).numpy()
    assert np.abs(logits - expected).max() <= bound + theirs, recorded["class"]


def test_a_model_counts_its_bytes() -> None:
    model = LlamaModel(CONFIG, random_checkpoint(CONFIG, 0).tensors, dtype=torch.bfloat16)
    assert model.num_weight_bytes == sum(array.size * 2 for array in random_arrays(CONFIG, 0).values())
    assert model.forward.__name__ == "forward"


def test_a_tensor_of_another_shape_is_refused() -> None:
    tensors = dict(random_checkpoint(CONFIG, 0).tensors)
    tensors["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"tensor model.norm.weight has shape \[3\], expected \[48\]"):
        LlamaModel(CONFIG, tensors)


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_model(smollm2: Checkpoint) -> LlamaModel:
    return LlamaModel(smollm2.config, smollm2.tensors)


def greedy(model: LlamaModel, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """The continuation, and the margin of the two largest logits before each token."""
    paged = Paged(model, 1, 16, 16)
    chunk, token_ids, margins = prompt, [], []
    while len(token_ids) < num_tokens:
        top = paged.step({0: chunk})[0].double().topk(2)
        margins.append(float(top.values[0] - top.values[1]))
        token_ids.append(int(top.indices[0]))
        chunk = token_ids[-1:]
        if chunk[0] in model.config.eos_token_ids:
            break
    return token_ids, margins


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2: Checkpoint, smollm2_model: LlamaModel) -> None:
    assert smollm2.tokenizer is not None and smollm2.chat_template is not None
    text = render([{"role": "user", "content": "What is the capital of France?"}], smollm2.chat_template)
    token_ids, _ = greedy(smollm2_model, smollm2.tokenizer.encode(text), 24)
    assert smollm2.tokenizer.decode(token_ids) == "The capital of France is Paris."


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["prompt"][:20])
def test_prompts_are_tokenized_as_transformers_does(smollm2: Checkpoint, case: dict[str, Any]) -> None:
    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.encode(case["rendered"], add_special_tokens=False) == case["prompt_token_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["prompt"][:20])
def test_smollm2_continues_as_transformers_does(smollm2_model: LlamaModel, case: dict[str, Any]) -> None:
    token_ids, margins = greedy(smollm2_model, case["prompt_token_ids"], RECORDED["num_tokens"])
    assert token_ids == case["token_ids"]
    # Both compute in float32: the margins differ by far less than the smallest of them, 0.0014.
    assert max(abs(ours - theirs) for ours, theirs in zip(margins, case["margins"], strict=True)) < 1e-4
