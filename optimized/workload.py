"""Requests to come: when each arrives, how long its prompt is and how long its answer will be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spec.vocabulary import InvalidConfig

if TYPE_CHECKING:
    import numpy as np

MAX_LEN = 1 << 24
MAX_ARRIVALS = 10_000_000
MAX_ARRIVAL_S = 1e8
"""Three years: on a clock that shows more, a step of a microsecond is lost in rounding."""


class Arrival(NamedTuple):
    """A request that will come ``at_s`` seconds after the start. The first ``shared_len`` tokens of its prompt are those
    that every such request begins with."""

    at_s: float
    prompt_len: int
    output_len: int
    shared_len: int = 0


@dataclass(frozen=True)
class Lengths:
    """A law of lengths in tokens: all the same, ``kind`` "fixed"; or with the mean given, "exponential"; or from 1 to twice
    the mean less 1, each as likely, "uniform"."""

    kind: str
    mean: float

    @staticmethod
    def read(text: str, field: str) -> Lengths:
        """``256``, ``exponential:256`` or ``uniform:256``. Raises ``InvalidConfig``.

        >>> Lengths.read("exponential:256", "prompt_len")
        Lengths(kind='exponential', mean=256.0)
        """
        kind, colon, number = text.rpartition(":")
        kind = kind if colon else "fixed"
        try:
            mean = float(number)
        except ValueError:
            mean = math.nan
        if kind not in ("fixed", "exponential", "uniform") or not 1 <= mean <= MAX_LEN:
            limit = f"a number of tokens from 1 to {MAX_LEN}, or exponential:MEAN, or uniform:MEAN"
            raise InvalidConfig(field, text, limit)
        return Lengths(kind, mean)

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """So many lengths, each at least 1."""
        import numpy as np

        if self.kind == "exponential":
            lengths = random.exponential(self.mean, count)
        elif self.kind == "uniform":
            lengths = random.uniform(1.0, 2.0 * self.mean - 1.0, count)
        else:
            lengths = np.full(count, self.mean)
        drawn: list[int] = np.maximum(1, np.round(lengths)).astype(int).tolist()
        return drawn


@dataclass(frozen=True)
class PoissonTraffic:
    """Requests that come at random, ``rate`` a second on average, for ``duration_s`` seconds.

    No sequence is longer than ``max_model_len``: longer prompts and answers are cut. ``shared_len`` tokens of each prompt
    are the same for a share ``prefix_share`` of the requests, as a system prompt is.
    """

    rate: float
    duration_s: float
    prompt: Lengths
    output: Lengths
    max_model_len: int
    shared_len: int = 0
    prefix_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.rate < math.inf:
            raise InvalidConfig("rate", self.rate, "more than 0 requests a second")
        if not 0.0 < self.duration_s < math.inf:
            raise InvalidConfig("duration", self.duration_s, "more than 0 seconds")
        if self.rate * self.duration_s > MAX_ARRIVALS:
            raise InvalidConfig("rate", self.rate, f"at most {MAX_ARRIVALS} requests in {self.duration_s:g} s")
        if not 0.0 <= self.prefix_share <= 1.0:
            raise InvalidConfig("prefix_share", self.prefix_share, "from 0 to 1")

    def arrivals(self, seed: int) -> list[Arrival]:
        """One draw of it."""
        import numpy as np

        random = np.random.default_rng(seed)
        expected = self.rate * self.duration_s
        times = np.cumsum(random.exponential(1.0 / self.rate, int(expected + 10 * math.sqrt(expected) + 20)))
        times = times[times <= self.duration_s]
        prompts, outputs = self.prompt.draw(random, len(times)), self.output.draw(random, len(times))
        shares = (random.random(len(times)) < self.prefix_share).tolist()
        return [
            fitted(Arrival(at_s, prompt, output, self.shared_len * shares), self.max_model_len)
            for at_s, prompt, output, shares in zip(times.tolist(), prompts, outputs, shares, strict=True)
        ]


def fitted(arrival: Arrival, max_model_len: int) -> Arrival:
    """The request, cut where it would become longer than a sequence may be."""
    prompt_len = min(arrival.prompt_len, max_model_len - 1)
    return arrival._replace(
        prompt_len=prompt_len,
        output_len=min(arrival.output_len, max_model_len - prompt_len),
        shared_len=min(arrival.shared_len, prompt_len),
    )


def read_arrivals(path: Path, max_model_len: int) -> list[Arrival]:
    """A workload file: a line of JSON for each request, with ``prompt_len`` (or ``prompt_token_ids``), ``max_tokens`` and
    ``arrival_s``. An answer ends where its sequence would become too long. Raises ``InvalidConfig`` that names the line."""
    return sorted(fitted(_arrival(where, values, max_model_len), max_model_len) for where, values in read_lines(path))


def read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a workload file, each with where it stands. Raises ``InvalidConfig`` that names the line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [(f"{path.name} line {number}", line) for number, line in enumerate(file, start=1) if line.strip()]
    if not lines:
        raise InvalidConfig("workload", str(path), "a file with at least one request")
    return [(where, _object(where, line)) for where, line in lines]


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidConfig("workload", where, "a JSON object")
    return values


def arrival_s_of(where: str, values: Mapping[str, Any]) -> float:
    """When the request of a line arrives, at once unless it says otherwise. Raises ``InvalidConfig``."""
    at_s = values.get("arrival_s", 0.0)
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0.0 <= at_s <= MAX_ARRIVAL_S:
        raise InvalidConfig(f"arrival_s in {where}", at_s, f"a number of seconds from 0 to {MAX_ARRIVAL_S:,.0f}")
    return float(at_s)


def _arrival(where: str, values: Mapping[str, Any], max_model_len: int) -> Arrival:
    given = values.get("prompt_token_ids")
    prompt_len = _length(
        f"prompt_len in {where}", values.get("prompt_len", len(given) if isinstance(given, list) else None)
    )
    if prompt_len >= max_model_len:
        raise InvalidConfig(f"prompt_len in {where}", prompt_len, f"below max_model_len ({max_model_len})")
    return Arrival(arrival_s_of(where, values), prompt_len, _length(f"max_tokens in {where}", values.get("max_tokens")))


def _length(name: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_LEN:
        raise InvalidConfig(name, value, f"a whole number from 1 to {MAX_LEN}")
    return value


def prompt_of(arrival: Arrival, number: int) -> tuple[int, ...]:
    """A prompt of its length: the shared tokens are 0, the others are ``number``, which nobody else has."""
    return (0,) * arrival.shared_len + (number,) * (arrival.prompt_len - arrival.shared_len)
