"""Measures the attention kernels on the GPU that is here: ``python -m kernels.bench --out DIR``, minutes, one table.

Correctness comes first, then what this GPU can do (a copy, a large bfloat16 product), then each case beside its floor
and beside PyTorch's own attention on gathered, contiguous K and V; then a whole decode step, eagerly and as a CUDA graph;
last, where it is installed, FlashInfer on the same pools. What has been measured is written after every case, so a run that
is cut short leaves what it has. Without a GPU it measures nothing and exits with 2.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from kernels.attention import paged_attention
from kernels.bench_case import Case, correctness_cases, llama_heads, make_inputs, problems
from kernels.bench_peers import flashinfer_launch, torch_launch
from kernels.bench_step import DecodeStep, StepShape, captured
from kernels.roofline import Heads, Work

LIMIT_S = 270.0  # then what remains is left out, by name
RESERVE_S = 60.0  # of it for the decode step and FlashInfer
FLUSH_BYTES = 1 << 30  # written before each launch: several times any second-level cache
PRODUCT_SIZE = 8192
REPEATS = 15
FLASHINFER_APART = 0.02  # of bfloat16 outputs near 1: not a bound, but the same cache was read


@dataclass(frozen=True)
class Ceilings:
    """What this GPU was seen to do."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Result:
    case: str
    time_us: float
    floor_us: float  # at both ceilings
    bandwidth_share: float  # bytes a second, of the measured copy
    rate_share: float  # operations a second, of the measured product
    torch_us: float | None = None  # PyTorch's attention, where one call can say the case
    flashinfer_us: float | None = None  # FlashInfer's, where it is installed


def cases() -> list[Case]:
    made = [decode(64, 4096, block_size=block_size) for block_size in (8, 16, 32, 64, 128)]
    made += [decode(batch, 4096) for batch in (1, 8, 32, 128, 256)]
    made += [decode(64, 512), decode(64, 1024), decode(16, 16384), decode(1, 131072)]
    made += [decode(64, 4096, heads=Heads(8 * group, 8, 128)) for group in (1, 2, 8)]
    made += [decode(64, 4096, heads=Heads(9, 3, 64)), decode(64, 4096, heads=Heads(32, 8, 64))]
    made += [decode(64, 4096, heads=replace(llama_heads(), is_fp8=True))]
    made += [prefill(1, num_tokens) for num_tokens in (512, 2048, 8192)] + [prefill(8, 2048)]
    made += [Case("prefill 8192, window 1024", (8192,), (8192,), window=1024)]
    made += [Case("chunk 512 of 8192", (512,), (8192,))]
    made += [Case("mixed 63 decodes x 4096 + 2048", (1,) * 63 + (2048,), (4096,) * 63 + (2048,)), decode(63, 4096)]
    return made


def decode(batch: int, seq_len: int, *, heads: Heads | None = None, block_size: int = 16) -> Case:
    heads = heads or llama_heads()
    shape = (
        f"{heads.num_query_heads}/{heads.num_kv_heads} x {heads.head_size}, block {block_size}{', fp8' * heads.is_fp8}"
    )
    return Case(f"decode {batch} x {seq_len}, {shape}", (1,) * batch, (seq_len,) * batch, heads, block_size)


def prefill(batch: int, num_tokens: int) -> Case:
    return Case(f"prefill {batch} x {num_tokens}", (num_tokens,) * batch, (num_tokens,) * batch)


def median_s(launch: Callable[[], object], flush: Tensor) -> float:
    """The median time of a launch that finds no data in the second-level cache."""
    for _ in range(3):
        launch()
    pairs = []
    for _ in range(REPEATS):
        flush.zero_()  # also hides the time that the host takes to launch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        launch()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    times: list[float] = [begin.elapsed_time(end) for begin, end in pairs]
    return statistics.median(times) / 1e3


def measure_ceilings(flush: Tensor) -> Ceilings:
    source = torch.empty_like(flush)
    target = torch.empty_like(flush)
    bytes_per_s = 2 * source.numel() / median_s(lambda: target.copy_(source), flush)
    a, b = torch.randn((2, PRODUCT_SIZE, PRODUCT_SIZE), device=flush.device, dtype=torch.bfloat16)
    return Ceilings(bytes_per_s, 2 * PRODUCT_SIZE**3 / median_s(lambda: a @ b, flush))


def measure(case: Case, ceilings: Ceilings, flush: Tensor) -> list[Result]:
    """The one result of a case."""
    inputs = make_inputs(case, flush.device)
    out, plan = torch.empty_like(inputs.query), case.plan(flush.device)
    how = {"scale": case.scale, "window": case.window, "out": out, "plan": plan, "kv_scales": inputs.kv_scales}

    def launch() -> object:
        return paged_attention(*inputs.tensors, **how)  # type: ignore[call-overload]  # a dict has one type of values

    time_s = median_s(launch, flush)
    peer = torch_launch(case, inputs)
    torch_us = None if peer is None else median_s(peer, flush) * 1e6
    return [replace(result_of(case.name, case.work, time_s, ceilings), torch_us=torch_us)]


def result_of(name: str, work: Work, time_s: float, ceilings: Ceilings) -> Result:
    floor_s = work.floor_s(bytes_per_s=ceilings.bytes_per_s, operations_per_s=ceilings.operations_per_s)
    return Result(
        name,
        time_us=time_s * 1e6,
        floor_us=floor_s * 1e6,
        bandwidth_share=work.bytes / time_s / ceilings.bytes_per_s,
        rate_share=work.operations / time_s / ceilings.operations_per_s,
    )


