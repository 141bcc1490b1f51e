"""A step: what is kept of it while it is in flight, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optimized.device import Failure
from optimized.plan import BlockCopy, Plan, Swap
from optimized.sequences import LiveSeq
from spec.vocabulary import BlockId, FinishReason, RequestId, SeqId, StepId, Token

if TYPE_CHECKING:
    from optimized.sampling import Logprob


_NOT_YET = Plan(-1)


@dataclass(slots=True)
class StepInFlight:
    """A step between ``schedule`` and ``commit``."""

    step_id: StepId
    budget: int
    scheduled: list[LiveSeq] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """How many tokens it computes of each."""
    num_decodes: int | None = None
    """How many of the first ones compute exactly their last token; None while all do."""
    copies: list[BlockCopy] = field(default_factory=list)
    holds: list[BlockId] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    num_hit_tokens: dict[SeqId, int] = field(default_factory=dict)
    """Of those that began with what the prefix cache has."""
    plan: Plan = _NOT_YET
    gone: set[SeqId] = field(default_factory=set)
    """Scheduled sequences that have ended since. Nobody else has their ids before the step is over."""
    is_torn: bool = False
    """Whether a sequence has ended since that the plan may name."""


@dataclass(slots=True)
class Outcome:
    """What a commit made of a step's tokens. ``seq_ids[i]`` got ``tokens[i]``."""

    seq_ids: Sequence[SeqId] = ()
    tokens: Sequence[Token] = ()
    preempted: Sequence[RequestId] = ()
    scheduled: Sequence[SeqId] = ()
    """Sequences for which something was computed, whether they got a token or not."""
    num_hit_tokens: Mapping[SeqId, int] = field(default_factory=dict)
    """How many tokens a sequence that was admitted found in the prefix cache, if it found some."""
    forked: list[tuple[SeqId, SeqId]] = field(default_factory=list)
    """Parents and children; the children got their tokens of this step too."""
    finished: list[tuple[SeqId, FinishReason]] = field(default_factory=list)
    failed: list[tuple[RequestId, Failure]] = field(default_factory=list)
    """Requests that ended because the device had no token for one of their sequences."""
    logprobs: Mapping[SeqId, dict[Token, Logprob]] = field(default_factory=dict)
    """What the model thought of the tokens, where that was asked for."""
    prompt_logprobs: Mapping[SeqId, dict[int, dict[Token, Logprob]]] = field(default_factory=dict)
    """What it thought of the tokens of prompts, by position."""
    device_seconds: float = field(default=0.0, compare=False)
    """How long the step was on the device."""
