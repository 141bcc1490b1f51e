"""What the log says of a request, if it is asked to: what it wants, and at DEBUG what it says, each in one line and cut."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields

from optimized.prompts import Prompt
from optimized.sampling import SamplingParams
from optimized.server.front import Front

logger = logging.getLogger(__name__)


def log_request(front: Front, request_id: str, prompts: Sequence[Prompt], params: SamplingParams) -> None:
    """The lines of a request. A form may be that of tools, which are part of the prompt: at INFO only its kind is told."""
    if not front.enable_log_requests:
        return
    most, form = front.max_log_len, params.structured_outputs
    said = {each.name: getattr(params, each.name) for each in fields(params)}
    said["structured_outputs"] = None if form is None else form.kind
    asked = ", ".join(f"{name}={brief(value, most)}" for name, value in said.items())
    logger.info("%s asks with %d prompts: %s", request_id, len(prompts), f"SamplingParams({asked})"[:most])
    if logger.isEnabledFor(logging.DEBUG):
        for each in (*prompts, *(() if form is None else (form.text,))):
            text = (each.get("prompt") or each["prompt_token_ids"]) if isinstance(each, Mapping) else each
            logger.debug("%s says: %s", request_id, brief(text, most))


def brief(value: object, most: int) -> str:
    """So many characters of a value at most, without reading all of one that has millions."""
    return repr(value[:most] if isinstance(value, str | list | tuple) else value)[:most]
