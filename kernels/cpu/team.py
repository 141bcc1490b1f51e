"""The threads that work on a task, which are torch's own, and the compiled code that they run."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch  # noqa: F401  loads the OpenMP library whose threads are used

from kernels.cpu.task import TASK


class _Compiled(Protocol):
    address: int


@cache
def why_not() -> str | None:
    """Why the vector kernels can not run here, or None if they can."""
    try:
        from numba import config

        from kernels.cpu import instructions
    except ImportError as error:
        return f"{error.name} is not installed"
    if not sys.platform.startswith("linux"):
        return f"they are made for Linux, this is {sys.platform}"
    if (missing := instructions.why_not()) is not None:
        return missing
    if config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set"
    return None if _openmp_library() else "torch has no OpenMP library libgomp"


@cache
def _openmp_library() -> str | None:
    """The file of the libgomp that torch has loaded: with a second one there would be a second team."""
    names = (
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line
    )
    return next(names, None)


def _version() -> int:
    """A number that changes with the sources of the compiled code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "big") | 1


def _say_compiling() -> None:
    print("compiling the CPU kernels for this processor, once, in less than a minute ...", file=sys.stderr, flush=True)


@cache
def _work() -> _Compiled:
    from kernels.cpu.step import compiled

    function: _Compiled = compiled(_version(), _say_compiling)
    return function


class Team:
    """So many threads, of torch's own team. Fewer may come: work is claimed, not dealt out."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._address = _work().address
        library = ctypes.CDLL(_openmp_library())
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def run(self, task: npt.NDArray[np.void]) -> None:
        """Do the task, a record of type ``TASK``; returns when it is done."""
        if task.dtype != TASK:
            raise TypeError(f"a task is {task.dtype}")
        self._parallel(self._address, task.ctypes.data, self.num_threads, 0)


def usable_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """Physical cores that this process may use: those of its affinity, and no more than its control group's quota."""
    if not hasattr(os, "sched_getaffinity"):
        return usable_processors()
    siblings = {_core_of(processor) for processor in os.sched_getaffinity(0)}
    return max(1, min(len(siblings), _quota()))


def _core_of(processor: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(processor)


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Whole cores that the control group grants, rounded up; very many if it says nothing."""
    try:
        granted, _, period = path.read_text().partition(" ")
        return -(-int(granted) // int(period))
    except (OSError, ValueError):
        return 1 << 20
