"""Memory in huge pages: a step reads all weights and many blocks, and with pages of 4 KiB half of that time is address translation."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 1 << 21
"""Bytes of a huge page."""

POPULATE = 23
"""Linux's advice MADV_POPULATE_WRITE, which Python has no name for: find and clear every page now."""

CHUNK = 1 << 26
"""Bytes that an arena asks for at once."""

LINE = 64
"""Bytes of a cache line, at which every tensor begins."""


def huge_pages(num_bytes: int, is_touched: bool = False) -> Tensor:
    """So many zero bytes in huge pages, if the system gives them; untouched ones take no memory."""
    memory = mmap.mmap(-1, -(-num_bytes // HUGE) * HUGE + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # another system, or a kernel without them: ordinary pages do
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE
    if is_touched:
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            memory.madvise(POPULATE, start, num_bytes)
        except (AttributeError, OSError):  # an older kernel: whoever writes has the pages too
            whole[first : first + num_bytes] = 0
    return whole[first : first + num_bytes]


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros, in huge pages if they fill one."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < HUGE:
        return torch.zeros(tuple(shape), dtype=dtype)
    return huge_pages(num_bytes).view(dtype).view(tuple(shape))


class Arena:
    """Tensors one behind the other in huge pages; they live as long as one of their chunk does.

    It has so many bytes at once if that is told, all of them touched, and more when it has to.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self._chunk = huge_pages(num_bytes, is_touched=True) if num_bytes else torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = huge_pages(max(CHUNK, num_bytes)), 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used = -(-(self._used + num_bytes) // LINE) * LINE
        return part.view(dtype).view(tuple(shape))
