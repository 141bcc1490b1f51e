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
state ``h``.) Then, with the logits of one row widened to float64 and changed as ``optimized.adjustment`` says:

1. ``temperature == 0``: the token of the largest logit, of several the lowest id. Otherwise
2. ``x = logits / temperature``.
3. ``min_p > 0``: tokens with ``x < max(x) + log(min_p)`` are out.
4. The rest is ordered by falling ``x``, equal ones by rising id; ``top_k > 0`` keeps the first ``top_k``.
5. ``top_p < 1``: with ``c = cumsum(exp(x - max(x)))`` in that order, a token stays if it is the first, or if ``c`` of the
   one before it is less than ``top_p * c[-1]``.
6. The token of the largest ``x + gumbel``, of several the lowest id. This draws from the softmax of what is left.

Where ``forced_token_ids`` has a token for this place of the output, it is that one, whatever the logits say.

>>> [hex(absorb(absorb(absorb(absorb(0, 1), 0), 5), token_id)) for token_id in (0, 1)]
['0xe21180adfdd4132f', '0xf60509ae9dd096e4']
>>> uniforms(seed=1, sequence=0, position=5, token_ids=np.arange(3)).tolist()
[0.8830795693191508, 0.9610143710431792, 0.42086312575338425]
>>> sample(np.array([0.0, 1.0, 2.0], np.float32), Draw(SamplingParams(temperature=1.0), seed=1, sequence=0, position=5))
1
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from optimized.adjustment import adjusted, is_adjusting
from optimized.bounds import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from optimized.structured_outputs import StructuredOutputsParams
from spec.engine import InvalidField

if TYPE_CHECKING:
    from optimized.grammar import Progress

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB

MIN_TEMPERATURE = 1e-5
MAX_BIAS = 100.0
MAX_TOKEN_ID = 1 << 31

