"""The signature that every paged attention of this package has."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol, cast, overload

from torch import Tensor

if TYPE_CHECKING:
    from kernels.attention_plan import AttentionPlan


class PagedAttention(Protocol):
    """A tensor; with ``return_lse`` the log-sum-exp beside it."""

    @overload
    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        *,
        scale: float,
        window: int | None = None,
        logit_cap: float | None = None,
        return_lse: Literal[False] = False,
        out: Tensor | None = None,
        plan: "AttentionPlan | None" = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        *,
        scale: float,
        window: int | None = None,
        logit_cap: float | None = None,
        return_lse: Literal[True],
        out: Tensor | None = None,
        plan: "AttentionPlan | None" = None,
        kv_scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


def signed(function: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> PagedAttention:
    """The function itself: its type says that ``return_lse`` decides what comes back, which a union can not."""
    return cast(PagedAttention, function)
