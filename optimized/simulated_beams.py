"""Beam searches with probabilities that are drawn: which beams live on is decided by the real search, on random logits.

A model's logits are not known without the model. Here each beam's are normal and independent, over a small vocabulary, as
wide as makes a next token as uncertain as one with the perplexity that is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

import numpy as np

from optimized.beam_search import BeamSearch, BeamSearchParams
from optimized.device import Sampled
from optimized.engine import EngineCore
from optimized.plan import Plan
from optimized.workload import Arrival, prompt_of
from spec.vocabulary import Config, Request, SeqId

VOCAB_SIZE = 1000


class _DrawnSearch:
    """A device for one search at a time: it gives what the search makes of logits that it draws."""

    def __init__(self, spread: float, seed: int) -> None:
        self.search: BeamSearch | None = None
        self._spread = spread
        self._random = np.random.default_rng(seed)

    def run(self, plan: Plan) -> Sequence[Sampled]:
        search = self.search
        if search is None or not plan.sample_seq_ids:
            return ()
        prompt_is_computed = not search.has_begun  # all beams are about to be forked from one row of logits
        rows = 1 if prompt_is_computed else len(plan.sample_seq_ids)
        drawn = (self._spread * self._random.standard_normal((rows, VOCAB_SIZE))).astype(np.float32)
        logits: dict[SeqId, np.ndarray] = {
            seq_id: drawn[0 if prompt_is_computed else row] for row, seq_id in enumerate(plan.sample_seq_ids)
        }
        chosen = search.choose(logits)
        return [chosen[seq_id] for seq_id in plan.sample_seq_ids]


def spread_of(perplexity: float) -> float:
    """How wide the logits are: normal ones of variance ``v`` have an entropy of about ``log(VOCAB_SIZE) - v / 2``.

    >>> f"{spread_of(10):.2f}"
    '3.03'
    """
    return math.sqrt(2.0 * math.log(VOCAB_SIZE / perplexity))


def saved_by_beams(config: Config, arrivals: Sequence[Arrival], width: int, perplexity: float, seed: int = 0) -> float:
    """The part of the blocks that sharing spares, over all steps, when each request is a search with so many beams.

    One after the other: how much a search shares does not depend on who else runs.
    """
    device, names = _DrawnSearch(spread_of(perplexity), seed), count()
    core = EngineCore(config, device)
    for number, arrival in enumerate(arrivals):
        params = BeamSearchParams(beam_width=width, max_tokens=arrival.output_len, ignore_eos=True)
        seq_ids = tuple(next(names) for _ in range(width))
        device.search = BeamSearch(params, (), seq_ids, lambda: next(names))
        core.add(Request(number, prompt_of(arrival, number), arrival.output_len, seq_ids))
        while core.has_work:
            core.step()
    counters = core.scheduler.counters
    spared = counters.num_spared_block_steps
    return spared / (spared + counters.num_block_steps)
