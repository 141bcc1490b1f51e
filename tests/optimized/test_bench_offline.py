"""The benchmark of a whole engine counts what it served, and refuses a bad workload by its line."""

import json
from pathlib import Path

import pytest

from optimized import LLM
from optimized.bench_offline import Task, bench_offline, read_tasks
from optimized.checkpoint import ModelConfig, random_checkpoint
from spec.vocabulary import InvalidConfig

MODEL = ModelConfig(2, 16, 24, 4, 2, 8, vocab_size=32, max_model_len=64)


def test_tokens_are_counted_and_late_requests_waited_for() -> None:
    tasks = [Task([1, 2, 3], 4), Task([4], 2, n=2), Task([5, 6], 3, arrival_s=0.05)]
    facts = bench_offline(LLM(random_checkpoint(MODEL, 0), block_size=4, max_num_seqs=4), tasks)
    assert (facts["requests"], facts["tokens_in"], facts["tokens_out"]) == (3, 6, 11)
    assert isinstance(facts["seconds"], float)
    assert facts["seconds"] >= 0.05


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