NOT_WITH_A_GRAMMAR = {
    "min_tokens": 0,
    "ignore_eos": False,
    "allowed_token_ids": None,
    "bad_words": (),
    "forced_token_ids": (),
}
"""Sampling parameters that could leave no token of those that a grammar allows, with the values that say nothing."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt; names and meanings are vLLM's. ``max_tokens=None`` is as much as fits,
    and no more than the model's ``generation_config.json`` has for ``max_new_tokens``.

    ``logprobs=k`` asks, for each token of an answer, for the logarithm of its probability before all else that is said
    here, and for those of the ``k`` likeliest tokens; ``prompt_logprobs`` asks the same of the prompt. Below
    ``min_tokens`` nothing ends an answer. ``forced_token_ids`` are the first tokens of every answer, and
    ``structured_outputs`` says what it looks like.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    forced_token_ids: Sequence[int] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._settle_lists()
        demand_integer("n", self.n, 1, MAX_SAMPLES)
        demand_number("temperature", self.temperature, 0.0, math.inf)
        if 0.0 < self.temperature < MIN_TEMPERATURE or self.temperature > sys.float_info.max:
            raise InvalidField("temperature", self.temperature, f"0, or finite and at least {MIN_TEMPERATURE}")
        demand_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidField("top_p", self.top_p, "more than 0 and at most 1")
        if self.top_k != -1:
            demand_integer("top_k", self.top_k, 0, 1 << 31)
        demand_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            demand_integer("seed", self.seed, 0, MASK)
        most = MAX_TOKEN_ID
        if self.max_tokens is not None:
            demand_integer("max_tokens", self.max_tokens, 1, most)
            most = self.max_tokens
        demand_integer("min_tokens", self.min_tokens, 0, most)
        for penalty in ("presence_penalty", "frequency_penalty"):
            demand_number(penalty, getattr(self, penalty), -2.0, 2.0)
        demand_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for count in ("logprobs", "prompt_logprobs"):
            if getattr(self, count) is not None:
                demand_integer(count, getattr(self, count), 0, MAX_LOGPROBS)
        for flag in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, flag), bool):
                raise InvalidField(flag, getattr(self, flag), "True or False")
        if self.structured_outputs is not None:
            self._settle_structure(self.structured_outputs)

    def _settle_structure(self, structure: object) -> None:
        """A grammar decides what may come and when an answer ends; nothing else may leave it without a token."""
        if not isinstance(structure, StructuredOutputsParams):
            raise InvalidField("structured_outputs", structure, "StructuredOutputsParams")
        for name, nothing in NOT_WITH_A_GRAMMAR.items():
            if getattr(self, name) != nothing:
                raise InvalidField(name, getattr(self, name), f"{nothing!r} with {structure.asked_as}")

    def _settle_lists(self) -> None:
        """Lists become tuples, None the empty one, and what is in them is looked at."""
        for field, most in (("stop", MAX_STOP_STRINGS), ("bad_words", MAX_BAD_WORDS)):
            given = getattr(self, field)
            texts = (given,) if isinstance(given, str) and field == "stop" else () if given is None else given
            _demand_list(field, texts, most)
            for text in texts:
                if not isinstance(text, str) or not text:
                    raise InvalidField(field, text, "strings that are not empty")
            object.__setattr__(self, field, tuple(texts))
        limits = {
            "stop_token_ids": MAX_STOP_TOKEN_IDS,
            "allowed_token_ids": MAX_TOKEN_ID,
            "forced_token_ids": MAX_TOKEN_ID,
        }
        for field, most in limits.items():
            given = getattr(self, field)
            if given is None and field == "allowed_token_ids":
                continue
            token_ids = () if given is None and field == "stop_token_ids" else given
            _demand_list(field, token_ids, most)
            for token_id in token_ids:
                demand_integer(field, token_id, 0, MAX_TOKEN_ID)
            object.__setattr__(self, field, tuple(token_ids))
        if self.allowed_token_ids == ():
            raise InvalidField("allowed_token_ids", [], "at least one token id, or None for all")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def demand_known(self, vocab_size: int) -> None:
        """Raise ``InvalidField`` unless all token ids are those of a vocabulary."""
        named: dict[str, Sequence[int]] = {
            "stop_token_ids": self.stop_token_ids or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "forced_token_ids": self.forced_token_ids,
            "logit_bias": [token_id for token_id, _ in self.biases],
        }
        for field, token_ids in named.items():
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise InvalidField(field, token_id, f"made of token ids from 0 to {vocab_size - 1}")

    @property
    def biases(self) -> Sequence[tuple[int, float]]:
        """``logit_bias`` as pairs."""
        return (
            tuple(self.logit_bias or ()) if not isinstance(self.logit_bias, Mapping) else tuple(self.logit_bias.items())
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and chance has no part."""
        return self.temperature == 0.0

    @cached_property
    def is_plain(self) -> bool:
        """Whether the answer is the likeliest token of the model, whatever came before."""
        return self.greedy and self.is_memoryless

    @cached_property
    def is_memoryless(self) -> bool:
        """Whether a token depends on its row of logits, temperature, filters and chance alone, whatever came before."""
        return not (self.forced_token_ids or is_adjusting(self))

    @cached_property
    def is_open(self) -> bool:
        """Whether any token of the model can be drawn, by its logit, the temperature and chance alone."""
        is_filtered = self.min_p > 0.0 or self.top_k > 0 or self.top_p < 1.0
        return self.is_memoryless and not (self.greedy or is_filtered)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits, as pairs, so that parameters can be compared and hashed."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, list | tuple) or len(pairs) > MAX_BIASES:
        raise InvalidField("logit_bias", given, f"an object of at most {MAX_BIASES} token ids")
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidField("logit_bias", given, "an object from token ids to numbers")
        demand_integer("logit_bias", pair[0], 0, MAX_TOKEN_ID)
        demand_number("logit_bias", pair[1], -MAX_BIAS, MAX_BIAS)
    return tuple((token_id, float(bias)) for token_id, bias in pairs)


