"""A trace that is given up, and not the engine, when it can not be written: for whoever serves."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from spec.choices import Choices
from spec.trace import Writer
from spec.vocabulary import Config

logger = logging.getLogger(__name__)


class LossyTraces:
    """The traces of a server's engines, one after the other, and how many events are in none of them."""

    def __init__(self) -> None:
        self.num_lost = 0

    def begin(self, path: Path, config: Config, engine: str, choices: Choices, *, is_first: bool) -> Writer | None:
        """The trace of a new engine; None if it can not be written. Whoever starts a server with one is told by ``OSError``."""
        try:
            return LossyWriter(self, path, config, engine, choices)
        except OSError as error:
            if is_first:
                raise
            logger.error("the trace %s can not be written: %s", path, error.strerror)
            return None


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
