"""Two engines on one story, compared after every call up to the names of their blocks."""

from dataclasses import replace
from typing import TypeVar

from spec.choices import EvictionOrder
from spec.conformance.judge import JudgedEngine
from spec.engine import Admission, Engine, Profile, StepReport, TokenSource
from spec.explore import Names
from spec.vocabulary import Config, Request, RequestId, SeqId, State

T = TypeVar("T")


class EnginesDiffer(AssertionError):
    """Two engines were asked the same and are not in the same state any more."""


def nameless(s: State) -> State:
    """The state with its blocks named in the order of first use: by the tables, then by the free list.

    Two states that are equal after that differ in nothing that the specification fixes.
    """
    names = Names()
    tables = {i: tuple(names.block(b) for b in table) for i, table in sorted(s.block_tables.items())}
    host_tables = {i: tuple(names.host_block(b) for b in table) for i, table in sorted(s.host_tables.items())}
    cached = sorted(s.cached.items(), key=lambda item: (names.blocks.get(item[0], s.config.num_blocks), repr(item[1])))
    flights = {
        i: replace(
            flight,
            holds=tuple(names.block(b) for b in flight.holds),
            blocks=frozenset(names.block(b) for b in flight.blocks),
            preempting=False,
        )
        for i, (_, flight) in enumerate(sorted(s.flights.items()))
    }
    renamed = {names.block(b): key for b, key in cached}
    free = sorted(names.block(b) for b in s.free)
    counts = {names.block(b): count for b, count in enumerate(s.ref_count)}
    return replace(
        s,
        free=tuple(free),
        ref_count=tuple(counts[b] for b in range(s.config.num_blocks)),
        block_tables=tables,
        host_tables=host_tables,
        host_free=(len(s.host_free),),
        cached=renamed,
        flights=flights,
        num_preemptions={i: n for i, n in s.num_preemptions.items() if n},
        cells={},
        host_cells={},
    )


class LockstepEngine:
    """A pair of judged engines that looks like one."""

    def __init__(self, first: Engine, second: Engine, config: Config) -> None:
        self.pair = (JudgedEngine(first, config), JudgedEngine(second, config))
        self.config = config

    @property
    def is_sound(self) -> bool:
        return all(engine.is_sound for engine in self.pair)

    @property
    def state(self) -> State:
        return self.pair[0].state

    def add(self, request: Request) -> bool:
        return self._same("add", *(engine.add(request) for engine in self.pair))

    def fork(self, parent: SeqId, child: SeqId) -> Admission | None:
        return self._same("fork", *(engine.fork(parent, child) for engine in self.pair))

    def step(self, token_source: TokenSource) -> StepReport:
        return self._same_step(*(engine.step(token_source) for engine in self.pair))

    def begin_step(self) -> StepReport | None:
        first, second = (engine.begin_step() for engine in self.pair)
        if first is None or second is None:
            return self._same("begin_step", first, second)
        return self._same_step(first, second)

    def end_step(self, token_source: TokenSource) -> StepReport:
        return self._same_step(*(engine.end_step(token_source) for engine in self.pair))

    def _same_step(self, first: StepReport, second: StepReport) -> StepReport:
        for what in ("emitted", "preempted", "finished"):
            self._same(what, getattr(first, what), getattr(second, what))
        self._same(
            "positions written",
            sorted((write.seq, write.start, len(write.slots)) for write in first.writes),
            sorted((write.seq, write.start, len(write.slots)) for write in second.writes),
        )
        return first

    def abort(self, request_id: RequestId) -> None:
        for engine in self.pair:
            engine.abort(request_id)
        self._same("abort", None, None)

    def reset_cache(self) -> bool:
        return self._same("reset_cache", *(engine.reset_cache() for engine in self.pair))

    def _same(self, what: str, first: T, second: T) -> T:
        if first != second:
            raise EnginesDiffer(f"{what}: {self._names()[0]} says {first!r}, {self._names()[1]} says {second!r}")
        a, b = (nameless(engine.state) for engine in self.pair)
        if a != b:
            raise EnginesDiffer(f"after {what}:\n  {self._names()[0]}: {a}\n  {self._names()[1]}: {b}")
        return first

    def _names(self) -> tuple[str, str]:
        return self.pair[0].engine.profile.name, self.pair[1].engine.profile.name


def common(first: Profile, second: Profile) -> Profile:
    """What both engines can do."""
    return Profile(
        name=f"{first.name} beside {second.name}",
        capabilities=first.capabilities & second.capabilities,
        eviction_order=first.eviction_order if first.eviction_order is second.eviction_order else EvictionOrder.ANY,
        admission_rules=tuple(rule for rule in first.admission_rules if rule in second.admission_rules),
    )
