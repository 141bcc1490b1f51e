"""The device port: whoever computes a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from optimized.plan import Plan
from spec.vocabulary import Token


@dataclass(frozen=True)
class Failure:
    """Why there is no token for a sample. Only its request is concerned."""

    reason: str


Sampled: TypeAlias = Token | Failure


class Device(Protocol):
    """Does what the plan says, in the order that ``Plan`` states."""

    def run(self, plan: Plan) -> Sequence[Sampled]:
        """What each row of ``plan.sample_rows`` gives, in that order."""
        ...
