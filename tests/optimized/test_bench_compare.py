"""The comparison takes every side in turn, gives ratios of the same round, and names what a peer says wrongly."""

import itertools
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optimized.bench_compare import Side, busy_s, compare, peer_command, ticks_of_tree
from optimized.bench_offline import Work
from optimized.bench_worker import rounds
from optimized.checkpoint import ModelConfig
from optimized.floor import Floor
from spec.vocabulary import InvalidConfig
from tests.models.tiny_files import FAMILIES, write_directory

MODEL = ModelConfig(2, 16, 24, 4, 2, 8, vocab_size=32, max_model_len=64)

PEER = """
import json, sys, itertools
print("a message", flush=True)
print(json.dumps({"engine": "fake"}), flush=True)
for line, seconds in zip(sys.stdin, itertools.cycle(%r)):
    assert json.loads(line)["serial"] is False
    facts = {"seconds": seconds, "tokens_in": 6, "tokens_out": 4, "work": [[6, 2, 6, 1], [2, 2, 8, 1]]}
    print(json.dumps(facts | %r), flush=True)
"""


def side(name: str, seconds: list[float], more: dict[str, object] | None = None) -> Side:
    return Side(name, [sys.executable, "-c", PEER % (seconds, more or {})])


def test_ratios_are_of_the_same_round_and_the_first_does_not_count(tmp_path: Path) -> None:
    ours, peer = side("kvproof", [100.0, 1.0, 2.0, 4.0]), side("fake", [0.001, 3.0, 2.0, 8.0])
    try:
        facts = compare(ours, [peer], tmp_path / "mixed.jsonl", 3, False, lambda work: 0.5 * sum(work.values()))
    finally:
        ours.close()
        peer.close()
    assert facts["ratio"] == {"fake": {"median": 2.0, "least": 1.0, "largest": 3.0}}
    assert facts["floor_share"] == {"median": 0.5, "least": 0.25, "largest": 1.0}
    assert facts["workload"] == "mixed"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"seconds": 0.0}, "seconds of fake is 0.0, it must be a number above 0"),
        ({"tokens_in": "many"}, "tokens_in of fake is 'many', it must be a number above 0"),
    ],
)
def test_what_a_peer_says_wrongly_is_named(tmp_path: Path, more: dict[str, object], sentence: str) -> None:
    peer = side("fake", [1.0], more)
    try:
        with pytest.raises(InvalidConfig, match=sentence):
            peer.serve(tmp_path / "mixed.jsonl", False)
    finally:
        peer.close()


WITH_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass\\nprint(1, flush=True)\\ninput()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print("ready", flush=True)
input()
child.communicate(b"\\n")
print("ended", flush=True)
input()
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_the_children_of_a_peer_use_is_the_peers_while_they_live_and_after() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_A_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        for said in ("ready", "ended"):
            assert peer.stdout.readline().strip() == said
            assert ticks_of_tree(peer.pid) / os.sysconf("SC_CLK_TCK") >= 0.5
            print(file=peer.stdin, flush=True)
    with pytest.raises(ProcessLookupError):
        ticks_of_tree(peer.pid)
    assert busy_s(peer.pid) is None


def test_a_peer_that_ends_is_named() -> None:
    with pytest.raises(
        InvalidConfig, match="peer is 'gone', it must be a program that answers: it ended with status 3"
    ):
        Side("gone", [sys.executable, "-c", "raise SystemExit(3)"])


def test_a_peer_is_a_folder_with_a_program(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="a folder with a program named run"):
        peer_command(tmp_path, "model", False)
    program = tmp_path / "run"
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert peer_command(tmp_path, "model", True) == [str(program), "model", "--enable-prefix-caching"]


def test_our_worker_begins_each_round_with_an_empty_cache(tmp_path: Path) -> None:
    model, workload = tmp_path / "model", tmp_path / "w.jsonl"
    write_directory(model, FAMILIES["llama"][0])
    prompt = list(range(3, 43))
    workload.write_text("".join(json.dumps({"prompt_token_ids": prompt, "max_tokens": 2}) + "\n" for _ in range(2)))
    asked = json.dumps({"workload": str(workload), "serial": True})
    greeting, *answers = rounds(str(model), "float32", True, [asked, asked])
    assert greeting == {"engine": "kvproof", "dtype": "float32"}
    assert [each["hit_tokens"] for each in answers] == [32, 32]
    assert answers[0]["work"] == [[1, 1, 41, 2], [8, 1, 40, 1], [40, 1, 40, 1]]


def test_the_floor_counts_each_step_as_often_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimized.floor.COPIED_BYTES", 1 << 20)
    floor = Floor(MODEL, torch.float32)
    floor._products_s = lambda step: float(step.num_tokens)  # type: ignore[method-assign]
    floor.bytes_per_s = 2.0 * 2 * 2 * 8 * 4  # one key of all layers a second, with its value
    assert floor.seconds({Work(5, 1, 10): 2, Work(1, 1, 3): 1}) == 11 + 23
    assert Floor(MODEL, torch.bfloat16).seconds({Work(5, 1, 10): 1}) > 0


def test_of_each_kind_of_product_the_faster_side_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimized.floor.COPIED_BYTES", 1 << 20)
    floor = Floor(MODEL, torch.float32)
    floor._sides *= 2
    times = itertools.cycle([[1.0, 2.0, 4.0, 8.0, 0.5], [2.0, 1.0, 4.0, 9.0, 0.25]])
    floor._kinds_s = lambda *_: next(times)  # type: ignore[method-assign]
    floor.bytes_per_s = float("inf")
    assert floor.seconds({Work(5, 1, 10): 2}) == 2 * (1 + 1 + 4 + 8 + 0.25)
