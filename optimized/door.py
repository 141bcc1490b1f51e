"""The door: which requests and forks are let in. Whatever is refused here has changed nothing."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from optimized.pool import blocks_needed
from optimized.sequences import LiveRequest, LiveSeq
from spec.engine import Admission, InvalidField, PromptTooLong, UnknownId
from spec.vocabulary import Config, Request, RequestId, SeqId

IsNew = Callable[[SeqId], bool]
"""Whether no live sequence has an id, nor one that is still to be forked."""


def check_request(config: Config, request: Request, live: Container[RequestId], is_new: IsNew) -> None:
    """Raise ``InvalidRequest`` unless an empty engine can serve the request to its end, and its ids are new (SCHED-8)."""
    num_seqs, most = len(request.seq_ids), len(request.prompt) + request.max_tokens
    if request.request_id in live:
        raise InvalidField("request_id", request.request_id, "an id that no live request has")
    if not request.prompt:
        raise InvalidField("prompt", request.prompt, "at least one token")
    if request.max_tokens < 1:
        raise InvalidField("max_tokens", request.max_tokens, "at least 1")
    if not request.seq_ids or len(set(request.seq_ids)) < num_seqs:
        raise InvalidField("seq_ids", request.seq_ids, "at least one id, each once")
    for seq_id in request.seq_ids:
        if not is_new(seq_id):
            raise InvalidField("seq_ids", seq_id, "an id that no live sequence has")
    if num_seqs > config.max_num_seqs:
        raise InvalidField("seq_ids", request.seq_ids, f"at most max_num_seqs ({config.max_num_seqs})")
    if most > config.max_model_len:
        limit = f"at most max_model_len ({config.max_model_len}) together with the prompt ({len(request.prompt)})"
        raise InvalidField("max_tokens", request.max_tokens, limit)
    if num_seqs * blocks_needed(most - 1, config.block_size) > config.num_blocks:
        raise PromptTooLong(most - 1, num_seqs, config.num_slots)


def check_fork(seqs: Mapping[SeqId, LiveSeq], parent_id: SeqId, child_id: SeqId, is_new: IsNew) -> LiveSeq:
    """The parent. Raises ``InvalidRequest`` unless it runs with output and in no step, and the child's id is new."""
    parent = seqs.get(parent_id)
    if parent is None:
        raise UnknownId("sequence", parent_id)
    request = parent.request
    ready = request.running and len(parent.tokens) > len(request.request.prompt) and not parent.num_scheduled
    if not ready:
        raise InvalidField("parent", parent_id, "a sequence of a running request, with output and not in a step")
    if not is_new(child_id):
        raise InvalidField("child", child_id, "an id that no live sequence has")
    return parent


def room_for_fork(config: Config, request: LiveRequest, seats_taken: int) -> Admission:
    """Whether the request may have one more sequence now."""
    blocks = blocks_needed(request.most_tokens_stored, config.block_size)
    if (len(request.seqs) + 1) * blocks > config.num_blocks:
        return Admission.NEVER
    if seats_taken >= config.max_num_seqs:
        return Admission.LATER
    return Admission.NOW
