"""The binaries that the launchers can ask for, and how each launcher calls its kernel.

The launchers themselves need tensors; ``call_of`` says the same without any, and a test compares the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels import attention_kernel, cache_kernel, layer_kernel, sampling_kernel
from kernels.attention_launch import PRECISION
from kernels.fp8 import NATIVE, SCALE_BYTES, largest_bits
from kernels.layer_launch import norm_warps
from kernels.tile_shape import (
    ARCHITECTURES,
    COPY_TILE,
    DRAW_TILE,
    GATE_TILE,
    SEARCH_TILE,
    TileShape,
    power_of_two,
    tile_shapes,
    write_warps,
)

ATTENTION = ("decode", "prefill")
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 192, 256)
GROUPS = (*range(1, 9), 16, 32)
"""Query heads of a KV head."""
MOVES = ("write_kv", "copy_blocks", "pack_blocks", "unpack_blocks")
LAYER = ("rms_norm", "add_rms_norm", "silu_mul", "rotate_write", "rotate_write_norm", "draw_tokens")


@dataclass(frozen=True)
class Configuration:
    """One binary that a launcher can ask for."""

    target: str
    kernel: str  # one of ATTENTION, MOVES, LAYER, or merge
    head_size: int = 128
    block_size: int = 16
    group: int = 4
    num_kv_heads: int = 8
    dtype: str = "bfloat16"
    window: bool = False
    logit_cap: bool = False
    lse: bool = False
    fp8: bool = False  # the cache; dtype is that of the query


def small_set() -> list[Configuration]:
    """Both shapes on every target, in seconds."""
    return [Configuration(target, kernel) for target in ARCHITECTURES for kernel in ATTENTION]


def covering_set() -> list[Configuration]:
    """Every head size, group, type and option at least once on every target, in minutes."""
    made = []
    for target in ARCHITECTURES:
        for kernel in ATTENTION:
            made += [
                Configuration(target, kernel, head_size=64),
                Configuration(target, kernel, head_size=128),
                Configuration(target, kernel, head_size=128, block_size=1, group=8, dtype="float16", window=True),
                Configuration(
                    target, kernel, head_size=128, block_size=5, group=3, window=True, logit_cap=True, lse=True
                ),
                Configuration(target, kernel, head_size=32, block_size=5, group=1, logit_cap=True),
                Configuration(target, kernel, head_size=80, block_size=256, group=7, lse=True),
                Configuration(target, kernel, head_size=96, block_size=64, group=32, dtype="float16", lse=True),
                Configuration(target, kernel, head_size=112, block_size=48, group=16, window=True),
                Configuration(target, kernel, head_size=192, block_size=32, group=2, window=True, lse=True),
                Configuration(target, kernel, head_size=256, block_size=8, group=4, window=True, logit_cap=True),
                Configuration(target, kernel, head_size=64, group=3, dtype="float32", window=True),
            ]
            made.append(Configuration(target, kernel, fp8=True))
        made += [Configuration(target, "decode", group=48, lse=True)]
        made += [Configuration(target, "merge", head_size=256)]
        with_fp8 = ("unpack_blocks", "rotate_write")  # others beside them do the same with other numbers
        made += [Configuration(target, kernel, fp8=kernel in with_fp8) for kernel in MOVES + LAYER]
        made.append(Configuration(target, "write_kv", head_size=80, num_kv_heads=3, fp8=True))
    return made


def engine_set() -> list[Configuration]:
    """Attention as an engine can ask for it: every head size with every group, and each option of an engine beside them.

    No engine of ours asks for a cap or a log-sum-exp, and a block size changes addresses only: the covering set has those.
    """
    options: list[dict[str, Any]] = [{}, {"window": True}, {"fp8": True}, {"dtype": "float16"}]
    return [
        Configuration(target, kernel, head_size=head_size, group=group, **each)
        for target in ARCHITECTURES
        for kernel in ATTENTION
        for head_size in HEAD_SIZES
        for group in GROUPS
        for each in (options if head_size in (64, 128) else options[:1])
    ]


class FakeTensor:
    """All that the launcher's binder asks of a tensor: its type, its alignment and its span."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0

    def ptr_range(self) -> int:
        return 1 << 40  # AMD: a pool beyond 2 GiB takes no 32-bit buffer loads


