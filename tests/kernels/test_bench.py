"""The measuring script says what it must without a GPU, and its code runs, on the CPU with a clock in place of events."""

import json
import time
from dataclasses import replace

import pytest
import torch

import kernels
from kernels import bench, bench_case, bench_peers
from kernels.bench_case import Case
from kernels.bench_step import DecodeStep, StepShape
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
FP8 = Case("fp8", (1, 3), (20, 30), Heads(4, 2, 32, is_fp8=True))
STEP = StepShape(2, 64, 96, 300, Heads(4, 2, 32), batch=3, seq_len=20)


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench", "--out", str(tmp_path / "out")])
    assert bench.main() == 2
    assert capsys.readouterr() == ("", "No GPU is here, so nothing was measured.\n")
    assert not (tmp_path / "out").exists()


def test_a_file_is_no_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "taken").touch()
    monkeypatch.setattr("sys.argv", ["bench", "--out", str(tmp_path / "taken")])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert "taken, needs a folder" in capsys.readouterr().err


def test_the_table_has_a_line_for_each_case(clock, tmp_path, capsys):
    assert bench.bench(tmp_path, CPU, "no card", SMALL, SMALL) == 0
    facts = json.loads((tmp_path / "bench.json").read_text())
    assert [each["case"] for each in facts["results"]] == ["decode", "prefill", "mixed"]
    assert [each["torch_us"] is not None for each in facts["results"]] == [True, True, False]
    assert [each["flashinfer_us"] for each in facts["results"]] == [None, None, None]
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
    assert "left out: prefill, for lack of time" in (tmp_path / "bench.md").read_text()


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_has_no_problems(case, dtype):
    assert bench_case.problems(replace(case, dtype=dtype), CPU) == []


def test_the_peer_computes_the_same():
    for case in SMALL[:2]:
        inputs = bench_case.make_inputs(replace(case, dtype=torch.float32), CPU)
        ours = kernels.paged_attention(*inputs.tensors, scale=case.scale)
        peer = bench_peers.torch_launch(case, inputs)()
        torch.testing.assert_close(peer.transpose(1, 2).reshape(ours.shape), ours)


def test_the_cases_differ_and_fit_in_a_minute_of_memory_traffic():
    names = [case.name for case in bench.cases()]
    assert len(set(names)) == len(names)
    assert sum(case.work.bytes for case in bench.cases()) < 60e9


@pytest.mark.slow
@pytest.mark.parametrize("case", bench_case.correctness_cases(), ids=lambda case: case.name)
def test_the_twin_passes_the_checks_that_come_first(case):
    assert bench_case.problems(case, CPU) == []


def test_a_cache_of_8_bits_is_a_case_too(clock, tmp_path):
    assert bench.bench(tmp_path, CPU, "no card", [FP8], [FP8]) == 0
    [result] = json.loads((tmp_path / "bench.json").read_text())["results"]
    assert result["time_us"] > 0


def test_a_case_that_fails_leaves_the_others_alone(clock, tmp_path, monkeypatch):
    def refuse(case, inputs):
        raise torch.OutOfMemoryError("too much was asked for\nand more lines") if case.name == "decode" else None

    monkeypatch.setattr(
        bench, "torch_launch", lambda case, inputs: None if case.name != "decode" else refuse(case, inputs)
    )
    assert bench.bench(tmp_path, CPU, "no card", SMALL, []) == 0
    text = (tmp_path / "bench.md").read_text()
    assert "left out: decode: OutOfMemoryError: too much was asked for\n" in text
    assert [each["case"] for each in json.loads((tmp_path / "bench.json").read_text())["results"]] == [
        "prefill",
        "mixed",
    ]


class FlashInfer:
    """What we use of it, over the same twin, so that the call is seen to fit together."""

    def __init__(self, is_wrong: bool = False) -> None:
        self.is_wrong = is_wrong

    def __call__(self, workspace, layout, **options):
        assert layout == "NHD"
        return self

    BatchDecodeWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper = property(lambda self: self)

    def plan(self, *arguments, **options):
        *starts, ids, last_lens, _, _, _, block_size = arguments
        self.page_starts = starts[-1]
        self.query_start = starts[0] if len(starts) == 2 else torch.arange(len(starts[0]), dtype=torch.int32)
        counts = self.page_starts.diff()
        self.seq_lens = ((counts - 1) * block_size + last_lens).int()
        self.tables = torch.nn.utils.rnn.pad_sequence(list(ids.split_with_sizes(counts.tolist())), batch_first=True)
        self.window = None if options["window_left"] < 0 else options["window_left"] + 1
        self.scale = options["sm_scale"]

    def run(self, query, caches):
        how = {"scale": self.scale, "window": self.window}
        out = kernels.paged_attention(query, *caches, self.tables, self.seq_lens, self.query_start, **how)
        return out + 1 if self.is_wrong else out


@pytest.mark.parametrize("is_wrong", [False, True])
def test_flashinfer_is_measured_where_it_is_installed_and_agrees(clock, tmp_path, monkeypatch, is_wrong):
    monkeypatch.setattr(bench_peers, "import_module", lambda name: FlashInfer(is_wrong))
    assert bench.bench(tmp_path, CPU, "no card", [*SMALL, FP8], []) == 0
    facts = json.loads((tmp_path / "bench.json").read_text())
    assert [each["flashinfer_us"] is not None for each in facts["results"]] == [not is_wrong] * 3 + [False]
    assert len(facts["left_out"]) == 3 * is_wrong


def test_flashinfer_that_does_not_work_is_said_once(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "import_module", lambda name: object())
    assert bench.bench(tmp_path, CPU, "no card", SMALL, []) == 0
    [said] = json.loads((tmp_path / "bench.json").read_text())["left_out"]
    assert said.startswith("FlashInfer: AttributeError: ")


def test_a_step_draws_the_same_tokens_again_and_its_floor_counts_what_it_holds(clock, tmp_path, monkeypatch):
    step = DecodeStep(STEP, CPU)
    tokens = step()
    assert torch.equal(step(), tokens)
    assert tokens.shape == (3,)
    assert ((tokens >= 0) & (tokens < 300)).all()
    weights = [each for layer in step.layers for each in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    assert sum(each.numel() for each in [*weights, step.head]) == STEP.num_weights
    live = 2 * 2 * 3 * 20 * 2 * 32 * 2  # layers, K and V, sequences, tokens, heads, head_size, bytes
    assert STEP.work.bytes > STEP.num_weights * 2 + live
    monkeypatch.setattr(bench, "captured", lambda step: step)
    assert bench.bench(tmp_path, CPU, "no card", [], [], [STEP]) == 0
    names = [each["case"] for each in json.loads((tmp_path / "bench.json").read_text())["results"]]
    assert [name.rsplit(", ", 1)[1] for name in names] == ["eager", "CUDA graph"]


def test_a_graph_that_draws_other_tokens_says_so(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "captured", lambda step: lambda: step() + 1)
    assert bench.bench(tmp_path, CPU, "no card", [], [], [STEP]) == 0
    assert "CUDA graph, 3 OTHER TOKENS |" in (tmp_path / "bench.md").read_text()


def test_a_check_that_raises_is_a_wrong_result(clock, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_case, "paged_attention", lambda *_, **__: 1 // 0)
    assert bench.bench(tmp_path, CPU, "no card", [], SMALL[:1]) == 1
    assert "WRONG: decode: ZeroDivisionError: " in (tmp_path / "bench.md").read_text()
