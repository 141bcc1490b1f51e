"""Where the slots of a KV cache are at one moment: four classes that add up to all of them (Kwon et al. 2023, figure 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optimized.scheduler import Scheduler
from optimized.sequences import LiveSeq


@dataclass(frozen=True)
class Slots:
    """``tokens`` hold K and V of a live sequence. ``reserved`` are set aside for tokens that its limits allow it to get
    yet, ``internal`` are set aside and will never be used, ``external`` are set aside for nobody: free, or lost between
    two reservations."""

    tokens: int
    reserved: int
    internal: int
    external: int

    @property
    def total(self) -> int:
        """All slots there are."""
        return self.tokens + self.reserved + self.internal + self.external

    def share(self, slots: int) -> float:
        """A number of slots as a part of all."""
        return slots / self.total if self.total else 0.0


def slots_of(scheduler: Scheduler) -> Slots:
    """Where the slots of a paged cache are. O(sequences), and O(blocks in use) while some are shared.

    A block that several sequences hold counts once. A cached block that nobody holds is free: whoever needs room takes it.
    """
    size, pool = scheduler.config.block_size, scheduler.pool
    running = [seq for request in scheduler.running for seq in request.seqs]
    if pool.num_shared:
        tokens, reserved = _shared(running, size)
    else:
        tokens = sum([seq.num_computed - seq.num_dropped_blocks * size for seq in running])
        reserved = sum([_reserved(seq, size) for seq in running])
    external = pool.num_free * size
    return Slots(tokens, reserved, pool.num_blocks * size - external - tokens - reserved, external)


def _reserved(seq: LiveSeq, block_size: int) -> int:
    """The slots of its blocks that the sequence may still fill; its last token is never stored."""
    end = (len(seq.table) + seq.num_dropped_blocks) * block_size
    return max(0, min(end, seq.max_tokens - 1) - seq.num_computed)


def _shared(running: Iterable[LiveSeq], block_size: int) -> tuple[int, int]:
    """Tokens, and slots that may still be filled: of each block the most that one of its holders has or may have."""
    filled: dict[int, int] = {}
    fillable: dict[int, int] = {}
    for seq in running:
        for index, block in enumerate(seq.table, start=seq.num_dropped_blocks):
            start = index * block_size
            filled[block] = max(filled.get(block, 0), min(block_size, max(0, seq.num_computed - start)))
            fillable[block] = max(fillable.get(block, 0), min(block_size, max(0, seq.max_tokens - 1 - start)))
    tokens = sum(filled.values())
    return tokens, sum(max(0, most - filled[block]) for block, most in fillable.items())
