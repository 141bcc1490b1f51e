"""How log lines look: text for people, or one JSON object a line for programs. Times are UTC."""

from __future__ import annotations

import json
import logging
import time

from spec.vocabulary import InvalidConfig

FORMATS = ("text", "json")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
EXTRA = ("request_id", "method", "path", "status", "seconds", "numbers")
"""What a line may say besides its text."""


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


def start_logging(form: str, level: str) -> None:
    """Write log lines to standard error, those of uvicorn and of what fetches models only if something is wrong."""
    for name, value, allowed in (("log_format", form, FORMATS), ("log_level", level, LEVELS)):
        if value not in allowed:
            raise InvalidConfig(name, value, " or ".join(allowed))
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLine() if form == "json" else text_line())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("uvicorn", "httpx", "httpx2", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.WARNING)
