"""What a caller may give for prompts, conversations and parameters: one or several, always taken as several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from optimized.sampling import SamplingParams
from spec.engine import InvalidField
from spec.vocabulary import Policy, Token

Prompt: TypeAlias = str | Sequence[Token] | Mapping[str, Any]
"""Text, token ids, or ``{"prompt": text}`` or ``{"prompt_token_ids": token ids}``."""

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Messages, each with a role and a content."""


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise InvalidField("prompts", type(prompts).__name__, "a text, a list of token ids, or a list of prompts")
    return [prompts] if prompts and all(type(each) is int for each in prompts) else list(prompts)


def conversations_of(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or several, as several."""
    if not isinstance(messages, list | tuple):
        raise InvalidField("messages", type(messages).__name__, "a list of messages, or a list of such lists")
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def text_and_ids(prompt: Prompt) -> tuple[str | None, object]:
    """The text of one prompt and its token ids, as far as it has them."""
    text: object = prompt
    token_ids: object = None
    if isinstance(prompt, Mapping):
        if not prompt or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise InvalidField("prompt", sorted(map(str, prompt)), "an object with prompt or prompt_token_ids")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif not isinstance(prompt, str):
        text, token_ids = None, prompt
    if text is not None and not isinstance(text, str):
        raise InvalidField("prompt", type(text).__name__, "a text")
    return text, token_ids


def params_for(
    count: int, given: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams
) -> list[SamplingParams]:
    """The parameters for each of so many prompts."""
    if given is None or isinstance(given, SamplingParams):
        return [given or default] * count
    if not isinstance(given, list | tuple) or not all(isinstance(each, SamplingParams) for each in given):
        raise InvalidField("sampling_params", given, "SamplingParams, or a list of them")
    if len(given) != count:
        raise InvalidField(
            "sampling_params", f"{len(given)} of them", f"one for all, or one for each of {count} prompts"
        )
    return list(given)


def priorities_for(count: int, given: int | Sequence[int]) -> list[int]:
    """The priority of each of so many prompts; whether one may have it is asked where its request is made."""
    if type(given) is int:
        return [given] * count
    if not isinstance(given, list | tuple) or any(type(each) is not int for each in given):
        raise InvalidField("priority", given, "a whole number, or a list of them")
    if len(given) != count:
        raise InvalidField("priority", f"{len(given)} of them", f"one for all, or one for each of {count} prompts")
    return list(given)


def demand_priority(priority: int, policy: Policy) -> None:
    """Raise ``InvalidField`` unless a request may have this priority under this scheduling policy."""
    if type(priority) is not int or not -(1 << 63) <= priority < 1 << 63:
        raise InvalidField("priority", priority, "a whole number of at most 64 bits")
    if priority and policy is not Policy.PRIORITY:
        raise InvalidField("priority", priority, "0, unless the scheduling policy is priority")


def spelled(words: Sequence[str], encode: Callable[[str, bool], list[Token]]) -> tuple[tuple[Token, ...], ...]:
    """Bad words in token ids, as they begin a text, and as they stand after a space."""
    found = [tuple(encode(prefix + word, False)) for word in words for prefix in ("", " ")]
    return tuple(word for word in dict.fromkeys(found) if word)


def checked_ids(token_ids: object, vocab_size: int) -> list[Token]:
    """Token ids of a vocabulary, at least one. Raises ``InvalidField``."""
    if not isinstance(token_ids, list | tuple):
        raise InvalidField("prompt", type(token_ids).__name__, "a text or a list of token ids")
    if not token_ids:
        raise InvalidField("prompt", "", "at least one token long")
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidField("prompt", token_id, f"made of token ids from 0 to {vocab_size - 1}")
    return list(token_ids)
