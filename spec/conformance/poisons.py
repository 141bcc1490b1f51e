"""Requests that servers have died of, by what is in them, with the advisory; most of them are no valid requests at all."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Fields: TypeAlias = Mapping[str, Any]  # Any: what a caller may send

DEADLY: Mapping[str, tuple[str, Fields]] = {
    "more tokens at least than at most": ("CVE-2026-114051", {"min_tokens": 10**9, "max_tokens": None}),
    "a stop token outside": ("CVE-2026-116181", {"stop_token_ids": [10**9]}),
    "a stop token below zero": ("CVE-2026-116181", {"stop_token_ids": [-1]}),
    "a stop token beyond 64 bits": ("CVE-2026-116181", {"stop_token_ids": [1 << 70]}),
    "a biased token outside": ("CVE-2026-93989", {"logit_bias": {"999999999": 100, "-5": 1}}),
    "a bias that is no number": ("CVE-2026-105754", {"logit_bias": {"1": float("nan")}}),
    "allowed tokens outside": ("CVE-2026-93840", {"allowed_token_ids": [10**9]}),
    "no allowed token": ("CVE-2026-93840", {"allowed_token_ids": []}),
    "prompt tokens outside": ("CVE-2026-93840", {"prompt": [10**9]}),
    "prompt tokens below zero": ("CVE-2026-93840", {"prompt": [-1, -2]}),
    "an empty prompt": ("CVE-2024-8768", {"prompt": ""}),
    "an empty list of tokens": ("CVE-2024-8768", {"prompt": [[]]}),
    "no prompt at all": ("CVE-2024-8768", {"prompt": []}),
    "a salt of other characters": ("CVE-2026-105756", {"cache_salt": "\x00/../\xe9\n"}),
    "log probabilities of an echo": (
        "CVE-2026-116180",
        {"echo": True, "logprobs": 1, "prompt": "a b c d e f g h " * 4},
    ),
    "log probabilities of a cached prompt": (
        "CVE-2026-116180",
        {"prompt_logprobs": 1, "prompt": "a b c d e f g h " * 4},
    ),
    "penalties beyond measure": (
        "CVE-2026-105922",
        {"repetition_penalty": 1e-300, "presence_penalty": 1e308, "frequency_penalty": -1e308},
    ),
    "a repetition penalty of zero": ("CVE-2026-105922", {"repetition_penalty": 0}),
    "embeddings that are none": ("CVE-2025-62164", {"prompt_embeds": "UEsDBAAACAgAAAAA" * 8}),
    "a temperature near zero": ("CVE-2026-105754", {"temperature": 1e-320}),
    "an infinite temperature": ("CVE-2026-105754", {"temperature": float("inf")}),
    "numbers that are none": ("CVE-2026-105754", {"temperature": float("nan"), "top_p": float("nan")}),
    "a top_p of zero": ("CVE-2026-105754", {"top_p": 0, "top_k": 0, "min_p": 1.0}),
    "a seed beyond 64 bits": ("CVE-2026-105754", {"seed": 1 << 64}),
    "log probabilities below zero": ("CVE-2026-105754", {"logprobs": -1, "prompt_logprobs": -1}),
    "half a character": ("CVE-2026-105754", {"prompt": "\ud800", "stop": ["\udfff"], "user": "\ud800"}),
    "a character of number zero": ("CVE-2026-105754", {"prompt": "\x00\x00", "stop": ["\x00"]}),
    "an empty stop string": ("CVE-2026-105754", {"stop": ["", ""]}),
    "a prompt cut to less than nothing": ("CVE-2026-105754", {"truncate_prompt_tokens": -10, "max_tokens": 1}),
    "a transfer of blocks": (
        "CVE-2026-105754",
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [9]}},
    ),
    "priorities beyond measure": ("CVE-2026-105754", {"priority": -(1 << 80)}),
    "options of a stream without one": ("CVE-2026-105754", {"stream_options": {"include_usage": True}}),
    "types that are others": ("CVE-2026-105754", {"max_tokens": {"a": 1}, "stop": 5, "n": "x"}),
}
"""Sent as a completion, each of them twice."""

GRAMMARS: Mapping[str, tuple[str, Fields]] = {
    "an expression that tries for ever": ("CVE-2026-55574", {"regex": "(a|a|aa)*(a|aa)*(a*)*$"}),
    "nested repetitions": ("CVE-2025-71379", {"regex": "((((a{1,100}){1,100}){1,100}){1,100})"}),
    "30,000 parentheses": ("CVE-2026-25048", {"regex": "(" * 30_000 + "a" + ")" * 30_000}),
    "an expression that is none": ("CVE-2025-48943", {"regex": "[a-"}),
    "an empty expression": ("CVE-2026-105757", {"regex": ""}),
    "an empty grammar": ("CVE-2026-105757", {"grammar": ""}),
    "a grammar that is none": ("CVE-2025-48944", {"grammar": "root ::= root root | \x00"}),
    "a grammar of itself": ("CVE-2025-57809", {"grammar": "start: start"}),
    "no choice": ("CVE-2026-105757", {"choice": []}),
    "a schema that is none": ("CVE-2025-48942", {"json": {"type": "no such type", "pattern": "("}}),
    "a schema of itself": ("CVE-2025-57809", {"json": {"$ref": "#"}}),
    "a schema of 400 levels": ("CVE-2025-29770", {"json": "DEEP"}),
    "a pattern that tries for ever": ("CVE-2025-48943", {"json": {"type": "string", "pattern": "^(a+)+(b+)+$"}}),
    "repetitions without end": (
        "CVE-2025-32381",
        {"json": {"type": "string", "minLength": 1 << 40, "maxLength": 1 << 50}},
    ),
}
"""Asked for as ``structured_outputs`` of vLLM, ``guided_*``, and in ``response_format``."""


def schema_of(levels: int) -> Fields:
    """A schema of arrays of arrays."""
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        found = {"type": "array", "items": found}
    return found


def ways_to_ask(constraint: Fields) -> list[Fields]:
    """The fields that carry a constraint to different servers."""
    [(kind, value)] = constraint.items()
    value = schema_of(400) if value == "DEEP" else value
    fields: list[Fields] = [{"structured_outputs": {kind: value}}, {f"guided_{kind}": value}, {kind: value}]
    if kind == "json":
        schema = {"name": "x", "schema": value, "strict": True}
        fields.append({"response_format": {"type": "json_schema", "json_schema": schema}})
    return fields


GREEDY: Mapping[str, tuple[str, Fields]] = {
    "a thousand million answers": ("CVE-2026-34756", {"n": 10**9}),
    "a hundred thousand answers": ("CVE-2026-34756", {"n": 100_000}),
    "the best of very many": ("CVE-2024-8939", {"best_of": 10**9, "n": 1}),
    "100,000 prompts": ("CVE-2026-73559", {"prompt": ["a"] * 100_000}),
    "100,000 lists of tokens": ("CVE-2026-73559", {"prompt": [[5]] * 100_000}),
    "many prompts times many answers": ("CVE-2026-73559", {"prompt": ["a"] * 1000, "n": 64}),
    "more tokens than there is room": ("CVE-2026-34756", {"max_tokens": 10**12}),
    "a million log probabilities": ("CVE-2026-34756", {"logprobs": 10**6}),
    "a hundred thousand stop strings": ("CVE-2026-34756", {"stop": [f"stop{i}" for i in range(100_000)]}),
    "a hundred thousand bad words": ("CVE-2026-34756", {"bad_words": [f"word{i}" for i in range(100_000)]}),
}
"""Requests that ask for more than anybody gives."""
