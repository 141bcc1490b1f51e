"""Admission counts as the specification does: the same answer for every number of free blocks, seats and tokens, in both
engines."""

from abc import abstractmethod
from collections import Counter
from dataclasses import replace

import pytest

from optimized import admission as optimized
from optimized.engine import SymbolicEngine
from optimized.placement import longest_hit
from reference import admission as reference
from reference.engine import ReferenceEngine
from spec import scheduler as spec
from spec.engine import Admission
from spec.sharing import fork
from spec.vocabulary import AdmissionRule, Config, Fork, Recovery, Request, SeqId, State, seqs_of
from tests.optimized.driver import Caller, config_for, next_token


class Asker(Caller):
    """Asks, after every call, whether somebody might come in if other numbers were free than are."""

    engine: ReferenceEngine | SymbolicEngine

    def __init__(self, config: Config, seed: int) -> None:
        super().__init__(config, [self.engine], seed)
        self.seen: Counter[object] = Counter()
        self.num_victims = 0
        """How often a request waited that had more than one sequence."""

    def compare(self) -> None:
        state = self.state
        self.num_victims += sum(len([*seqs_of(state, request_id)]) > 1 for request_id in state.waiting)
        for count in range(self.config.num_blocks + 1):
            shown = replace(state, free=tuple(range(100, 100 + count)))
            self.pretend(count)
            self.may_admit(shown)
            self.may_fork(shown)
        self.pretend(len(state.free))

    def may_admit(self, shown: State) -> None:
        if shown.waiting and self.is_asked(shown):
            head = shown.waiting[0]
            for budget in (1, 2, self.config.max_num_batched_tokens):
                now = spec.admission(shown, head, budget) is Admission.NOW
                assert self.admits(budget) is now, (budget, shown)
                self.seen["admit", now] += 1

    def may_fork(self, shown: State) -> None:
        for parent, seq in shown.seqs.items():
            if seq.request_id in shown.running and seq.num_output_tokens and not seq.num_scheduled_tokens:
                event = Fork(parent, self.num_seqs)
                now = spec.forks_keep_what_was_promised(shown, event, fork(shown, event))
                assert self.forks(parent) is now, (event, shown)
                self.seen["fork", now] += 1

    def is_asked(self, shown: State) -> bool:
        """Whether the engine may ever want to know in this state."""
        return True

    @abstractmethod
    def pretend(self, num_free: int) -> None:
        """From now on so many blocks are free."""

    @abstractmethod
    def admits(self, budget: int) -> bool:
        """What the engine says of the head of the queue."""

    @abstractmethod
    def forks(self, parent: SeqId) -> bool:
        """What the engine says of one more sequence."""

    @abstractmethod
    def num_hits_in_use(self, seq_id: SeqId) -> int:
        """How many blocks that others hold a waiting sequence would hit."""


class ReferenceAsker(Asker):
    """Asks the reference engine."""

    def __init__(self, config: Config, seed: int) -> None:
        self.engine = self.live = ReferenceEngine(config)
        self.free = self.live.pool.free
        super().__init__(config, seed)

    def pretend(self, num_free: int) -> None:
        self.live.pool.free = self.free if num_free == len(self.free) else [*range(100, 100 + num_free)]

    def admits(self, budget: int) -> bool:
        assert not reference.may_admit(self.live.roster, self.live.pool, self.live.roster.waiting[0], 0)
        return reference.may_admit(self.live.roster, self.live.pool, self.live.roster.waiting[0], budget)

    def forks(self, parent: SeqId) -> bool:
        return reference.may_fork(self.live.roster, self.live.pool, parent)

    def num_hits_in_use(self, seq_id: SeqId) -> int:
        hits = reference.longest_hit(self.live.roster, self.live.pool, seq_id)
        return sum(self.live.pool.ref_count[block] > 0 for block in hits)


class OptimizedAsker(Asker):
    """Asks the optimized engine."""

    def __init__(self, config: Config, seed: int) -> None:
        self.engine = SymbolicEngine(config)
        self.live = self.engine.core.scheduler
        super().__init__(config, seed)

    def is_asked(self, shown: State) -> bool:
        """Under PROMPT the engine asks only when whoever runs has room for all of its tokens (SCHED-13)."""
        is_prompt = self.config.admission_rule is AdmissionRule.PROMPT
        return not (is_prompt and sum(spec.blocks_owed(shown, request_id) for request_id in shown.running))

    def pretend(self, num_free: int) -> None:
        self.live.pool.num_free = num_free

    def admits(self, budget: int) -> bool:
        head = self.live.waiting.head()
        assert head is not None
        num_seats = self.config.max_num_seqs - spec.seats_taken(self.state)
        return optimized.may_admit(self.config, self.live.pool, self.live.running, head, num_seats, budget)

    def forks(self, parent: SeqId) -> bool:
        return optimized.may_fork(self.config, self.live.pool, self.live.running, self.live.seqs[parent])

    def num_hits_in_use(self, seq_id: SeqId) -> int:
        return self.live.pool.num_in_use(longest_hit(self.live.pool, self.live.seqs[seq_id]))


