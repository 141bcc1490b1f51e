"""What the launchers of ``kernels.layer`` demand of their arguments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.arguments import DTYPES, BadArgument, check_index, check_places, check_write, demand

MAX_HIDDEN_SIZE = 1 << 15  # one program holds a row


@dataclass(frozen=True)
class QKNorm:
    """RMS norms of each head of Q and of K, before they are rotated."""

    query_weight: Tensor  # [head_size]
    key_weight: Tensor  # [head_size]
    eps: float


def check_rows(argument: str, tensor: Tensor, like: Tensor | None = None) -> None:
    """``[num_tokens, size]``, of one of the types, with contiguous rows."""
    demand(argument, "rank", tensor.dim(), 2)
    if tensor.dtype not in DTYPES:
        raise BadArgument(argument, "dtype", tensor.dtype, f"one of {DTYPES}")
    demand(argument, "last stride", tensor.stride(1), 1)
    if like is not None:
        demand(argument, "shape", tuple(tensor.shape), tuple(like.shape))
        demand(argument, "dtype", tensor.dtype, like.dtype)
        demand(argument, "device", tensor.device, like.device)


def check_norm(hidden: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    check_rows("hidden", hidden)
    if hidden.shape[1] > MAX_HIDDEN_SIZE:
        raise BadArgument("hidden", "hidden_size", hidden.shape[1], f"at most {MAX_HIDDEN_SIZE}")
    check_weight("weight", weight, hidden.shape[1], hidden.device)
    if residual is not None:
        check_rows("residual", residual, hidden)


def check_weight(argument: str, weight: Tensor, size: int, device: torch.device) -> None:
    demand(argument, "shape", tuple(weight.shape), (size,))
    if weight.dtype not in DTYPES:
        raise BadArgument(argument, "dtype", weight.dtype, f"one of {DTYPES}")
    demand(argument, "device", weight.device, device)
    demand(argument, "last stride", weight.stride(0), 1)


def check_rotate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    rotation: Tensor,
    norm: QKNorm | None,
    kv_scales: Tensor | None,
) -> None:
    check_write(key, value, key_cache, value_cache, slot_mapping, kv_scales)
    demand("query", "rank", query.dim(), 3)
    demand("query", "num_tokens", query.shape[0], key.shape[0])
    demand("query", "head_size", query.shape[2], key.shape[2])
    demand("query", "dtype", query.dtype, key.dtype)
    demand("query", "device", query.device, key.device)
    demand("query", "last stride", query.stride(2), 1)
    check_places("query", query)
    check_index("positions", positions, 1, torch.int64, key.device)
    demand("positions", "length", positions.shape[0], key.shape[0])
    demand("rotation", "rank", rotation.dim(), 3)
    demand("rotation", "dtype", rotation.dtype, torch.float32)
    demand("rotation", "device", rotation.device, key.device)
    demand("rotation", "second axis", rotation.shape[1], 2)
    demand("rotation", "contiguity", rotation.is_contiguous(), True)
    if not 0 < 2 * rotation.shape[2] <= key.shape[2]:
        raise BadArgument("rotation", "rotary_size", 2 * rotation.shape[2], f"2 to head_size {key.shape[2]}")
    if norm is not None:
        check_weight("norm.query_weight", norm.query_weight, key.shape[2], key.device)
        check_weight("norm.key_weight", norm.key_weight, key.shape[2], key.device)


def check_position_values(positions: Tensor, max_position: int) -> None:
    if positions.numel() == 0:
        return
    lowest, highest = (int(bound) for bound in positions.aminmax())
    if lowest < 0 or highest >= max_position:
        found = lowest if lowest < 0 else highest
        raise BadArgument("positions", "position", found, f"0 to {max_position - 1}")