def shape_of(configuration: Configuration) -> TileShape:
    dtype = getattr(torch, configuration.dtype)
    shapes = tile_shapes(
        configuration.target,
        head_size=configuration.head_size,
        group=configuration.group,
        dtype=dtype,
        is_fp8=configuration.fp8,
    )
    return shapes.prefill if configuration.kernel == "prefill" else shapes.decode


@dataclass(frozen=True)
class Call:
    """What a launcher hands to Triton. A kernel is untyped, as Triton is."""

    kernel: Any
    arguments: Sequence[object]
    constants: Mapping[str, object]
    options: Mapping[str, int | bool]


def call_of(c: Configuration, shape: TileShape | None = None) -> Call:
    """The launcher's call for contiguous tensors."""
    if c.kernel in ATTENTION or c.kernel == "merge":
        return _attention_call(c, shape or shape_of(c))
    return _move_call(c) if c.kernel in MOVES else _layer_call(c)


@dataclass(frozen=True)
class _Tensors:
    """Stand-ins for the tensors of a configuration, and their strides."""

    c: Configuration

    @property
    def data(self) -> FakeTensor:
        return FakeTensor(getattr(torch, self.c.dtype))

    @property
    def cache_data(self) -> FakeTensor:
        return FakeTensor(torch.uint8) if self.c.fp8 else self.data

    def scales(self, dtype: torch.dtype, instead: FakeTensor) -> FakeTensor:
        return FakeTensor(dtype) if self.c.fp8 else instead

    @property
    def scale_bytes(self) -> int:
        """Of a block."""
        return self.c.block_size * self.c.num_kv_heads * SCALE_BYTES if self.c.fp8 else 0

    @property
    def query_strides(self) -> list[int]:
        return [self.c.num_kv_heads * self.c.group * self.c.head_size, self.c.head_size]

    @property
    def key_strides(self) -> list[int]:
        return [self.c.num_kv_heads * self.c.head_size, self.c.head_size]

    @property
    def cache_strides(self) -> list[int]:
        return [self.c.block_size * self.c.num_kv_heads * self.c.head_size, *self.key_strides]

    @property
    def encoding(self) -> dict[str, object]:
        return {"IS_FP8": self.c.fp8, "LARGEST": largest_bits(getattr(torch, self.c.dtype))}

    @property
    def cache(self) -> dict[str, object]:
        return {"num_kv_heads": self.c.num_kv_heads, "head_size": self.c.head_size, "block_size": self.c.block_size}


FLOAT32, FLOAT64 = FakeTensor(torch.float32), FakeTensor(torch.float64)
INT32, INT64 = FakeTensor(torch.int32), FakeTensor(torch.int64)
VOCAB_SIZE = 49152
FUSION: dict[str, int | bool] = {"enable_fp_fusion": True}  # said, as its default is about to change


def _attention_call(c: Configuration, shape: TileShape) -> Call:
    t = _Tensors(c)
    common: dict[str, object] = {
        "group": c.group,
        "head_size": c.head_size,
        "HEAD": power_of_two(c.head_size),
        "ROWS": shape.rows,
        "HAS_LSE": c.lse,
    }
    if c.kernel == "merge":
        arguments = [t.data, FLOAT32, FLOAT32, FLOAT32, INT32, *t.query_strides]
        return Call(attention_kernel.merge_splits_kernel, arguments, common | {"GROUP": power_of_two(c.group)}, FUSION)
    constants = common | {
        "block_size": c.block_size,
        "TILE_TOKENS": shape.tile_tokens,
        "SPLIT_TOKENS": shape.split_tokens,
        "HAS_CAP": c.logit_cap,
        "HAS_WINDOW": c.window,
        "IS_FP8": c.fp8,
        "IS_NATIVE": c.fp8 and c.target in NATIVE,
        "PRECISION": PRECISION,
    }
    scales = t.scales(torch.int32, t.data)
    arguments = [
        t.data,
        FLOAT32,
        FLOAT32,
        FLOAT32,
        t.data,
        t.cache_data,
        t.cache_data,
        scales,
        INT32,
        INT32,
        INT32,
        INT32,
    ]
    arguments += [0.1, 30.0, 4096, *t.query_strides, *t.query_strides, *t.cache_strides, 1024]
    options = FUSION | shape.options
    return Call(attention_kernel.paged_attention_kernel, arguments, constants, options)


