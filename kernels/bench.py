"""Measures the attention kernels on the GPU that is here: ``python -m kernels.bench --out DIR``, minutes, one table.

Correctness comes first, then what this GPU can do (a copy, a large bfloat16 product), then each case beside its floor
and beside PyTorch's own attention on gathered, contiguous K and V. Without a GPU it measures nothing and exits with 2.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from kernels.attention import paged_attention
from kernels.bench_case import Case, correctness_cases, llama_heads, make_inputs, peer_launch, problems
from kernels.roofline import Heads

LIMIT_S = 270.0  # then the remaining cases are left out, by name
FLUSH_BYTES = 1 << 30  # written before each launch: several times any second-level cache
PRODUCT_SIZE = 8192
REPEATS = 15


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
    peer_us: float | None  # PyTorch's attention, where one call can say the case


def cases() -> list[Case]:
    made = [decode(64, 4096, block_size=block_size) for block_size in (8, 16, 32, 64, 128)]
    made += [decode(batch, 4096) for batch in (1, 8, 32, 128, 256)]
    made += [decode(64, 512), decode(64, 1024), decode(16, 16384), decode(1, 131072)]
    made += [decode(64, 4096, heads=Heads(8 * group, 8, 128)) for group in (1, 2, 8)]
    made += [decode(64, 4096, heads=Heads(9, 3, 64)), decode(64, 4096, heads=Heads(32, 8, 64))]
    made += [prefill(1, num_tokens) for num_tokens in (512, 2048, 8192)] + [prefill(8, 2048)]
    made += [Case("prefill 8192, window 1024", (8192,), (8192,), window=1024)]
    made += [Case("chunk 512 of 8192", (512,), (8192,))]
    made += [Case("mixed 63 decodes x 4096 + 2048", (1,) * 63 + (2048,), (4096,) * 63 + (2048,)), decode(63, 4096)]
    return made


def decode(batch: int, seq_len: int, *, heads: Heads | None = None, block_size: int = 16) -> Case:
    heads = heads or llama_heads()
    shape = f"{heads.num_query_heads}/{heads.num_kv_heads} x {heads.head_size}, block {block_size}"
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


def measure(case: Case, ceilings: Ceilings, flush: Tensor) -> Result:
    inputs = make_inputs(case, flush.device)
    out, plan = torch.empty_like(inputs.query), case.plan(flush.device)

    def launch() -> Tensor:
        return paged_attention(*inputs.tensors, scale=case.scale, window=case.window, out=out, plan=plan)

    time_s = median_s(launch, flush)
    peer = peer_launch(case, inputs)
    work = case.work
    floor_s = work.floor_s(bytes_per_s=ceilings.bytes_per_s, operations_per_s=ceilings.operations_per_s)
    return Result(
        case.name,
        time_us=time_s * 1e6,
        floor_us=floor_s * 1e6,
        bandwidth_share=work.bytes / time_s / ceilings.bytes_per_s,
        rate_share=work.operations / time_s / ceilings.operations_per_s,
        peer_us=None if peer is None else median_s(peer, flush) * 1e6,
    )


def table(results: Sequence[Result]) -> str:
    lines = ["| case | us | floor us | of copy | of product | PyTorch us |", "| --- | --- | --- | --- | --- | --- |"]
    for each in results:
        peer = "-" if each.peer_us is None else f"{each.peer_us:.1f}"
        shares = f"{each.bandwidth_share:.0%} | {each.rate_share:.0%}"
        lines.append(f"| {each.case} | {each.time_us:.1f} | {each.floor_us:.1f} | {shares} | {peer} |")
    return "\n".join(lines)


def bench(folder: Path, device: torch.device, card: str, wanted: Sequence[Case], checked: Sequence[Case]) -> int:
    """Checks, measures and writes ``bench.json`` and ``bench.md``; 1 if a result was wrong."""
    begin = time.monotonic()
    wrong = [each for case in checked for each in problems(case, device)]
    os.environ["KVPROOF_UNCHECKED_KERNELS"] = "1"  # an engine's hot path looks at no value
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    ceilings = measure_ceilings(flush)
    results, left_out = [], []
    for case in wanted:
        if time.monotonic() - begin > LIMIT_S:
            left_out.append(case.name)
        else:
            results.append(measure(case, ceilings, flush))
    facts = {"card": card, "torch": torch.__version__, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    heading = (
        f"{', '.join(facts.values())}: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, "
        f"bfloat16 product {ceilings.operations_per_s / 1e12:.0f} TFLOP/s"
    )
    notes = [f"WRONG: {each}" for each in wrong] + [f"left out for lack of time: {each}" for each in left_out]
    text = "\n\n".join([heading, table(results), *notes])
    measured = {"ceilings": asdict(ceilings), "results": [asdict(each) for each in results]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(
        json.dumps(facts | {"wrong": wrong, "left_out": left_out} | measured, indent=1) + "\n"
    )
    (folder / "bench.md").write_text(text + "\n")
    print(text)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for bench.json and bench.md")
    folder: Path = parser.parse_args().out
    if not torch.cuda.is_available():
        print("No GPU is here, so nothing was measured.", file=sys.stderr)
        return 2
    return bench(folder, torch.device("cuda"), torch.cuda.get_device_name(), cases(), correctness_cases())


if __name__ == "__main__":
    raise SystemExit(main())
