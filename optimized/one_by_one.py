"""Tells an observer that takes single events what a step did to many sequences."""

from __future__ import annotations

from collections.abc import Sequence

from spec.batches import Allocated, Appended, BatchObserver, Computed
from spec.engine import Observer
from spec.vocabulary import Event, SeqId, Token


class OneByOne:
    """A ``BatchObserver`` that passes each event on by itself."""

    def __init__(self, observer: Observer, block_size: int) -> None:
        self.event = observer.event
        self.settled = observer.settled
        self._block_size = block_size

    def allocated(self, seqs: Sequence[SeqId]) -> None:
        self._tell(Allocated(seqs).events(self._block_size))

    def computed(self, step: Computed) -> None:
        self._tell(step.events(self._block_size))

    def appended(self, seqs: Sequence[SeqId], tokens: Sequence[Token]) -> None:
        self._tell(Appended(seqs, tokens).events(self._block_size))

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            self.event(event)


def in_batches(observer: Observer, block_size: int) -> BatchObserver:
    """The observer, if it takes batches, or one that passes single events on to it."""
    return observer if isinstance(observer, BatchObserver) else OneByOne(observer, block_size)
