"""Memory: huge pages for the weights, which every step reads, and ordinary ones for a pool, found while others go on.

With pages of 4 KiB half of the time of reading all weights is address translation. A virtual machine may have to be given each
huge page by its host, which takes 20 times as long as clearing it. So weights are packed into ordinary pages, and
made one with huge ones while others go on.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

HUGE = 1 << 21
"""Bytes of a huge page."""

POPULATE, COLLAPSE = 23, 25
"""Linux's advice MADV_POPULATE_WRITE and MADV_COLLAPSE, which Python has no names for: find and clear every page now, and
copy what is there into huge pages."""

TOUCHED = 1 << 24
"""Bytes of a pool that are touched at once: other threads that need the address space wait no longer than that."""

CHUNK = 1 << 26
"""Bytes that an arena asks for at once."""

LINE = 64
"""Bytes of a cache line, at which every tensor begins."""


def zero_bytes(num_bytes: int, *, are_huge: bool) -> Tensor:
    """So many zero bytes in huge pages, if the system gives them, or in ordinary ones; untouched ones take no memory."""
    memory = mmap.mmap(-1, -(-num_bytes // HUGE) * HUGE + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if are_huge:
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
    return zero_bytes(num_bytes, are_huge=True).view(dtype).view(tuple(shape))


def pool_of_zeros(
    count: int, shape: Sequence[int], dtype: torch.dtype, then: Callable[[], None] | None = None
) -> tuple[list[Tensor], threading.Thread]:
    """So many tensors of zeros, and who is finding pages for them, first things first, and does something then.

    Whoever writes before that has its pages at once, as ever; nobody waits for the thread.
    """
    size = math.prod(shape) * dtype.itemsize
    stride = -(-size // LINE) * LINE
    memory = mmap.mmap(-1, max(1, count * stride), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)

    def touch() -> None:
        for start in range(0, len(whole), TOUCHED):
            if not _advise(whole.data_ptr() + start, min(TOUCHED, len(whole) - start), POPULATE):
                break
        if then is not None:
            then()

    toucher = threading.Thread(target=touch, name="kvproof-pool", daemon=True)
    toucher.start()
    parts = [whole[index * stride : index * stride + size] for index in range(count)]
    return [part.view(dtype).view(tuple(shape)) for part in parts], toucher


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    """Tell Linux what to do with these pages, and whether it did; no number in them changes."""
    try:
        advise = ctypes.CDLL(None).madvise  # Python's own would keep every other thread waiting
    except (AttributeError, OSError, TypeError):
        return False
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(advise(address, num_bytes, advice) == 0)


class Arena:
    """Tensors one behind the other, which live as long as one of their chunk does.

    They are in huge pages from the start where the system can not copy them there later.
    """

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._used = 0
        self._are_huge = not _advise(0, 0, COLLAPSE)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if not self._chunks or self._used + num_bytes > len(self._chunks[-1]):
            self._chunks.append(zero_bytes(max(CHUNK, num_bytes), are_huge=self._are_huge))
            self._used = 0
        part = self._chunks[-1][self._used : self._used + num_bytes]
        self._used = -(-(self._used + num_bytes) // LINE) * LINE
        return part.view(dtype).view(tuple(shape))

    def to_huge_pages(self) -> None:
        """Have what is there in huge pages, if the system gives them; no address and no number changes."""
        for chunk in () if self._are_huge else self._chunks:
            for start in range(0, len(chunk), HUGE):
                _advise(chunk.data_ptr() + start, HUGE, COLLAPSE)
