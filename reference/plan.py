"""What one step does: an immutable value that a device can run without knowing the scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from spec.engine import DeviceEvent
from spec.vocabulary import BlockId, Copy, Prefix, SeqId, Slot, StepId, SwapIn, SwapOut, Token


@dataclass(frozen=True)
class ScheduledSeq:
    """One sequence's part of a step: which tokens, where their K and V go, and where its earlier ones lie.

    Entry i of ``block_table`` holds the positions from ``first_kept + i * block_size`` on; ``first_kept`` is 0 unless a
    sliding window has dropped blocks.
    """

    seq: SeqId
    start: int
    tokens: tuple[Token, ...]
    slot_mapping: tuple[Slot, ...]
    block_table: tuple[BlockId, ...]
    first_kept: int = 0

    @property
    def stop(self) -> int:
        """The position after the last token of this step."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Sample:
    """A token that the step draws: for ``seq``, from the logits of the last token that it computes for ``source``.

    Both are the same sequence, except for the samples that are about to be forked from a prompt.
    """

    seq: SeqId
    source: SeqId
    tokens: Prefix


@dataclass(frozen=True)
class Swap:
    """One sequence's table moves between device and host: block ``sources[i]`` to block ``event.blocks[i]``."""

    event: SwapOut | SwapIn
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A step: first the swaps, then the copies, then all writes, then all reads, then the samples."""

    step_id: StepId
    block_size: int
    window: int | None = None
    swaps: tuple[Swap, ...] = ()
    copies: tuple[Copy, ...] = ()
    scheduled: tuple[ScheduledSeq, ...] = ()
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a device did, in its order, and the token that it drew for each sampled sequence."""

    events: tuple[DeviceEvent, ...]
    tokens: Mapping[SeqId, Token]


class Device(Protocol):
    """Whatever runs plans."""

    def run(self, plan: Plan) -> Outcome: ...
