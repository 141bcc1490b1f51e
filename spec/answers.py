"""What an engine answers: whether there is room, and what a step did."""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from spec.vocabulary import Append, Copy, Finish, Preempt, Read, SwapIn, SwapOut, Write


class Admission(Enum):
    """Is there room? Now, later (when others have given blocks back), or never (not even in an empty engine)."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


DeviceEvent: TypeAlias = Write | Read | Copy | SwapOut | SwapIn


@dataclass(frozen=True)
class StepReport:
    """What one step did. ``device`` is in the order in which the device did it."""

    device: tuple[DeviceEvent, ...] = ()
    emitted: tuple[Append, ...] = ()
    preempted: tuple[Preempt, ...] = ()
    finished: tuple[Finish, ...] = ()

    @property
    def writes(self) -> tuple[Write, ...]:
        return tuple(event for event in self.device if isinstance(event, Write))

    @property
    def reads(self) -> tuple[Read, ...]:
        return tuple(event for event in self.device if isinstance(event, Read))

    @property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(event for event in self.device if isinstance(event, Copy))

    @property
    def swaps(self) -> tuple[SwapOut | SwapIn, ...]:
        return tuple(event for event in self.device if isinstance(event, SwapOut | SwapIn))
