"""Triton's interpreter, with its products repaired and its loads watched."""

from typing import Self

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def repair_products() -> None:
    """The interpreter keeps bfloat16 as the bits of a uint16: ``tl.dot`` multiplies those, and a cast cuts bits off.

    And it multiplies by NumPy's library for matrices, in which the order of a sum may depend on the row's place in the tile.
    A GPU has one order for all rows, and so has ``einsum``; in float64, so that a long sum in a row loses no more than one in
    blocks.
    """
    create_dot, cast_impl = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    if hasattr(create_dot, "is_repaired"):
        return

    def dot_of_numbers(self, a, b, d, input_precision, max_num_imprecise_acc):
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return create_dot(self, a, b, d, input_precision, max_num_imprecise_acc)
        numbers = np.einsum("ik,kj->ij", widened(a).data, widened(b).data, dtype=np.float64)
        return TensorHandle(numbers.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def cast_to_nearest(self, source, target):
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return widened(source)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(nearest_bfloat16(source.data), tl.bfloat16)
        return cast_impl(self, source, target)

    dot_of_numbers.is_repaired = True
    InterpreterBuilder.create_dot = dot_of_numbers
    InterpreterBuilder.cast_impl = cast_to_nearest


def widened(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def nearest_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 of each float32, ties to even, as a GPU rounds."""
    bits = np.ascontiguousarray(numbers).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded).astype(np.uint16)


class Watch:
    """Every address that the kernels of a ``with`` block load or store."""

    def __init__(self) -> None:
        self.loads: list[tuple[np.ndarray, int]] = []
        self.stores: list[tuple[np.ndarray, int]] = []
        self.multiplications = 0  # of matrix products, padding included

    def __enter__(self) -> Self:
        self._originals = {
            name: getattr(InterpreterBuilder, name)
            for name in ("create_masked_load", "create_masked_store", "create_dot")
        }

        def create_masked_load(builder, pointers, mask, *rest):
            self.loads.append(addresses(pointers, mask))
            return self._originals["create_masked_load"](builder, pointers, mask, *rest)

        def create_masked_store(builder, pointers, value, mask, *rest):
            self.stores.append(addresses(pointers, mask))
            return self._originals["create_masked_store"](builder, pointers, value, mask, *rest)

        def create_dot(builder, a, b, *rest):
            self.multiplications += a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
            return self._originals["create_dot"](builder, a, b, *rest)

        InterpreterBuilder.create_masked_load = create_masked_load
        InterpreterBuilder.create_masked_store = create_masked_store
        InterpreterBuilder.create_dot = create_dot
        return self

    def __exit__(self, *_) -> None:
        for name, original in self._originals.items():
            setattr(InterpreterBuilder, name, original)

    def read(self, tensor: torch.Tensor) -> np.ndarray:
        """The elements of the tensor's storage that were loaded, once for each load and lane."""
        return within(self.loads, tensor)

    def written(self, tensor: torch.Tensor) -> np.ndarray:
        return within(self.stores, tensor)

    def bytes_moved(self) -> int:
        return sum(len(found) * size for found, size in self.loads + self.stores)


def addresses(pointers: TensorHandle, mask: TensorHandle) -> tuple[np.ndarray, int]:
    live = np.broadcast_to(mask.data, pointers.data.shape)
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    return pointers.data[live].ravel().astype(np.int64), size


def within(accesses: list[tuple[np.ndarray, int]], tensor: torch.Tensor) -> np.ndarray:
    begin, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
    end = begin + tensor.untyped_storage().nbytes()
    found = [each[(each >= begin) & (each < end)] for each, width in accesses if width == size]
    return (np.concatenate(found) - begin) // size if found else np.empty(0, np.int64)
