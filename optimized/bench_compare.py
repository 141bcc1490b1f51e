"""Our engine and another one on the same workload, in turn, beside the least time that the arithmetic takes.

A **peer** is a folder with a program ``run``, called as ``run MODEL [--enable-prefix-caching]``. It loads the model in bfloat16 and
prints a line of JSON when it is ready. Then it reads lines of JSON, ``{"workload": FILE, "serial": false}``, serves each
workload with an empty cache, and answers with a line of JSON that has ``seconds``, ``tokens_in`` and ``tokens_out``. Whatever
else it prints is passed over, unless the line begins with a brace. ``optimized.bench_worker`` is such a program too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from optimized.bench_offline import Work
from spec.vocabulary import InvalidConfig

Facts = Mapping[str, Any]

MOST_BUSY: Final = 0.05
"""CPUs that others may use during a round; with more, its figures are marked."""


class Side:
    """A program that serves workloads, as a process that stays up."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        # The first JSON line is a peer's greeting; its own messages go where ours go.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.greeting = self._answer()
        except BaseException:
            self.close()
            raise

    def serve(self, workload: Path, serial: bool) -> dict[str, Any]:
        """One round. ``neighbours`` is how many CPUs others used meanwhile, on average; None where nobody can say."""
        if self._process.stdin is None:
            raise RuntimeError("a side has a standard input")
        before = busy_s(self._process.pid)
        started = time.perf_counter()
        print(json.dumps({"workload": str(workload.resolve()), "serial": serial}), file=self._process.stdin, flush=True)
        facts = self._answer()
        for name in ("seconds", "tokens_in", "tokens_out"):
            value = facts.get(name)
            if not isinstance(value, int | float) or not value > 0:
                raise InvalidConfig(f"{name} of {self.name}", value, "a number above 0")
        after = busy_s(self._process.pid)
        wall = time.perf_counter() - started
        facts["neighbours"] = None if before is None or after is None else max(0.0, (after - before) / wall)
        return facts

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        """The next line of JSON. Raises ``InvalidConfig`` if there is none."""
        if self._process.stdout is None:
            raise RuntimeError("a side has a standard output")
        for line in self._process.stdout:
            if line.startswith("{"):
                try:
                    facts = json.loads(line)
                except ValueError:
                    raise InvalidConfig(f"a line of {self.name}", line.strip(), "JSON, as it begins with {") from None
                return dict(facts)
        raise InvalidConfig("peer", self.name, f"a program that answers: it ended with status {self._process.wait()}")


def peer_command(folder: Path, model: str, prefix_caching: bool) -> list[str]:
    """How a peer is called. Raises ``InvalidConfig`` if the folder has no program ``run``."""
    program = folder / "run"
    if not os.access(program, os.X_OK) or program.is_dir():
        raise InvalidConfig("peer", str(folder), "a folder with a program named run")
    return [str(program.resolve()), model, *(["--enable-prefix-caching"] if prefix_caching else [])]


def our_command(model: str, prefix_caching: bool, quantization: str | None = None) -> list[str]:
    """How our own side is called."""
    caching = ["--enable-prefix-caching"] if prefix_caching else []
    quantized = [] if quantization is None else ["--quantization", quantization]
    return [sys.executable, "-m", "optimized.bench_worker", model, *caching, *quantized]


def compare(
    ours: Side,
    peers: Sequence[Side],
    workload: Path,
    rounds: int,
    serial: bool,
    floor_s: Callable[[Mapping[Work, int]], float],
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, object]:
    """Each side in turn, so many rounds, after one that does not count. Ratios are of the same round, ours over the peer's.

    ``floor_share`` is the floor's time over ours. The medians are given, and the extremes.
    """
    sides = [ours, *peers]
    answers: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    shares: list[float] = []
    for number in range(rounds + 1):
        for side in sides:
            progress(f"round {number} of {rounds}, {side.name}")
            facts = side.serve(workload, serial)
            if number:
                answers[side.name].append(facts)
        if number:
            work = {Work(*step): count for *step, count in answers[ours.name][-1]["work"]}
            shares.append(floor_s(work) / answers[ours.name][-1]["seconds"])
    busy = [each["neighbours"] for name in answers for each in answers[name]]
    return {
        "workload": workload.stem,
        "rounds": rounds,
        "serial": serial,
        "sides": {
            name: {
                "seconds": _spread([each["seconds"] for each in own]),
                "tokens_per_s": _spread([(each["tokens_in"] + each["tokens_out"]) / each["seconds"] for each in own]),
                "tokens_out_per_s": _spread([each["tokens_out"] / each["seconds"] for each in own]),
            }
            for name, own in answers.items()
        },
        "ratio": {
            peer.name: _spread([_rate(own) / _rate(other) for own, other in _pairs(answers, ours, peer)])
            for peer in peers
        },
        "floor_share": _spread(shares),
        "neighbours": None if None in busy else round(max(busy), 3),
        "quiet": None if None in busy else max(busy) <= MOST_BUSY,
    }


def _pairs(answers: Mapping[str, list[dict[str, Any]]], ours: Side, peer: Side) -> list[tuple[Facts, Facts]]:
    return list(zip(answers[ours.name], answers[peer.name], strict=True))


def _rate(facts: Facts) -> float:
    rate: float = (facts["tokens_in"] + facts["tokens_out"]) / facts["seconds"]
    return rate


def _spread(values: Sequence[float]) -> dict[str, float]:
    """The median and the extremes, four digits of each."""
    found = {"median": statistics.median(values), "least": min(values), "largest": max(values)}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def busy_s(pid: int | None = None) -> float | None:
    """Seconds for which CPUs were busy since the machine started, but for those of this process, and of ``pid`` and all below it.

    None where there is no ``/proc``.
    """
    try:
        fields = [int(each) for each in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        times = 0 if pid is None else ticks_of_tree(pid)
    except (OSError, ValueError):
        return None
    idle = fields[3] + fields[4]
    own = os.times()
    ticks = os.sysconf("SC_CLK_TCK")
    return (sum(fields) - idle - times) / ticks - own.user - own.system


def ticks_of_tree(pid: int) -> int:
    """Ticks of a process and of all below it, those that have ended and been waited for included. Raises ``OSError``."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has just ended
        # After the name in brackets: state and parent, then the eleventh to fourteenth are utime, stime, cutime and cstime.
        values = stat.rpartition(")")[2].split()
        ticks[int(folder.name)] = sum(map(int, values[11:15]))
        children.setdefault(int(values[1]), []).append(int(folder.name))
    if pid not in ticks:
        raise ProcessLookupError(f"there is no process {pid}")
    total, open_ = 0, [pid]
    while open_:
        each = open_.pop()
        total += ticks[each]
        open_ += children.get(each, [])
    return total
