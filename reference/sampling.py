"""Sampling: a token from one row of logits, as a function of the logits, the parameters and three numbers.

``seed`` is the request's, ``sequence`` counts the request's samples from 0, ``position`` is the place that the new token
takes in its sequence. Batches, chunks, preemption and cache hits can not change a token. The definition is that of
``optimized.sampling``, written again.
"""

import math
from dataclasses import dataclass

import numpy as np

from reference.attention import Floats
from spec.vocabulary import Token

MODULUS = 2**64


@dataclass(frozen=True)
class Sampling:
    """How to choose the tokens of a request. Temperature 0 takes the likeliest; ``top_k`` below 1 keeps all."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


def mix(z: int) -> int:
    """The finalizer of SplitMix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
    return z ^ (z >> 31)


def absorb(state: int, value: int) -> int:
    """A state that depends on one more number."""
    return mix((state + (value + 1) * 0x9E3779B97F4A7C15) % MODULUS)


def uniform(seed: int, sequence: int, position: int, token: Token) -> float:
    """A number strictly between 0 and 1.

    >>> [uniform(seed=1, sequence=0, position=5, token=token) for token in range(3)]
    [0.8830795693191508, 0.9610143710431792, 0.42086312575338425]
    """
    state = 0
    for value in (seed, sequence, position, token):
        state = absorb(state, value)
    return ((state >> 12) + 0.5) / 2**52


def gumbel(seed: int, sequence: int, position: int, token: Token) -> float:
    return -math.log(-math.log(uniform(seed, sequence, position, token)))


def candidates(logits: list[float], sampling: Sampling) -> list[Token]:
    """The tokens that ``min_p``, ``top_k`` and ``top_p`` leave, the likeliest first, equally likely ones by id."""
    largest = max(logits)
    tokens = list(range(len(logits)))
    if sampling.min_p > 0.0:
        tokens = [token for token in tokens if logits[token] >= largest + math.log(sampling.min_p)]
    tokens.sort(key=lambda token: (-logits[token], token))
    if sampling.top_k > 0:
        tokens = tokens[: sampling.top_k]
    if sampling.top_p < 1.0:
        sums = np.cumsum(np.exp(np.array([logits[token] for token in tokens]) - largest))
        tokens = [token for i, token in enumerate(tokens) if i == 0 or sums[i - 1] < sampling.top_p * sums[-1]]
    return tokens


def sample(logits: Floats, sampling: Sampling, *, sequence: int, position: int) -> Token:
    """A token for logits ``[vocab_size]``.

    >>> sample(np.array([0.0, 1.0, 2.0]), Sampling(temperature=1.0, seed=1), sequence=0, position=5)
    1
    """
    if not np.isfinite(logits.max()):
        raise ArithmeticError(f"the largest logit is {logits.max()}: there is no token to choose")
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = [logit / sampling.temperature for logit in logits.tolist()]
    tokens = candidates(scaled, sampling)
    return max(tokens, key=lambda t: (scaled[t] + gumbel(sampling.seed, sequence, position, t), -t))
