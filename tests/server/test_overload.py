"""Ten times as many callers as there are places: who is accepted is served to the end, who is not is told so at once."""

import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from optimized.checkpoint import Checkpoint
from optimized.server.limits import Limits
from tests.server.conftest import running, waited_for
from tests.server.overload import Seen, tell

NUM_PLACES = 8


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_ten_times_the_capacity(tiny: Checkpoint) -> None:
    """For a few seconds, and with ``KVPROOF_TIER=soak`` for a minute; ``-s`` shows what was counted."""
    seconds = 60.0 if os.environ.get("KVPROOF_TIER") == "soak" else 4.0
    server = running(replace(tiny), Limits(max_num_queued_reqs=NUM_PLACES), max_num_seqs=4)
    step = server.engine.llm.step

    def paced() -> object:
        time.sleep(0.005)
        return step()

    server.engine.llm.step = paced  # type: ignore[assignment,method-assign]
    try:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=tell, args=(theirs, server.port, 10 * NUM_PLACES, seconds))
        before = resident_bytes()
        process.start()
        seen = ours.recv()
        process.join()
        assert isinstance(seen, Seen), seen
        assert seen.others == []
        assert seen.num_whole >= NUM_PLACES
        assert seen.num_refused > seen.num_whole
        assert waited_for(lambda: server.engine.health.num_unfinished == 0)
        assert waited_for(lambda: server.free_blocks() == server.engine.llm.config.num_blocks)
        assert server.ask("GET", "/health").status == 200
        assert server.complete(max_tokens=2).status == 200
        times = sorted(seen.refusal_s)
        print(
            f"\n{10 * NUM_PLACES} callers, {NUM_PLACES} places, {seconds:.0f} s: {seen.num_whole} whole answers, "
            f"{seen.num_refused} refusals, half of them within {times[len(times) // 2] * 1e3:.1f} ms and 99 % within "
            f"{times[len(times) * 99 // 100] * 1e3:.1f} ms, grown by {(resident_bytes() - before) / (1 << 20):.1f} MiB"
        )
    finally:
        server.stop()
