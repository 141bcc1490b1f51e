"""What the launchers of ``kernels.sampling`` demand of their arguments."""

import math

import torch
from torch import Tensor

from kernels.arguments import BadArgument, check_index, demand, values_are_checked

NO_TOKEN = -1  # drawn for a row that has a NaN, or whose largest number is infinite


def check_draw(
    logits: Tensor, temperatures: Tensor, log_min_ps: Tensor, top_ks: Tensor, top_ps: Tensor, keys: Tensor
) -> None:
    demand("logits", "rank", logits.dim(), 2)
    demand("logits", "dtype", logits.dtype, torch.float32)
    demand("logits", "last stride", logits.stride(1), 1)
    if logits.shape[1] == 0:
        raise BadArgument("logits", "vocab_size", 0, "at least 1")
    for argument, tensor, dtype in (
        ("temperatures", temperatures, torch.float64),
        ("log_min_ps", log_min_ps, torch.float64),
        ("top_ks", top_ks, torch.int64),
        ("top_ps", top_ps, torch.float64),
        ("keys", keys, torch.int64),
    ):
        check_index(argument, tensor, 1, dtype, logits.device)
        demand(argument, "length", len(tensor), len(logits))
    if values_are_checked() and len(logits):
        lowest, highest = float(temperatures.min()), float(temperatures.max())
        if not (lowest >= 0.0 and highest < math.inf):
            raise BadArgument("temperatures", "range", (lowest, highest), "finite numbers from 0")
        if not float(log_min_ps.max()) <= 0.0:
            raise BadArgument("log_min_ps", "largest entry", float(log_min_ps.max()), "at most 0, the logarithm of 1")
        if int(top_ks.min()) < 0:
            raise BadArgument("top_ks", "smallest entry", int(top_ks.min()), "at least 0, which keeps all")
        lowest, highest = float(top_ps.min()), float(top_ps.max())
        if not 0.0 < lowest <= highest <= 1.0:
            raise BadArgument("top_ps", "range", (lowest, highest), "more than 0 and at most 1")
