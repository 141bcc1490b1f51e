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
    """What the states of an engine carry, so that it is judged as it has chosen. The first ``num_reserved_blocks`` block
    ids are its own (padding, a null block): no sequence ever gets one."""

    publication: Publication = Publication.AFTER_COMPUTE
    eviction_order: EvictionOrder = EvictionOrder.ANY
    num_reserved_blocks: int = 0


USUAL_CHOICES = Choices()
"""What an engine chooses that says nothing else."""
