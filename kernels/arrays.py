"""Tensors over the memory of other people's arrays."""

import torch
from torch import Tensor


def tensor_of(array: object, dtype: str, *, device: str = "cpu") -> Tensor:
    """The array as a tensor of the type that torch calls ``dtype``, on a CPU without a copy.

    bfloat16 comes as its bits in any type of 16 bits, for libraries that do not have it.
    """
    tensor = torch.as_tensor(array)
    wanted: torch.dtype = getattr(torch, dtype)
    return (tensor if tensor.dtype == wanted else tensor.view(wanted)).to(device)
