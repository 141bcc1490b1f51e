"""Contiguous reservation, for comparison only: what an engine without paging does with the same memory.

Reserving the longest possible sequence for everybody needs nothing of this: it is paging with one block of
``max_model_len`` tokens. Reservations of different sizes are placed by a buddy allocator, as Kwon et al. 2023 (section
6.1) assume for Orca: each is rounded up to a power of two and put at a multiple of its size.
"""

from __future__ import annotations

from enum import Enum

from spec.vocabulary import Slot


class Allocation(Enum):
    """How room for a sequence is set aside.

    PAGED takes blocks as tokens come. The others reserve in one piece and in advance: CONTIGUOUS the longest possible
    sequence, POW2 the prompt and the output rounded up to a power of two, ORACLE exactly what will be needed.
    """

    PAGED = "paged"
    CONTIGUOUS = "contiguous"
    POW2 = "pow2"
    ORACLE = "oracle"


def power_of_two_above(number: int) -> int:
    """The smallest power of two that is at least ``number``.

    >>> [power_of_two_above(number) for number in (1, 2, 3, 25, 32)]
    [1, 2, 4, 32, 32]
    """
    return 1 << (number - 1).bit_length()


def reserved_slots(allocation: Allocation, prompt_len: int, output_len: int, max_model_len: int) -> int:
    """What a contiguous allocation sets aside for a sequence that will have an output of ``output_len`` tokens.

    >>> [reserved_slots(kind, 100, 25, 2048) for kind in (Allocation.CONTIGUOUS, Allocation.POW2, Allocation.ORACLE)]
    [2048, 132, 125]
    """
    if allocation is Allocation.CONTIGUOUS:
        return max_model_len
    output = power_of_two_above(output_len) if allocation is Allocation.POW2 else output_len
    return min(max_model_len, prompt_len + output)


class BuddyAllocator:
    """Pieces of ``num_slots`` slots, each a power of two long. An operation costs O(free pieces).

    Where ``num_slots`` is no power of two, the memory begins as one piece for each of its binary digits.

    >>> memory = BuddyAllocator(12)
    >>> memory.reserve(3), memory.reserve(3), memory.reserve(3), memory.reserve(1)
    (8, 0, 4, None)
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_reserved = 0
        """The slots that were asked for, without what rounding them up cost."""
        self._free: dict[int, set[Slot]] = {}
        self._reserved: dict[Slot, tuple[int, int]] = {}
        start = 0
        for place in reversed(range(num_slots.bit_length())):
            if num_slots >> place & 1:
                self._free.setdefault(1 << place, set()).add(start)
                start += 1 << place

    def reserve(self, size: int) -> Slot | None:
        """Where ``size`` slots begin, in the smallest free piece that is large enough; None if there is none."""
        wanted = power_of_two_above(size)
        piece = min((length for length, starts in self._free.items() if length >= wanted and starts), default=None)
        if piece is None:
            return None
        start = min(self._free[piece])
        self._free[piece].remove(start)
        while piece > wanted:
            piece //= 2
            self._free.setdefault(piece, set()).add(start + piece)
        self._reserved[start] = (piece, size)
        self.num_reserved += size
        return start

    def release(self, start: Slot) -> None:
        """The piece is free again, together with its other half if that is free, and so on."""
        piece, size = self._reserved.pop(start)
        self.num_reserved -= size
        while (other := start ^ piece) in self._free.get(piece, ()):
            self._free[piece].remove(other)
            start, piece = min(start, other), piece * 2
        self._free.setdefault(piece, set()).add(start)
