"""Record what ``transformers`` itself generates, greedily, with SmolLM2's weights: the values of smollm2_greedy.json.

transformers is no dependency of kvproof, so this runs in an environment of its own::

    python -m venv hf && hf/bin/pip install torch==2.13.0 transformers accelerate gguf safetensors
    hf/bin/python tests/peers/record_transformers.py SmolLM2-135M-Instruct.Q4_1.gguf tests/models/smollm2_greedy.json

Weights are the float32 numbers that the GGUF file dequantizes to; nothing is rounded to another type, and all
arithmetic is float32. A margin is the difference of the two largest logits before each token.
"""

import hashlib
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

NUM_TOKENS = 24

CHATS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Translate 'good morning' into Spanish.",
    "Name three colors.",
    "What is 12 + 30?",
    "Explain gravity to a child.",
]
TEXTS = [
    "Once upon a time, in a small village",
    "The 7 wonders of the ancient world are: 1.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Les élèves de l'école étudient",
    "東京 is the capital of Japan. Its population in 2020 was about 13,960,000; it's",
]


def main(gguf: Path, target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    cases = [record(tokenizer, model, text, chat=True) for text in CHATS]
    cases += [record(tokenizer, model, text, chat=False) for text in TEXTS]
    answer = {
        "command": "python tests/peers/record_transformers.py SmolLM2-135M-Instruct.Q4_1.gguf tests/models/smollm2_greedy.json",
        "model_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "weights": "float32 as dequantized by gguf, not rounded; arithmetic in float32",
        "versions": {name: version(name) for name in ("torch", "transformers", "gguf", "tokenizers")},
        "num_tokens": NUM_TOKENS,
        "cases": cases,
    }
    target.write_text(json.dumps(answer, indent=1, ensure_ascii=True) + "\n")


def record(tokenizer, model, text: str, chat: bool) -> dict[str, object]:
    """One prompt and its continuation; an end token, if one comes, is the last."""
    rendered = text
    if chat:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(rendered, add_special_tokens=False, return_tensors="pt").input_ids
    made = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    token_ids = made.sequences[0, prompt_ids.shape[1] :].tolist()
    margins = []
    for logits in made.logits:
        first, second = logits[0].double().topk(2).values.tolist()
        margins.append(round(first - second, 6))
    return {
        "prompt": text,
        "chat": chat,
        "rendered": rendered,
        "prompt_token_ids": prompt_ids[0].tolist(),
        "token_ids": token_ids,
        "text": tokenizer.decode(token_ids),
        "margins": margins,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
