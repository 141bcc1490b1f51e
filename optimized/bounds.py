"""The most that a request may ask of an engine, whoever asks: no flag of a server goes beyond."""

MAX_SAMPLES = 64
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BAD_WORDS = 128

MAX_CHARACTERS = 1 << 16
"""Characters of a grammar, and"""
MAX_DEPTH = 64
"""brackets inside each other in a schema."""
MAX_UTF8_BYTES = 4
"""Bytes of a character at most."""
