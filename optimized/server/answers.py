"""The bodies of answers, in OpenAI's shapes, and how an engine's outputs become them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from optimized.outputs import CompletionOutput, RequestOutput
from optimized.sampling import Logprob
from optimized.server.tools import ToolCall, tool_call


class Usage(BaseModel):
    """Tokens of all prompts, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """The legacy shape: parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(BaseModel):
    """The answer of ``/v1/completions``, or a chunk of one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprob(BaseModel):
    """A token with its text, its bytes and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """A token of an answer, and the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """One entry for each token of the answer."""

    content: list[ChosenLogprob]


class ChatMessage(BaseModel):
    """The answer of the model."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "kvproof"
    root: str
    max_model_len: int
    default_sampling_params: dict[str, int | float]
    """What is taken where a request does not say, of what the model's generation_config.json says."""


class ModelList(BaseModel):
    """All of them: one."""

    object: str = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """The answer of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int


class TokenizerInfo(BaseModel):
    """The answer of ``/tokenizer_info``: what lm-eval asks before it trusts ``/tokenize``."""

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class Text(BaseModel):
    """The answer of ``/detokenize``."""

    prompt: str


class Status(BaseModel):
    """How the server is."""

    status: str


class Load(BaseModel):
    """Requests that wait or run, each prompt counted."""

    server_load: int


class Version(BaseModel):
    """Which kvproof this is."""

    version: str


def said_of(output: CompletionOutput, calls: bool) -> tuple[ChatMessage, str | None]:
    """What an answer of a chat says, a text or a tool call, and why it ended."""
    if not calls:
        return ChatMessage(content=output.text), output.finish_reason
    call, is_cut = tool_call(output.text)
    message = ChatMessage(content=None, tool_calls=None if call is None else [call])
    return message, output.finish_reason if is_cut else "tool_calls"


def usage_of(outputs: list[RequestOutput]) -> Usage:
    """A prompt counts once, however many answers it has."""
    prompt = sum(len(each.prompt_token_ids) for each in outputs)
    completion = sum(len(output.token_ids) for each in outputs for output in each.outputs)
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def text_of(token: int, logprob: Logprob) -> str:
    """The text of a token as far as it has one."""
    return logprob.decoded_token if logprob.decoded_token is not None else f"token_id:{token}"


def completion_logprobs(token_ids: list[int], entries: list[dict[int, Logprob]], offset: int = 0) -> CompletionLogprobs:
    """Log probabilities of an answer, whose text begins at ``offset``."""
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token, entry in zip(token_ids, entries, strict=True):
        text = text_of(token, entry[token])
        found.tokens.append(text)
        found.token_logprobs.append(_finite(entry[token].logprob))
        found.top_logprobs.append(_by_text(entry))
        found.text_offset.append(offset)
        offset += len(text)
    return found


def _by_text(entry: dict[int, Logprob]) -> dict[str, float]:
    """Likeliest tokens by their texts. Pieces of a character all look alike; the likeliest of them is told."""
    told: dict[str, float] = {}
    for token, one in entry.items():
        text, logprob = text_of(token, one), _finite(one.logprob)
        told[text] = max(logprob, told.get(text, logprob))
    return told


def echoed(answer: RequestOutput, output: CompletionOutput, prompt_text: list[str]) -> CompletionLogprobs:
    """Log probabilities of the prompt, whose first token has none, and then of the answer."""
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    offset = 0
    for token, text, entry in zip(answer.prompt_token_ids, prompt_text, answer.prompt_logprobs or [], strict=True):
        found.tokens.append(text)
        found.token_logprobs.append(None if entry is None else _finite(entry[token].logprob))
        found.top_logprobs.append(None if entry is None else _by_text(entry))
        found.text_offset.append(offset)
        offset += len(text)
    more = completion_logprobs(output.token_ids, output.logprobs or [], offset)
    found.tokens += more.tokens
    found.token_logprobs += more.token_logprobs
    found.top_logprobs += more.top_logprobs
    found.text_offset += more.text_offset
    return found


def chat_logprobs(token_ids: list[int], entries: list[dict[int, Logprob]], num_top: int) -> ChatLogprobs:
    """Log probabilities of an answer. The chosen token is among the likeliest only where it is one of them."""
    return ChatLogprobs(
        content=[
            ChosenLogprob(
                **_token(token, entry[token]),
                top_logprobs=[
                    TokenLogprob(**_token(each, one))
                    for each, one in sorted(entry.items(), key=lambda pair: pair[1].rank)
                    if one.rank <= num_top
                ][:num_top],
            )
            for token, entry in zip(token_ids, entries, strict=True)
        ]
    )


def _token(token: int, logprob: Logprob) -> dict[str, Any]:
    text = text_of(token, logprob)
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    """JSON has no infinity: a probability of 0 is shown as OpenAI does."""
    return max(logprob, -9999.0)
