"""Kernels compiled for GPUs that need not be here, and judged by the machine code: ``python -m kernels.compiled --json``.

A configuration fails on a spill, on narrow loads of K or V, on a 16-bit product without tensor cores, on too much shared
memory, and on a loop whose copies do not run ahead of their use. Exit status 1 says that one did.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.errors import TritonError
from triton.runtime.jit import create_function_from_signature

from kernels.configuration import (
    ATTENTION,
    MOVES,
    Configuration,
    call_of,
    covering_set,
    engine_set,
    shape_of,
    small_set,
)
from kernels.machine_code import MachineCode, load_width, read_amd, read_nvidia
from kernels.tile_shape import TileShape, power_of_two

__all__ = ["CHIPS", "CompileReport", "Configuration", "as_text", "compile_report", "covering_set", "judge", "small_set"]


@dataclass(frozen=True)
class Chip:
    """A target, and what one of its multiprocessors holds, from the vendors' tables."""

    target: GPUTarget
    registers: int  # 32 bits each (gfx942: of one lane of a wave on one of 4 SIMDs)
    max_shared: int  # bytes one program may ask for
    shared: int
    warps: int
    programs: int
    reserved: int  # bytes of shared memory that the system takes from each program


CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 65536, 163 << 10, 164 << 10, 64, 32, 1024),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 65536, 227 << 10, 228 << 10, 64, 32, 1024),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 65536, 227 << 10, 228 << 10, 64, 32, 1024),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 512, 64 << 10, 64 << 10, 32, 32, 0),
}
MIN_WARPS = 4  # fewer on a multiprocessor leave one of its four schedulers without work


@dataclass(frozen=True)
class CompileReport:
    """What became of a configuration; without problems it may be shipped."""

    configuration: Configuration
    shape: TileShape | None
    registers: int
    spills: int
    shared_bytes: int
    warps_resident: int  # on one multiprocessor, an upper bound: registers, shared memory and warp slots
    loop_instructions: int
    loads: str  # of the loop, by instruction
    load_bytes: int  # the widest that the loop's loads of K and V have, a thread
    tensor_core: str
    copies_ahead: int | None  # groups of asynchronous copies that fly while the loop computes; AMD has none
    problems: tuple[str, ...]


def compile_report(configurations: Iterable[Configuration] | None = None) -> list[CompileReport]:
    """Compiles and judges; by default the small set."""
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: the interpreter compiles nothing, unset it before the import")
    reports = []
    for configuration in small_set() if configurations is None else configurations:
        try:
            reports.append(judge(configuration))
        except TritonError as error:
            reports.append(not_compiled(configuration, error))
    return reports


def not_compiled(configuration: Configuration, error: Exception) -> CompileReport:
    problem = f"does not compile: {type(error).__name__}"
    return CompileReport(configuration, None, 0, 0, 0, 0, 0, "", 0, "", None, (problem,))


def compile_one(configuration: Configuration, shape: TileShape) -> Any:  # Triton has no types
    """The binary that the launcher would get."""
    call = call_of(configuration, shape)
    target = CHIPS[configuration.target].target
    backend = make_backend(target)
    binder = create_function_from_signature(call.kernel.signature, call.kernel.params, backend)
    bound, specialization, _ = binder(*call.arguments, **call.constants, **call.options)
    packed = call.kernel._pack_args(backend, dict(call.options), bound, specialization, None)
    _, signature, constexprs, attributes = packed
    source = ASTSource(call.kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target, options=dict(call.options))


