"""What a server takes at most. Each limit is a flag of ``kvproof serve``, made from what is written here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


def _limit(default: int, text: str, least: int = 1) -> int:
    """A field with what its flag says."""
    made: int = field(default=default, metadata={"help": text, "least": least})
    return made


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Counts, bytes and seconds. A request over a limit is answered before any work is done for it."""

    max_head_bytes: int = _limit(16 << 10, "Bytes of the request line and the headers.", 256)
    max_header_count: int = _limit(100, "Headers of a request.")
    max_body_bytes: int = _limit(4 << 20, "Bytes of a body.")
    max_json_depth: int = _limit(64, "Brackets inside each other in a body.")
    head_timeout: int = _limit(
        10, "Seconds in which a request's headers must have come, and before them a TLS handshake."
    )
    body_timeout: int = _limit(30, "Seconds in which a request's body must have come.")
    keep_alive_timeout: int = _limit(5, "Seconds that a connection may be idle between two requests.")
    max_connections: int = _limit(1024, "Connections; one more is told 503.", 2)
    max_prompts: int = _limit(64, "Prompts of a request.")
    max_n: int = _limit(64, "Answers to each prompt.")
    max_choices: int = _limit(128, "Prompts times answers.")
    max_logprobs: int = _limit(20, "Likeliest tokens that are told, of a prompt or an answer.", 0)
    max_stop_strings: int = _limit(4, "Stop strings.", 0)
    max_stop_characters: int = _limit(256, "Characters of a stop string.")
    max_stop_token_ids: int = _limit(64, "Stop tokens.", 0)
    max_logit_biases: int = _limit(300, "Tokens with a bias.", 0)
    max_bad_words: int = _limit(128, "Bad words.", 0)
    max_bad_word_tokens: int = _limit(1024, "Tokens of all bad words.", 0)
    max_cache_salt: int = _limit(128, "Characters of a cache salt.")
    max_regex_bytes: int = _limit(2 << 10, "Bytes of a regular expression that answers follow.")
    max_grammar_bytes: int = _limit(32 << 10, "Bytes of a grammar, or of a list of choices.")
    max_schema_bytes: int = _limit(64 << 10, "Bytes of a JSON schema.")
    max_schema_depth: int = _limit(32, "Brackets inside each other in a JSON schema.")
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
    stall_seconds: int = _limit(10, "Seconds without progress after which /health is 503.")
    shutdown_timeout: int = _limit(30, "Seconds that requests get after the first signal.", 0)

    def __post_init__(self) -> None:
        from spec.vocabulary import InvalidConfig  # the command line reads this file for every command

        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata["least"]
            if type(value) is not int or not least <= value < 1 << 40:
                raise InvalidConfig(each.name, value, f"a whole number, at least {least}")
