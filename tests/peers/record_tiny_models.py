"""Record the logits that ``transformers`` computes for tiny random models: the values of tiny_logits.json.

transformers is no dependency of kvproof, so this runs in an environment of its own, on folders that the tests' own
writer makes::

    python -m tests.models.tiny_files FOLDER
    python -m venv hf && hf/bin/pip install torch==2.13.0 transformers safetensors
    hf/bin/python tests/peers/record_tiny_models.py FOLDER tests/models/tiny_logits.json

Matrix products are float64 and attention is transformers' own eager one; its norms and rotary angles are float32, always.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM

NUM_BEAMS, NUM_NEW_TOKENS = 4, 7
TOKENS = [7, 3, 3, 58, 11, 0, 42, 7, 3, 19, 25, 31, 44, 2]


def main(folder: Path, target: Path) -> None:
    models = {path.name: record(path) for path in sorted(folder.iterdir())}
    answer = {
        "command": "python tests/peers/record_tiny_models.py FOLDER tests/models/tiny_logits.json",
        "arithmetic": "float64, but for norms and rotary angles; eager attention",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "token_ids": TOKENS,
        "models": models,
    }
    target.write_text(json.dumps(answer).replace("], [", "],\n[") + "\n")


def record(path: Path) -> dict[str, object]:
    """The logits after every token, rounded far below what single precision can tell."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS])).logits[0]
    return {
        "class": type(model).__name__,
        "beams": beams(model),
        "logits": [[round(x, 7) for x in row] for row in logits.tolist()],
    }


def beams(model) -> list[dict[str, object]]:
    """The answers of a beam search that nothing ends early, the best first, each with its score."""
    found = model.generate(
        torch.tensor([TOKENS]),
        attention_mask=torch.ones((1, len(TOKENS)), dtype=torch.int64),
        num_beams=NUM_BEAMS,
        num_return_sequences=NUM_BEAMS,
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = zip(found.sequences[:, len(TOKENS) :].tolist(), found.sequences_scores.tolist(), strict=True)
    return [{"token_ids": token_ids, "score": round(score, 7)} for token_ids, score in answers]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
