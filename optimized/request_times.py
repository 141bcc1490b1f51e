"""When what happened to a request, and how often a time came up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds of ``time.monotonic``. ``begun`` is when the step was scheduled that first computed something for it."""

    added: float
    begun: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    token_before: float | None = None
    """When there was last news before ``last_token``."""


@dataclass
class Clock:
    """The times of one request as they come."""

    times: RequestTimes = field(default_factory=lambda: RequestTimes(monotonic()))

    def begin(self, now: float) -> None:
        """It is scheduled, for the first time or again: only the first time counts."""
        if self.times.begun is None:
            self.times = RequestTimes(self.times.added, now)

    def tell(self, now: float) -> None:
        """It has news."""
        times = self.times
        first = now if times.first_token is None else times.first_token
        self.times = RequestTimes(times.added, times.begun, first, now, times.last_token)


class Buckets:
    """A histogram that is written in one thread and read in others.

    >>> buckets = Buckets((1.0, 2.0))
    >>> buckets.add(1.0), buckets.add(1.5, 2), buckets.add(9.0)
    (None, None, None)
    >>> buckets.cumulative(), buckets.total
    ([1, 3, 4], 13.0)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float, count: int = 1) -> None:
        """A value, so many times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> list[int]:
        """How many values are at most each bound; the last one is how many there are."""
        found, sums = 0, []
        for count in self._counts:
            found += count
            sums.append(found)
        return sums
