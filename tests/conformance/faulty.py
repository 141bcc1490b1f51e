"""Adapters that break the protocol, each in one way, around the reference engine; and two that break a rule."""

import time
from dataclasses import replace
from typing import ClassVar

import reference
from spec.engine import Admission, Capability, InvalidRequest, Observer, Profile, StepReport, TokenSource
from spec.vocabulary import Append, Config, Event, Request, RequestId, SeqId, State


class Adapter:
    """The reference engine, by delegation."""

    def __init__(self, config: Config) -> None:
        self.engine = reference.make_engine(config)

    @property
    def profile(self) -> Profile:
        return self.engine.profile

    def add(self, request: Request) -> None:
        self.engine.add(request)

    def fork(self, parent: SeqId, child: SeqId) -> Admission:
        return self.engine.fork(parent, child)

    def step(self, token_source: TokenSource) -> StepReport:
        return self.engine.step(token_source)

    def begin_step(self) -> StepReport:
        return self.engine.begin_step()

    def end_step(self, token_source: TokenSource) -> StepReport:
        return self.engine.end_step(token_source)

    def abort(self, request_id: RequestId) -> None:
        self.engine.abort(request_id)

    def reset_cache(self) -> bool:
        return self.engine.reset_cache()

    def snapshot(self) -> State:
        return self.engine.snapshot()


class Raises(Adapter):
    def abort(self, request_id):
        raise KeyError(request_id)


class RefusesSteps(Adapter):
    def step(self, token_source):
        raise InvalidRequest("not today")


class Exits(Adapter):
    def step(self, token_source):
        raise SystemExit(3)


class Skips(Adapter):
    """To skip a test is not for an adapter to decide."""

    def step(self, token_source):
        import pytest

        pytest.skip("too hard")


class Hangs(Adapter):
    """And catches what it can."""

    def step(self, token_source):
        while True:
            try:
                time.sleep(0.001)
            except Exception:  # noqa: BLE001, S110  that is the fault
                pass


class AnswersLists(Adapter):
    def step(self, token_source):
        report = super().step(token_source)
        return replace(report, emitted=list(report.emitted))


class AnswersFloats(Adapter):
    def snapshot(self):
        state = super().snapshot()
        return replace(state, ref_count=tuple(float(count) for count in state.ref_count))


class AnswersFalse(Adapter):
    def add(self, request):
        try:
            super().add(request)
        except InvalidRequest:
            return False


class AsksForNobody(Adapter):
    def step(self, token_source):
        return super().step(lambda seq, tokens: token_source(seq, list(tokens)))


class HidesWhatItRaised(Adapter):
    """Whoever catches what the judge raises is found all the same."""

    def step(self, token_source):
        def ask(seq, tokens):
            try:
                return token_source(seq, list(tokens))
            except Exception:  # noqa: BLE001  that is the fault
                return 0

        return super().step(ask)


class ShowsItsOwnVariables(Adapter):
    def __init__(self, config):
        super().__init__(config)
        self.shown = {}

    def snapshot(self):
        state = super().snapshot()
        self.shown.clear()
        self.shown.update(state.seqs)
        return replace(state, seqs=self.shown)


class ShowsOtherLimits(Adapter):
    def snapshot(self):
        state = super().snapshot()
        return replace(state, config=replace(state.config, max_num_seqs=99))


class OneForAll(Adapter):
    """Every engine is the same one."""

    made: ClassVar[dict[Config, object]] = {}

    def __init__(self, config):
        self.engine = OneForAll.made.setdefault(config, reference.make_engine(config))


class Without(Adapter):
    """Does not declare what it does."""

    hidden: Capability

    @property
    def profile(self):
        return replace(super().profile, capabilities=super().profile.capabilities - {self.hidden})


class PreemptsInSecret(Without):
    hidden = Capability.PREEMPTION


class CachesInSecret(Without):
    hidden = Capability.PREFIX_CACHE


class NeverForks(Adapter):
    def fork(self, parent, child):
        return Admission.LATER


class NeverAborts(Adapter):
    def abort(self, request_id):
        pass


class NeverCaches(Adapter):
    def __init__(self, config):
        super().__init__(replace(config, prefix_cache=False))
        self.config = config

    def snapshot(self):
        return replace(super().snapshot(), config=self.config)


class ChangesItsMind(Adapter):
    calls = 0

    @property
    def profile(self):
        self.calls += 1
        return replace(super().profile, num_reserved_blocks=self.calls)


class CountsSharedBlocksOnce(Adapter):
    """A broken rule: ALLOC-2."""

    def snapshot(self):
        state = super().snapshot()
        return replace(state, ref_count=tuple(min(count, 1) for count in state.ref_count))


class StopsForThree(Adapter):
    """A broken rule: with three requests it does nothing any more (SCHED-9)."""

    def step(self, token_source):
        return StepReport() if len(super().snapshot().requests) == 3 else super().step(token_source)


class Pool:
    """The reference pool, by delegation."""

    def __init__(self, config: Config) -> None:
        self.pool = reference.make_pool(config)

    def __getattr__(self, name: str) -> object:
        return getattr(self.pool, name)


class RaisesOnRelease(Pool):
    def release(self, seq):
        raise KeyError(seq)


class TakesChances(Pool):
    """Begins with another block each time."""

    number = 0

    def __init__(self, config):
        super().__init__(config)
        TakesChances.number += 1
        first = TakesChances.number % config.num_blocks
        self.pool.pool.free = [*range(first, config.num_blocks), *range(first)]


class NeverSwaps(Pool):
    def swap_out(self, seq):
        return Admission.NEVER


class SharesTheLastBlockOnly(Pool):
    """A broken rule: a fork counts one block too few (ALLOC-2)."""

    def fork(self, parent, child):
        events = self.pool.fork(parent, child)
        self.pool.pool.ref_count[self.pool.pool.tables[child][0]] -= 1
        return events


class Twice:
    """An observer that hears each token twice."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.settled = observer.settled

    def event(self, event: Event) -> None:
        self.observer.event(event)
        if isinstance(event, Append):
            self.observer.event(event)


class TellsTwice(Adapter):
    """What it shows is right, and what it tells is not."""

    def __init__(self, config: Config, observer: Observer | None = None) -> None:
        self.engine = reference.make_engine(config, Twice(observer) if observer is not None else None)


class TellsNonsense(Adapter):
    def __init__(self, config: Config, observer: Observer | None = None) -> None:
        super().__init__(config)
        self.observer = observer

    def add(self, request):
        self.engine.add(request)
        if self.observer is not None:
            self.observer.event("a request came")
