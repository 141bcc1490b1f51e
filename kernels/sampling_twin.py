"""Tokens drawn on the CPU, in torch."""

import torch
from torch import Tensor

from kernels.arguments import demand
from kernels.sampling_arguments import NO_TOKEN, check_draw


def signed(bits: int) -> int:
    """The int64 that has these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


FIRST_FACTOR, SECOND_FACTOR = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)
GOLDEN = signed(0x9E3779B97F4A7C15)
WEIGHT = 2.0**40  # of the likeliest token


def cpu_draw_tokens(
    logits: Tensor, temperatures: Tensor, log_min_ps: Tensor, top_ks: Tensor, top_ps: Tensor, keys: Tensor
) -> Tensor:
    """``draw_tokens`` for CPU tensors."""
    check_draw(logits, temperatures, log_min_ps, top_ks, top_ps, keys)
    demand("logits", "device", logits.device.type, "cpu")
    if len(logits) == 0:
        return torch.empty(0, dtype=torch.int64)
    is_greedy = (temperatures == 0.0)[:, None]
    scaled = logits.double() / torch.where(is_greedy, 1.0, temperatures[:, None])
    largest = scaled.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[1])
    score = scaled + torch.where(is_greedy, 0.0, _gumbel(keys[:, None], ids))
    stays = scaled >= largest + log_min_ps[:, None]
    if bool((top_ks > 0).any()) or bool((top_ps < 1.0).any()):
        stays &= is_greedy | _likeliest(scaled - largest, stays, top_ks[:, None], top_ps[:, None])
    score = score.masked_fill(~stays, float("-inf"))
    is_bad = ~largest[:, 0].isfinite()
    return score.argmax(-1).masked_fill(is_bad, NO_TOKEN)  # of equal numbers argmax takes the first


def _likeliest(below: Tensor, is_left: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Which tokens top_k and top_p leave, by the integer weights of ``kernels.sampling_kernel``: no sum is rounded."""
    ranked, order = below.sort(dim=-1, descending=True, stable=True)  # of equal numbers the lowest id first
    is_left = is_left.gather(-1, order)
    is_left &= (top_ks == 0) | (torch.arange(order.shape[-1]) < top_ks)
    weights = torch.where(is_left, ranked.exp() * WEIGHT, 0.0).nan_to_num(0.0).long()
    sums = weights.cumsum(-1)
    limit = (top_ps * sums[:, -1:].double()).ceil().long().clamp(min=1)
    is_left &= (top_ps == 1.0) | (sums - weights < limit)
    return torch.zeros_like(is_left).scatter(-1, order, is_left)


def _gumbel(key: Tensor, ids: Tensor) -> Tensor:
    """int64 arithmetic is modulo 2^64 too; only the shifts must not spread the sign."""
    z = key + (ids + 1) * GOLDEN
    z = (z ^ _shifted(z, 30)) * FIRST_FACTOR
    z = (z ^ _shifted(z, 27)) * SECOND_FACTOR
    z = z ^ _shifted(z, 31)
    uniform = (_shifted(z, 12).double() + 0.5) / 2.0**52
    return -(-uniform.log()).log()


def _shifted(bits: Tensor, places: int) -> Tensor:
    return (bits >> places) & ((1 << (64 - places)) - 1)
