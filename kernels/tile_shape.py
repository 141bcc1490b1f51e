"""The shape of a tile: how many rows and keys a program of the attention kernel works on, and with how many warps.

A table and no autotuning: a shape fixes the order of the additions, so it may depend on the GPU, the head size, the
type and on whether the sequence has one query, and on nothing that its neighbours in the batch could change.
"""

from dataclasses import dataclass, replace

import torch

from kernels.arguments import WIDE_LOAD

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
COPY_TILE = 2048  # elements a program copies of one block: a wide load or two of 2 bytes each for every thread
GATE_TILE = 1024  # elements a program computes of one row: one wide load of 2 bytes each for 128 threads
DRAW_TILE = 2048  # tokens a turn of the sampler looks at
SEARCH_TILE = 512  # tokens, each beside 16 candidates, a turn of its search looks at
SPLIT_TOKENS = 1024  # a decode's keys are cut here, always counted from position 0


@dataclass(frozen=True)
class TileShape:
    """What one program works on. Only ``num_stages`` and ``max_registers`` do not change the result's bits."""

    rows: int  # (query, head of group) pairs, a power of two
    tile_tokens: int  # keys per loop turn, a power of two
    split_tokens: int  # keys per split, a multiple of tile_tokens; 0: one split
    num_warps: int
    num_stages: int
    max_registers: int = 0  # of a thread; 0: as many as the compiler likes

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told beside the constants."""
        more = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **more}


@dataclass(frozen=True)
class TileShapes:
    """The two shapes of a launch: for a sequence with one query, and for one with more."""

    decode: TileShape
    prefill: TileShape


# 16 rows are the least that a tensor core takes; a decode has `group` of them. The stages keep enough bytes in flight to
# cover the memory's latency. A small head needs more keys to give each thread a load of 16 bytes, a head of 256 has
# registers for fewer.
_DECODE_TOKENS = {32: 64, 64: 32, 128: 32, 256: 16}
_WIDE_GROUP_TOKENS = {(32, 128): 16}  # where the compiler spills otherwise
_DECODE_STAGES = {"sm_80": 3, "sm_90": 4, "sm_100": 4, "gfx942": 2}

# Of a thread, in a decode of NVIDIA's with 4 warps and a head of more than 64: left to itself the assembler spills a few, here and
# there, to stay at 128 (4 programs on a multiprocessor) or at 168 (3 programs). Told that 168 is the most, it spills none.
_DECODE_REGISTERS = 168

# The largest tiles that do not spill with a window, a cap and a log-sum-exp. Three stages: with two, nothing is copied
# while the loop computes. kernels.compiled reads all this from the machine code.
_PREFILL = {
    ("sm_80", 64): TileShape(64, 64, 0, 4, 3),
    ("sm_80", 128): TileShape(128, 32, 0, 8, 3),
    ("sm_80", 256): TileShape(64, 16, 0, 8, 3),  # under the 99 KiB of shared memory that an sm_86 and sm_120 have
    ("sm_90", 64): TileShape(128, 128, 0, 8, 3),
    ("sm_90", 128): TileShape(128, 64, 0, 8, 3),
    ("sm_90", 256): TileShape(128, 32, 0, 8, 3),
    ("sm_100", 64): TileShape(128, 128, 0, 8, 3),
    ("sm_100", 128): TileShape(128, 64, 0, 8, 3),
    ("sm_100", 256): TileShape(64, 32, 0, 8, 3),
    ("gfx942", 64): TileShape(64, 64, 0, 4, 2),
    ("gfx942", 128): TileShape(64, 32, 0, 4, 2),
    ("gfx942", 256): TileShape(64, 16, 0, 8, 2),
}

# Where what an fp8 cache is decoded to takes the registers of so many rows.
_FP8_PREFILL_ROWS = {("sm_80", 128): 64, ("sm_90", 256): 64}

# Exact products of float32 take no tensor core and many registers: a small tile, for tests.
_FLOAT32 = TileShape(16, 16, 0, 4, 2)


def power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def tile_shapes(
    architecture: str, *, head_size: int, group: int, dtype: torch.dtype, is_fp8: bool = False
) -> TileShapes:
    """The shapes for queries of this type over a cache of the same, or one of fp8."""
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture is {architecture!r}, there are tile shapes for {', '.join(ARCHITECTURES)}")
    head = max(power_of_two(head_size), 32)
    rows = max(power_of_two(group), 16)
    if dtype == torch.float32:
        shape = replace(_FLOAT32, rows=rows)
        return TileShapes(replace(shape, split_tokens=SPLIT_TOKENS), shape)
    tile_tokens = _WIDE_GROUP_TOKENS.get((rows, head), _DECODE_TOKENS[head])
    lanes = 64 if architecture.startswith("gfx") else 32
    has_work_for_8 = rows > 16 and tile_tokens * head * 2 >= 8 * lanes * WIDE_LOAD
    num_warps = 8 if has_work_for_8 else 4  # a wide group needs more registers, or more threads that have some
    is_at_the_border = not architecture.startswith("gfx") and head > 64 and num_warps == 4
    max_registers = _DECODE_REGISTERS if is_at_the_border else 0
    decode = TileShape(rows, tile_tokens, SPLIT_TOKENS, num_warps, _DECODE_STAGES[architecture], max_registers)
    prefill = _PREFILL[architecture, max(head, 64)]
    most = _FP8_PREFILL_ROWS.get((architecture, head), prefill.rows) if is_fp8 else prefill.rows
    return TileShapes(decode, replace(prefill, rows=max(most, rows)))


def write_warps(num_kv_heads: int, head_size: int) -> int:
    """The warps that write one token: few enough that each thread has 16 bytes to move at once."""
    return max(1, min(4, power_of_two(num_kv_heads) * power_of_two(head_size) // 512))


def architecture_of(device: torch.device) -> str:
    """The table row for a device: its own, or that of the next older architecture with the same instructions."""
    if device.type != "cuda":
        return "sm_80"  # the interpreter: any row will do, this one has the smallest tiles
    if torch.version.hip is not None:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")  # 12 is Blackwell with the shared memory of an sm_86
