"""The measuring script says what it must without a GPU, and its code runs, on the CPU with a clock in place of events."""

import json
import time
from dataclasses import replace

import pytest
import torch

import kernels
from kernels import bench, bench_case
from kernels.bench_case import Case
from kernels.roofline import Heads

CPU = torch.device("cpu")


class Clock:
    def __init__(self, enable_timing: bool) -> None:
        self.time_ms = 0.0

    def record(self) -> None:
        self.time_ms = time.perf_counter() * 1e3

    def elapsed_time(self, end: "Clock") -> float:
        return end.time_ms - self.time_ms


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench, "FLUSH_BYTES", 1 << 12)
    monkeypatch.setattr(bench, "PRODUCT_SIZE", 32)
    monkeypatch.setenv("KVPROOF_UNCHECKED_KERNELS", "0")


SMALL = [
    Case("decode", (1, 1), (20, 20), Heads(4, 2, 32)),
    Case("prefill", (20,), (20,), Heads(4, 2, 32)),
    Case("mixed", (1, 5), (20, 30), Heads(4, 2, 32), window=7),
]


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench", "--out", str(tmp_path / "out")])
    assert bench.main() == 2
    assert capsys.readouterr() == ("", "No GPU is here, so nothing was measured.\n")
    assert not (tmp_path / "out").exists()


def test_the_table_has_a_line_for_each_case(clock, tmp_path, capsys):
    assert bench.bench(tmp_path, CPU, "no card", SMALL, SMALL) == 0
    facts = json.loads((tmp_path / "bench.json").read_text())
    assert [each["case"] for each in facts["results"]] == ["decode", "prefill", "mixed"]
    assert [each["peer_us"] is not None for each in facts["results"]] == [True, True, False]
    assert all(each["time_us"] > 0 and each["floor_us"] > 0 for each in facts["results"])
    text = (tmp_path / "bench.md").read_text()
    assert text.count("\n| ") == 2 + len(SMALL)
    assert capsys.readouterr().out == text


def test_a_wrong_result_is_said_and_fails(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_case, "paged_attention", lambda query, *_, **__: query)
    assert bench.bench(tmp_path, CPU, "no card", [], SMALL[:1]) == 1
    assert "WRONG: decode: error" in (tmp_path / "bench.md").read_text()


def test_cases_past_the_limit_are_named(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "LIMIT_S", -1.0)
    assert bench.bench(tmp_path, CPU, "no card", SMALL, []) == 0
    assert "left out for lack of time: prefill" in (tmp_path / "bench.md").read_text()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_has_no_problems(case, dtype):
    assert bench_case.problems(replace(case, dtype=dtype), CPU) == []


def test_the_peer_computes_the_same():
    for case in SMALL[:2]:
        inputs = bench_case.make_inputs(replace(case, dtype=torch.float32), CPU)
        ours = kernels.paged_attention(*inputs.tensors, scale=case.scale)
        peer = bench_case.peer_launch(case, inputs)()
        torch.testing.assert_close(peer.transpose(1, 2).reshape(ours.shape), ours)


def test_the_cases_differ_and_fit_in_a_minute_of_memory_traffic():
    names = [case.name for case in bench.cases()]
    assert len(set(names)) == len(names)
    assert sum(case.work.bytes for case in bench.cases()) < 60e9


@pytest.mark.parametrize("case", bench_case.correctness_cases(), ids=lambda case: case.name)
def test_the_twin_passes_the_checks_that_come_first(case):
    assert bench_case.problems(case, CPU) == []
