"""Tokens drawn where the logits are, by a kernel: a row of logits does not leave the GPU for one number.

It is the sampler of ``optimized.sampling``, but for the border of ``top_p``: ``kernels.sampling_kernel`` adds weights up as
integers, in any order, and that of the definition as floats. The two can part only where a sum is within rounding of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import NO_TOKEN, draw_tokens
from optimized.sampling import Draw


def can_draw(draw: Draw) -> bool:
    """Whether the kernel knows all that this draw depends on, and nobody asks for more than a token."""
    return draw.params.is_memoryless and draw.params.logprobs is None


def drawn(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """A token for each row of logits ``[num_samples, vocab_size]``; None where its numbers leave none."""
    params = [draw.params for draw in draws]
    floats = [
        [each.temperature for each in params],
        [math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in params],
        [each.top_p for each in params],
    ]
    keys = torch.tensor([draw.key for draw in draws], dtype=torch.uint64).view(torch.int64)
    whole = torch.stack((torch.tensor([max(each.top_k, 0) for each in params]), keys)).to(logits.device)
    temperatures, log_min_ps, top_ps = torch.tensor(floats, dtype=torch.float64, device=logits.device)
    tokens = draw_tokens(logits, temperatures, log_min_ps, whole[0], top_ps, whole[1]).tolist()
    return [None if token == NO_TOKEN else token for token in tokens]
