"""The launcher of the Triton kernel that draws tokens."""

import torch
from torch import Tensor

from kernels.launching import check_device
from kernels.sampling_arguments import check_draw
from kernels.sampling_kernel import draw_tokens_kernel
from kernels.tile_shape import DRAW_TILE, SEARCH_TILE, power_of_two


def triton_draw_tokens(
    logits: Tensor, temperatures: Tensor, log_min_ps: Tensor, top_ks: Tensor, top_ps: Tensor, keys: Tensor
) -> Tensor:
    """``draw_tokens`` by a Triton kernel."""
    check_draw(logits, temperatures, log_min_ps, top_ks, top_ps, keys)
    check_device("logits", logits)
    num_samples, vocab_size = logits.shape
    out = torch.empty(num_samples, dtype=torch.int64, device=logits.device)
    if num_samples:
        draw_tokens_kernel[(num_samples,)](
            out,
            logits,
            temperatures,
            log_min_ps,
            top_ks,
            top_ps,
            keys,
            logits.stride(0),
            vocab_size,
            TILE=min(DRAW_TILE, power_of_two(vocab_size)),
            SEARCH_TILE=min(SEARCH_TILE, power_of_two(vocab_size)),
            num_warps=8,
            enable_fp_fusion=True,
        )
    return out
