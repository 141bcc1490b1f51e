"""The device port: whoever computes a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from optimized.plan import Plan
from spec.vocabulary import SeqId, Token


@dataclass(frozen=True)
class Failure:
    """Why there is no token for a sample. Only its request is concerned."""

    reason: str


class PassFailed(RuntimeError):
    """The blocks of a plan are moved, and what was to be computed was not (``__cause__``): it may be tried again in parts."""


@dataclass(frozen=True)
class Branches:
    """A sequence goes on in several ways, or in none: it ends if there is none, and all but the first are forked from it.

    The first has its own id, the others new ones.
    """

    tokens: tuple[tuple[SeqId, Token], ...]


Sampled: TypeAlias = Token | Failure | Branches


class Device(Protocol):
    """Does what the plan says, in the order that ``Plan`` states."""

    def run(self, plan: Plan) -> Sequence[Sampled]:
        """What each row of ``plan.sample_rows`` gives, in that order."""
        ...
