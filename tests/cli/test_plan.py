"""``kvproof plan``: facts, and one sentence for what makes no sense."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.conftest import Run

QUICK = ("plan", "--rate", "40", "--duration", "0.5", "--prompt-len", "64", "--output-len", "8", "--seeds", "2")


def test_a_plan_answers_in_json(run: Run) -> None:
    facts = json.loads(run(*QUICK, "--json").stdout)
    assert facts["requests_that_fit"] == facts["num_blocks"] // 5 > 256
    assert facts["requests_that_run_at_once"] == 256
    assert sum(each["median"] for each in facts["slots"].values()) == pytest.approx(1.0)
    assert facts["ttft_s"]["p50"]["median"] <= facts["ttft_s"]["p99"]["median"]


def test_a_plan_answers_in_lines(run: Run, tmp_path: Path) -> None:
    load = tmp_path / "load.jsonl"
    load.write_text('{"prompt_len": 10, "max_tokens": 3}\n')
    result = run("plan", "--workload", load, "--duration", "0.5", "--prompt-len", "64", "--output-len", "8")
    assert result.exit_code == 0
    assert "requests that fit" in result.stdout
    assert "saturation rate" in result.stdout


def test_one_answer_is_drawn_and_swapping_needs_no_number(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "answer.svg"
    answer = json.loads(run(*QUICK, "--preemption-mode", "swap", "--plot", plot, "--json").stdout)
    words = ElementTree.fromstring(plot.read_text()).findtext("{http://www.w3.org/2000/svg}desc")
    assert words is not None
    assert f"p99 {answer['ttft_s']['p99']['median']:.4g}" in words
    assert "Percent of the cache" in words


def test_a_sweep_is_a_list_and_its_picture_says_in_words_what_it_shows(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "sweep.svg"
    answers = json.loads(run(*QUICK, "--sweep", "block_size=16:48:16", "--plot", plot, "--json").stdout)
    assert [each["block_size"] for each in answers] == [16, 32, 48]
    assert [each["requests_that_fit"] for each in answers] == [
        each["num_blocks"] // n for each, n in zip(answers, (5, 3, 2), strict=True)
    ]
    drawing = ElementTree.fromstring(plot.read_text())
    words = drawing.findtext("{http://www.w3.org/2000/svg}desc")
    assert words is not None
    assert f"{answers[1]['ttft_s']['p50']['median']:.3g} at 32" in words
    assert f"fit: {answers[0]['requests_that_fit']:,} at 16" in words


def test_a_sweep_of_one_value_is_no_line_and_a_far_saturation_does_not_push_the_curves_together(
    run: Run, tmp_path: Path
) -> None:
    plot = tmp_path / "sweep.svg"
    for values, words in (("rate=40", "Requests finished a second: 40.0 "), ("rate=20:40:20", "finished: ")):
        run(*QUICK, "--seeds", "1", "--sweep", values, "--plot", plot)
        drawn = ElementTree.fromstring(plot.read_text()).findtext("{http://www.w3.org/2000/svg}desc")
        assert drawn is not None
        assert words in drawn
        assert "saturated" not in drawn


def test_a_sweep_of_names_is_a_page_that_asks_nobody(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "sweep.html"
    result = run(*QUICK, "--sweep", "allocation=paged,oracle", "--plot", plot)
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["allocation", "paged", "oracle"]
    assert re.findall(r"(?:src|href|url)\s*[=(]", plot.read_text()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "llama-3-70b"), "model is 'llama-3-70b', it must be one that leaves room"),
        (("--gpu", "h300"), "gpu is 'h300', it must be one of a100-40gb"),
        (("--replicas", "0"), "replicas is 0, it must be from 1 to 4096"),
        (("--router", "random"), "router is 'random', it must be one of round-robin, least-loaded"),
        (("--rate", "0"), "rate is 0.0, it must be more than 0"),
        (("--output-len", "0"), "output_len is '0', it must be a number of tokens"),
        (("--allocation", "heap"), "allocation is 'heap', it must be one of paged"),
        (("--batching", "some"), "batching is 'some', it must be continuous or static"),
        (("--preset", "paper2"), "preset is 'paper2', it must be one of workshop, paper, baselines"),
        (("--sweep", "speed=1:3"), "sweep is 'speed=1:3', it must be NAME=FIRST:LAST"),
        (("--sweep", "rate=3:1"), "sweep is 'rate=3:1', it must be FIRST:LAST"),
        (("--sweep", "rate=1:1e9"), "sweep is 'rate=1:1e9', it must be FIRST:LAST"),
        (("--sweep", "rate=0:2"), "rate is 0.0, it must be more than 0"),
        (("--sweep", "block_size=1.5:3"), "sweep is 'block_size=1.5:3'"),
        (("--sweep", "gpu=h100,h300"), "gpu is 'h300', it must be one of a100-40gb"),
        (("--sweep", "block_size=0:2"), "block_size is 0, it must be from 1 to"),
        (("--swap-space", "inf"), "swap_space is inf, it must be from 0 to"),
        (("--prefix-share", "0.5"), "prefix_share is 0.5, it must be left out without --shared-len"),
        (("--sweep", "swap_space=-1:1"), "swap_space is -1.0, it must be from 0 to"),
        (("--shared-len", "-1"), "shared_len is -1, it must be from 0 to"),
        (("--preemption-mode", "evict"), "preemption_mode is 'evict', it must be one of auto, recompute, swap"),
        (("--preemption-mode", "recompute", "--swap-space", "1"), "swap_space is 1.0, it must be left out where"),
        (
            ("--prompt-len", "8000", "--output-len", "200"),
            "prompt_len is '8000', it must be together with output_len (200) at",
        ),
        (("--plot", "x.png", "--sweep", "rate=1:2"), "plot is 'x.png', it must be a file that ends in .svg"),
        (("--plot", "nowhere/x.svg", "--sweep", "rate=1:2"), "plot is 'nowhere/x.svg', it must be a file in a folder"),
        (("--seeds", "0"), "seeds is 0, it must be from 1 to 1000"),
        (("--compute-efficiency", "1e-320"), "compute_efficiency is 1e-320, it must be from 0.001 to 1"),
        (("--overhead-ms", "1e9"), "overhead is 1000000.0, it must be from 0 to 60 s"),
        (("--slo", "ttft=1,ttft=2"), "slo is 'ttft=1,ttft=2', it must be ttft=SECONDS"),
        (("--model", ""), "model is '', it must be one of smollm2-135m"),
        (("--preset", "workshop", "--rate", "30"), "rate is 30.0, it must be left out with --preset"),
        (("--sweep", "rate=1:2", "--preset", "paper"), "sweep is 'rate=1:2', it must be left out with --preset"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(sentence)
    assert result.stderr.count("\n") == 1
