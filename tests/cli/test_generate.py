"""``kvproof generate``: what a user sees, with either engine."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from optimized.checkpoint import Checkpoint, load_checkpoint
from tests.cli.conftest import Run


def answer(run: Run, *arguments: object) -> dict[str, Any]:
    result = run("generate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def complaint(result: Result) -> list[str]:
    """The lines on standard error but for that of the cache."""
    return [line for line in result.stderr.splitlines() if not line.startswith("tiny.gguf: a KV cache of ")]


def test_the_text_is_all_there_is_on_standard_output(run: Run, tiny_path: Path) -> None:
    result = run("generate", "hello", "--model", tiny_path, "--max-tokens", 5)
    text = answer(run, "hello", "--model", tiny_path, "--max-tokens", 5)["outputs"][0]["text"]
    assert result.exit_code == 0
    assert re.fullmatch(r"tiny.gguf: a KV cache of [\d,]+ blocks, [\d,]+ tokens, .*", result.stderr.strip())
    assert result.stdout.endswith("\n")
    assert "\x1b" not in result.stdout
    assert text


def test_json_has_all_facts(run: Run, tiny_path: Path) -> None:
    options = ("--n", 4, "--temperature", 1, "--seed", 1, "--max-tokens", 6, "--block-size", 4)
    found = answer(run, "hello", "--model", tiny_path, *options)
    assert (found["engine"], found["model"], found["prompts"]) == ("optimized", "tiny.gguf", ["hello"])
    assert [(each["prompt"], each["index"]) for each in found["outputs"]] == [(0, index) for index in range(4)]
    assert {each["finish_reason"] for each in found["outputs"]} <= {"stop", "length"}
    num_tokens = sum(len(each["token_ids"]) for each in found["outputs"])
    # "user: hello\n" is twelve bytes, and "hello" one token: eight tokens, two full blocks.
    assert found["usage"] == {"prompt_tokens": 8, "completion_tokens": num_tokens, "total_tokens": 8 + num_tokens}
    assert (found["blocks_prompt_shared"], found["blocks_copied"], found["num_preemptions"]) == (2, 0, 0)
    assert found["seconds"] > 0


@pytest.mark.parametrize("engine", ["optimized", "reference"])
def test_the_size_of_the_cache_is_told_at_the_start(run: Run, tiny_path: Path, engine: str) -> None:
    options = ("--engine", engine, "--block-size", 4, "--num-gpu-blocks-override", 33, "--max-tokens", 2)
    result = run("generate", "hello", "--model", tiny_path, *options, "--json")
    assert result.stderr == "tiny.gguf: a KV cache of 33 blocks, 132 tokens, room for 2 requests of 64 tokens\n"
    assert json.loads(result.stdout)["num_blocks"] == 33


def test_a_promise_to_the_end_spares_preemptions(run: Run, tiny_path: Path) -> None:
    options = ("one", "two", "three", "--model", tiny_path, "--max-tokens", 20, "--block-size", 4)
    tight = (*options, "--num-gpu-blocks-override", 9, "--no-enable-prefix-caching")
    found = {rule: answer(run, *tight, "--admission-rule", rule) for rule in ("optimistic", "prompt", "no_evict")}
    assert found["no_evict"]["num_preemptions"] == 0 < found["prompt"]["num_preemptions"]
    alone = answer(run, *tight, "--watermark-blocks", 8)  # a second one would never leave so many free
    assert alone["num_preemptions"] == 0
    assert found["optimistic"]["outputs"] == found["prompt"]["outputs"] == found["no_evict"]["outputs"]
    assert alone["outputs"] == found["no_evict"]["outputs"]


def test_shares_and_static_batches_say_the_same(run: Run, tiny_path: Path) -> None:
    options = ("one", "two", "three", "--model", tiny_path, "--max-tokens", 6, "--max-num-batched-tokens", 8)
    plain = answer(run, *options)["outputs"]
    assert answer(run, *options, "--max-num-partial-prefills", 3)["outputs"] == plain
    static = answer(run, *options, "--scheduling-policy", "static")
    assert static["outputs"] == plain
    assert static["steps"] > answer(run, *options)["steps"]


def test_both_engines_say_the_same(run: Run, tiny_path: Path) -> None:
    options = ("one", "two", "--model", tiny_path, "--n", 2, "--temperature", 1, "--max-tokens", 6)
    optimized, reference = (answer(run, *options, "--engine", engine) for engine in ("optimized", "reference"))
    timing = ("engine", "num_blocks", "seconds", "load_seconds", "device_seconds")
    assert {name: optimized[name] for name in optimized if name not in timing} == {
        name: reference[name] for name in reference if name not in timing
    }


def test_raw_leaves_the_template_out(run: Run, tiny_path: Path) -> None:
    options = ("hello", "--model", tiny_path, "--max-tokens", 2)
    assert answer(run, *options, "--raw")["usage"]["prompt_tokens"] == 1
    assert answer(run, *options)["usage"]["prompt_tokens"] == 8


def test_several_answers_are_told_apart(run: Run, tiny_path: Path) -> None:
    shown = run("generate", "one", "two", "--model", tiny_path, "--n", 2, "--max-tokens", 3).stdout.splitlines()
    headings = [line for line in shown if line.startswith(("=== ", "--- "))]
    assert headings == ["=== one", "--- 1 of 2", "--- 2 of 2", "=== two", "--- 1 of 2", "--- 2 of 2"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_tiny_cache_preempts_and_says_the_same(run: Run, tiny_path: Path, mode: str) -> None:
    options = ("one", "two", "three", "--model", tiny_path, "--max-tokens", 20, "--block-size", 4)
    roomy = answer(run, *options, "--no-enable-prefix-caching")
    tight = answer(run, *options, "--num-gpu-blocks-override", 9, "--preemption-mode", mode)
    assert tight["num_preemptions"] > 0 == roomy["num_preemptions"]
    assert (tight["blocks_swapped_out"] > 0) is (mode == "swap")
    assert tight["outputs"] == roomy["outputs"]


@pytest.mark.parametrize("engine", ["optimized", "reference"])
def test_a_judged_run_is_like_any_other_and_leaves_a_log(
    run: Run, tiny_path: Path, tmp_path: Path, engine: str
) -> None:
    log = tmp_path / "log"
    options = ("one", "two", "--model", tiny_path, "--n", 2, "--temperature", 1, "--engine", engine, "--max-tokens", 9)
    judged = answer(run, *options, "--self-check", "every-step", "--trace", log, "--block-size", 4)
    assert judged["outputs"] == answer(run, *options, "--block-size", 4)["outputs"]
    assert (judged["self_check"], judged["num_blocks"]) == ("every-step", 256)
    checked = run("trace", "check", log)
    assert checked.exit_code == 0
    assert re.match(
        rf"[\d,]+ events of {engine}: \d+ of \d+ rules hold; --full judges the other \d+ too\n", checked.stdout
    )
    assert f" events of {engine}: every one of " in run("trace", "check", log, "--full").stdout


def test_the_prefix_cache_tells_what_it_stores(run: Run, tiny_path: Path, tmp_path: Path) -> None:
    log = tmp_path / "kv.jsonl"
    options = ("one", "two", "one", "--model", tiny_path, "--max-tokens", 20, "--block-size", 4)
    told = answer(run, *options, "--num-gpu-blocks-override", 9, "--kv-events", log)
    assert told["outputs"] == answer(run, *options)["outputs"]
    assert "BlockRemoved" in log.read_text()
    assert " KV events: those rules hold that " in run("trace", "check", log).stdout


def test_a_run_that_is_judged_by_counters_keeps_its_cache(run: Run, tiny_path: Path, tmp_path: Path) -> None:
    options = ("one", "--model", tiny_path, "--max-tokens", 20, "--num-gpu-blocks-override", 300)
    judged = answer(run, *options, "--self-check", "sampled", "--trace", tmp_path / "log")
    assert (judged["self_check"], judged["num_blocks"]) == ("sampled", 300)
    assert judged["outputs"] == answer(run, *options)["outputs"]
    assert run("trace", "check", tmp_path / "log").exit_code == 0


@pytest.mark.parametrize("how", ["sampled", "every-step"])
def test_a_broken_engine_is_told_by_the_rule(
    run: Run, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The pool forgets that a second table entry is a second holder."""
    monkeypatch.setenv("KVPROOF_HOME", str(tmp_path))
    monkeypatch.setattr("optimized.pool.BlockPool.share", lambda pool, table: None)
    result = run("generate", "one", "--model", tiny_path, "--n", 2, "--max-tokens", 9, "--self-check", how)
    assert result.exit_code == 1
    assert complaint(result)[0].startswith("ALLOC-2 does not hold: ")
    assert "Traceback" not in result.stderr
    [file] = (tmp_path / "violations").iterdir()
    assert str(file) in complaint(result)[-1]


