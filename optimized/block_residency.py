"""How long blocks keep what is in them: vLLM's residency of a sample of the blocks, seen through the door of events.

A block lives from when it is taken to when it is taken again, which is when what it held is gone. Between the two it may be
hit. An engine without a prefix cache loses a block with its last holder, and nothing is counted. The pool knows nothing of
this: somebody listens to the engine's events, or nobody does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from optimized.request_times import Buckets
from spec.batches import Computed
from spec.vocabulary import (
    Allocate,
    BlockId,
    Config,
    Copy,
    Event,
    Hit,
    InvalidConfig,
    Reset,
    SeqId,
    State,
    SwapIn,
    Token,
)

RESIDENCY_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1200.0, 1800.0),
)
"""Seconds: vLLM's bounds."""

MOST_HITS = 4
"""So many of a block's last hits are remembered, as vLLM does."""


@dataclass(slots=True)
class Stay:
    """A block since it was taken."""

    began: float
    hits: list[float] = field(default_factory=list)

    def hit(self, now: float) -> None:
        """Somebody found it."""
        self.hits = [*self.hits[1 - MOST_HITS :], now]


class BlockResidency:
    """The residency of a sample of the blocks, over all engines that are made. All times are in seconds."""

    def __init__(
        self,
        sample: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``sample``, above 0 and at most 1, is the part of the blocks that is looked at, each time that they are taken.
        Raises ``InvalidConfig`` for any other."""
        if type(sample) not in (int, float) or not 0.0 < sample <= 1.0:
            raise InvalidConfig("kv_cache_metrics_sample", sample, "more than 0 and at most 1")
        self.sample = sample
        self.lifetimes = Buckets(RESIDENCY_BUCKETS)
        self.idle_times = Buckets(RESIDENCY_BUCKETS)
        self.gaps = Buckets(RESIDENCY_BUCKETS)
        self._clock = clock
        self._draw = draw

    def observer(self, config: Config) -> StayObserver:
        """Somebody to watch a new engine."""
        return StayObserver(self, config.prefix_cache)

    def begun(self) -> Stay | None:
        """A block is taken: its stay, if it is one of the sample."""
        return Stay(self._clock()) if self._draw() < self.sample else None

    def hit(self, stays: Iterable[Stay]) -> None:
        """Blocks were found."""
        now = self._clock()
        for stay in stays:
            stay.hit(now)

    def ended(self, stay: Stay) -> None:
        """What a block held is gone."""
        now = self._clock()
        self.lifetimes.add(now - stay.began)
        self.idle_times.add(now - (stay.hits[-1] if stay.hits else stay.began))
        for before, after in zip(stay.hits, stay.hits[1:], strict=False):
            self.gaps.add(after - before)


class StayObserver:
    """Hears of one engine's blocks. O(blocks) for an event that takes or hits some, nothing for any other."""

    def __init__(self, residency: BlockResidency, has_cache: bool) -> None:
        self._residency = residency
        self._has_cache = has_cache
        self._stays: dict[BlockId, Stay] = {}

    def event(self, event: Event) -> None:
        if not self._has_cache:
            return
        match event:
            case Allocate(blocks=blocks) | SwapIn(blocks=blocks):
                self._take(blocks)
            case Copy(target=target):
                self._take((target,))
            case Hit(blocks=blocks):
                self._residency.hit([self._stays[block] for block in blocks if block in self._stays])
            case Reset():
                self._stays.clear()
            case _:
                pass

    def _take(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if (stay := self._stays.pop(block, None)) is not None:
                self._residency.ended(stay)
            if (stay := self._residency.begun()) is not None:
                self._stays[block] = stay

    def allocated(self, seqs: Sequence[SeqId]) -> None:
        """None of them needed a block."""

    def computed(self, step: Computed) -> None:
        """No block changes hands."""

    def appended(self, seqs: Sequence[SeqId], tokens: Sequence[Token]) -> None:
        """No block changes hands."""

    def settled(self, snapshot: Callable[[], State]) -> None:
        """Nothing is looked at."""