def _move_call(c: Configuration) -> Call:
    t = _Tensors(c)
    if c.kernel == "write_kv":
        arguments = [t.data, t.data, t.cache_data, t.cache_data, t.scales(torch.int32, INT64), INT64, 1 << 20]
        arguments += [*t.key_strides, *t.key_strides, *t.cache_strides, *t.cache_strides]
        constants = t.cache | {"HEADS": power_of_two(c.num_kv_heads), "HEAD": power_of_two(c.head_size)} | t.encoding
        options = FUSION | {"num_warps": write_warps(c.num_kv_heads, c.head_size)}
        return Call(cache_kernel.write_kv_kernel, arguments, constants, options)
    moved: dict[str, object] = {"TILE": COPY_TILE, "SCALE_BYTES": t.scale_bytes}
    if c.kernel == "copy_blocks":
        arguments = [t.cache_data, t.cache_data, t.scales(torch.uint8, INT64), INT64, 2]
        arguments += [*t.cache_strides, *t.cache_strides]
        return Call(cache_kernel.copy_blocks_kernel, arguments, t.cache | moved, FUSION)
    arguments = [t.cache_data, t.cache_data, t.cache_data, t.scales(torch.uint8, INT64), INT64]
    arguments += [*t.cache_strides, *t.cache_strides]
    constants = t.cache | moved | {"IS_UNPACKING": c.kernel == "unpack_blocks"}
    return Call(cache_kernel.pack_blocks_kernel, arguments, constants, FUSION)


def _layer_call(c: Configuration) -> Call:
    t = _Tensors(c)
    size = c.num_kv_heads * c.group * c.head_size
    if c.kernel == "silu_mul":
        arguments = [t.data, t.data, t.data, size, size]
        return Call(layer_kernel.silu_mul_kernel, arguments, {"size": size, "TILE": GATE_TILE}, FUSION)
    if c.kernel in ("rms_norm", "add_rms_norm"):
        arguments = [t.data, t.data, t.data, t.data, t.data, 1e-5, size, size]
        constants: dict[str, object] = {
            "hidden_size": size,
            "HIDDEN": power_of_two(size),
            "HAS_RESIDUAL": c.kernel == "add_rms_norm",
        }
        return Call(layer_kernel.rms_norm_kernel, arguments, constants, FUSION | {"num_warps": norm_warps(size)})
    if c.kernel == "draw_tokens":
        arguments = [INT64, FLOAT32, FLOAT64, FLOAT64, INT64, FLOAT64, INT64, VOCAB_SIZE, VOCAB_SIZE]
        tiles: dict[str, object] = {"TILE": DRAW_TILE, "SEARCH_TILE": SEARCH_TILE}
        return Call(sampling_kernel.draw_tokens_kernel, arguments, tiles, FUSION | {"num_warps": 8})
    has_norm = c.kernel == "rotate_write_norm"
    norm = [t.data, t.data, 1e-6] if has_norm else [FLOAT32, FLOAT32, 0.0]
    arguments = [t.data, t.data, t.data, t.cache_data, t.cache_data, t.scales(torch.int32, INT64)]
    arguments += [INT64, INT64, FLOAT32, *norm, 1 << 20]
    arguments += [*t.query_strides, *t.key_strides, *t.key_strides, *t.cache_strides, *t.cache_strides]
    rotation: dict[str, object] = {
        "num_query_heads": c.num_kv_heads * c.group,
        "rotary_size": c.head_size,
        "QUERY_HEADS": power_of_two(c.num_kv_heads * c.group),
        "KV_HEADS": power_of_two(c.num_kv_heads),
        "HEAD": power_of_two(c.head_size),
        "HALF": power_of_two(c.head_size // 2),
        "REST": 1,
        "IS_INTERLEAVED": False,
        "HAS_NORM": has_norm,
    }
    return Call(layer_kernel.rotate_write_kernel, arguments, t.cache | rotation | t.encoding, FUSION)