@pytest.mark.parametrize("engine", ["optimized", "reference"])
def test_a_model_without_numbers_fails_with_a_sentence(
    run: Run, tiny_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    def spoiled(path: Path) -> Checkpoint:
        checkpoint = load_checkpoint(path)
        norm = "model.norm.weight"
        return replace(checkpoint, tensors={**checkpoint.tensors, norm: checkpoint.tensors[norm] * math.nan})

    monkeypatch.setattr("optimized.llm.load_checkpoint", spoiled)
    result = run("generate", "one", "--engine", engine, "--model", tiny_path)
    assert result.exit_code == 1
    [said] = complaint(result)
    assert "there is no token to choose" in said


def test_an_answer_without_a_limit_is_as_long_as_fits(run: Run, tiny_path: Path) -> None:
    found = answer(run, "hello", "--model", tiny_path, "--seed", 3, "--temperature", 1)
    assert found["usage"]["total_tokens"] <= 64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--temperature", -1), "temperature is -1.0, it must be a number from 0 to inf"),
        (("--max-tokens", 0), "max_tokens is 0, it must be a whole number from 1 to"),
        (
            ("--max-tokens", 999),
            "max_tokens is 999, it must be at most max_model_len (64) together with the prompt (8)",
        ),
        (("--n", 5, "--max-num-seqs", 4), "n is 5, it must be at most max_num_seqs (4)"),
        (("--engine", "fast"), "engine is 'fast', it must be optimized or reference"),
        (("--block-size", 0), "block_size is 0, it must be a whole number, at least 1"),
        (
            ("--num-gpu-blocks-override", 1, "--max-tokens", 30),
            "the request needs room for 37 tokens, the cache has 16",
        ),
        (("--kv-cache-memory-bytes", 9), "kv_cache_memory_bytes is 9, it must be at least one block, 4,096 bytes"),
        (("--seed", -1), "seed is -1, it must be a whole number, at least 0"),
        (("--kv-cache-dtype", "fp4"), "kv_cache_dtype is 'fp4', it must be one of auto, fp8"),
        (("--quantization", "int4"), "quantization is 'int4', it must be int8 or gguf, or left out"),
        (("--trace", "/no/such/folder/log"), "it must be a file in a folder that is there"),
        (("--kv-events", "/no/such/folder/log"), "it must be a file in a folder that is there"),
        (("--kv-events", "log", "--trace", "./log"), "it must be another file than that of the trace"),
        (
            ("--kv-events", "log", "--no-enable-prefix-caching"),
            "kv_events is 'log', it must be left out with the reference engine or without a prefix cache",
        ),
        (
            ("--model", "no-such-model"),
            "there is no file or folder 'no-such-model': pass a .gguf file, a folder with",
        ),
        (("--model", __file__), "this is not a model: pass a .gguf file, a folder with"),
    ],
)
@pytest.mark.parametrize("engine", ["optimized", "reference"])
def test_a_mistake_is_one_sentence(
    run: Run, tiny_path: Path, engine: str, options: tuple[object, ...], said: str
) -> None:
    if "kv_cache_memory_bytes" in said and engine == "reference":
        said = said.replace("4,096", "8,192")  # float64
    result = run("generate", "hello", "--engine", engine, "--model", tiny_path, *options)
    assert result.exit_code == 2
    [line] = complaint(result)
    assert said in line
    assert result.stdout == ""


def test_a_damaged_model_is_refused_by_name(run: Run, tiny_path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_path.read_bytes()[:5000])
    result = run("generate", "hello", "--model", cut)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"{cut}: ")
    assert len(result.stderr.splitlines()) == 1


def test_beams_are_answers_best_first(run: Run, tiny_path: Path) -> None:
    asked = ("generate", "hello", "--model", tiny_path, "--raw", "--max-tokens", "5", "--beam-width")
    facts = json.loads(run(*asked, "3", "--json").stdout)
    sums = [output["cumulative_logprob"] / len(output["token_ids"]) for output in facts["outputs"]]
    assert len(sums) == 3
    assert sums == sorted(sums, reverse=True)
    assert run(*asked, "3").exit_code == 0
    assert run(*asked, "3", "--n", "2").stderr.startswith("beam_width is 3, it must be without n")
    assert run(*asked, "65").stderr == "beam_width is 65, it must be a whole number from 1 to 64\n"
