"""What a request does not say of sampling: the model's ``generation_config.json`` says it, as vLLM reads that file.

Six of its keys count, ``NAMES``; the others are about transformers. A value beats what this project would take, and a
request's own beats both. ``max_new_tokens`` is what an answer has where no ``max_tokens`` is said and there is room.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from optimized.checkpoint import Checkpoint
from optimized.model_store import BadModelFile
from optimized.sampling import SamplingParams
from spec.engine import InvalidField
from spec.vocabulary import InvalidConfig

NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The keys that count, each with the field of ``SamplingParams`` that it is about."""

FILE = "generation_config.json"
MAX_BYTES = 1 << 20
MAX_SHOWN = 100
AUTO, NONE = "auto", "vllm"

Defaults: TypeAlias = Mapping[str, Any]
"""Fields of ``SamplingParams`` and their values where a request says nothing."""


def defaults_of(
    checkpoint: Checkpoint, generation_config: str = AUTO, override: Mapping[str, Any] | None = None
) -> Defaults:
    """The defaults of a model: of its own file (``auto``), of none (``vllm``) or of another file or its folder, and then
    what ``override`` has instead. Raises ``BadModelFile`` and ``InvalidConfig`` for values that no request could have."""
    changed = checked_override(override)
    path, said = checkpoint.path / FILE, checkpoint.generation_config if generation_config == AUTO else {}
    if generation_config not in (AUTO, NONE):
        from optimized.hf_checkpoint import read_json

        named = Path(generation_config).expanduser()
        path = named / FILE if named.is_dir() else named
        said = read_json(path, MAX_BYTES)
    try:
        found = _checked(said)
    except InvalidField as error:
        raise BadModelFile(path, f"{error} (--generation-config vllm leaves this file out)") from None
    both = {**found, **changed}
    return MappingProxyType({name: value for name, value in both.items() if value is not None})


def checked_override(override: Mapping[str, Any] | None) -> Defaults:
    """What stands instead of the file's values; None is for nothing. Raises ``InvalidConfig`` for what means nothing."""
    given = {} if override is None else override
    if not isinstance(given, Mapping) or not given.keys() <= NAMES.keys():
        shown = sorted(given.keys() - NAMES.keys()) if isinstance(given, Mapping) else given
        raise InvalidConfig("override_generation_config", shown, f"an object of {', '.join(NAMES)}")
    try:
        return _checked(given)
    except InvalidField as error:
        raise InvalidConfig("override_generation_config", dict(given), f"possible for a request: {error}") from None


def read_override(text: str | None) -> dict[str, Any] | None:
    """An override as it stands on a command line. Raises ``InvalidConfig``."""
    if text is None:
        return None
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError):
        given = text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
    if not isinstance(given, dict):  # null is none, too, and not as if nothing had been said
        raise InvalidConfig("override_generation_config", given, f"an object of {', '.join(NAMES)}")
    checked_override(given)
    return given


def params_by_default(defaults: Defaults) -> SamplingParams:
    """The parameters of a request that says nothing. Where the file says how long answers are, there must be room."""
    return SamplingParams(**{**defaults, **({"max_tokens": None} if "max_tokens" in defaults else {})})


def defaults_sentence(defaults: Defaults) -> str:
    """What whoever starts an engine is told of them.

    >>> defaults_sentence({"temperature": 0.6, "top_p": 0.9})
    'sampling, where a request does not say: temperature 0.6, top_p 0.9'
    """
    return f"sampling, where a request does not say: {', '.join(f'{name} {v}' for name, v in defaults.items())}"


def fill(body: object, defaults: Defaults) -> None:
    """Let the fields that a request left empty be what the defaults say, but for how long its answer is."""
    for name, value in defaults.items():
        if name != "max_tokens" and getattr(body, name) is None:
            setattr(body, name, value)


def _checked(said: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that count, under our names. Raises ``InvalidField`` unless a request could ask for the same."""
    found = {name: said[key] for key, name in NAMES.items() if key in said}
    for name, value in found.items():
        if len(shown := repr(value)) > MAX_SHOWN:
            raise InvalidField(name, shown[:MAX_SHOWN] + "...", "a number, and a short one")
    SamplingParams(**{name: value for name, value in found.items() if value is not None})
    return found
