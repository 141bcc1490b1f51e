"""A process that makes one grammar and ends: some take hours, and only a process can be stopped.

It reads ``{"kind": ..., "text": ..., "cpu_ms": ...}`` and writes ``{"grammar": ...}``, in llguidance's own form, or ``{"error": ...}``.
It is run as a file, and so imports nothing of ours.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

STARTING_CPU_S = 2
MEMORY_BYTES = 2 << 30

MAX_GRAMMAR_SIZE = 60_000
"""Symbols of a grammar. At 65,525 llguidance 1.9 fails an assertion of its own."""

WHITESPACE = " ?"
"""Between the parts of JSON: a small model that may write as much as it likes does so until it is cut off."""


def main() -> None:
    asked = json.load(sys.stdin)
    most = STARTING_CPU_S + math.ceil(asked["cpu_ms"] / 1000)
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    signal.setitimer(signal.ITIMER_PROF, asked["cpu_ms"] / 1000)  # ends it; to start is not its caller's work
    try:
        grammar = made(asked["kind"], asked["text"])
        # Not validate_grammar, which leaves out what takes hours.
        error = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes())), grammar, log_level=0, limits=limits()).get_error()
    except Exception as failure:  # noqa: BLE001  whatever it is, it is about this grammar
        grammar, error = "", str(failure) or type(failure).__name__
    json.dump({"error": error} if error else {"grammar": grammar}, sys.stdout)


def limits() -> LLParserLimits:
    """What llguidance may spend on a grammar, and on each step of an answer."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_grammar_size=MAX_GRAMMAR_SIZE, precompute_large_lexemes=False, verbose_errors=False)


class Bytes:
    """Tokens that are bytes, for llguidance: which tokens there are makes no difference to what a grammar takes."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (256,)
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def made(kind: str, text: str) -> str:
    """What a caller says in llguidance's own form."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in json.loads(text)))
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    schema = text if kind == "json" else '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})


if __name__ == "__main__":
    main()
