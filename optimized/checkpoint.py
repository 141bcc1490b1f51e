"""A model as it is loaded: its configuration, its tensors under fixed names, its tokenizer and its chat template.

Every source (a GGUF file, a Hugging Face directory, random numbers) comes out in one form. Tensors have the names of
``transformers``' Llama, each weight as ``[out_features, in_features]``, rotary pairs in halves (element ``i`` turns with
element ``i + head_size / 2``)::

    model.embed_tokens.weight                            [vocab_size, hidden_size]
    model.layers.{i}.input_layernorm.weight              [hidden_size]
    model.layers.{i}.self_attn.q_proj.weight             [num_query_heads * head_size, hidden_size]
    model.layers.{i}.self_attn.k_proj.weight             [num_kv_heads * head_size, hidden_size]
    model.layers.{i}.self_attn.v_proj.weight             [num_kv_heads * head_size, hidden_size]
    model.layers.{i}.self_attn.o_proj.weight             [hidden_size, num_query_heads * head_size]
    model.layers.{i}.self_attn.{q,k,v,o}_proj.bias       [out_features], with qkv_bias and o_bias
    model.layers.{i}.self_attn.{q,k}_norm.weight         [head_size], with qk_norm
    model.layers.{i}.post_attention_layernorm.weight     [hidden_size]
    model.layers.{i}.mlp.gate_proj.weight                [intermediate_size, hidden_size]
    model.layers.{i}.mlp.up_proj.weight                  [intermediate_size, hidden_size]
    model.layers.{i}.mlp.down_proj.weight                [hidden_size, intermediate_size]
    model.norm.weight                                    [hidden_size]
    lm_head.weight                                       [vocab_size, hidden_size], absent when tied
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimized.model_store import BadModelFile, resolve

if TYPE_CHECKING:
    import numpy as np
    import torch

    from optimized.chat_template import TemplateLimits
    from optimized.tokenizer import Tokenizer

MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_SIZE = 1024
MAX_HIDDEN_SIZE = 1 << 17
MAX_INTERMEDIATE_SIZE = 1 << 20
MAX_VOCAB_SIZE = 1 << 22
MAX_CONTEXT = 1 << 24


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that fix a model's shapes and arithmetic: Llama's, and what Mistral, Qwen2 and Qwen3 do differently.

    With ``qk_norm`` the queries and keys of each head are normed before they are turned; ``rope_scale`` stretches both of
    them when they are.

    ``rope_divisors`` has one number per rotary pair, or none at all: the angle of pair ``i`` at position ``p`` is
    ``p * rope_theta ** (-2 * i / head_size) / rope_divisors[i]``. With a ``sliding_window`` a token sees so many tokens,
    itself included, in every layer.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    rope_theta: float = 10_000.0
    rope_divisors: tuple[float, ...] = ()
    rope_scale: float = 1.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        _check_count("num_layers", self.num_layers, MAX_LAYERS)
        _check_count("hidden_size", self.hidden_size, MAX_HIDDEN_SIZE)
        _check_count("intermediate_size", self.intermediate_size, MAX_INTERMEDIATE_SIZE)
        _check_count("num_query_heads", self.num_query_heads, MAX_HEADS)
        _check_count("num_kv_heads", self.num_kv_heads, MAX_HEADS)
        _check_count("head_size", self.head_size, MAX_HEAD_SIZE)
        _check_count("vocab_size", self.vocab_size, MAX_VOCAB_SIZE)
        _check_count("max_model_len", self.max_model_len, MAX_CONTEXT)
        if self.sliding_window is not None:
            _check_count("sliding_window", self.sliding_window, MAX_CONTEXT)
        if self.num_query_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_query_heads is {self.num_query_heads}, not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ConfigError(f"head_size is {self.head_size}, rotary embeddings need an even one")
        if not 1.0 <= self.rope_theta <= 1e12:
            raise ConfigError(f"rope_theta is {self.rope_theta}, it lies between 1 and 1e12")
        if not 0.0 < self.rms_norm_eps <= 0.1:
            raise ConfigError(f"rms_norm_eps is {self.rms_norm_eps}, it lies between 0 and 0.1")
        if len(self.rope_divisors) not in (0, self.head_size // 2):
            raise ConfigError(f"there are {len(self.rope_divisors)} rope_divisors for {self.head_size // 2} pairs")
        if not 1e-6 <= self.rope_scale <= 1e6:
            raise ConfigError(f"rope_scale is {self.rope_scale}, it lies between 1e-6 and 1e6")
        for divisor in self.rope_divisors:
            if not 1e-6 <= divisor <= 1e6:
                raise ConfigError(f"a rope divisor is {divisor}, it lies between 1e-6 and 1e6")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise ConfigError(f"special token {token_id} is outside the vocabulary of {self.vocab_size}")

    @property
    def scale(self) -> float:
        """What attention scores are multiplied with."""
        return 1.0 / math.sqrt(self.head_size)

    def inverse_frequencies(self) -> tuple[float, ...]:
        """The angle per position of each rotary pair, in float64.

        >>> config = ModelConfig(num_layers=1, hidden_size=8, intermediate_size=8, num_query_heads=2, num_kv_heads=1,
        ...                      head_size=4, vocab_size=16, max_model_len=32, rope_theta=100.0)
        >>> config.inverse_frequencies()
        (1.0, 0.1)
        """
        pairs = range(self.head_size // 2)
        divisors = self.rope_divisors or (1.0,) * len(pairs)
        return tuple(self.rope_theta ** (-2.0 * pair / self.head_size) / divisors[pair] for pair in pairs)


class ConfigError(ValueError):
    """A model's numbers are impossible or not supported; loaders turn it into a ``BadModelFile``."""


