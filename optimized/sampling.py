"""What a caller may ask of sampling, and the sampler: a pure function of logits, parameters and three numbers.

**The definition**, exact enough to be written again elsewhere. All arithmetic on hashes is modulo 2**64::

    mix(z)     = z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^ (z >> 31)
    absorb(h, v) = mix(h + (v + 1) * 0x9E3779B97F4A7C15)
    key        = absorb(absorb(absorb(0, seed), sequence), position)
    uniform(t) = ((absorb(key, t) >> 12) + 0.5) / 2**52            in float64, for every token id t
    gumbel(t)  = -log(-log(uniform(t)))                            in float64

``seed`` is the request's, ``sequence`` counts the request's samples from 0, ``position`` is the place that the new token
takes in its sequence, counted from the prompt's first token. Nothing else enters: neither the batch, nor chunks, nor
preemption, nor a cache hit can change a token. (``absorb(h, 0), absorb(h, 1), ...`` is the SplitMix64 generator with
state ``h``.) Then, with the logits of one row widened to float64:

1. ``temperature == 0``: the token of the largest logit, of several the lowest id. Otherwise
2. ``x = logits / temperature``.
3. ``min_p > 0``: tokens with ``x < max(x) + log(min_p)`` are out.
4. The rest is ordered by falling ``x``, equal ones by rising id; ``top_k > 0`` keeps the first ``top_k``.
5. ``top_p < 1``: with ``c = cumsum(exp(x - max(x)))`` in that order, a token stays if it is the first, or if ``c`` of the
   one before it is less than ``top_p * c[-1]``.
6. The token of the largest ``x + gumbel``, of several the lowest id. This draws from the softmax of what is left.

>>> [hex(absorb(absorb(absorb(absorb(0, 1), 0), 5), token_id)) for token_id in (0, 1)]
['0xe21180adfdd4132f', '0xf60509ae9dd096e4']
>>> uniforms(seed=1, sequence=0, position=5, token_ids=np.arange(3)).tolist()
[0.8830795693191508, 0.9610143710431792, 0.42086312575338425]
>>> sample(np.array([0.0, 1.0, 2.0], np.float32), SamplingParams(temperature=1.0), seed=1, sequence=0, position=5)
1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spec.engine import InvalidField

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB

MIN_TEMPERATURE = 1e-5
MAX_SAMPLES = 64
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt; names and meanings are vLLM's. ``max_tokens=None`` is as much as fits."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _demand_list("stop", stop, MAX_STOP_STRINGS)
        _demand_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _demand_integer("n", self.n, 1, MAX_SAMPLES)
        _demand_number("temperature", self.temperature, 0.0, math.inf)
        if 0.0 < self.temperature < MIN_TEMPERATURE or self.temperature == math.inf:
            raise InvalidField("temperature", self.temperature, f"0, or finite and at least {MIN_TEMPERATURE}")
        _demand_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidField("top_p", self.top_p, "more than 0 and at most 1")
        if self.top_k != -1:
            _demand_integer("top_k", self.top_k, 0, 1 << 31)
        _demand_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _demand_integer("seed", self.seed, 0, MASK)
        if self.max_tokens is not None:
            _demand_integer("max_tokens", self.max_tokens, 1, 1 << 31)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidField("stop", text, "strings that are not empty")
        for token_id in self.stop_token_ids:
            _demand_integer("stop_token_ids", token_id, 0, 1 << 31)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidField("ignore_eos", self.ignore_eos, "True or False")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and chance has no part."""
        return self.temperature == 0.0


def _demand_list(field: str, value: Any, most: int) -> None:
    if not isinstance(value, list | tuple) or len(value) > most:
        raise InvalidField(field, value, f"a list of at most {most}")


