"""The oracle of ``spec.conformance.kernel_oracle``, for tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec.conformance import kernel_oracle
from spec.conformance.kernel_oracle import Call, Exact


@dataclass(frozen=True)
class Batch:
    """The tensors of one call of ``paged_attention``."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor

    def __iter__(self):
        return iter((self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens, self.query_start))

    @property
    def query_lens(self) -> list[int]:
        return self.query_start.diff().tolist()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kept(tensor: Tensor):
    """The array that ``kernel_oracle`` keeps for a tensor, without a copy."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def dense(batch, *, scale, window=None, logit_cap=None, dtype=torch.float64) -> Exact:
    call = Call(*map(kept, batch), scale, name_of(batch.query.dtype), window, logit_cap)
    return kernel_oracle.dense(call, name_of(dtype))


def half_ulp(dtype: torch.dtype, size: float) -> float:
    return kernel_oracle.half_ulp(name_of(dtype), size)


def kernel_bound(exact: Exact, own: Exact, dtype: torch.dtype) -> float:
    return kernel_oracle.kernel_bound(exact, own, name_of(dtype))


lse_bound = kernel_oracle.lse_bound


def max_error(found: Tensor, exact) -> float:
    return kernel_oracle.max_error(found.double().numpy(), exact.double().numpy() if torch.is_tensor(exact) else exact)


def largest(tensor: Tensor) -> float:
    return kernel_oracle.largest(tensor.double().numpy())
