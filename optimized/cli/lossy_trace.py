"""A trace that is given up, and not the engine, when it can not be written, or not as fast: for whoever serves."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from optimized.fault_points import FaultPoint, reach
from spec.batches import Computed
from spec.choices import Choices
from spec.trace import Writer, gap_line
from spec.vocabulary import Config, Event, SeqId, State, Token

logger = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
SECONDS_TO_WRITE = 5.0
"""What waits at the end has so long to come into the file."""
TOO_SLOW = "the disk was too slow"


class LossyTraces:
    """The traces of a server's engines, one after the other, and how many events are in none of them."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """``most_bytes`` of events may wait to be written."""
        self.most_bytes = most_bytes
        self.num_lost = 0
        self._newest: LossyWriter | None = None

    @property
    def num_waiting_bytes(self) -> int:
        """How many bytes wait to be written."""
        return 0 if self._newest is None else self._newest.num_waiting_bytes

    def begin(self, path: Path, config: Config, engine: str, choices: Choices, *, is_first: bool) -> Writer | Uncaught:
        """The trace of a new engine; if it can not be written, its events are counted. Whoever starts a server with one is told by ``OSError``."""
        try:
            if path.is_dir():  # else the file would be told so when it gets its name, at the very end
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            self._newest = LossyWriter(self, path, config, engine, choices)
        except OSError as error:
            if is_first:
                raise
            logger.error("the trace %s can not be written: %s", path, error.strerror)
            return Uncaught(self)
        return self._newest


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
    """A trace that a thread of its own writes, so that no step waits for a disk.

    What is to be written waits in a queue of so many bytes. An event that finds no room ends the trace, as a file that can
    not be written does: to go on after a gap would be worth nothing to whoever judges, and to wait would hold up the engine.
    The file then says in its last line that the rest is missing, and never gets its name.
    """

    def __init__(self, traces: LossyTraces, path: Path, config: Config, engine: str, choices: Choices) -> None:
        self._traces = traces
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        """Guards what follows, and the number of lost events."""
        self._waiting = list[str]()
        self._num_waiting_events = 0
        self.num_waiting_bytes = 0
        self._num_taken = 0
        self._gap: str | None = None
        """Why the trace has ended, if it has."""
        self._is_closing = False
        super().__init__(
            path, config, engine, choices
        )  # writes the first line: who starts a server is told if it can not
        self._thread = threading.Thread(target=self._write_what_waits, name="kvproof-trace", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Every line so far waits to be written, or is lost."""
        if self._thread is None:
            super().flush()
            return
        lines, self._lines = self._lines, []
        num_events, self._num_taken = self.num_events - self._num_taken, self.num_events
        size = sum(map(len, lines))  # they are ASCII
        with self._changed:
            if self._gap is None and self.num_waiting_bytes and self.num_waiting_bytes + size > self._traces.most_bytes:
                self._end(TOO_SLOW)
            if self._gap is not None:
                self._traces.num_lost += num_events
                return
            self._waiting += lines
            self._num_waiting_events += num_events
            self.num_waiting_bytes += size
            self._changed.notify()

    def _end(self, why: str) -> None:
        """Nothing more comes into this trace. With the lock."""
        self._gap = why
        self._changed.notify()
        logger.error("the trace %s ends here, serving goes on: %s", self.path, why)

    def _write_what_waits(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing or self._gap is not None)
                lines, self._waiting = self._waiting, []
                num_events, self._num_waiting_events = self._num_waiting_events, 0
            if not lines:
                break
            text = "".join(lines)
            try:
                reach(FaultPoint.WRITE_TRACE)
                self.write(text)
            except OSError as error:
                with self._changed:
                    if self._gap is None:
                        self._end(str(error.strerror))
                    self._traces.num_lost += num_events + self._num_waiting_events
                    self._waiting, self._num_waiting_events, self.num_waiting_bytes = [], 0, 0
                return
            with self._changed:
                self.num_waiting_bytes -= len(text)
        if self._gap is not None:
            with suppress(OSError):
                self.write(gap_line(self._gap))
            self.leave()

    def close(self) -> None:
        """What waits is written, and the file gets its name if nothing is missing."""
        if self._thread is None:
            return
        self.flush()
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(SECONDS_TO_WRITE)
        with self._changed:
            if self._thread.is_alive() and self._gap is None:
                self._end(f"not written within {SECONDS_TO_WRITE:g} s")
            if self._gap is not None:
                return
        self._thread = None
        try:
            super().close()
        except OSError as error:
            logger.error("the trace %s has no end: %s", self.path, error.strerror)