def _demand_integer(field: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidField(field, value, f"a whole number from {least} to {most}")


def _demand_number(field: str, value: Any, least: float, most: float) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidField(field, value, f"a number from {least:g} to {most:g}")


class BadLogits(ArithmeticError):
    """The model gave no numbers to sample from; only this sequence is concerned."""

    def __init__(self, largest: float, num_nan: int) -> None:
        super().__init__(f"the largest logit is {largest}, {num_nan} logits are NaN: there is no token to choose")
        self.largest = largest
        self.num_nan = num_nan


@dataclass(frozen=True)
class Draw:
    """What one row is sampled with."""

    params: SamplingParams
    seed: int
    sequence: int
    position: int


def sample_rows(logits: npt.NDArray[np.float32], draws: Sequence[Draw]) -> list[int | BadLogits]:
    """A token for each row of logits ``[num_samples, vocab_size]``, or what is wrong with that row."""
    tokens: list[int | BadLogits] = []
    for row, draw in zip(logits, draws, strict=True):
        try:
            tokens.append(sample(row, draw.params, seed=draw.seed, sequence=draw.sequence, position=draw.position))
        except BadLogits as error:
            tokens.append(error)
    return tokens


def sample(logits: npt.NDArray[np.float32], params: SamplingParams, *, seed: int, sequence: int, position: int) -> int:
    """The token that the definition of this module gives for logits ``[vocab_size]``."""
    largest = logits.max()
    if not np.isfinite(largest):  # NaN if any is NaN, infinite if any is +inf or all are -inf
        raise BadLogits(float(largest), int(np.isnan(logits).sum()))
    if params.greedy:
        return int(logits.argmax())
    x = logits.astype(np.float64) / params.temperature
    token_ids = survivors(x, params)
    noise = -np.log(-np.log(uniforms(seed=seed, sequence=sequence, position=position, token_ids=token_ids)))
    return int(token_ids[(x[token_ids] + noise).argmax()])


def survivors(x: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.int64]:
    """The token ids that the filters leave of scaled logits ``[vocab_size]``, rising: steps 3 to 5 of the definition."""
    token_ids = np.arange(len(x))
    largest = x.max()
    if params.min_p > 0.0:
        token_ids = np.flatnonzero(x >= largest + math.log(params.min_p))
    if 0 < params.top_k < len(token_ids):
        # What is below the k-th largest cannot stay, which spares the sort most of the vocabulary.
        least = np.partition(x[token_ids], -params.top_k)[-params.top_k]
        token_ids = token_ids[x[token_ids] >= least]
        token_ids = token_ids[np.argsort(-x[token_ids], kind="stable")[: params.top_k]]
    if params.top_p < 1.0:
        token_ids = np.sort(token_ids)
        token_ids = token_ids[np.argsort(-x[token_ids], kind="stable")]
        sums = np.cumsum(np.exp(x[token_ids] - largest))
        stays = np.concatenate(([True], sums[:-1] < params.top_p * sums[-1]))
        token_ids = token_ids[stays]
    return np.sort(token_ids)


def logprob(logits: npt.NDArray[np.float32], token_id: int) -> float:
    """The logarithm of a token's probability under logits ``[vocab_size]``, before temperature and filters."""
    wide = logits.astype(np.float64)
    largest = wide.max()
    return float(wide[token_id] - largest - np.log(np.exp(wide - largest).sum()))


# --- counter-based randomness ----------------------------------------------------------------------------------------


def mix(z: int) -> int:
    """The finalizer of SplitMix64."""
    z = ((z ^ (z >> 30)) * FIRST_FACTOR) & MASK
    z = ((z ^ (z >> 27)) * SECOND_FACTOR) & MASK
    return z ^ (z >> 31)


def absorb(state: int, value: int) -> int:
    """A state that depends on one more number."""
    return mix((state + (value + 1) * GOLDEN) & MASK)


def uniforms(*, seed: int, sequence: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number strictly between 0 and 1 for each token id."""
    key = absorb(absorb(absorb(0, seed), sequence), position)
    z = np.uint64(key) + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    z ^= z >> np.uint64(31)
    # 52 bits and a half fit into float64 exactly, so that neither 0 nor 1 can come out.
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def derived_seed(engine_seed: int, ordinal: int) -> int:
    """The seed of a request that brought none: the engine's own, and how many requests came before."""
    return absorb(absorb(0, engine_seed), ordinal)
