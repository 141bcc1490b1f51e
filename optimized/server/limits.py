"""What a server takes at most. Each limit is a flag of ``kvproof serve``, made from what is written here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from optimized import bounds

MOST = (1 << 40) - 1
DEEPEST = 512
"""Parsers recurse, and have no room for much more."""
MAX_FORM_BYTES = bounds.MAX_UTF8_BYTES * bounds.MAX_CHARACTERS


def _limit(default: int, text: str, least: int = 1, most: int = MOST) -> int:
    """A field with what its flag says. ``most`` is what those behind it take: a flag beyond it would change nothing."""
    made: int = field(default=default, metadata={"help": text, "least": least, "most": most})
    return made


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Counts, bytes and seconds. A request over a limit is answered before any work is done for it."""

    max_head_bytes: int = _limit(16 << 10, "Bytes of the request line and the headers.", 256)
    max_header_count: int = _limit(100, "Headers of a request.")
    max_body_bytes: int = _limit(4 << 20, "Bytes of a body.")
    max_json_depth: int = _limit(64, "Brackets inside each other in a body.", most=DEEPEST)
    head_timeout: int = _limit(
        10, "Seconds in which a request's headers must have come, and before them a TLS handshake."
    )
    body_timeout: int = _limit(30, "Seconds in which a request's body must have come.")
    keep_alive_timeout: int = _limit(5, "Seconds that a connection may be idle between two requests.")
    max_connections: int = _limit(1024, "Connections; one more is told 503.", 2)
    max_prompts: int = _limit(64, "Prompts of a request.")
    max_n: int = _limit(64, "Answers to each prompt.", most=bounds.MAX_SAMPLES)
    max_choices: int = _limit(128, "Prompts times answers.")
    max_logprobs: int = _limit(20, "Likeliest tokens that are told, of a prompt or an answer.", 0, bounds.MAX_LOGPROBS)
    max_stop_strings: int = _limit(4, "Stop strings.", 0, bounds.MAX_STOP_STRINGS)
    max_stop_characters: int = _limit(256, "Characters of a stop string.")
    max_stop_token_ids: int = _limit(64, "Stop tokens.", 0, bounds.MAX_STOP_TOKEN_IDS)
    max_logit_biases: int = _limit(300, "Tokens with a bias.", 0, bounds.MAX_BIASES)
    max_bad_words: int = _limit(128, "Bad words.", 0, bounds.MAX_BAD_WORDS)
    max_bad_word_tokens: int = _limit(1024, "Tokens of all bad words.", 0)
    max_cache_salt: int = _limit(128, "Characters of a cache salt.")
    max_regex_bytes: int = _limit(2 << 10, "Bytes of a regular expression that answers follow.", most=MAX_FORM_BYTES)
    max_grammar_bytes: int = _limit(32 << 10, "Bytes of a grammar, or of a list of choices.", most=MAX_FORM_BYTES)
    max_schema_bytes: int = _limit(64 << 10, "Bytes of a JSON schema.", most=MAX_FORM_BYTES)
    max_schema_depth: int = _limit(32, "Brackets inside each other in a JSON schema.", most=bounds.MAX_DEPTH)
    grammar_timeout_ms: int = _limit(500, "Milliseconds of a processor's time to make a grammar in.")
    grammar_cache_bytes: int = _limit(64 << 20, "Bytes of grammars that are kept.", 0)
    max_grammars_at_once: int = _limit(2, "Grammars that are made at the same time.")
    template_fuel: int = _limit(500_000, "Steps of a chat template.")
    max_template_characters: int = _limit(4 << 20, "Characters that a chat template makes.")
    max_num_queued_reqs: int = _limit(256, "Requests that wait or run, each prompt counted; one more is told 503.")
    max_num_queued_tokens: int = _limit(
        0, "Tokens of prompts that have no answer yet; more are told 503. 0 is 8 full steps.", 0
    )
    max_per_key: int = _limit(0, "Requests of one key at once; one more is told 429. 0 is any number.", 0)
    max_request_seconds: int = _limit(600, "Seconds that an answer may take.")
    stream_buffer_bytes: int = _limit(256 << 10, "Bytes that wait for one client to read them.")
    send_timeout: int = _limit(30, "Seconds after which a client that reads nothing is given up.")
    trace_queue_bytes: int = _limit(
        64 << 20, "Bytes of --trace that may wait for the disk; where more would, the trace ends."
    )
    stall_seconds: int = _limit(10, "Seconds without progress after which /health is 503.")
    shutdown_timeout: int = _limit(30, "Seconds that requests get after the first signal.", 0)

    def __post_init__(self) -> None:
        from spec.vocabulary import InvalidConfig  # the command line reads this file for every command

        for each in fields(self):
            value, least, most = getattr(self, each.name), each.metadata["least"], each.metadata["most"]
            if type(value) is not int or not least <= value <= most:
                upward = (
                    f", at least {least}"
                    if most == MOST
                    else f" from {least} to {most:,}: nothing behind it takes more"
                )
                raise InvalidConfig(each.name, value, f"a whole number{upward}")
