"""The reference engine runs SmolLM2 itself."""

import json
from pathlib import Path

import pytest

from optimized.model_store import default_path
from reference import generate
from spec.vocabulary import Config, Request

RECORDED = Path(__file__).parent.parent / "models" / "smollm2_greedy.json"


@pytest.mark.slow
@pytest.mark.skipif(not default_path().exists(), reason=f"the default model is not at {default_path()}")
def test_smollm2_names_the_capital_of_france_as_transformers_does() -> None:
    pytest.importorskip("torch")
    from optimized.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(default_path())
    case = json.loads(RECORDED.read_text())["cases"][0]
    stop = tuple(checkpoint.config.eos_token_ids)
    asked = Request(0, tuple(case["prompt_token_ids"]), 12, (0,), stop_token_ids=stop)
    pool = Config(num_blocks=8, block_size=16, max_model_len=128, max_num_batched_tokens=32)
    tokens = [token for _, token in generate(checkpoint.arrays(), checkpoint.config, pool, [asked])]
    assert tokens == case["token_ids"]
    assert checkpoint.tokenizer is not None
    assert "Paris" in checkpoint.tokenizer.decode(tokens)
