"""vLLM 0.32 with its asynchronous scheduler, judged without a model: it schedules a step while the one before still runs.

``begin_step`` is ``AsyncScheduler.schedule``; ``end_step`` lets the worker do what the oldest message says, and gives the
tokens to ``update_from_output``. That is what vLLM's engine core does with two batches in its queue.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any  # vLLM has no types here: what is annotated with Any is an object of vLLM's

from spec.block_table import slot_mapping
from spec.conformance.adapters import vllm
from spec.engine import Capability, InvalidRequest, Profile, StepReport, TokenSource
from spec.vocabulary import BlockId, Config, Flight, Preempt, SeqId, State, StepId, Token, Write

PROFILE = replace(
    vllm.PROFILE,
    name="vllm async",
    capabilities=vllm.PROFILE.capabilities | {Capability.OVERLAP},
    schedules_ahead=True,
)
PRIORITY_PROFILE = replace(
    PROFILE, name="vllm async by priority", capabilities=PROFILE.capabilities | {Capability.PRIORITY}
)


@dataclass
class Message:
    """What the scheduler told its workers, the names that it used, and the tables that they had then; ``step_id`` is None if
    nothing is computed."""

    step_id: StepId | None
    output: Any
    seqs: Mapping[str, SeqId]
    tables: Mapping[str, tuple[BlockId, ...]]


class AsyncVllmEngine(vllm.VllmEngine):
    """vLLM's ``AsyncScheduler`` with two steps in flight."""

    def __init__(self, config: Config, profile: Profile) -> None:
        super().__init__(config, profile)
        self.messages: deque[Message] = deque()
        self.flights: dict[StepId, Flight] = {}
        self.num_begun = 0
        self.waits_for_end = False

    def seqs_in_flight(self) -> set[SeqId]:
        return {seq for flight in self.flights.values() for seq in flight.scheduled}

    def begin_step(self) -> StepReport:
        """After a step that computed nothing the engine core waits for the oldest one: who was preempted is then given
        his token before anybody is scheduled."""
        if len(self.flights) == 2:
            raise InvalidRequest("two steps are in flight")
        owed = any(theirs.num_stale_output_tokens for theirs in self.scheduler.waiting)
        if not self.scheduler.has_requests() or (self.waits_for_end and owed):
            return StepReport()
        output = self.scheduler.schedule()
        preempted = self._preempted(output)
        self._learn_keys()
        self._leave_flights(preempted)
        step_id = self.num_begun if output.num_scheduled_tokens else None
        manager = self.scheduler.kv_cache_manager
        tables = {name: tuple(manager.get_block_ids(name)[0]) for name in output.num_scheduled_tokens}
        self.messages.append(Message(step_id, output, self._seqs(), tables))
        if step_id is None:
            self.waits_for_end = bool(self.flights)
            self._tell_what_computes_nothing()
        else:
            self.num_begun += 1
            seqs = self._seqs()
            counts = {seqs[name]: count for name, count in output.num_scheduled_tokens.items()}
            self.flights[step_id] = Flight(scheduled=counts, submitted=True)
        return StepReport(preempted=preempted)

    def end_step(self, token_source: TokenSource) -> StepReport:
        if not self.flights:
            return StepReport()
        message, self.waits_for_end = self.messages.popleft(), False
        flight = self.flights.pop(min(self.flights))
        names = message.output.num_scheduled_tokens
        gone = {name for name in names if name not in self.scheduler.requests}
        preempted = {name for name in names if message.seqs[name] not in flight.scheduled}
        outcome = self.worker.run(message.output, message.seqs, token_source, gone, preempted)
        emitted, finished = self._update(message.output, outcome)
        self._tell_what_computes_nothing()
        strays = stray_writes(outcome.unheard, message.tables, self.config.block_size)
        return StepReport((*strays, *outcome.events), emitted, (), finished)

    def step(self, token_source: TokenSource) -> StepReport:
        if self.flights:
            raise InvalidRequest("a step is in flight")
        begun = self.begin_step()
        return replace(self.end_step(token_source), preempted=begun.preempted)

    def snapshot(self) -> State:
        return replace(super().snapshot(), flights=dict(self.flights))

    def _leave_flights(self, preempted: tuple[Preempt, ...]) -> None:
        """Of who was preempted, a step in flight computes nothing any more that counts, but for its token."""
        left = {
            seq
            for each in preempted
            for request in self.alive.values()
            if request.request_id == each.request_id
            for seq in request.seq_ids
        }
        for step_id, flight in self.flights.items():
            kept = {seq: count for seq, count in flight.scheduled.items() if seq not in left}
            self.flights[step_id] = replace(flight, scheduled=kept)

    def _tell_what_computes_nothing(self) -> None:
        while self.messages and self.messages[0].step_id is None:
            message = self.messages.popleft()
            self._update(message.output, self.worker.run(message.output, message.seqs, _no_token))


def stray_writes(
    unheard: Mapping[str, Write], tables: Mapping[str, tuple[BlockId, ...]], block_size: int
) -> tuple[Write, ...]:
    """Of what a step wrote for those who had left it, what did not go where their tables were when it was scheduled. The
    rest is taken as written, and no rule allows these: nobody is there any more who could write them."""

    def strays(write: Write, table: tuple[BlockId, ...]) -> bool:
        stop = write.start + len(write.slots)
        return stop > len(table) * block_size or write.slots != slot_mapping(table, write.start, stop, block_size)

    return tuple(write for name, write in unheard.items() if strays(write, tables[name]))


def _no_token(seq: SeqId, tokens: tuple[Token, ...]) -> Token:
    raise RuntimeError(f"a step that computes nothing wants a token for sequence {seq}")


def make_engine(config: Config) -> AsyncVllmEngine:
    """vLLM's asynchronous scheduler with these limits."""
    return AsyncVllmEngine(config, PROFILE)


def make_priority_engine(config: Config) -> AsyncVllmEngine:
    """The same, declaring priorities as well."""
    return AsyncVllmEngine(config, PRIORITY_PROFILE)
