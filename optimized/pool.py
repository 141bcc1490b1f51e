"""The block pool: which blocks are free and how many holders the others have.

The free list is in the order in which blocks are taken: first the blocks that were never used, from the lowest id on,
then the used ones, the one that has been free longest first. The never-used ones are one number; the others are a
doubly linked list in two arrays of 4 bytes a block, so that a block can also leave it from the middle (a prefix hit).
With the reference counts a pool costs 12 bytes a block; to make one of ten million blocks takes some 50 milliseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from optimized.fault_points import FaultPoint, reach
from optimized.prefix_cache import PrefixCache
from spec.vocabulary import BlockId, StepId


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """Blocks that the device may touch until the step is over, and those that the step holds: the sources of its copies,
    and what nobody else holds any more. Of the former the caller names at least those that he gives back meanwhile."""

    blocks: set[BlockId] = field(default_factory=set)
    holds: list[BlockId] = field(default_factory=list)


class BlockPool:
    """Free blocks and reference counts. The caller sees to it that ``num_free`` suffices before it takes."""

    def __init__(self, num_blocks: int, cache: PrefixCache | None = None) -> None:
        self.num_blocks = num_blocks
        self.cache = cache
        """Hears of every block that is handed out to be written, and forgets what it held."""
        self.num_free = num_blocks
        self.ref_count = _zeros(num_blocks)
        self.holds: dict[BlockId, int] = {}
        """How many of a block's holders are steps in flight; blocks that have none are left out."""
        self.num_shared = 0
        """How many blocks have more than one holder."""
        self.peak_shared = 0
        self.num_spared = 0
        """How many more blocks it would take if nobody shared one: the holders of each but the first."""
        self.submitted: dict[StepId, SubmittedStep] = {}
        """Steps that the device may be busy with while blocks are given back; the oldest first."""
        self._num_fresh = num_blocks  # the last ``_num_fresh`` ids were never used
        # A ring of the used free blocks: the entry past the last block is its start and its end.
        self._next = _zeros(num_blocks + 1)
        self._previous = _zeros(num_blocks + 1)
        self._next[num_blocks] = self._previous[num_blocks] = num_blocks

    def take(self) -> BlockId:
        """The front of the free list, with one holder. O(1)."""
        (block,) = self.take_many(1)
        return block

    def take_many(self, count: int) -> tuple[BlockId, ...]:
        """The first ``count`` blocks of the free list, each with one holder. O(count)."""
        reach(FaultPoint.TAKE_BLOCKS)
        num_fresh = min(count, self._num_fresh)
        first = self.num_blocks - self._num_fresh
        blocks = [*range(first, first + num_fresh)]
        self._num_fresh -= num_fresh
        if num_fresh < count:
            following, end = self._next, self.num_blocks
            block = following[end]
            for _ in range(count - num_fresh):
                blocks.append(block)
                block = following[block]
            following[end] = block
            self._previous[block] = end
            if self.cache is not None:
                self.cache.evict(blocks[num_fresh:])
        ref_count = self.ref_count
        for block in blocks:
            ref_count[block] = 1
        self.num_free -= count
        return tuple(blocks)

    def add_holder(self, block: BlockId) -> None:
        """A block, possibly a free one whose contents are still known, gets one more holder. O(1)."""
        count = self.ref_count[block]
        self.ref_count[block] = count + 1
        if count == 0:
            self._unlink(block)
            self.num_free -= 1
            return
        self.num_spared += 1
        if count == 1:
            self.num_shared += 1
            self.peak_shared = max(self.peak_shared, self.num_shared)

    def share(self, table: Sequence[BlockId]) -> None:
        """Every block of a table gets one more holder. O(len(table))."""
        ref_count = self.ref_count
        for block in table:
            count = ref_count[block]
            if count > 1:
                ref_count[block] = count + 1
                self.num_spared += 1
            else:
                self.add_holder(block)

    def drop_holder(self, block: BlockId) -> None:
        """A block loses one holder; without any, it goes to the end of the free list. O(1), O(steps in flight) if any."""
        self.release((block,))

    def release(self, table: Sequence[BlockId]) -> None:
        """A table gives its references back, the last block first, so that the end of a prefix is taken first.

        ALLOC-5: a block that a submitted step may touch does not become free; the newest such step is its last holder.
        O(len(table)), times the steps in flight if any.
        """
        ref_count, following, previous, end = self.ref_count, self._next, self._previous, self.num_blocks
        last, num_freed = previous[end], 0
        for block in reversed(table):
            count = ref_count[block] - 1
            if count:
                self.num_spared -= 1
                if count == 1:
                    self.num_shared -= 1
            elif self.submitted and self._handed_over(block):
                continue
            else:
                following[last] = block
                previous[block] = last
                last = block
                num_freed += 1
            ref_count[block] = count
        following[last] = end
        previous[end] = last
        self.num_free += num_freed

    def _handed_over(self, block: BlockId) -> bool:
        for step in reversed(self.submitted.values()):
            if block in step.blocks:
                step.holds.append(block)
                self.hand_to_step(block)
                return True
        return False

    def hand_to_step(self, block: BlockId) -> None:
        """A table entry that was copied away becomes a hold of the step in flight: the same count. O(1)."""
        self.holds[block] = self.holds.get(block, 0) + 1

    def drop_holds(self, blocks: Sequence[BlockId]) -> None:
        """A step is over; what it kept alive is given back, in the order in which it was handed over. O(len(blocks))."""
        for block in blocks:
            left = self.holds.pop(block) - 1
            if left:
                self.holds[block] = left
            self.drop_holder(block)

    def submit(self, step_id: StepId, blocks: Iterable[BlockId] = (), holds: Sequence[BlockId] = ()) -> None:
        """From now on the device may touch these blocks, and the step holds those. O(blocks)."""
        self.submitted[step_id] = SubmittedStep(set(blocks), list(holds))

    def retire(self, step_id: StepId) -> list[BlockId]:
        """The device is done with the step: what it still holds, for ``drop_holds``."""
        return self.submitted.pop(step_id).holds

    def num_entries(self, block: BlockId) -> int:
        """How many table entries name the block. O(1)."""
        return self.ref_count[block] - self.holds.get(block, 0)

    def num_in_use(self, blocks: Iterable[BlockId]) -> int:
        """How many of these blocks somebody holds. O(len(blocks))."""
        return sum([self.ref_count[block] > 0 for block in blocks])

    def free_list(self) -> Iterator[BlockId]:
        """The free list from its front on. O(free blocks): for snapshots only."""
        yield from range(self.num_blocks - self._num_fresh, self.num_blocks)
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def _unlink(self, block: BlockId) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """The number of blocks that hold ``num_tokens`` tokens.

    >>> [blocks_needed(n, 16) for n in (0, 1, 16, 17)]
    [0, 1, 1, 2]
    """
    return -(-num_tokens // block_size)


def _zeros(count: int) -> array[int]:
    return array("I", (0,)) * count