def measure_step(shape: StepShape, ceilings: Ceilings, flush: Tensor) -> list[Result]:
    """The step launched kernel by kernel, and as a graph; that it draws the same tokens is looked at, and said if not."""
    step = DecodeStep(shape, flush.device)
    tokens = step().clone()
    eager = result_of(f"{shape.name}, eager", shape.work, median_s(step, flush), ceilings)
    replay = captured(step)
    num_other = int((replay() != tokens).sum())
    name = f"{shape.name}, CUDA graph{f', {num_other} OTHER TOKENS' if num_other else ''}"
    return [eager, result_of(name, shape.work, median_s(replay, flush), ceilings)]


@dataclass
class Report:
    """What is known so far, written anew whenever that grows."""

    folder: Path
    facts: dict[str, str]
    ceilings: Ceilings
    results: list[Result] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # each with its reason

    def text(self) -> str:
        heading = (
            f"{', '.join(self.facts.values())}: copy {self.ceilings.bytes_per_s / 1e12:.2f} TB/s, "
            f"bfloat16 product {self.ceilings.operations_per_s / 1e12:.0f} TFLOP/s"
        )
        notes = [f"WRONG: {each}" for each in self.wrong] + [f"left out: {each}" for each in self.left_out]
        return "\n\n".join([heading, table(self.results), *notes])

    def write(self) -> None:
        measured = {"ceilings": asdict(self.ceilings), "results": [asdict(each) for each in self.results]}
        found = self.facts | {"wrong": self.wrong, "left_out": self.left_out} | measured
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "bench.json").write_text(json.dumps(found, indent=1) + "\n")
        (self.folder / "bench.md").write_text(self.text() + "\n")

    def add(self, name: str, measured: Callable[[], list[Result]], end: float) -> None:
        """The results, or the reason why there are none; a case that fails leaves the others alone."""
        if time.monotonic() > end:
            self.left_out.append(f"{name}, for lack of time")
        else:
            try:
                self.results += measured()
            except Exception as error:  # noqa: BLE001  whatever the card's stack raises: the table is worth more
                self.left_out.append(f"{name}: {first_line(error)}")
        self.write()


def table(results: Sequence[Result]) -> str:
    lines = ["| case | us | floor us | of copy | of product | PyTorch us | FlashInfer us |", "| --- " * 7 + "|"]
    for each in results:
        peers = " | ".join("-" if us is None else f"{us:.1f}" for us in (each.torch_us, each.flashinfer_us))
        shares = f"{each.bandwidth_share:.0%} | {each.rate_share:.0%}"
        lines.append(f"| {each.case} | {each.time_us:.1f} | {each.floor_us:.1f} | {shares} | {peers} |")
    return "\n".join(lines)


def bench(
    folder: Path,
    device: torch.device,
    card: str,
    wanted: Sequence[Case],
    checked: Sequence[Case],
    steps: Sequence[StepShape] = (),
) -> int:
    """Checks, measures and writes ``bench.json`` and ``bench.md``; 1 if a result was wrong."""
    end = time.monotonic() + LIMIT_S
    wrong = [each for case in checked for each in problems_or_error(case, device)]
    os.environ["KVPROOF_UNCHECKED_KERNELS"] = "1"  # an engine's hot path looks at no value
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    versions = {"torch": f"torch {torch.__version__}", "triton": f"triton {triton.__version__}"}
    facts = {"card": card, **versions, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    report = Report(folder, facts, measure_ceilings(flush), wrong=wrong)
    report.write()
    for case in wanted:
        report.add(case.name, partial(measure, case, report.ceilings, flush), end - RESERVE_S)
    for shape in steps:
        report.add(shape.name, partial(measure_step, shape, report.ceilings, flush), end)
    measure_flashinfer(report, wanted, flush, end)
    print(report.text())
    return 1 if wrong else 0


def problems_or_error(case: Case, device: torch.device) -> list[str]:
    try:
        return problems(case, device)
    except Exception as error:  # noqa: BLE001  a kernel that does not compile is a result too
        return [f"{case.name}: {first_line(error)}"]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def measure_flashinfer(report: Report, wanted: Sequence[Case], flush: Tensor, end: float) -> None:
    """The same cases by FlashInfer: last, since it may compile, and the first error ends it."""
    by_name = {case.name: case for case in wanted}
    for index, result in enumerate(report.results):
        if result.case not in by_name or time.monotonic() > end:
            continue
        case = by_name[result.case]
        try:
            inputs = make_inputs(case, flush.device)
            launch = flashinfer_launch(case, inputs)
            if launch is None:
                continue
            ours = paged_attention(*inputs.tensors, scale=case.scale, window=case.window)
            apart = float((launch().double() - ours.double()).abs().max())
            if not apart < FLASHINFER_APART:
                report.left_out.append(f"FlashInfer, {case.name}: it is {apart:.3g} apart from ours")
            else:
                report.results[index] = replace(result, flashinfer_us=median_s(launch, flush) * 1e6)
        except Exception as error:  # noqa: BLE001  it is somebody else's
            report.left_out.append(f"FlashInfer: {first_line(error)}")
            end = 0.0
        report.write()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for bench.json and bench.md")
    folder: Path = parser.parse_args().out
    if folder.exists() and not folder.is_dir():
        parser.error(f"--out is {folder}, needs a folder")  # now, and not when all is measured
    if not torch.cuda.is_available():
        print("No GPU is here, so nothing was measured.", file=sys.stderr)
        return 2
    card = torch.cuda.get_device_name()
    return bench(folder, torch.device("cuda"), card, cases(), correctness_cases(), [StepShape()])


if __name__ == "__main__":
    raise SystemExit(main())