def _check_count(name: str, value: int, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"{name} is {value!r}, it is a whole number from 1 to {most:,}")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model; ``tensors`` reads each tensor from disk when it is asked for."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    template_limits: TemplateLimits | None = None
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """What its ``generation_config.json`` says; a GGUF file has none."""

    @property
    def name(self) -> str:
        """What the model is called: its file or folder name, or ORG/NAME if it is the hub's."""
        from optimized.hub_cache import name_of

        return name_of(self.path)

    def arrays(self) -> dict[str, np.ndarray]:
        """All tensors as float32 arrays under the same names: what the reference engine takes."""
        import torch

        return {name: tensor.to(torch.float32).numpy() for name, tensor in self.tensors.items()}

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation in the model's chat template; encode it without adding special tokens."""
        from optimized.chat_template import BadTemplate, render

        if self.chat_template is None:
            raise BadTemplate(f"{self.name} has no chat template: give a prompt as plain text or token ids")
        tokenizer = self.tokenizer
        bos = eos = None
        if tokenizer is not None:
            bos = tokenizer.token(tokenizer.bos_token_id)
            eos = tokenizer.token(next(iter(tokenizer.eos_token_ids), None))
        return render(
            messages,
            self.chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            bos_token=bos or "",
            eos_token=eos or "",
            limits=self.template_limits,
        )


def load_checkpoint(model: str | Path | None = None, *, with_tokenizer: bool = True) -> Checkpoint:
    """Load a GGUF file, a Hugging Face directory, or the default model; ``BadModelFile`` says why one is refused.

    Without ``with_tokenizer`` it may lack its tokenizer, as the caller has another one.
    """
    path = resolve(model, with_tokenizer=with_tokenizer)
    if path.is_dir():
        from optimized.hf_checkpoint import load_directory

        return load_directory(path)
    from optimized.gguf_checkpoint import load_gguf

    return load_gguf(path)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a model has."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_query_heads * config.head_size, config.num_kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
        if config.qkv_bias:
            shapes |= {f"{prefix}.self_attn.{part}_proj.bias": (query if part == "q" else kv,) for part in "qkv"}
        if config.o_bias:
            shapes[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (config.head_size,) for part in "qk"}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(path: Path, config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a model whose tensors are not exactly those of its configuration; nothing is read for this."""
    expected = tensor_shapes(config)
    if missing := [name for name in expected if name not in found]:
        raise BadModelFile(path, f"{_these(missing)} missing")
    if unexpected := sorted(name for name in found if name not in expected):
        raise BadModelFile(path, f"{_these(unexpected)} not part of such a model of {config.num_layers} layers")
    for name, shape in expected.items():
        if found[name] != shape:
            raise BadModelFile(path, f"tensor {name} has shape {list(found[name])}, expected {list(shape)}")


def _these(names: list[str]) -> str:
    """The first name, and how many more there are."""
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"tensor {names[0]}{more}"


def random_arrays(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Weights of a random model in float32, of a size that keeps activations near one: for tests and dry runs."""
    import numpy as np

    draw = np.random.Generator(np.random.PCG64(seed))
    return {name: _random_array(draw, shape) for name, shape in tensor_shapes(config).items()}


def _random_array(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    import numpy as np

    if len(shape) == 1:
        return (1.0 + 0.1 * draw.standard_normal(shape)).astype(np.float32)
    return (draw.standard_normal(shape) / math.sqrt(shape[-1])).astype(np.float32)


def random_checkpoint(config: ModelConfig, seed: int) -> Checkpoint:
    """A random model without a tokenizer: it takes and gives token ids only."""
    import torch

    arrays = random_arrays(config, seed)
    return Checkpoint(Path(f"random-{seed}"), config, {name: torch.from_numpy(a) for name, a in arrays.items()})


class LazyTensors(Mapping[str, "torch.Tensor"]):
    """Tensors by name, each made when it is asked for; a subclass says how."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._known = frozenset(self._names)

    def read(self, name: str) -> torch.Tensor:
        """Make the tensor of a known name."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._known:
            raise KeyError(name)
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def llama3_divisors(
    head_size: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_len: int
) -> tuple[float, ...]:
    """Llama 3's rope scaling: short waves stay, long waves are stretched by ``factor``, those between by a mixture."""
    divisors = []
    for pair in range(head_size // 2):
        wavelength = 2.0 * math.pi * theta ** (2.0 * pair / head_size)
        turns = original_len / wavelength
        mixture = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        mixture = min(1.0, max(0.0, mixture))
        divisors.append(1.0 / ((1.0 - mixture) / factor + mixture))
    return tuple(divisors)


def yarn_divisors(
    head_size: int,
    theta: float,
    factor: float,
    original_len: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    whole_pairs: bool = True,
) -> tuple[float, ...]:
    """YaRN's rope scaling (Peng et al. 2023, "NTK-by-parts"): pairs that turn more than ``beta_fast`` times within the
    original context stay, those that turn less than ``beta_slow`` times are stretched by ``factor``, and in between the
    share falls in a line over the pairs, whose ends are whole pairs if ``whole_pairs``."""

    def pair_that_turns(times: float) -> float:
        return head_size * math.log(original_len / (times * 2.0 * math.pi)) / (2.0 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = high - low or 0.001
    divisors = []
    for pair in range(head_size // 2):
        stretched = min(1.0, max(0.0, (pair - low) / width))
        divisors.append(1.0 / (stretched / factor + (1.0 - stretched)))
    return tuple(divisors)


def yarn_scale(factor: float) -> float:
    """How much longer YaRN makes queries and keys, so that attention is as sharp over the longer context."""
    return 0.1 * math.log(factor) + 1.0
