"""What a server takes at most. Each limit is a flag of ``kvproof serve`` and has an error of its own."""

from __future__ import annotations

from dataclasses import dataclass, fields

from spec.vocabulary import InvalidConfig


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Counts and bytes. A request over a limit is answered before any work is done for it."""

    max_body_bytes: int = 4 << 20
    max_header_count: int = 100
    max_prompts: int = 64
    max_choices: int = 128
    """Prompts times ``n``."""
    max_num_queued_reqs: int = 256
    """Requests that wait or run; one more is answered 503."""
    max_request_seconds: int = 600
    stall_seconds: int = 10
    """A step that takes longer than this makes ``/health`` say so."""
    shutdown_timeout: int = 30
    """How long requests may go on after the first signal."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is not int or not 0 <= value < 1 << 40 or (value == 0 and each.name != "shutdown_timeout"):
                raise InvalidConfig(each.name, value, "a whole number, at least 1")