def _demand_list(field: str, value: Any, most: int) -> None:
    if not isinstance(value, list | tuple) or len(value) > most:
        raise InvalidField(field, value, f"a list of at most {most}")


def demand_integer(field: str, value: Any, least: int, most: int) -> None:
    """Raise ``InvalidField`` unless the value is a whole number within these limits."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidField(field, value, f"a whole number from {least} to {most}")


def demand_number(field: str, value: Any, least: float, most: float) -> None:
    """Raise ``InvalidField`` unless the value is a number within these limits."""
    # Written so that NaN, which compares false with everything, is refused.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidField(field, value, f"a number from {least:g} to {most:g}")


def demand_text(field: str, value: Any) -> None:
    """Raise ``InvalidField`` unless the value is a text whose characters are whole."""
    if not isinstance(value, str) or any(0xD800 <= ord(character) < 0xE000 for character in value):
        raise InvalidField(field, value, "a text of whole characters")


class NoToken(ArithmeticError):
    """There is no token to choose for one row; only its sequence is concerned."""


class BadLogits(NoToken):
    """The numbers of one row leave no token."""

    BEGINNING = "the largest logit is"
    """How the sentence begins, if the logits are no numbers."""

    def __init__(self, largest: float, num_nan: int) -> None:
        why = f"{self.BEGINNING} {largest}, {num_nan} logits are NaN"
        if largest == -math.inf and not num_nan:
            why = "the model and the sampling parameters leave no token"
        super().__init__(f"{why}: there is no token to choose")
        self.largest = largest
        self.num_nan = num_nan


@dataclass(frozen=True)
class Draw:
    """What one row is sampled with. ``tokens`` are those of its sequence so far, prompt and output, and are looked at
    only if the parameters ask for it, as are the tokens that end the sequence and those of the bad words."""

    params: SamplingParams
    seed: int
    sequence: int
    position: int
    tokens: Sequence[int] = ()
    num_prompt_tokens: int = 0
    end_token_ids: Sequence[int] = ()
    bad_words: Sequence[tuple[int, ...]] = ()
    progress: Progress | None = None

    @property
    def key(self) -> int:
        """What the randomness of this draw depends on, as 64 bits."""
        return key_of(self.seed, self.sequence, self.position)

    @property
    def forced(self) -> int | None:
        """The token that the caller has fixed for this place of the output."""
        index = self.position - self.num_prompt_tokens
        return self.params.forced_token_ids[index] if 0 <= index < len(self.params.forced_token_ids) else None


def sample_rows(
    logits: npt.NDArray[np.float32],
    draws: Sequence[Draw],
    likeliest: npt.NDArray[np.int64] | None = None,
    contenders: Mapping[int, npt.NDArray[np.int64] | None] = MappingProxyType({}),
) -> list[int | NoToken]:
    """A token for each row of logits ``[num_samples, vocab_size]``, or what is wrong with that row.

    ``likeliest`` is what ``likeliest_tokens`` would find, if somebody has it already; ``contenders`` are the tokens that
    can win a row's draw if it is open, where somebody has looked.
    """
    tokens: list[int | NoToken] = [0] * len(draws)
    if not draws:
        return tokens
    tokens_of_rows = (likeliest_tokens(logits) if likeliest is None else likeliest).tolist()
    for row, draw in enumerate(draws):
        if tokens_of_rows[row] >= 0 and draw.params.is_plain:
            tokens[row] = tokens_of_rows[row]
            continue
        try:
            tokens[row] = sample(logits[row], draw, contenders.get(row))
        except NoToken as error:
            tokens[row] = error
    return tokens


def likeliest_tokens(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The likeliest token of each row of logits ``[num_rows, vocab_size]``, -1 where the largest is infinite or NaN is there."""
    largest = logits.max(axis=1)  # NaN if any is NaN, infinite if any is +inf or all are -inf
    return np.where(np.isfinite(largest), logits.argmax(axis=1), -1)


