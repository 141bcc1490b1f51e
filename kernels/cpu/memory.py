"""Memory: huge pages for the weights, which every step reads, and ordinary ones for a pool, found while others go on.

With pages of 4 KiB half of the time of reading all weights is address translation.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 1 << 21
"""Bytes of a huge page."""

POPULATE = 23
"""Linux's advice MADV_POPULATE_WRITE, which Python has no name for: find and clear every page now."""

TOUCHED = 1 << 24
"""Bytes of a pool that are touched at once: other threads that need the address space wait no longer than that."""

CHUNK = 1 << 26
"""Bytes that an arena asks for at once."""

LINE = 64
"""Bytes of a cache line, at which every tensor begins."""


def huge_pages(num_bytes: int) -> Tensor:
    """So many zero bytes in huge pages, if the system gives them; untouched ones take no memory."""
    memory = mmap.mmap(-1, -(-num_bytes // HUGE) * HUGE + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # another system, or a kernel without them: ordinary pages do
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE
    return whole[first : first + num_bytes]


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros, in huge pages if they fill one."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE:
        return torch.zeros(tuple(shape), dtype=dtype)
    return huge_pages(num_bytes).view(dtype).view(tuple(shape))


def pool_of_zeros(count: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[list[Tensor], threading.Thread]:
    """So many tensors of zeros, and who is finding pages for them, first things first.

    Whoever writes before that has its pages at once, as ever; nobody waits for the thread.
    """
    size = math.prod(shape) * dtype.itemsize
    stride = -(-size // LINE) * LINE
    memory = mmap.mmap(-1, max(1, count * stride), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    toucher = threading.Thread(target=_touch, args=(whole,), name="kvproof-pool", daemon=True)
    toucher.start()
    parts = [whole[index * stride : index * stride + size] for index in range(count)]
    return [part.view(dtype).view(tuple(shape)) for part in parts], toucher


def _touch(memory: Tensor) -> None:
    """Find and clear every page; what others have written stays. Nothing on a system that can not do this."""
    try:
        advise = ctypes.CDLL(None).madvise  # Python's own would keep every other thread waiting
    except (AttributeError, OSError, TypeError):
        return
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, len(memory), TOUCHED):
        if advise(memory.data_ptr() + start, min(TOUCHED, len(memory) - start), POPULATE) != 0:
            return


class Arena:
    """Tensors one behind the other in huge pages; they live as long as one of their chunk does."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = huge_pages(max(CHUNK, num_bytes)), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used = -(-(self._used + num_bytes) // LINE) * LINE
        return part.view(dtype).view(tuple(shape))
