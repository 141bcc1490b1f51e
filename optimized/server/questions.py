"""What requests ask, as the engine reads it: prompts of every shape, and conversations, cut where they are to be."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from optimized.async_llm import AsyncLLM
from optimized.prompts import Prompt
from optimized.server.errors import RequestError
from optimized.server.requests import ChatRequest, CompletionRequest


async def completion_prompts(engine: AsyncLLM, body: CompletionRequest) -> list[Prompt]:
    """The prompts. Where nothing is to be cut from them or left out, the engine reads texts when their turn comes."""
    most = _longest(engine, body.truncate_prompt_tokens)
    with_special = body.add_special_tokens is not False
    found: list[Prompt] = []
    for prompt in body.prompts():
        if isinstance(prompt, str) and (most is not None or not with_special):
            ids = await engine.tokenize(prompt, with_special)
            found.append(_cut({"prompt": prompt, "prompt_token_ids": ids}, most))
        else:
            found.append(prompt[-most:] if most is not None and not isinstance(prompt, str) else prompt)
    return found


async def chat_prompt(engine: AsyncLLM, body: ChatRequest) -> Prompt:
    """The conversation in the model's template, up to where the answer begins or, if it is to go on, to its beginning's end."""
    if body.continue_final_message:
        text = await _up_to_its_end(engine, body)
        found: Any = {"prompt": text, "prompt_token_ids": await engine.tokenize(text, False)}
    else:
        begins = body.add_generation_prompt is not False
        found = await engine.chat_prompt(body.conversation(), begins, body.told_tools())
    return _cut(found, _longest(engine, body.truncate_prompt_tokens))


async def _up_to_its_end(engine: AsyncLLM, body: ChatRequest) -> str:
    """The conversation without what its template writes after the last message.

    That may have the message's own words in it, as ``<|im_end|>`` has ``end``. So the template gets the message with a mark
    behind it that nobody can have foreseen.
    """
    mark, conversation = f"mark{secrets.token_hex(16)}", body.conversation()
    beginning = body.messages[-1].text.rstrip()
    conversation[-1]["content"] = beginning + mark
    made: Any = await engine.chat_prompt(conversation, False, body.told_tools())
    shown = made["prompt"].split(mark)
    if len(shown) != 2 or not shown[0].endswith(beginning.lstrip()):
        message = "continue_final_message: the chat template does not show the last message as it is"
        raise RequestError(400, "invalid_value", message, "continue_final_message")
    return str(shown[0])


def _longest(engine: AsyncLLM, asked: int | None) -> int | None:
    """How many tokens of a prompt are left, the last ones; -1 is as many as leave room for one more."""
    return engine.llm.config.max_model_len - 1 if asked == -1 else asked


def _cut(prompt: Mapping[str, Any], most: int | None) -> Prompt:
    ids = prompt["prompt_token_ids"]
    return dict(prompt) if most is None or len(ids) <= most else {"prompt_token_ids": ids[-most:]}
