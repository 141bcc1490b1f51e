"""The door: which requests and forks are let in. Whatever is refused here has changed nothing."""

from reference.admission import may_fork, most_tokens_stored
from reference.pool import BlockPool, blocks_needed
from reference.roster import Roster
from spec.engine import Admission, InvalidField, PromptTooLong, UnknownId
from spec.vocabulary import Config, Request, SeqId


def seq_ids_in_use(roster: Roster, pool: BlockPool) -> set[SeqId]:
    """The ids that a new sequence must not have: of live and of promised ones, and of those in a step in flight."""
    return roster.seq_ids_in_use().union(*(flight.scheduled for flight in pool.flights.values()))


def check_request(config: Config, roster: Roster, pool: BlockPool, request: Request) -> None:
    """Raise ``InvalidRequest`` unless an empty engine can serve the request to its end, and its ids are new."""
    num_prompt_tokens, num_seqs = len(request.prompt), len(request.seq_ids)
    if request.request_id in roster.requests:
        raise InvalidField("request_id", request.request_id, "an id that no live request has")
    if num_prompt_tokens == 0:
        raise InvalidField("prompt", request.prompt, "at least one token")
    if request.max_tokens < 1:
        raise InvalidField("max_tokens", request.max_tokens, "at least 1")
    if num_seqs == 0 or len(set(request.seq_ids)) < num_seqs:
        raise InvalidField("seq_ids", request.seq_ids, "at least one id, each once")
    for seq_id in request.seq_ids:
        if seq_id in seq_ids_in_use(roster, pool):
            raise InvalidField("seq_ids", seq_id, "an id that no live sequence has")
    if num_seqs > config.max_num_seqs:
        raise InvalidField("seq_ids", request.seq_ids, f"at most max_num_seqs ({config.max_num_seqs})")
    if num_prompt_tokens + request.max_tokens > config.max_model_len:
        limit = f"at most max_model_len ({config.max_model_len}) together with the prompt ({num_prompt_tokens})"
        raise InvalidField("max_tokens", request.max_tokens, limit)
    if not _fit(config, request, num_seqs):
        raise PromptTooLong(most_tokens_stored(request), num_seqs, config.num_slots)


def check_fork(roster: Roster, pool: BlockPool, parent: SeqId, child: SeqId) -> None:
    """Raise ``InvalidRequest`` unless the parent runs with output and in no step, and the child's id is new."""
    if parent not in roster.seqs:
        raise UnknownId("sequence", parent)
    seq = roster.seqs[parent]
    if seq.request_id not in roster.running or seq.num_output_tokens == 0 or seq.num_scheduled_tokens > 0:
        raise InvalidField("parent", parent, "a sequence of a running request, with output and not in a step")
    if child in seq_ids_in_use(roster, pool):
        raise InvalidField("child", child, "an id that no live sequence has")


def room_for_fork(config: Config, roster: Roster, pool: BlockPool, parent: SeqId) -> Admission:
    """Whether the parent's request may have one more sequence now."""
    request = roster.request_of(parent)
    if not _fit(config, request, len(roster.seqs_of(request.request_id)) + 1):
        return Admission.NEVER
    if roster.seats_taken() + 1 > config.max_num_seqs or not may_fork(roster, pool, parent):
        return Admission.LATER
    return Admission.NOW


def _fit(config: Config, request: Request, num_seqs: int) -> bool:
    """Whether so many sequences of the request end in a cache of their own, even if they share nothing."""
    return num_seqs * blocks_needed(most_tokens_stored(request), config.block_size) <= config.num_blocks
