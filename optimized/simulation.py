"""The real scheduler and block pool, served by a simulated device: what becomes of a workload, second by second.

Nothing of the engine is imitated: requests go through its door, wait in its queue, share and lose its blocks. What is
simulated is the time that a pass takes. The contiguous allocations of an engine without paging stand in front of it as a
gate: a request comes to the door when there is a piece of memory for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from optimized.contiguous import Allocation, BuddyAllocator, reserved_slots
from optimized.engine import EngineCore
from optimized.pool import blocks_needed
from optimized.simulated_device import SimulatedDevice
from optimized.step import Outcome
from optimized.waste import Slots, slots_of
from optimized.workload import Arrival, prompts_of
from spec.vocabulary import Config, Request, RequestId, Slot

Counted: TypeAlias = Callable[[float, bool], bool]


@dataclass(frozen=True)
class Served:
    """One request, in seconds: from its arrival to its first token, to its end, and for each token after the first."""

    arrival: Arrival
    first_token_s: float
    latency_s: float

    @property
    def seconds_per_token(self) -> float:
        """Between two tokens of its answer, on average; 0 for an answer of one token."""
        return (self.latency_s - self.first_token_s) / max(1, self.arrival.output_len - 1)

    @property
    def normalized_latency_s(self) -> float:
        """The latency over the length of the answer (Kwon et al. 2023, section 6.1)."""
        return self.latency_s / self.arrival.output_len


@dataclass
class Run:
    """What a simulation saw. Shares are means over the part of the busy time that counts, ``counted_s``."""

    served: list[Served] = field(default_factory=list)
    end_s: float = 0.0
    busy_s: float = 0.0
    counted_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_queried_tokens: int = 0
    num_spared_block_steps: int = 0
    num_unshared_block_steps: int = 0
    """The blocks that would have been in use if nobody had shared one, summed over the steps."""
    peak_running: int = 0
    running_s: float = 0.0
    slot_s: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("tokens", "reserved", "internal", "external"), 0.0)
    )

    def note(self, slots: Slots, running: int, seconds: float) -> None:
        """So it was for so long."""
        self.counted_s += seconds
        self.peak_running = max(self.peak_running, running)
        self.running_s += running * seconds
        for name in self.slot_s:
            self.slot_s[name] += getattr(slots, name) * seconds

    @property
    def share_of_reserved(self) -> float:
        """The part of what was set aside for requests that held tokens."""
        aside = sum(self.slot_s.values()) - self.slot_s["external"]
        return self.slot_s["tokens"] / aside if aside else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The four classes of slots, as parts of the cache."""
        total = sum(self.slot_s.values())
        return {name: (value / total if total else 0.0) for name, value in self.slot_s.items()}

    @property
    def mean_running(self) -> float:
        """How many requests ran at once, on average."""
        return self.running_s / self.counted_s if self.counted_s else 0.0

    @property
    def num_output_tokens(self) -> int:
        """The tokens of all answers."""
        return sum(each.arrival.output_len for each in self.served)


