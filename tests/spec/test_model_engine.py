"""The executable model keeps its own rules, whatever its caller does."""

import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from spec.conformance.judge import JudgedEngine
from spec.conformance.machine import machine_for
from spec.engine import Engine, StepReport, TokenSource
from spec.rules import RuleViolation
from spec.vocabulary import AdmissionRule, CacheKey, Config, Preempt, Publish, Request, replace
from tests.reference.follow import next_token
from tests.spec.model_engine import ModelEngine, make_engine, make_engine_ahead, make_engine_at_schedule


def test_the_model_is_an_engine() -> None:
    assert isinstance(make_engine(Config(num_blocks=1)), Engine)


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_engine, make_engine_at_schedule, make_engine_ahead])
def test_the_model_keeps_every_rule_whatever_its_caller_does(make: Callable[[Config], ModelEngine]) -> None:
    """Also a check of the rules: one that the plainest engine breaks asks for too much."""
    run_state_machine_as_test(machine_for(make), settings=settings(max_examples=20, stateful_step_count=15))


def test_what_was_published_for_a_victim_is_worked_out() -> None:
    """Sequences 0 and 2 computed the same block, and the cache names that of 0. Sequence 2 takes it, so that its own block
    gets the name; then its request is preempted, since sequence 3 lacks a block."""
    config = Config(num_blocks=5, block_size=1, prefix_cache=True)
    engine = JudgedEngine(make_engine_at_schedule(config), config)
    engine.add(Request(0, (1,), max_tokens=1, seq_ids=(0,)))
    engine.add(Request(1, (0,), max_tokens=3, seq_ids=(1,)))
    engine.add(Request(2, (1,), max_tokens=2, seq_ids=(2, 3)))
    engine.step(lambda seq, tokens: 5)
    named = next(block for block, key in engine.state.cached.items() if key == CacheKey((1,)))
    engine.step(lambda seq, tokens: 5)
    trace = engine.follower.trace
    assert trace.index(Publish(2, 0)) + 1 == trace.index(Preempt(2))
    assert CacheKey((1,)) in engine.state.cached.values()
    assert named not in engine.state.cached


@pytest.mark.parametrize("seed", [88, 152, 164, *range(9)])
def test_a_narrow_pool_with_names_for_what_is_not_written_is_judged_by_its_reports(seed: int) -> None:
    """Where a block is published before it is written, the judge works out when: these runs it once found guilty."""
    rng = random.Random(seed)
    optimistic = AdmissionRule.OPTIMISTIC
    config = Config(8, 1, max_num_seqs=4, max_num_batched_tokens=3, admission_rule=optimistic, prefix_cache=True)
    engine = JudgedEngine(make_engine_at_schedule(config), config)
    num_requests = num_seqs = 0
    for _ in range(40):
        what = rng.random()
        if what < 0.4:
            count = rng.choice((1, 1, 2))
            prompt = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 7)))
            seq_ids = tuple(range(num_seqs, num_seqs + count))
            engine.add(Request(num_requests, prompt, rng.randint(1, 5), seq_ids))
            num_requests, num_seqs = num_requests + 1, num_seqs + count
        elif what < 0.85:
            engine.step(next_token)
        elif what < 0.93:
            state = engine.state
            parents = [i for i, q in state.seqs.items() if q.request_id in state.running and q.num_output_tokens]
            if parents:
                engine.fork(rng.choice(parents), num_seqs)
                num_seqs += 1
        elif num_requests:
            engine.abort(rng.randrange(num_requests))


class FromTheFourth(ModelEngine):
    """Its slots behind the fourth entry of a table come from the fourth."""

    def step(self, token_source: TokenSource) -> StepReport:
        report = super().step(token_source)
        device = (
            replace(e, slots=(*e.slots[:4], *e.slots[3:4] * len(e.slots[4:]))) for e in report.writes + report.reads
        )
        return replace(report, device=tuple(device))


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_wrong_slot_is_a_wrong_slot_also_of_a_sequence_that_has_ended(max_tokens: int) -> None:
    """The suite reads off the slots which blocks it had: of one that nobody shows any more, the allocator was blamed."""
    config = Config(num_blocks=8, block_size=1)
    judged = JudgedEngine(FromTheFourth(config), config)
    judged.add(Request(0, (0, 1, 0, 1, 0), max_tokens, (0,)))
    with pytest.raises(RuleViolation, match="^TABLE-2 does not hold"):
        judged.step(next_token)
