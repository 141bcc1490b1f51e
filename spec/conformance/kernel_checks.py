"""What level L4 asks of a kernel: named cases, each with its judge, and any case that the kernel declares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from hypothesis import strategies as st

from spec.conformance.kernel import (
    AttentionKernel,
    Offer,
    judge_copies,
    judge_huge_ids,
    judge_invariance,
    judge_numbers,
    judge_reads,
)
from spec.conformance.kernel_case import Case


@dataclass(frozen=True)
class Check:
    """One thing that is asked of a kernel, if it declares what that needs."""

    judge: Callable[[AttentionKernel, Case], None]
    case: Callable[[AttentionKernel], Case]
    offers: tuple[Offer, ...] = ()

    def missing(self, kernel: AttentionKernel) -> str | None:
        """Why the kernel is not asked."""
        lacking = [offer.name for offer in self.offers if not kernel.can(offer)]
        return f"{kernel.name} does not declare {' and '.join(lacking)}" if lacking else None

    def __call__(self, kernel: AttentionKernel) -> None:
        """Raises ``RuleViolation``, and ``KernelFault`` if the kernel gives no answer."""
        self.judge(kernel, self.case(kernel))


def small(kernel: AttentionKernel, *, rows: tuple[tuple[int, int], ...], **more: object) -> Case:
    """A few blocks of the kernel's own shape nearest to 4 tokens. ``rows`` says for each sequence its queries and by how
    many keys it is longer or shorter than two blocks."""
    size = min(kernel.block_sizes, key=lambda each: abs(each - 4))
    lens = tuple(max(queries, 2 * size + more_keys) for queries, more_keys in rows)
    case = Case(tuple(queries for queries, _ in rows), lens, kernel.dtypes[0], size, 1, 1, kernel.head_sizes[0])
    return replace(case, **more)  # type: ignore[arg-type]  # the fields of a case


def simple(kernel: AttentionKernel, **more: object) -> Case:
    """A decode and the end of a prefill, in the kernel's largest block and group."""
    size, group = max(kernel.block_sizes), max(kernel.groups)
    case = Case((1, 3), (2 * size + 5, 9), kernel.dtypes[0], size, group, 2, kernel.head_sizes[0])
    return replace(case, **more)  # type: ignore[arg-type]  # the fields of a case


READS: Mapping[str, Check] = {
    "decode": Check(
        judge_reads, lambda kernel: small(kernel, rows=((1, -1), (1, 0)), num_kv_heads=2, group=kernel.groups[-1])
    ),
    "prefill": Check(judge_reads, partial(small, rows=((6, -2), (3, -3)))),
    "shared-blocks": Check(judge_reads, partial(small, rows=((1, -2), (2, -1)), num_shared=1)),
    "window": Check(judge_reads, partial(small, rows=((1, -1), (3, -2)), window=3), (Offer.WINDOW,)),
    "fp8": Check(judge_reads, partial(small, rows=((1, -1), (3, -2)), fp8=True), (Offer.FP8,)),
}
"""Found out slot by slot."""

NUMBERS: Mapping[str, Check] = {
    "empty-set": Check(judge_numbers, partial(simple, query_lens=(1, 1), seq_lens=(0, 9))),
    "smallest-block": Check(judge_numbers, lambda kernel: simple(kernel, block_size=min(kernel.block_sizes))),
    "largest-block": Check(judge_numbers, simple),
    "largest-head": Check(judge_numbers, lambda kernel: simple(kernel, head_size=max(kernel.head_sizes))),
    "long": Check(judge_numbers, partial(simple, query_lens=(1, 1), seq_lens=(2077, 3), num_kv_heads=1)),
    "sharp": Check(judge_numbers, partial(simple, magnitude=1000.0)),
    "infinite-poison": Check(judge_numbers, partial(simple, poison=np.inf)),
    "views": Check(judge_numbers, partial(simple, is_interleaved=True), (Offer.NO_COPY,)),
    **{
        f"window-{window}": Check(judge_numbers, partial(simple, window=window), (Offer.WINDOW,))
        for window in (1, 2, 15, 16, 17)
    },
    **{
        f"cap-{cap:g}": Check(judge_numbers, partial(simple, logit_cap=cap, magnitude=10.0), (Offer.LOGIT_CAP,))
        for cap in (0.5, 30.0, 1000.0)
    },
    "fp8": Check(judge_numbers, partial(simple, fp8=True), (Offer.FP8,)),
    "huge-pool": Check(
        judge_huge_ids, lambda kernel: small(kernel, rows=(), dtype=kernel.dtypes[-1]), (Offer.NO_COPY,)
    ),
}
"""Held against float64."""

BITS: Mapping[str, Check] = {
    name: Check(judge_invariance, partial(simple, query_lens=lens, seq_lens=(45, 20, 33), fp8=name == "fp8"), offers)
    for name, lens, offers in (
        ("decode", (1, 1, 1), (Offer.BATCH_INVARIANT,)),
        ("prefill", (9, 4, 2), (Offer.BATCH_INVARIANT,)),
        ("mixed", (1, 9, 1), (Offer.BATCH_INVARIANT,)),
        ("fp8", (1, 9, 1), (Offer.BATCH_INVARIANT, Offer.FP8)),
    )
}
"""The same, bit for bit, wherever it lies and whoever is beside it."""

COPIES: Mapping[str, Check] = {
    "copies": Check(judge_copies, partial(small, rows=((1, -1),), num_kv_heads=2), (Offer.COPY,)),
    "fp8-copies": Check(
        judge_copies, partial(small, rows=((1, -1),), num_kv_heads=2, fp8=True), (Offer.COPY, Offer.FP8)
    ),
}
"""Through blocks that were copied."""


@st.composite
def cases(draw: st.DrawFn, kernel: AttentionKernel) -> Case:
    """Any tables within what the kernel declares; small ones first."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 2, 5, 20])), min_size=1, max_size=4))
    return Case(
        query_lens=tuple(min(num_queries, max(length, 1)) for length, num_queries in sizes),
        seq_lens=tuple(length for length, _ in sizes),
        dtype=draw(st.sampled_from(kernel.dtypes)),
        block_size=draw(st.sampled_from(kernel.block_sizes)),
        group=draw(st.sampled_from(kernel.groups)),
        num_kv_heads=draw(st.integers(1, 2)),
        head_size=draw(st.sampled_from(kernel.head_sizes)),
        window=draw(st.sampled_from([None, None, 1, 7, 40])) if kernel.can(Offer.WINDOW) else None,
        logit_cap=draw(st.sampled_from([None, None, 2.0, 50.0])) if kernel.can(Offer.LOGIT_CAP) else None,
        num_shared=draw(st.integers(0, 2)),
        aliases=tuple(draw(st.lists(st.integers(1, 12), max_size=4))),
        is_interleaved=draw(st.booleans()) if kernel.can(Offer.NO_COPY) else False,
        magnitude=draw(st.sampled_from([1.0, 1.0, 20.0])),
        poison=draw(st.sampled_from([np.nan, np.inf, -np.inf, 3e4])),
        seed=draw(st.integers(0, 2**16)),
        fp8=draw(st.booleans()) if kernel.can(Offer.FP8) else False,
    )
