"""A trace that is given up, and not the engine, when it can not be written: for whoever serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from spec.batches import Computed
from spec.choices import Choices
from spec.trace import Writer
from spec.vocabulary import Config, Event, SeqId, State, Token

logger = logging.getLogger(__name__)


class LossyTraces:
    """The traces of a server's engines, one after the other, and how many events are in none of them."""

    def __init__(self) -> None:
        self.num_lost = 0

    def begin(self, path: Path, config: Config, engine: str, choices: Choices, *, is_first: bool) -> Writer | Uncaught:
        """The trace of a new engine; if it can not be written, its events are counted. Whoever starts a server with one is told by ``OSError``."""
        try:
            return LossyWriter(self, path, config, engine, choices)
        except OSError as error:
            if is_first:
                raise
            logger.error("the trace %s can not be written: %s", path, error.strerror)
            return Uncaught(self)


class Uncaught:
    """Counts the events of an engine whose trace could not begin."""

    def __init__(self, traces: LossyTraces) -> None:
        self._traces = traces

    def event(self, event: Event) -> None:
        self._traces.num_lost += 1

    def allocated(self, seqs: Sequence[SeqId]) -> None:
        """A token's room for each of these sequences."""
        self._traces.num_lost += len(seqs)

    def computed(self, step: Computed) -> None:
        """The writes of a step, and its reads."""
        self._traces.num_lost += len(step)

    def appended(self, seqs: Sequence[SeqId], tokens: Sequence[Token]) -> None:
        """A token for each of these sequences."""
        self._traces.num_lost += len(seqs)

    def settled(self, snapshot: Callable[[], State]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """There is nothing to close."""


class LossyWriter(Writer):
    """A trace that ends where it could not be written further."""

    def __init__(self, traces: LossyTraces, path: Path, config: Config, engine: str, choices: Choices) -> None:
        self._traces = traces
        self._num_written = 0
        self._has_failed = self._is_closing = False
        super().__init__(path, config, engine, choices)

    def flush(self) -> None:
        if not self._has_failed:
            try:
                super().flush()
            except OSError as error:
                self._has_failed = True
                logger.error("the trace %s ends here, serving goes on: %s", self.path, error.strerror)
                if self._is_closing:
                    raise
            else:
                self._num_written = self.num_events
        if self._has_failed:
            self._traces.num_lost += self.num_events - self._num_written
            self._num_written = self.num_events
            self._lines.clear()

    def close(self) -> None:
        self._is_closing = True
        with suppress(OSError):  # which has been said
            super().close()
