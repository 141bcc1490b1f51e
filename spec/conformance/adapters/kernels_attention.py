"""The attention kernels of ``kernels``: the CPU twin, the vector kernel, and the Triton kernels, on a GPU or in Triton's interpreter."""

from functools import partial
from typing import Any

from spec.conformance.kernel import AttentionKernel, Offer
from spec.conformance.kernel_oracle import Array


def _convert(array: Array, dtype: str, *, device: str = "cpu") -> object:
    from kernels import tensor_of

    return tensor_of(array, dtype, device=device)


def _attend(name: str, *arguments: object, **options: object) -> tuple[object, object]:
    import kernels

    *tensors, scale = arguments
    attend: Any = getattr(kernels, name)  # Any: one of several functions of torch's tensors
    out, lse = attend(*tensors, scale=scale, return_lse=True, **options)
    return out.float().cpu(), lse.cpu()


def _copy_blocks(name: str, *tensors: object, **scales: object) -> None:
    import kernels

    getattr(kernels, name)(*tensors, **scales)


def _attend_in_vectors(query: Any, key_cache: Any, value_cache: Any, *rest: Any, window: int | None = None) -> object:
    from kernels.cpu.alone import packed_attention
    from kernels.cpu.layout import pack_blocks_for_products
    from kernels.cpu.team import Team

    *indices, scale = rest
    caches = pack_blocks_for_products(key_cache, value_cache)
    return packed_attention(query, *caches, *indices, team=Team(2), scale=scale, window=window).float()


twin = AttentionKernel(
    "kernels.cpu_paged_attention",
    partial(_attend, "cpu_paged_attention"),
    offers=frozenset(Offer),
    dtypes=("float32", "float16", "bfloat16"),
    head_sizes=(32, 64, 80, 96, 112, 128, 256),
    block_sizes=(1, 2, 3, 5, 8, 12, 16, 17, 32, 64),
    groups=(1, 2, 3, 4, 7, 8),
    convert=_convert,
    copy_blocks=partial(_copy_blocks, "cpu_copy_blocks"),
)
vectors = AttentionKernel(
    "kernels.cpu.alone.packed_attention",
    _attend_in_vectors,
    offers=frozenset({Offer.WINDOW, Offer.BATCH_INVARIANT}),
    dtypes=("bfloat16",),
    head_sizes=(16, 32, 64, 80, 96, 112, 128, 256),
    block_sizes=(16, 32, 64),
    groups=twin.groups,
    convert=_convert,
)
"""The vector kernel: Linux, a processor with AVX-512 for bf16, or with AVX2 and FMA."""
triton_interpreted = AttentionKernel(
    "kernels.triton_paged_attention in the interpreter",
    partial(_attend, "triton_paged_attention"),
    offers=frozenset(Offer),
    dtypes=("float32", "float16"),  # the interpreter multiplies the bits of bfloat16
    head_sizes=twin.head_sizes,
    block_sizes=twin.block_sizes,
    groups=twin.groups,
    convert=_convert,
    copy_blocks=partial(_copy_blocks, "triton_copy_blocks"),
)
"""For CPU tensors, with ``TRITON_INTERPRET=1``."""
triton_cuda = AttentionKernel(
    "kernels.triton_paged_attention on a GPU",
    partial(_attend, "triton_paged_attention"),
    offers=frozenset(Offer) - {Offer.NO_COPY},
    dtypes=("bfloat16", "float16", "float32"),
    head_sizes=twin.head_sizes,
    block_sizes=twin.block_sizes,
    groups=twin.groups,
    convert=partial(_convert, device="cuda"),
    copy_blocks=partial(_copy_blocks, "triton_copy_blocks"),
)
