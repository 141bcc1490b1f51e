"""How log lines look, text for people or one JSON object a line for programs, and how they get to standard error. Times are UTC."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue

from spec.vocabulary import InvalidConfig

FORMATS = ("text", "json")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
EXTRA = ("request_id", "method", "path", "status", "seconds", "numbers")
"""What a line may say besides its text."""

MOST_LINES = 4096
"""So many lines wait for a reader at most."""
SECONDS_TO_WRITE = 1.0
"""What waits at the exit has so long to be written."""
STANDARD_ERROR = 2


class JsonLine(logging.Formatter):
    """A record as a JSON object, whatever is in it."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in EXTRA if hasattr(record, name)},
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def text_line() -> logging.Formatter:
    """A record for people."""
    made = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    made.converter = time.gmtime
    return made


class LossyLog(QueueHandler):
    """Lines that a thread of its own writes, so that nobody who logs waits for whoever reads.

    A line that finds no room is dropped and counted, and so are those after it until half of the room is free; then a line
    says how many there were. A line is formatted by whoever logs it, with its exception.
    """

    def __init__(self, file: int = STANDARD_ERROR, most_lines: int = MOST_LINES) -> None:
        self._lines: Queue[logging.LogRecord | None] = Queue(most_lines)
        super().__init__(self._lines)
        self._writer = LineWriter(self._lines, file)
        self._is_open = False
        self._room = max(1, most_lines // 2)
        self._num_refused = 0
        self._num_told = 0

    @property
    def num_dropped(self) -> int:
        """How many lines nobody can read."""
        return self._num_refused + self._writer.num_failed

    def start(self) -> None:
        """From now on lines are written."""
        self._is_open = True
        self._writer.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._num_refused > self._num_told:
            if self._lines.qsize() > self._room:
                raise Full
            self._lines.put_nowait(self._gap())
        self._lines.put_nowait(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """There is no room for the line, or it can not be formatted; to say so here would be to wait."""
        self._num_refused += 1

    def _gap(self) -> logging.LogRecord:
        """The line in place of those that were dropped and that nobody was told of."""
        count, self._num_told = self._num_refused - self._num_told, self._num_refused
        text = "%d lines of the log were dropped: nobody read as fast as they came"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (count,), None)
        prepared: logging.LogRecord = self.prepare(record)
        return prepared

    def close(self) -> None:
        """What waits is written, but nobody waits long for a reader. ``logging`` calls this at the exit."""
        if self._is_open:
            self._is_open = False
            ending = threading.Thread(target=self._end, daemon=True)
            ending.start()
            ending.join(SECONDS_TO_WRITE)
        super().close()

    def _end(self) -> None:
        if self._num_refused > self._num_told:
            self._lines.put(self._gap())
        self._writer.stop()


class LineWriter(QueueListener):
    """Writes lines past Python's buffers: a thread that is stuck here holds nothing that the exit of the process waits for."""

    def __init__(self, lines: Queue[logging.LogRecord | None], file: int) -> None:
        super().__init__(lines)
        self._lines = lines
        self._file = file
        self.num_failed = 0

    def handle(self, record: logging.LogRecord) -> None:
        left = f"{record.msg}\n".encode(errors="backslashreplace")
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            self.num_failed += 1

    def enqueue_sentinel(self) -> None:
        self._lines.put(None)  # there may be no room yet


def start_logging(form: str, level: str, log: LossyLog) -> None:
    """Write log lines to standard error, those of uvicorn and of what fetches models only if something is wrong."""
    for name, value, allowed in (("log_format", form, FORMATS), ("log_level", level, LEVELS)):
        if value not in allowed:
            raise InvalidConfig(name, value, " or ".join(allowed))
    log.setFormatter(JsonLine() if form == "json" else text_line())
    log.start()
    logging.basicConfig(level=level, handlers=[log], force=True)
    for name in ("uvicorn", "httpx", "httpx2", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)
