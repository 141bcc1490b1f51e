"""A log that nobody reads: whoever writes a line waits for nobody, and what is lost is counted."""

import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from optimized.checkpoint import Checkpoint
from optimized.server import logs
from optimized.server.front import Front
from optimized.server.logs import JsonLine, LossyLog
from tests.server.conftest import running, waited_for
from tests.server.test_observability import value

logger = logging.getLogger("kvproof.server.test")
LONG = 500 * "x"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The ends of a pipe that takes one page."""
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 4096)
    yield out, into
    for end in (out, into):
        os.close(end)


@pytest.fixture
def log(pipe: tuple[int, int]) -> Iterator[LossyLog]:
    """A log of eight lines at most besides those in the pipe, of whatever the process says."""
    made, root = LossyLog(pipe[1], most_lines=8), logging.getLogger()
    made.setFormatter(JsonLine())
    made.start()
    root.addHandler(made)
    level = root.level
    root.setLevel(logging.INFO)
    yield made
    root.setLevel(level)
    root.removeHandler(made)
    os.set_blocking(pipe[1], False)
    os.set_blocking(pipe[0], False)
    with suppress(BlockingIOError):
        os.read(pipe[0], 1 << 16)
    made.close()


def read(out: int, is_last: Callable[[str], bool]) -> list[str]:
    """The messages of what is written until such a one comes."""
    messages = []
    with os.fdopen(os.dup(out)) as lines:
        for line in lines:
            messages.append(json.loads(line)["message"])
            if is_last(messages[-1]):
                break
    return messages


def test_lines_that_nobody_reads_are_dropped_and_each_gap_says_how_many(pipe: tuple[int, int], log: LossyLog) -> None:
    for index in range(40):
        logger.info("%d %s", index, LONG)
    assert log.num_dropped >= 20
    reading = threading.Thread(target=lambda: seen.extend(read(pipe[0], lambda text: text == "the end")))
    seen: list[str] = []
    reading.start()
    assert waited_for(log._lines.empty)
    try:
        raise ValueError("it broke")
    except ValueError:
        logger.exception("the end")
    reading.join(60)
    following = 0
    for message in seen[:-1]:
        if message.endswith(LONG):
            assert int(message.split()[0]) == following
            following += 1
        else:
            assert message.endswith("lines of the log were dropped: nobody read as fast as they came")
            following += int(message.split()[0])
    assert (following, seen[-1]) == (40, "the end")
    lost = log.num_dropped
    log.close()
    assert log.num_dropped == lost


def test_a_line_that_can_not_be_formatted_is_counted_too(log: LossyLog) -> None:
    log.handle(logging.LogRecord("x", logging.INFO, "file", 1, "%d", ("no number",), None))
    assert log.num_dropped == 1
    log.close()


def test_a_server_answers_when_nobody_reads_its_log(tiny: Checkpoint, pipe: tuple[int, int], log: LossyLog) -> None:
    server = running(tiny, front=Front(num_dropped_lines=lambda: log.num_dropped))
    try:
        for _ in range(60):
            assert server.complete(prompt=[5, 6, 7], max_tokens=1).status == 200
        assert waited_for(lambda: log.num_dropped > 0)
        logging.getLogger("uvicorn.error").warning("what uvicorn says goes the same way %s", LONG)
        assert value(server, "kvproof:log_lines_dropped_total") > 0
    finally:
        server.stop()
    assert "POST /v1/completions" in read(pipe[0], lambda text: "POST" in text)[-1]


EXIT = """
import logging
from optimized.server.logs import LossyLog, start_logging
start_logging("text", "INFO", LossyLog())
for index in range({count}):
    logging.getLogger("x").info("%d %s", index, 1000 * "x")
"""


def test_at_the_exit_what_waits_is_written_but_for_no_stuck_reader() -> None:
    whole = subprocess.run([sys.executable, "-c", EXIT.format(count=200)], stderr=subprocess.PIPE, check=True)
    assert [int(line.split()[2]) for line in whole.stderr.splitlines()] == list(range(200))
    with subprocess.Popen([sys.executable, "-c", EXIT.format(count=9000)], stderr=subprocess.PIPE) as stuck:
        assert stuck.wait(60) == 0  # and nobody has read a word
        assert stuck.stderr is not None
        assert stuck.stderr.readline().split()[2] == b"0"


def test_a_log_that_can_not_be_written_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError("full")

    monkeypatch.setattr(logs.os, "write", full)
    log = LossyLog()
    log.start()
    log.handle(logging.LogRecord("x", logging.INFO, "file", 1, "a", (), None))
    log.close()
    assert log.num_dropped == 1