ASKERS: tuple[type[ReferenceAsker | OptimizedAsker], ...] = (ReferenceAsker, OptimizedAsker)
both = pytest.mark.parametrize("asker_of", ASKERS, ids=["reference", "optimized"])


@both
@pytest.mark.parametrize("rule", AdmissionRule)
def test_who_may_come_in_is_what_the_specification_says(
    rule: AdmissionRule, asker_of: type[ReferenceAsker | OptimizedAsker]
) -> None:
    seen: Counter[object] = Counter()
    for seed in range(12 if rule is AdmissionRule.NO_EVICT else 6):
        config = config_for(seed, SymbolicEngine.profile.capabilities)
        config = replace(config, num_blocks=12, max_num_seqs=6, max_model_len=10, admission_rule=rule)
        asker = asker_of(config, seed)
        asker.run(num_calls=30)
        seen += asker.seen
    assert all(seen["admit", now] > 100 for now in (True, False)), seen
    assert rule is not AdmissionRule.NO_EVICT or all(seen["fork", now] > 100 for now in (True, False)), seen


@both
@pytest.mark.parametrize("rule", [AdmissionRule.OPTIMISTIC, AdmissionRule.NO_EVICT])
def test_a_promise_to_the_end_does_not_count_on_what_others_hold(
    rule: AdmissionRule, asker_of: type[ReferenceAsker | OptimizedAsker]
) -> None:
    """The head would hit two blocks of a running request: they cost nothing, unless the promise is to hold to the end."""
    asker = asker_of(Config(12, 1, max_num_batched_tokens=8, prefix_cache=True, admission_rule=rule), seed=0)
    asker.engine.add(Request(0, (0, 1, 0), max_tokens=4, seq_ids=(0,)))
    asker.engine.step(next_token)
    asker.engine.add(Request(1, (0, 1, 1, 1), max_tokens=3, seq_ids=(1,)))
    asker.num_seqs = 2
    asker.compare()
    assert asker.num_hits_in_use(1) == 2
    assert asker.seen["admit", True]
    assert asker.seen["admit", False]


@both
@pytest.mark.parametrize("rule", [AdmissionRule.PROMPT, AdmissionRule.NO_EVICT])
def test_whoever_shares_a_tail_is_owed_a_copy(
    rule: AdmissionRule, asker_of: type[ReferenceAsker | OptimizedAsker]
) -> None:
    """First two samples share a tail, then two of each: all but the last writer of each will copy it."""
    asker = asker_of(Config(24, 2, max_num_seqs=8, max_num_batched_tokens=8, admission_rule=rule), seed=0)
    engine, head, asker.num_seqs = asker.engine, Request(1, (0,) * 7, max_tokens=2, seq_ids=(8,)), 9
    engine.add(Request(0, (0, 0, 0), max_tokens=6, seq_ids=(0, 1)))
    engine.step(next_token)
    engine.add(head)
    asker.compare()
    engine.abort(1)
    engine.step(next_token)
    engine.step(next_token)
    assert (engine.fork(0, 2), engine.fork(1, 3)) == (Admission.NOW, Admission.NOW)
    assert spec.copies_owed(asker.state, [0, 1, 2, 3]) == 2
    engine.add(head)
    asker.compare()
    assert all(asker.seen["admit", now] for now in (True, False)) is asker.is_asked(asker.state)


@both
@pytest.mark.parametrize("recovery", Recovery)
def test_whoever_comes_back_counts_what_it_left_in_the_cache(
    recovery: Recovery, asker_of: type[ReferenceAsker | OptimizedAsker]
) -> None:
    """So few blocks that requests of several sequences are preempted, while others hold their common prefix. Who comes
    back from host memory hits nothing."""
    num_victims, optimistic = 0, AdmissionRule.OPTIMISTIC
    for seed in range(10):
        config = Config(
            7, 2, 6, 6, 14, num_host_blocks=8, prefix_cache=True, recovery=recovery, admission_rule=optimistic
        )
        asker = asker_of(config, seed)
        asker.run(num_calls=30)
        num_victims += asker.num_victims
    assert num_victims > 20
