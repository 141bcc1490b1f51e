"""A task for lm-eval, offline, and what its loglikelihoods must be: computed from dense logits, without any cache."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optimized.checkpoint import Checkpoint
from tests.models.test_llama import dense_logits

DOCUMENTS = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "a river"], "answer": 0},
    {"question": "Two and two are", "choices": ["four", "seven", "naïve – 東京"], "answer": 0},
    {"question": "Water freezes at", "choices": ["zero degrees", "a hundred degrees", "noon"], "answer": 0},
    {"question": "The sun rises in the", "choices": ["west", "east"], "answer": 1},
]
"""Some choices are cut into pieces of characters, which have no text of their own."""

TASK = """\
task: four_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def write_task(folder: Path) -> None:
    """The task and its documents."""
    file = folder / "four_questions.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS), encoding="utf-8")
    (folder / "four_questions.yaml").write_text(TASK.format(file=file), encoding="utf-8")


@dataclass(frozen=True)
class Likelihood:
    """Of one choice: the sum over its tokens in float64, how far float32 may be from that, and whether it is the greedy
    answer, None if the numbers are too close to tell."""

    total: float
    bound: float
    is_greedy: bool | None


def direct(checkpoint: Checkpoint) -> Iterator[Likelihood]:
    """One for each choice of each document, in order."""
    arrays, tokenizer = checkpoint.arrays(), checkpoint.tokenizer
    assert tokenizer is not None
    for document in DOCUMENTS:
        question = tokenizer.encode(document["question"], add_special_tokens=False)
        for choice in document["choices"]:
            ids = tokenizer.encode(f"{document['question']} {choice}", add_special_tokens=False)
            assert ids[: len(question)] == question
            count = len(ids) - len(question)
            exact, rounded = (
                dense_logits(checkpoint.config, arrays, ids[:-1], kind)[-count:].astype(np.float64)
                for kind in (np.float64, np.float32)
            )
            told = ids[len(question) :]
            # Twice what float32 does to a logit (docs/architecture.md); a token's probability has two of them in it.
            logit_bound = 2 * float(np.abs(rounded - exact).max())
            chosen = exact[np.arange(count), told]
            total = float((chosen - np.log(np.exp(exact - exact.max(-1, keepdims=True)).sum(-1)) - exact.max(-1)).sum())
            margins = chosen - np.where(np.eye(exact.shape[1], dtype=bool)[told], -np.inf, exact).max(-1)
            is_greedy = None if np.abs(margins).min() <= logit_bound else bool((margins > 0).all())
            yield Likelihood(total, 2 * logit_bound * count, is_greedy)


def check(samples: Path, checkpoint: Checkpoint) -> list[str]:
    """Compare what lm-eval wrote with the direct computation, a line for each choice. Raises ``AssertionError``."""
    written: list[dict[str, Any]] = sorted(
        map(json.loads, samples.read_text(encoding="utf-8").splitlines()), key=lambda each: each["doc_id"]
    )
    seen = [(float(each[0]), str(each[1]) == "True") for one in written for [each] in one["resps"]]
    expected, lines = list(direct(checkpoint)), []
    assert len(seen) == len(expected) == sum(len(each["choices"]) for each in DOCUMENTS)
    for (total, is_greedy), known in zip(seen, expected, strict=True):
        lines.append(f"lm-eval {total:.6f}, direct {known.total:.6f}, bound {known.bound:.6f}, greedy {is_greedy}")
        assert abs(total - known.total) <= known.bound, lines[-1]
        assert known.is_greedy in (None, is_greedy), lines[-1]
    return lines
