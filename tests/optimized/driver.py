"""A caller who does anything in any order, from a seed; and engines driven by it side by side."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from spec.engine import Capability, InvalidRequest, OverlappedEngine, StepReport
from spec.vocabulary import (
    AdmissionRule,
    Config,
    Policy,
    Prefix,
    Recovery,
    Request,
    RequestId,
    SeqId,
    State,
    Token,
)

STOP: Token = 2


def next_token(seq: SeqId, tokens: Prefix) -> Token:
    """A token out of three that depends on the sequence and on all its tokens."""
    return hashlib.sha256(repr((seq, tokens)).encode()).digest()[0] % 3


def config_for(seed: int, capabilities: frozenset[Capability] = frozenset()) -> Config:
    """A tiny engine that has what the capabilities name."""
    rng = random.Random(seed)
    swaps = Capability.SWAP in capabilities
    return Config(
        num_blocks=rng.randint(2, 8),
        block_size=rng.randint(1, 4),
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(1, 12),
        max_model_len=rng.randint(8, 32),
        watermark_blocks=rng.choice((0, 0, 1)),
        num_host_blocks=rng.randint(0, 10) if swaps else 0,
        prefix_cache=Capability.PREFIX_CACHE in capabilities and rng.random() < 0.7,
        window=rng.randint(1, 6) if Capability.WINDOW in capabilities and rng.random() < 0.3 else None,
        recovery=rng.choice(list(Recovery)) if swaps else Recovery.RECOMPUTE,
        policy=rng.choice(list(Policy)) if Capability.PRIORITY in capabilities else Policy.FCFS,
        admission_rule=rng.choice(list(AdmissionRule)),
        max_num_partial_prefills=rng.choice((1, 1, 2, 3)) if Capability.PARTIAL_PREFILLS in capabilities else 1,
    )


class Caller:
    """Does the same to several engines and demands the same answers and the same states of all."""

    def __init__(self, config: Config, engines: Sequence[OverlappedEngine], seed: int) -> None:
        self.config = config
        self.engines = engines
        self.rng = random.Random(seed)
        self.num_requests = 0
        self.num_seqs = 0
        self.most_in_flight = 0
        self.answers: Counter[str] = Counter()
        """What came of the forks."""

    def run(self, num_calls: int) -> None:
        """So many calls; then whatever is left runs to its end."""
        calls = (
            self.add,
            self.add,
            self.add,
            self.step,
            self.step,
            self.step,
            self.step,
            self.fork,
            self.fork,
            self.abort,
            self.reset,
            *((self.begin_step, self.overlap, self.overlap) if self.rng.random() < 0.5 else ()),
        )
        for _ in range(num_calls):
            self.rng.choice(calls)()
            self.compare()
        for _ in range(10_000):
            if not self.state.requests and not self.state.flights:
                return
            self.step()
            self.compare()
        raise AssertionError(f"these requests never end: {sorted(self.state.requests)}")

    @property
    def state(self) -> State:
        return self.engines[0].snapshot()

    def add(self) -> None:
        longest = max(1, min(self.config.num_slots, self.config.max_model_len))
        length = self.rng.randint(0, self.rng.choice((3, longest)))
        often, seldom = tuple(range(2)) * longest, tuple(self.rng.randint(0, 1) for _ in range(length))
        prompt = often[:length] if self.rng.random() < 0.6 else seldom
        count = self.rng.choice((1, 1, 1, 2, 2, 3))
        request = Request(
            request_id=self.num_requests,
            prompt=prompt,
            max_tokens=self.rng.randint(0, max(1, longest // count - len(prompt) + 1)),
            seq_ids=tuple(range(self.num_seqs, self.num_seqs + count)),
            stop_token_ids=(STOP,) if self.rng.random() < 0.3 else (),
            priority=self.rng.randint(0, 2),
            cache_salt="" if self.rng.random() < 0.9 else "a",
        )
        self.num_requests += 1
        self.num_seqs += count
        self.same(lambda engine: _refusable(lambda: engine.add(request)))

    def step(self) -> None:
        """A whole step, or the end of the oldest one in flight."""
        if self.state.flights:
            self.end_step()
        else:
            self.same(lambda engine: _abstract_report(engine.step(next_token)))

    def begin_step(self) -> None:
        self.same(lambda engine: _refusable(engine.begin_step))
        self.most_in_flight = max(self.most_in_flight, len(self.state.flights))

    def overlap(self) -> None:
        """The oldest step ends while the next one is in flight; somebody may have come in between."""
        self.begin_step()
        self.add()
        self.begin_step()
        self.end_step()

    def end_step(self) -> None:
        self.same(lambda engine: _abstract_report(engine.end_step(next_token)))

    def fork(self) -> None:
        """Mostly of somebody who may be forked, into somebody new."""
        state = self.state
        ready = [
            i
            for i, seq in state.seqs.items()
            if seq.request_id in state.running and seq.num_output_tokens and not seq.num_scheduled_tokens
        ]
        seqs = list(state.seqs)
        if seqs:
            parent = self.rng.choice(ready if ready and self.rng.random() < 0.8 else seqs)
            child = self.num_seqs if self.rng.random() < 0.8 else self.rng.choice(seqs)
            self.num_seqs += 1
            answer = self.same(lambda engine: _refusable(lambda: engine.fork(parent, child)))
            self.answers[str(answer)] += 1

    def abort(self) -> None:
        request_id: RequestId = self.rng.randint(0, self.num_requests)
        if self.rng.random() < 0.3:
            self.same(lambda engine: engine.abort(request_id))

    def reset(self) -> None:
        if self.rng.random() < 0.2:
            self.same(lambda engine: engine.reset_cache())

    def same(self, call: Callable[[OverlappedEngine], object]) -> object:
        answers = [call(engine) for engine in self.engines]
        for engine, answer in zip(self.engines[1:], answers[1:], strict=True):
            assert answer == answers[0], (
                f"{engine.profile.name}: {answer}\n{self.engines[0].profile.name}: {answers[0]}"
            )
        return answers[0]

    def compare(self) -> None:
        self.same(lambda engine: up_to_names(engine.snapshot()))


def _refusable(call: Callable[[], object]) -> object:
    """The answer, or the kind of refusal."""
    try:
        return call()
    except InvalidRequest:
        return InvalidRequest


def _abstract_report(report: StepReport) -> StepReport:
    """What a report says, blocks and slots apart."""
    return replace(report, device=tuple(replace(w, slots=(0,) * len(w.slots)) for w in (*report.writes, *report.reads)))


def up_to_names(state: State) -> object:
    """Everything that a state says, blocks named by the order in which the tables name them.

    Free blocks have no names; what the cache knows of them stands in the order in which they will be taken.
    """
    tables = sorted(state.block_tables.items())
    name = {block: index for index, block in enumerate(dict.fromkeys(b for _, table in tables for b in table))}
    return {
        "free": len(state.free),
        "ref_count": [state.ref_count[block] for block in name],
        "tables": {i: [name[b] for b in table] for i, table in tables},
        "seqs": list(state.seqs.items()),
        "requests": list(state.requests.items()),
        "waiting": state.waiting,
        "running": state.running,
        "num_preemptions": {i: n for i, n in sorted(state.num_preemptions.items()) if n},
        "cached": {name[b]: key for b, key in state.cached.items() if b in name},
        "cached and free": [state.cached[b] for b in state.free if b in state.cached],
        "flights": {
            i: (
                flight.scheduled,
                sorted(name[b] for b in flight.blocks if b in name),
                len(flight.blocks),
                len(flight.holds),
            )
            for i, flight in state.flights.items()
        },
        "host": (len(state.host_free), {i: len(table) for i, table in sorted(state.host_tables.items())}),
    }
