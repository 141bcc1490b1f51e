"""What changes a row of logits before a token is drawn from it: what may not come, what is wanted, what repeats.

With the logits of one row widened to float64, in this order; each step is there only if its parameter is:

1. ``allowed_token_ids``: every other token is out, which is to say its logit is -inf. So is, with
   ``structured_outputs``, every token that the grammar does not allow after the output so far.
2. ``bad_words``: a token is out if it is the last of a bad word's tokens and the output ends with those before it.
3. ``min_tokens``: as long as the output has fewer tokens, the tokens that would end it are out.
4. ``logit_bias``: the bias of a token is added to its logit.
5. ``repetition_penalty`` r: of each token that the prompt or the output has, a logit above 0 is divided by r, another
   one multiplied.
6. ``frequency_penalty`` and ``presence_penalty``: of each token that the output has, the first times how often, and the
   second once, are taken off.

Names, order and meaning are vLLM's. Prompt and output are those of the one sequence: no neighbour has a part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from optimized.sampling import Draw, SamplingParams

Floats = npt.NDArray[np.float64]


def is_adjusting(params: SamplingParams) -> bool:
    """Whether these parameters change logits at all."""
    return bool(
        params.allowed_token_ids is not None
        or params.bad_words
        or params.min_tokens
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.structured_outputs is not None
    )


def adjusted(logits: npt.NDArray[np.float32], draw: Draw) -> Floats:
    """The logits ``[vocab_size]`` that a token is drawn from. O(vocabulary + tokens of the sequence)."""
    params, x = draw.params, logits.astype(np.float64)
    output = draw.tokens[draw.num_prompt_tokens :]
    if params.allowed_token_ids is not None:
        x = _only(x, params.allowed_token_ids)
    if draw.progress is not None:
        x[~draw.progress.allowed(output)] = -np.inf
    for word in draw.bad_words:
        if len(word) == 1 or tuple(output[-len(word) + 1 :]) == word[:-1]:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(draw.end_token_ids)] = -np.inf
    for token, bias in params.biases:
        x[token] += bias
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array(draw.tokens, np.int64))
        x[seen] = np.where(x[seen] > 0.0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        seen, counts = np.unique(np.array(output, np.int64), return_counts=True)
        x[seen] -= params.frequency_penalty * counts + params.presence_penalty
    return x


def _only(x: Floats, token_ids: Sequence[int]) -> Floats:
    allowed = list(token_ids)
    kept = np.full_like(x, -np.inf)
    kept[allowed] = x[allowed]
    return kept
