"""Admission counts as the specification does: the same answer for every number of free blocks, seats and tokens."""

from collections import Counter
from dataclasses import replace

import pytest

from optimized.admission import may_admit, may_fork
from optimized.engine import SymbolicEngine, make_engine
from optimized.placement import longest_hit
from spec import scheduler as spec
from spec.engine import Admission
from spec.sharing import fork
from spec.vocabulary import AdmissionRule, Config, Fork, Request, State
from tests.optimized.driver import Caller, config_for, next_token


class Asker(Caller):
    """Asks, after every call, whether somebody might come in if other numbers were free than are."""

    def __init__(self, config: Config, seed: int) -> None:
        self.engine = make_engine(config)
        super().__init__(config, [self.engine], seed)
        self.seen: Counter[object] = Counter()

    def compare(self) -> None:
        live, state = self.engine.core.scheduler, self.state
        num_free = live.pool.num_free
        for count in range(self.config.num_blocks + 1):
            live.pool.num_free, shown = count, replace(state, free=tuple(range(100, 100 + count)))
            self.may_admit(shown)
            self.may_fork(shown)
        live.pool.num_free = num_free

    def may_admit(self, shown: State) -> None:
        live = self.engine.core.scheduler
        head, is_prompt = live.waiting.head(), self.config.admission_rule is AdmissionRule.PROMPT
        # Under PROMPT the engine asks only when whoever runs has room for all of its tokens (SCHED-13).
        owed = is_prompt and sum(spec.blocks_owed(shown, request_id) for request_id in shown.running)
        if head is not None and not owed:
            num_seats = self.config.max_num_seqs - spec.seats_taken(shown)
            for budget in (1, 2, self.config.max_num_batched_tokens):
                now = spec.admission(shown, head.request.request_id, budget) is Admission.NOW
                assert may_admit(self.config, live.pool, live.running, head, num_seats, budget) is now, (budget, shown)
                self.seen["admit", now] += 1

    def may_fork(self, shown: State) -> None:
        live = self.engine.core.scheduler
        for request in live.running:
            for parent in request.seqs:
                if shown.seqs[parent.seq_id].num_output_tokens and not parent.num_scheduled:
                    event = Fork(parent.seq_id, self.num_seqs)
                    now = spec.forks_keep_what_was_promised(shown, event, fork(shown, event))
                    assert may_fork(self.config, live.pool, live.running, parent) is now, (event, shown)
                    self.seen["fork", now] += 1


@pytest.mark.parametrize("rule", AdmissionRule)
def test_who_may_come_in_is_what_the_specification_says(rule: AdmissionRule) -> None:
    seen: Counter[object] = Counter()
    for seed in range(12 if rule is AdmissionRule.NO_EVICT else 6):
        config = config_for(seed, SymbolicEngine.profile.capabilities)
        config = replace(config, num_blocks=12, max_num_seqs=6, max_model_len=10, admission_rule=rule)
        asker = Asker(config, seed)
        asker.run(num_calls=30)
        seen += asker.seen
    assert all(seen["admit", now] > 100 for now in (True, False)), seen
    assert rule is not AdmissionRule.NO_EVICT or all(seen["fork", now] > 100 for now in (True, False)), seen


@pytest.mark.parametrize("rule", [AdmissionRule.OPTIMISTIC, AdmissionRule.NO_EVICT])
def test_a_promise_to_the_end_does_not_count_on_what_others_hold(rule: AdmissionRule) -> None:
    """The head would hit two blocks of a running request: they cost nothing, unless the promise is to hold to the end."""
    asker = Asker(Config(12, 1, max_num_batched_tokens=8, prefix_cache=True, admission_rule=rule), seed=0)
    asker.engine.add(Request(0, (0, 1, 0), max_tokens=4, seq_ids=(0,)))
    asker.engine.step(next_token)
    asker.engine.add(Request(1, (0, 1, 1, 1), max_tokens=3, seq_ids=(1,)))
    asker.num_seqs = 2
    asker.compare()
    live = asker.engine.core.scheduler
    assert live.pool.num_in_use(longest_hit(live.pool, live.seqs[1])) == 2
    assert asker.seen["admit", True]
    assert asker.seen["admit", False]