def sample(logits: npt.NDArray[np.float32], draw: Draw, contenders: npt.NDArray[np.int64] | None = None) -> int:
    """The token that the definition of this module gives for logits ``[vocab_size]``. Raises ``NoToken``.

    Of an open draw ``contenders`` are the tokens that can win, if somebody has found that the numbers are sound.
    """
    if contenders is not None:
        return _won(logits[contenders].astype(np.float64) / draw.params.temperature, contenders, draw)
    _demand_a_largest(logits)
    if draw.forced is not None:
        return draw.forced
    params = draw.params
    x = logits.astype(np.float64)
    if is_adjusting(params):
        x = adjusted(logits, draw)
        _demand_a_largest(x)
    if params.greedy:
        return int(x.argmax())
    x /= params.temperature
    token_ids = survivors(x, params)
    return _won(x[token_ids], token_ids, draw)


def _won(x: npt.NDArray[np.float64], token_ids: npt.NDArray[np.int64], draw: Draw) -> int:
    """Which of these tokens chance takes, for their scaled logits."""
    numbers = uniforms(seed=draw.seed, sequence=draw.sequence, position=draw.position, token_ids=token_ids)
    return int(token_ids[(x - np.log(-np.log(numbers))).argmax()])


def _demand_a_largest(x: npt.NDArray[np.floating[Any]]) -> None:
    largest = x.max()
    if not np.isfinite(largest):  # NaN if any is NaN, infinite if any is +inf or all are -inf
        raise BadLogits(float(largest), int(np.isnan(x).sum()))


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


@dataclass(frozen=True)
class Logprob:
    """The logarithm of a token's probability, and how many tokens are at least as likely, itself included."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def logprob(logits: npt.NDArray[np.float32], token_id: int) -> float:
    """The logarithm of a token's probability under logits ``[vocab_size]``, before temperature and filters."""
    return float(log_softmax(logits)[token_id])


def logprobs(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> dict[int, Logprob]:
    """The chosen token's, then those of the ``num_top`` likeliest, of equal ones the lowest ids. O(vocabulary)."""
    logs = log_softmax(logits)
    rank = int((logs >= logs[token_id]).sum())
    found = {token_id: Logprob(float(logs[token_id]), rank)}
    if num_top == 0:
        return found
    # What is below the last of the likeliest cannot be one of them, which spares the sort most of the vocabulary.
    least = np.partition(logs, -num_top)[-num_top] if num_top < len(logs) else -np.inf
    near = np.flatnonzero(logs >= least)
    near = near[np.argsort(-logs[near], kind="stable")][:num_top]
    for place, each in enumerate(near.tolist()):
        found.setdefault(each, Logprob(float(logs[each]), place + 1))
    return found


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The logarithms of the probabilities of all tokens, ``[vocab_size]``, before temperature and filters."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    return wide


# --- counter-based randomness ----------------------------------------------------------------------------------------


def mix(z: int) -> int:
    """The finalizer of SplitMix64."""
    z = ((z ^ (z >> 30)) * FIRST_FACTOR) & MASK
    z = ((z ^ (z >> 27)) * SECOND_FACTOR) & MASK
    return z ^ (z >> 31)


def absorb(state: int, value: int) -> int:
    """A state that depends on one more number."""
    return mix((state + (value + 1) * GOLDEN) & MASK)


def key_of(seed: int, sequence: int, position: int) -> int:
    """The state that these three lead to."""
    return absorb(absorb(absorb(0, seed), sequence), position)


def uniforms(*, seed: int, sequence: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number strictly between 0 and 1 for each token id."""
    z = np.uint64(key_of(seed, sequence, position)) + (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FIRST_FACTOR)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(SECOND_FACTOR)
    z ^= z >> np.uint64(31)
    # 52 bits and a half fit into float64 exactly, so that neither 0 nor 1 can come out.
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def derived_seed(engine_seed: int, ordinal: int) -> int:
    """The seed of a request that brought none: the engine's own, and how many requests came before."""
    return absorb(absorb(0, engine_seed), ordinal)
