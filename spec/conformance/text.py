"""What a caller is shown: where text ends, how it grows, what is counted, what a draw depends on. Definitions only.

An engine has its own way to each of these, a token at a time; what it shows is compared with what stands here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from spec.vocabulary import Token

K = TypeVar("K")

# Where text ends (X3)


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings in the text begins.

    >>> first_stop("one two", ["two", "ne"])
    1
    """
    return min((place for each in stop if (place := text.find(each)) >= 0), default=None)


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it, wherever one begins.

    >>> cut("one two three", ["three", "two"])
    'one '
    """
    return text[: first_stop(text, stop)]


def answer(pieces: Sequence[str], stop: Sequence[str]) -> tuple[str, int]:
    """The text of an answer that comes in pieces, and how many of them it takes: none after one that completes a stop
    string.

    >>> answer(["one t", "wo", " three"], ["two"])
    ('one ', 2)
    """
    for count in range(len(pieces) + 1):
        text = "".join(pieces[:count])
        if first_stop(text, stop) is not None:
            return cut(text, stop), count
    return "".join(pieces), len(pieces)


def settled(text: str, stop: Sequence[str]) -> str:
    """The longest beginning of a text that no continuation takes back: the end may be the beginning of a stop string.

    >>> settled("one tw", ["two"])
    'one '
    """
    if first_stop(text, stop) is not None:
        return cut(text, stop)
    held = (n for each in stop for n in range(1, len(each)) if text.endswith(each[:n]))
    return text[: len(text) - max(held, default=0)]


def shows_only_what_stays(shown: Sequence[str], pieces: Sequence[str], stop: Sequence[str]) -> bool:
    """After each piece exactly the settled text is shown: nothing that may have to be taken back, and no less."""
    _, used = answer(pieces, stop)
    return list(shown) == [settled("".join(pieces[: min(count, used)]), stop) for count in range(len(pieces) + 1)]


# How it grows (X4, X5)


def pieces_are_the_whole(pieces: Iterable[str], decoded_at_once: str) -> bool:
    """The pieces of a streamed text, one after the other, are the text that the ids decode to at once."""
    return "".join(pieces) == decoded_at_once


def only_grows(shown: Sequence[str]) -> bool:
    """Each text that was shown begins with the one before it."""
    return all(later.startswith(earlier) for earlier, later in pairwise(shown))


def is_text_of_ids(text: str, decoded_at_once: str, stop: Sequence[str]) -> bool:
    """The text of an answer is that of its ids, cut: ids are never left out where text is."""
    return text == cut(decoded_at_once, stop)


# What is counted (X6)


@dataclass(frozen=True)
class Usage:
    """The tokens of a request: of the prompt, once, and of all its answers."""

    num_prompt_tokens: int
    num_completion_tokens: int

    @property
    def num_tokens(self) -> int:
        """Prompt and answers together."""
        return self.num_prompt_tokens + self.num_completion_tokens


def usage_of(prompt: Sequence[Token], answers: Iterable[Sequence[Token]]) -> Usage:
    """What a request used: neither cache hits, nor recomputed tokens, nor the way it is sent change it.

    >>> usage_of((1, 2, 3), [(4, 5), (6,)]).num_tokens
    6
    """
    return Usage(len(prompt), sum(map(len, answers)))


# What a draw depends on (C6, X7, X12)


def depends_on_itself_only(alone: Mapping[K, Sequence[Token]], together: Mapping[K, Sequence[Token]]) -> bool:
    """Each answer that came together with others is the one that came alone."""
    return all(list(alone[name]) == list(tokens) for name, tokens in together.items())


def are_distinct(streams: Sequence[Sequence[float]]) -> bool:
    """No two siblings draw by the same numbers."""
    return len({tuple(stream) for stream in streams}) == len(streams)


# Probabilities (X9, X11)


def log_probabilities(logits: Sequence[float]) -> tuple[float, ...]:
    """The logarithm of the softmax, before temperature and filters. A logit of -inf has probability 0.

    >>> [round(math.exp(each), 3) for each in log_probabilities((0.0, math.log(3.0), -math.inf))]
    [0.25, 0.75, 0.0]
    """
    most = max(logits)
    total = most + math.log(math.fsum(math.exp(x - most) for x in logits))
    return tuple(x - total for x in logits)


def is_distribution(probabilities: Sequence[float], error: float) -> bool:
    """The numbers are finite, at least 0, and their sum is 1 but for the error that the caller's arithmetic allows."""
    return all(0.0 <= p < math.inf for p in probabilities) and abs(math.fsum(probabilities) - 1.0) <= error


def reported_log_probabilities(logits: Sequence[float], chosen: Token, num_top: int) -> dict[Token, float]:
    """The chosen token's, and those of the ``num_top`` likeliest, of equal ones the lowest ids: 0 is the chosen one's
    only.

    >>> list(reported_log_probabilities((0.0, 2.0, 1.0), chosen=0, num_top=1))
    [0, 1]
    """
    logs = log_probabilities(logits)
    likeliest = sorted(range(len(logs)), key=lambda token: (-logs[token], token))[:num_top]
    return {token: logs[token] for token in (chosen, *likeliest)}
