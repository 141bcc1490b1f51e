"""An observer that follows an engine event by event in the executable model, and checks every rule after each."""

import hashlib

from reference.engine import ReferenceEngine
from spec.conformance.judge import Follower
from spec.vocabulary import Config, Prefix, Request, SeqId, Token


def next_token(seq: SeqId, tokens: Prefix) -> Token:
    """A token that depends on the sequence and on all its tokens, out of three."""
    return hashlib.sha256(repr((seq, tokens)).encode()).digest()[0] % 3


def followed(config: Config) -> tuple[ReferenceEngine, Follower]:
    """An engine, and the model that follows every event it emits."""
    follower = Follower(config, "reference")
    return ReferenceEngine(config, follower), follower


def request(
    request_id: int,
    prompt: tuple[Token, ...],
    max_tokens: int,
    seq_ids: tuple[SeqId, ...] | None = None,
    stop_token_ids: tuple[Token, ...] = (),
    priority: int = 0,
    cache_salt: str = "",
) -> Request:
    """A request whose only sequence has the request's number, unless said otherwise."""
    ids = (request_id,) if seq_ids is None else seq_ids
    return Request(request_id, prompt, max_tokens, ids, stop_token_ids, priority, cache_salt)
