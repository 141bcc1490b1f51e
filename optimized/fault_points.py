"""Fault points: named places at which somebody who tests may let something fail that else fails once in a blue moon.

Nobody does: then a point is one look at a global that is None. A decider is asked at every point that is reached, by
whichever thread reaches it, and what it answers is raised there. ``NthTime`` fails one of them once; a simulation that
draws what fails is another decider.

>>> with deciding(NthTime(FaultPoint.TOKENIZER_ENCODE, 2)):
...     reach(FaultPoint.TOKENIZER_ENCODE)
...     reach(FaultPoint.TOKENIZER_ENCODE)
Traceback (most recent call last):
...
RuntimeError: the fault point tokenizer.encode
"""

from __future__ import annotations

import errno
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from spec.vocabulary import InvalidConfig

VARIABLE = "KVPROOF_FAULTS"
TIME = re.compile("[1-9][0-9]{0,17}")


class Harm(Enum):
    """Which requests may end by a fault; no others do. Where all that have part of an answer may, the engine is made anew."""

    NOBODY = "nobody"
    ONE = "one request"
    RUNNING = "all that have part of an answer"


class FaultPoint(Enum):
    """A place at which something may fail: its name, what fails there, as which error, and who may suffer."""

    SCHEDULE = "engine.schedule", "the scheduler raises", RuntimeError, Harm.RUNNING
    TAKE_BLOCKS = "pool.take", "there is no memory where blocks are taken", MemoryError, Harm.RUNNING
    COMMIT = "engine.commit", "recording a step raises", RuntimeError, Harm.RUNNING
    TURN = "engine.turn", "the engine's thread raises between two steps", RuntimeError, Harm.RUNNING
    REMAKE = (
        "engine.remake",
        "there is no memory for the cache of an engine that is made anew",
        MemoryError,
        Harm.NOBODY,
    )
    MOVE_BLOCKS = "device.move", "copying and swapping blocks raises", RuntimeError, Harm.RUNNING
    FORWARD = "device.forward", "the forward pass raises", RuntimeError, Harm.ONE
    DEVICE_MEMORY = "device.memory", "the device is out of memory", MemoryError, Harm.RUNNING
    SAMPLE = "device.sample", "the sampler raises", RuntimeError, Harm.ONE
    DEVICE_ALIVE = "device.alive", "after a failure the device computes nothing at all", RuntimeError, Harm.RUNNING
    ADD_REQUEST = "request.add", "taking a request in raises", RuntimeError, Harm.ONE
    OUTPUT_TEXT = "request.text", "turning a token into text raises", RuntimeError, Harm.ONE
    TOKENIZER_ENCODE = "tokenizer.encode", "the tokenizer raises on a text", RuntimeError, Harm.ONE
    TOKENIZER_DECODE = "tokenizer.decode", "the tokenizer raises on token ids", RuntimeError, Harm.ONE
    RENDER_TEMPLATE = "template.render", "a chat template raises", RuntimeError, Harm.ONE
    MAKE_GRAMMAR = "grammar.make", "making a grammar raises", RuntimeError, Harm.ONE
    FOLLOW_GRAMMAR = "grammar.follow", "a grammar raises in the middle of an answer", RuntimeError, Harm.ONE
    READ_BODY = "client.read", "reading a body raises", OSError, Harm.ONE
    WRITE_EVENT = "client.write", "writing an event to a client raises", OSError, Harm.ONE
    MAKE_EVENT = "answer.event", "an event of a stream can not be made", RuntimeError, Harm.ONE
    MAKE_ANSWER = "answer.whole", "a whole answer can not be made", RuntimeError, Harm.ONE
    READ_METRICS = "metrics.read", "collecting the metrics raises", RuntimeError, Harm.ONE
    BEAT = "log.heartbeat", "the line of every ten seconds can not be made", RuntimeError, Harm.NOBODY
    WRITE_TRACE = "trace.write", "the disk of a trace is full", OSError, Harm.NOBODY

    def __init__(self, title: str, what: str, error: type[Exception], harm: Harm) -> None:
        self.title = title
        self.what = what
        self.error = error
        self.harm = harm

    def fault(self) -> Exception:
        """What is raised there."""
        message = f"the fault point {self.title}"
        return OSError(errno.ENOSPC, message) if self.error is OSError else self.error(message)


Decide: TypeAlias = Callable[[FaultPoint], BaseException | None]
"""What fails at a point that is reached now, if anything."""

_decide: Decide | None = None


def reach(point: FaultPoint) -> None:
    """Here something may fail."""
    if _decide is not None:
        error = _decide(point)
        if error is not None:
            raise error


@contextmanager
def deciding(decide: Decide) -> Iterator[None]:
    """Meanwhile it is asked at every point. One at a time: what is set before is back afterwards."""
    global _decide
    before, _decide = _decide, decide
    try:
        yield
    finally:
        _decide = before


class NthTime:
    """Lets each of some points fail once, the ``n``-th time that it is reached."""

    def __init__(self, point: FaultPoint, n: int = 1, others: Mapping[FaultPoint, int] | None = None) -> None:
        self._times = {**(others or {}), point: n}
        self._reached = Counter[FaultPoint]()
        self._lock = threading.Lock()

    def __call__(self, point: FaultPoint) -> Exception | None:
        with self._lock:
            self._reached[point] += 1
            return point.fault() if self._reached[point] == self._times.get(point) else None

    def has_failed(self, point: FaultPoint) -> bool:
        """Whether it was reached so often."""
        with self._lock:
            return self._reached[point] >= self._times[point]


def arm(environment: Mapping[str, str]) -> bool:
    """Let fail what ``KVPROOF_FAULTS`` says, ``device.forward:3,trace.write``; False if it says nothing. Raises
    ``InvalidConfig`` for what is no fault point, and in a release."""
    global _decide
    said = environment.get(VARIABLE)
    if not said:
        return False
    if is_release():
        raise InvalidConfig(VARIABLE, said, "left out: this is a release, and only a folder of the sources has faults")
    named = list(map(_time_of, said.split(",")))
    times = dict(named)
    if len(times) < len(named):
        raise InvalidConfig(VARIABLE, said, "made of points of which each is there once")
    first = next(iter(times))
    _decide = NthTime(first, times[first], times)
    return True


def is_release() -> bool:
    """Whether this was installed, and is not run from a folder of the sources."""
    return not (Path(__file__).parents[1] / "pyproject.toml").is_file()


def _time_of(text: str) -> tuple[FaultPoint, int]:
    title, _, count = text.strip().partition(":")
    found = [point for point in FaultPoint if point.title == title]
    if not found or TIME.fullmatch(count or "1") is None:
        limit = "NAME:N with commas between, and names that kvproof doctor --fault-points lists"
        raise InvalidConfig(VARIABLE, text, limit)
    return found[0], int(count or "1")
