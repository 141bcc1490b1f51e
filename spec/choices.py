"""Choices: what an engine decides once and for all, in its own way, and declares in its profile."""

from dataclasses import dataclass
from enum import Enum


class Publication(Enum):
    """When a block becomes findable. At the schedule, whoever hits it must not read it before it is written;
    after the compute, it is whole from the start."""

    AT_SCHEDULE = "at_schedule"
    AFTER_COMPUTE = "after_compute"


class EvictionOrder(Enum):
    """Which free block is taken first: the one that has been free longest, or any."""

    LRU = "lru"
    ANY = "any"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the states of an engine carry, so that it is judged as it has chosen.

    The first ``num_reserved_blocks`` block ids are its own (padding, a null block): no sequence ever gets one. With
    ``publishes_equal_blocks`` a block is published also when the prefix cache names another one with the same key: tables
    are append-only, and neither block is given up. With ``resets_idle_only`` the prefix cache is emptied only while no
    block at all is in use. With ``runs_in_admission_order`` priorities decide who is admitted and who is preempted, and
    those who run stand in the order in which they were admitted.

    With ``schedules_ahead`` the device is a queue: it runs the steps in the order in which they were submitted, each to its
    end, whatever becomes of their sequences. So a step may compute the token that an earlier one still draws; what a
    sequence gives up while a step is in flight is free at once, since whoever gets it is in a later step; and a request may
    be preempted in flight: it is still given the token that is being drawn, and is admitted again when that step is over.
    """

    publication: Publication = Publication.AFTER_COMPUTE
    eviction_order: EvictionOrder = EvictionOrder.ANY
    num_reserved_blocks: int = 0
    publishes_equal_blocks: bool = False
    resets_idle_only: bool = False
    runs_in_admission_order: bool = False
    schedules_ahead: bool = False


USUAL_CHOICES = Choices()
"""What an engine chooses that says nothing else."""