class PagedMemory:
    """No gate at all: whoever arrives goes to the door of the engine."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def admit(self, request_id: RequestId, arrival: Arrival) -> bool:
        return True

    def release(self, request_id: RequestId) -> None:
        """Nothing: the engine gave its blocks back."""

    def slots(self) -> Slots:
        return slots_of(self.core.scheduler)


class ContiguousMemory:
    """A gate: a request comes in when there is one piece of memory that is long enough."""

    def __init__(self, core: EngineCore, allocation: Allocation, num_slots: int) -> None:
        self.core = core
        self.allocation = allocation
        self.memory = BuddyAllocator(num_slots)
        self._pieces: dict[RequestId, Slot] = {}
        self._needed = 0
        self._lengths: dict[RequestId, int] = {}

    def admit(self, request_id: RequestId, arrival: Arrival) -> bool:
        length = self.core.config.max_model_len
        piece = self.memory.reserve(reserved_slots(self.allocation, arrival.prompt_len, arrival.output_len, length))
        if piece is None:
            return False
        self._pieces[request_id] = piece
        self._lengths[request_id] = arrival.prompt_len + arrival.output_len - 1
        self._needed += self._lengths[request_id]
        return True

    def release(self, request_id: RequestId) -> None:
        self.memory.release(self._pieces.pop(request_id))
        self._needed -= self._lengths.pop(request_id)

    def slots(self) -> Slots:
        scheduler = self.core.scheduler
        tokens = sum([seq.num_computed for request in scheduler.running for seq in request.seqs])
        reserved, needed = self.memory.num_reserved, min(self._needed, self.memory.num_reserved)
        return Slots(tokens, needed - tokens, reserved - needed, self.memory.num_slots - reserved)


@dataclass(frozen=True)
class Gate:
    """How requests come to the engine: into which memory, and one by one or in batches that end together."""

    allocation: Allocation = Allocation.PAGED
    num_slots: int = 0
    in_batches: bool = False


def simulate(
    arrivals: Sequence[Arrival],
    config: Config,
    device: SimulatedDevice,
    gate: Gate = Gate(),
    num_samples: int = 1,
    counted: Counted = lambda now, waits: True,
) -> Run:
    """Serve all arrivals, which are in the order of their time, to the end.

    ``counted`` says whether a step counts in the means, given the time of its end and whether somebody waits. A token is there when its pass is over. Raises ``InvalidRequest`` for a request that never fits.
    """
    core = EngineCore(config, device)
    contiguous = gate.allocation in (Allocation.POW2, Allocation.ORACLE)
    memory = ContiguousMemory(core, gate.allocation, gate.num_slots) if contiguous else PagedMemory(core)
    run, door = Run(), _Door(arrivals, core, memory, gate.in_batches, num_samples)
    while door.is_open or core.has_work:
        door.let_in(device.now)
        if not core.has_work:
            device.now = max(device.now, door.next_at_s)
            continue
        plan = core.schedule()
        before = device.now
        tokens = device.run(plan)
        running = len(core.scheduler.running)
        done = door.take(core.commit(plan, tokens), device.now)
        if counted(device.now, door.somebody_waits):
            run.note(memory.slots(), running, device.now - before)
        run.served += done
    run.end_s, run.busy_s = device.now, device.busy_s
    counters = core.scheduler.counters
    run.num_steps, run.num_preemptions = counters.num_steps, counters.num_preemptions
    run.num_spared_block_steps = counters.num_spared_block_steps
    run.num_unshared_block_steps = counters.num_block_steps + counters.num_spared_block_steps
    run.num_hit_tokens, run.num_queried_tokens = counters.num_hit_tokens, counters.num_queried_tokens
    return run


class _Door:
    """Brings requests to the engine as they arrive, and notes when they get their first and their last token."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        core: EngineCore,
        memory: PagedMemory | ContiguousMemory,
        in_batches: bool,
        num_samples: int,
    ) -> None:
        self.core = core
        self.memory = memory
        self.in_batches = in_batches
        self.num_samples = num_samples
        self.now = 0.0
        self._coming = deque(enumerate(zip(arrivals, prompts_of(arrivals), strict=True)))
        self._arrivals = arrivals
        self._silent: set[int] = set()  # first sequences of requests that have no token yet
        self._first_s: dict[RequestId, float] = {}
        self._open: dict[RequestId, int] = {}  # how many sequences of a request are still to end

    @property
    def is_open(self) -> bool:
        """Whether somebody is still to come in."""
        return bool(self._coming)

    @property
    def somebody_waits(self) -> bool:
        """Whether the last to arrive is not running yet, for want of room."""
        return bool(self.core.scheduler.waiting) or (self.is_open and self.next_at_s <= self.now)

    @property
    def next_at_s(self) -> float:
        return self._coming[0][1][0].at_s

    def let_in(self, now: float) -> None:
        """Everybody who is there by now and has room comes to the engine, in the order of arrival.

        A batch is only as large as the engine can run at once, to the end of each of its requests.
        """
        self.now = now
        if self.in_batches and self.core.has_work:
            return
        config, seats, blocks = self.core.config, 0, 0
        while self._coming and self._coming[0][1][0].at_s <= now:
            request_id, (arrival, prompt) = self._coming[0]
            length = arrival.prompt_len + arrival.output_len - 1
            seats, blocks = (
                seats + self.num_samples,
                blocks + blocks_needed(length, config.block_size) * self.num_samples,
            )
            if self.in_batches and (seats > config.max_num_seqs or blocks > config.num_blocks):
                break
            if not self.memory.admit(request_id, arrival):
                break
            self._coming.popleft()
            first = request_id * self.num_samples
            self.core.add(
                Request(request_id, prompt, arrival.output_len, tuple(range(first, first + self.num_samples)))
            )
            self._silent.add(first)
            self._open[request_id] = self.num_samples

    def take(self, outcome: Outcome, now: float) -> list[Served]:
        """What a step brought: first tokens, and requests that are done."""
        if self._silent:
            for seq_id in self._silent.intersection(outcome.seq_ids):
                self._silent.remove(seq_id)
                self._first_s[seq_id // self.num_samples] = now
        done = []
        for seq_id, _ in outcome.finished:
            request_id = seq_id // self.num_samples
            self._open[request_id] -= 1
            if not self._open[request_id]:
                del self._open[request_id]
                self.memory.release(request_id)
                arrival = self._arrivals[request_id]
                first_s = self._first_s.pop(request_id) - arrival.at_s
                done.append(Served(arrival, first_s, now - arrival.at_s))
        return done
