"""``kvproof plan``: facts, and one sentence for what makes no sense."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

QUICK = ("plan", "--rate", "40", "--duration", "0.5", "--prompt-len", "64", "--output-len", "8", "--seeds", "2")


def test_a_plan_answers_in_json(run: Run) -> None:
    facts = json.loads(run(*QUICK, "--json").stdout)
    assert facts["requests_that_fit"] == facts["num_blocks"] // 5
    assert sum(each["median"] for each in facts["slots"].values()) == pytest.approx(1.0)
    assert facts["ttft_s"]["p50"]["median"] <= facts["ttft_s"]["p99"]["median"]


def test_a_plan_answers_in_lines(run: Run, tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text('{"prompt_len": 10, "max_tokens": 3}\n')
    result = run("plan", "--workload", load, "--duration", "0.5", "--prompt-len", "64", "--output-len", "8")
    assert result.exit_code == 0
    assert "requests that fit" in result.stdout
    assert "saturation rate" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "llama-3-70b"), "model is 'llama-3-70b', it must be one that leaves room"),
        (("--gpu", "h300"), "gpu is 'h300', it must be one of a100-40gb"),
        (("--rate", "0"), "rate is 0.0, it must be more than 0"),
        (("--output-len", "0"), "output_len is '0', it must be a number of tokens"),
        (("--allocation", "heap"), "allocation is 'heap', it must be one of paged"),
        (("--batching", "some"), "batching is 'some', it must be continuous or static"),
        (("--preset", "paper2"), "preset is 'paper2'"),
        (("--seeds", "0"), "seeds is 0, it must be from 1 to 1000"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1
