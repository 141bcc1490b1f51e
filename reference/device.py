"""The device that computes nothing: it says what it was told to write and read, and asks a token source for tokens."""

from collections.abc import Iterator

from reference.plan import Outcome, Plan, ScheduledSeq
from reference.pool import slots_of
from spec.engine import DeviceEvent, TokenSource
from spec.vocabulary import Read, Write


def first_visible(position: int, window: int | None) -> int:
    """The first position that the token at ``position`` sees: with a window it sees that many, itself included."""
    return 0 if window is None else max(0, position - window + 1)


def write_of(scheduled: ScheduledSeq) -> Write:
    """Where the K and V of the sequence's tokens go: the slot mapping."""
    return Write(scheduled.seq, scheduled.start, scheduled.slot_mapping)


def read_of(scheduled: ScheduledSeq, block_size: int, window: int | None) -> Read:
    """What the attention of the sequence's tokens reads: through the block table, from the first visible position."""
    start = first_visible(scheduled.start, window)
    slots = slots_of(scheduled.block_table, scheduled.first_kept, start, scheduled.stop, block_size)
    return Read(scheduled.seq, slots, start)


def device_events(plan: Plan) -> Iterator[DeviceEvent]:
    """Everything that a step does to the cache, in order."""
    yield from (swap.event for swap in plan.swaps)
    yield from plan.copies
    yield from (write_of(scheduled) for scheduled in plan.scheduled)
    yield from (read_of(scheduled, plan.block_size, plan.window) for scheduled in plan.scheduled)


class TokenSourceDevice:
    """Runs plans without a model."""

    def __init__(self, token_source: TokenSource) -> None:
        self.token_source = token_source

    def run(self, plan: Plan) -> Outcome:
        tokens = {sample.seq: self.token_source(sample.seq, sample.tokens) for sample in plan.samples}
        return Outcome(tuple(device_events(plan)), tokens)
