"""The benchmark of a whole engine counts what it served, and refuses a bad workload by its line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu.team import why_not
from optimized import LLM
from optimized.bench_offline import Task, bench_offline, read_tasks
from optimized.checkpoint import ModelConfig, random_checkpoint
from optimized.step_profile import ProfiledCore
from spec.vocabulary import InvalidConfig

MODEL = ModelConfig(2, 16, 24, 4, 2, 8, vocab_size=32, max_model_len=64)


def test_tokens_are_counted_and_late_requests_waited_for() -> None:
    tasks = [Task([1, 2, 3], 4), Task([4], 2, n=2), Task([5, 6], 3, arrival_s=0.05)]
    facts = bench_offline(LLM(random_checkpoint(MODEL, 0), block_size=4, max_num_seqs=4), tasks)
    assert (facts["requests"], facts["tokens_in"], facts["tokens_out"]) == (3, 6, 11)
    assert isinstance(facts["seconds"], float)
    assert facts["seconds"] >= 0.05


@pytest.mark.parametrize("head_size", [8, 16], ids=["torch", "vector kernels where they run"])
def test_a_profile_accounts_for_all_of_the_time(head_size: int) -> None:
    cores: list[ProfiledCore] = []

    def make_core(*arguments: Any) -> ProfiledCore:
        cores.append(ProfiledCore(*arguments))
        return cores[0]

    llm = LLM(random_checkpoint(replace(MODEL, head_size=head_size), 0), max_num_seqs=4, make_core=make_core)
    facts = bench_offline(llm, [Task([1, 2, 3], 9), Task([4], 5)])
    shares = cores[0].shares(facts["seconds"])
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-4 * len(shares))
    assert shares["device, beside these"] > 0.0 < shares["scheduler"]
    assert ("attention" in shares) == (head_size == 16 and why_not() is None)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "workload is 'w.jsonl line 2', it must be a JSON object"),
        ('{"prompt_token_ids": [], "max_tokens": 1}', "prompt_token_ids in w.jsonl line 2"),
        ('{"prompt_token_ids": [1], "max_tokens": 0}', "max_tokens in w.jsonl line 2 is 0"),
        ('{"prompt_token_ids": [1], "max_tokens": 1, "arrival_s": -1}', "arrival_s in w.jsonl line 2 is -1"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [1], "max_tokens": 1}) + "\n" + line)
    with pytest.raises(InvalidConfig) as caught:
        read_tasks(path)
    assert sentence in str(caught.value)
