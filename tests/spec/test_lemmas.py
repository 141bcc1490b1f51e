"""The lemmas: they hold wherever the rules do that they follow from."""

from dataclasses import replace

import pytest

from reference.engine import make_engine
from spec.broken import ALICE, ALICE_WANTS_THE_LAST_BLOCK, ALONE, EQUALS, PROMISING, follow, served
from spec.engine import Admission
from spec.ledger import faults, walk_in, walk_under
from spec.lemmas import fork_shares_everything, no_evict_means_no_eviction, who_is_admitted_is_served
from spec.preemption import blocks_for_step
from spec.rules import RULES, WITHDRAWN
from spec.scheduler import admission
from spec.schedules import LOADS
from spec.scope import LENSES
from spec.vocabulary import Add, AdmissionRule, Admit, Allocate, Append, Begin, Fork, Observe, Preempt

RULES_OF_A_FORK = [RULES[rule_id] for rule_id in ("TABLE-8", "PREEMPT-4", "API-3")]
FORKS = [taken for taken in walk_in(LENSES["fork"].small) if isinstance(taken[1], Fork)]


def test_a_fork_of_the_model_shares_everything() -> None:
    assert len(FORKS) > 5
    for before, event, after in FORKS:
        assert isinstance(event, Fork) and fork_shares_everything(before, event, after)


def test_an_engine_that_shows_another_fork_breaks_a_rule() -> None:
    """Each single fault in what an engine shows after a fork that breaks the lemma breaks one of the rules."""
    num_faults = 0
    for before, event, after in FORKS[:5]:
        assert isinstance(event, Fork)
        for shown in faults(after):
            there = {event.parent, event.child} <= shown.block_tables.keys() & shown.seqs.keys()
            if not there or not fork_shares_everything(before, event, shown):
                num_faults += 1
                assert any(not rule.holds(after, Observe(), shown) for rule in RULES_OF_A_FORK)
    assert num_faults > 50


def test_a_fork_that_takes_blocks_or_loses_tokens_is_none() -> None:
    forked = follow(ALONE, Fork(0, 1))
    assert fork_shares_everything(ALONE, Fork(0, 1), forked)
    assert not fork_shares_everything(ALONE, Fork(0, 1), EQUALS)
    assert not fork_shares_everything(ALONE, Fork(0, 1), follow(forked, Append(1, (6,))))


def test_under_no_evict_nobody_who_runs_ever_lacks_a_block() -> None:
    load = LOADS["fcfs"]
    load = replace(load, config=replace(load.config, num_blocks=7, admission_rule=AdmissionRule.NO_EVICT))
    states = [after for seed in range(3) for _, _, after in walk_under(load, make_engine, seed=seed)]
    assert all(map(no_evict_means_no_eviction, states))
    assert sum(blocks_for_step(s) == len(s.free) > 0 for s in states) > 0, "it is tight"


def test_it_is_the_admission_that_keeps_the_promise() -> None:
    greedy = follow(PROMISING, Add(replace(ALICE, prompt=(5,) * 7)), Begin(1), *served(ALICE, 0))
    greedy = replace(greedy, config=replace(greedy.config, max_num_batched_tokens=9))
    assert not no_evict_means_no_eviction(greedy)


@pytest.mark.slow
@pytest.mark.parametrize("rule", AdmissionRule)
@pytest.mark.parametrize("name", LOADS)
def test_who_is_admitted_is_served_and_nobody_is_preempted_behind_it(name: str, rule: AdmissionRule) -> None:
    load = replace(LOADS[name], config=replace(LOADS[name].config, admission_rule=rule, num_blocks=4))
    num_victims = num_admitted = 0
    for before, event, after in (taken for seed in range(3) for taken in walk_under(load, make_engine, seed=seed)):
        if isinstance(event, Begin):
            num_admitted = 0
        elif isinstance(event, Admit):
            num_admitted += 1
            assert who_is_admitted_is_served(before, event, after)
        elif isinstance(event, Preempt):
            num_victims += 1
            assert num_admitted == 0
    assert (num_victims > 0) is (rule is not AdmissionRule.NO_EVICT)


def test_sched_11_what_the_running_ones_take_in_this_step_is_owed() -> None:
    """Also where the admission rule looks no further than the step: else the order of decisions would choose who runs."""
    assert not RULES["SCHED-11"].holds(
        ALICE_WANTS_THE_LAST_BLOCK, Admit(1), follow(ALICE_WANTS_THE_LAST_BLOCK, Admit(1))
    )
    larger = replace(ALICE_WANTS_THE_LAST_BLOCK, free=(1, 2))
    assert admission(larger, 1, budget=1) is Admission.NOW


def test_it_is_what_who_runs_takes_in_this_step_that_is_owed() -> None:
    """Alice runs and takes the last block for her next token. If Bob is admitted first, one of them lacks a block."""
    admitted = follow(ALICE_WANTS_THE_LAST_BLOCK, Admit(1))
    assert not who_is_admitted_is_served(ALICE_WANTS_THE_LAST_BLOCK, Admit(1), admitted)
    assert RULES["PREEMPT-5"].holds(follow(admitted, Allocate(1, 1, (1,))), Preempt(0), admitted)
    assert not RULES["PREEMPT-5"].holds(ALICE_WANTS_THE_LAST_BLOCK, Preempt(0), admitted), (
        "and before that she lacks none"
    )


def test_a_reason_to_withdraw_a_rule_names_rules() -> None:
    for rule_id, reason in WITHDRAWN.items():
        assert rule_id not in RULES and sum(each in reason for each in RULES) >= 3
