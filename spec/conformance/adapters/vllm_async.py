"""vLLM 0.32 with its asynchronous scheduler, judged without a model: it schedules a step while the one before still runs.

``begin_step`` is ``AsyncScheduler.schedule``; ``end_step`` lets the worker do what the oldest message says, and gives the
tokens to ``update_from_output``. That is what vLLM's engine core does with two batches in its queue. A batch that computes
nothing has its place in that queue too: behind another one the core waits for it, and schedules nothing meanwhile.
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
    """What the scheduler told its workers, the names that it used, and the tables that they had then."""

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

    def seqs_in_flight(self) -> set[SeqId]:
        return {seq for flight in self.flights.values() for seq in flight.scheduled}

    def begin_step(self) -> StepReport:
        """A step that computes nothing is in flight only behind another one; else it is over at once. Who has ended is told
        to the worker with the next one: there is no step for that alone while another one is in flight."""
        if len(self.flights) == 2:
            raise InvalidRequest("two steps are in flight")
        if not self.scheduler.has_requests() or (self.flights and not self.alive):
            return StepReport()
        output = self.scheduler.schedule()
        preempted = self._preempted(output)
        self._learn_keys()
        self._leave_flights(preempted)
        seqs, manager = self._seqs(), self.scheduler.kv_cache_manager
        tables = {name: tuple(manager.get_block_ids(name)[0]) for name in output.num_scheduled_tokens}
        self.messages.append(Message(output, seqs, tables))
        counts = {seqs[name]: count for name, count in output.num_scheduled_tokens.items()}
        self.flights[self.num_begun] = Flight(scheduled=counts, submitted=True)
        self.num_begun += 1
        if not counts and len(self.flights) == 1:
            self.end_step(_no_token)
        return StepReport(preempted=preempted)

    def end_step(self, token_source: TokenSource) -> StepReport:
        if not self.flights:
            return StepReport()
        message, flight = self.messages.popleft(), self.flights.pop(min(self.flights))
        names = message.output.num_scheduled_tokens
        gone = {name for name in names if name not in self.scheduler.requests}
        preempted = {name for name in names if message.seqs[name] not in flight.scheduled}
        outcome = self.worker.run(message.output, message.seqs, token_source, gone, preempted)
        emitted, finished = self._update(message.output, outcome)
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