def judge(configuration: Configuration, shape: TileShape | None = None) -> CompileReport:
    chip = CHIPS[configuration.target]
    is_attention = configuration.kernel in ATTENTION
    shape = shape or shape_of(configuration)
    compiled = compile_one(configuration, shape)
    is_amd = chip.target.backend == "hip"
    code = read_amd(compiled.asm["amdgcn"]) if is_amd else read_nvidia(compiled.asm["cubin"])
    num_warps = compiled.metadata.num_warps
    warps = resident_warps(chip, code.registers, compiled.metadata.shared, num_warps)
    is_pipelined = is_attention and not is_amd and configuration.dtype != "float32"
    ahead = None if not is_pipelined else copies_ahead(compiled.asm["ttgir"])
    problems = []
    if code.spills:
        problems.append(f"spills {code.spills}")
    if compiled.metadata.shared > chip.max_shared:
        problems.append(f"shared memory {compiled.metadata.shared} of {chip.max_shared} bytes")
    if warps < MIN_WARPS:
        problems.append(f"{warps} warps resident of {MIN_WARPS}")
    if is_attention:
        problems += loop_problems(configuration, shape, code, num_warps * chip.target.warp_size)
        if ahead == 0:
            problems.append("no copy in flight while the loop computes")
    elif configuration.kernel in MOVES and not is_amd and max(map(load_width, code.loads)) < 16:
        problems.append("no 16-byte load")
    return CompileReport(
        configuration=configuration,
        shape=shape if is_attention else None,
        registers=code.registers,
        spills=code.spills,
        shared_bytes=compiled.metadata.shared,
        warps_resident=warps,
        loop_instructions=len(code.loop),
        loads=" ".join(f"{name} x{count}" for name, count in sorted(code.loads.items())),
        load_bytes=max((load_width(name) for name in code.loads), default=0),
        tensor_core=" ".join(code.matrix),
        copies_ahead=ahead,
        problems=tuple(problems),
    )


def loop_problems(configuration: Configuration, shape: TileShape, code: MachineCode, threads: int) -> list[str]:
    """One turn brings a tile of K and one of V by 16-byte loads; narrow loads are the block table's.

    A tensor core's operand takes a part of an fp8 cache by 8 bytes; the scales come by narrow loads too.
    """
    dtype: torch.dtype = getattr(torch, configuration.dtype)
    cell_bytes, width, narrow_bytes = (1, 8, 8) if configuration.fp8 else (dtype.itemsize, 16, 4)
    turn = 2 * shape.tile_tokens * power_of_two(configuration.head_size) * cell_bytes
    wide = code.bytes_loaded(threads, at_least=width)
    narrow, needed = code.bytes_loaded(threads) - wide, turn // width * narrow_bytes  # an id, a pair of scales
    problems = [] if wide >= turn else [f"{width}-byte loads bring {wide} of {turn} bytes of K and V"]
    if dtype.itemsize == 4:  # for tests: exact products take neither tensor cores nor the register-saving layouts
        return problems
    if narrow > needed:
        problems.append(f"narrow loads bring {narrow} bytes, the table needs {needed}")
    if not code.matrix:
        problems.append("no tensor-core instruction in the loop")
    return problems


def copies_ahead(ttgir: str) -> int:
    """How many groups of copies may still fly where the loop waits for one."""
    return max((int(number) for number in re.findall(r"async_wait .*?num = (\d+)", ttgir)), default=0)


def resident_warps(chip: Chip, registers: int, shared: int, num_warps: int) -> int:
    if chip.target.backend == "hip":
        by_registers = 4 * (chip.registers // max(-(-registers // 8) * 8, 1)) // num_warps
    else:
        by_registers = chip.registers // (-(-registers * 32 // 256) * 256) // num_warps
    taken = -(-(shared + chip.reserved) // 128) * 128
    by_shared = chip.shared // taken if taken else chip.programs
    return num_warps * min(by_registers, by_shared, chip.warps // num_warps, chip.programs)


def as_text(report: CompileReport) -> str:
    c, s = report.configuration, report.shape
    options = " ".join(name for name in ("fp8", "window", "logit_cap", "lse") if getattr(c, name))
    most = f", at most {s.max_registers} registers" if s is not None and s.max_registers else ""
    shape = "" if s is None else f"tile {s.rows}x{s.tile_tokens} on {s.num_warps} warps, {s.num_stages} stages{most}: "
    return (
        f"{c.target} {c.kernel} head {c.head_size} block {c.block_size} group {c.group} {c.dtype} {options}: {shape}"
        f"{report.registers} registers, {report.spills} spills, {report.shared_bytes} shared bytes, "
        f"{report.warps_resident} warps, {report.loads} {report.tensor_core}: {'; '.join(report.problems) or 'passes'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.compiled", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("--all", action="store_true", help="the covering set, which takes minutes")
    parser.add_argument("--engine", action="store_true", help="whatever an engine can ask for, which takes an hour")
    parser.add_argument("--target", choices=list(CHIPS), help="only this one")
    options = parser.parse_args(arguments)
    named = engine_set() if options.engine else covering_set() if options.all else small_set()
    wanted = [each for each in named if options.target in (None, each.target)]
    reports = []
    for each in wanted:
        reports += compile_report([each])
        if not options.json:
            print(as_text(reports[-1]), flush=True)
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=1))
    return 1 if any(report.problems for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
