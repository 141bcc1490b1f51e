"""Small stories of the prefix cache, swapping, priorities, admission rules and windows in the reference engine."""

from dataclasses import replace
from typing import TypeVar

from reference.engine import ReferenceEngine
from reference.plan import Swap
from spec.conformance.judge import Follower
from spec.vocabulary import (
    AdmissionRule,
    Admit,
    CacheKey,
    Config,
    Event,
    Hit,
    Policy,
    Preempt,
    Publish,
    Read,
    Recovery,
    Slide,
    SwapIn,
    SwapOut,
    Write,
)
from tests.reference.follow import followed, next_token, request

E = TypeVar("E", bound=Event)

SMALL = Config(num_blocks=8, block_size=2, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32)
CACHING = replace(SMALL, prefix_cache=True)


def run(engine: ReferenceEngine) -> None:
    """Step until nothing is left."""
    for _ in range(200):
        if not engine.has_work:
            return
        engine.step(next_token)
    raise AssertionError("this never ends")


def events(follower: Follower, kind: type[E]) -> list[E]:
    return [event for event in follower.trace if isinstance(event, kind)]


# The prefix cache


def test_blocks_are_published_when_they_are_computed_and_hit_from_then_on() -> None:
    engine, follower = followed(CACHING)
    engine.add(request(0, (1, 0, 1, 0, 1), 1))
    engine.step(next_token)
    assert events(follower, Publish) == [Publish(0, 0), Publish(0, 1)]
    assert engine.snapshot().cached == {0: CacheKey((1, 0)), 1: CacheKey((1, 0, 1, 0))}
    engine.add(request(1, (1, 0, 1, 0, 0), 1))
    report = engine.step(next_token)
    assert events(follower, Hit) == [Hit(1, (0, 1))]
    assert [(write.start, len(write.slots)) for write in report.writes] == [(4, 1)]


def test_cache_4_the_last_token_of_a_cached_prompt_is_computed() -> None:
    engine, follower = followed(CACHING)
    engine.add(request(0, (1, 0, 1, 0), 1))
    run(engine)
    engine.add(request(1, (1, 0, 1, 0), 1))
    run(engine)
    assert events(follower, Hit) == [Hit(1, (0,))]


def test_another_salt_does_not_share() -> None:
    engine, follower = followed(CACHING)
    engine.add(request(0, (1, 0, 1), 1))
    run(engine)
    engine.add(request(1, (1, 0, 1), 1, cache_salt="mine"))
    run(engine)
    assert events(follower, Hit) == []
    assert {key.salt for key in engine.snapshot().cached.values()} == {"", "mine"}


def test_the_end_of_the_oldest_prefix_is_evicted_first() -> None:
    engine, _ = followed(replace(CACHING, num_blocks=4))
    engine.add(request(0, (1, 0, 1, 0), 1))
    run(engine)
    engine.add(request(1, (0, 0, 0, 0, 0), 1))
    engine.step(next_token)
    assert CacheKey((1, 0)) in engine.snapshot().cached.values()
    assert CacheKey((1, 0, 1, 0)) not in engine.snapshot().cached.values()


def test_a_hit_in_use_costs_no_free_block() -> None:
    engine, _ = followed(replace(CACHING, num_blocks=4))
    engine.add(request(0, (1, 0, 1, 0), 4))
    engine.step(next_token)
    engine.add(request(1, (1, 0, 1), 1))
    engine.step(next_token)
    assert engine.snapshot().ref_count[0] == 1, "one has ended"
    assert engine.snapshot().running == (0,), "one free block was enough for a prompt of two"


def test_a_preempted_request_finds_its_own_blocks() -> None:
    engine, follower = followed(replace(CACHING, num_blocks=6))
    engine.add(request(0, (1, 0, 1), 7))
    engine.add(request(1, (0, 1, 1), 7))
    run(engine)
    assert events(follower, Preempt) == [Preempt(1)]
    assert any(hit.seq == 1 for hit in events(follower, Hit))


def test_reset_waits_until_nobody_uses_a_cached_block() -> None:
    engine, _ = followed(CACHING)
    engine.add(request(0, (1, 0, 1), 3))
    engine.step(next_token)
    assert not engine.reset_cache()
    run(engine)
    assert engine.reset_cache()
    assert engine.snapshot().cached == {}


# Swapping

SWAPPING = replace(SMALL, num_blocks=4, recovery=Recovery.SWAP, num_host_blocks=4)


def test_a_preempted_request_is_swapped_out_and_comes_back_with_what_it_computed() -> None:
    engine, follower = followed(SWAPPING)
    engine.add(request(0, (1, 0, 1), 6))
    engine.add(request(1, (0, 1, 1), 6))
    run(engine)
    assert [len(event.blocks) for event in events(follower, SwapOut)] == [2]
    assert [len(event.blocks) for event in events(follower, SwapIn)] == [2]
    assert [write.start for write in events(follower, Write)].count(0) == 2, "nothing is computed twice"


def test_a_block_whose_name_was_lost_is_named_with_the_one_behind_it() -> None:
    """Sequence 1 computed the same first block as sequence 0, whose own had the name until it was taken."""
    engine, follower = followed(replace(CACHING, num_blocks=4))
    engine.add(request(0, (1, 0), 1))
    engine.add(request(1, (1, 0), 4))
    engine.step(next_token)
    assert events(follower, Publish) == [Publish(0, 0)]
    engine.add(request(2, (0, 0, 0), 1))
    engine.step(next_token)
    assert (1, 0) not in [key.tokens for key in engine.snapshot().cached.values()]
    engine.step(next_token)
    assert [event for event in events(follower, Publish) if event.seq == 1] == [Publish(1, 0), Publish(1, 1)]


def test_the_plan_says_from_where_to_where_a_table_moves() -> None:
    engine, _ = followed(SWAPPING)
    engine.add(request(0, (1, 0, 1), 6))
    engine.add(request(1, (0, 1, 1), 6))
    swaps: list[Swap] = []
    before = engine.snapshot()
    while engine.has_work:
        engine.begin_step()
        for swap in engine.plans[0].swaps:
            tables = before.block_tables if isinstance(swap.event, SwapOut) else before.host_tables
            assert swap.sources == tables[swap.event.seq]
            swaps.append(swap)
        engine.end_step(next_token)
        before = engine.snapshot()
    assert [type(swap.event) for swap in swaps] == [SwapOut, SwapIn]


def test_who_is_gone_before_the_step_ends_is_not_swapped_in() -> None:
    engine, _ = followed(SWAPPING)
    engine.add(request(0, (1, 0, 1), 6))
    engine.add(request(1, (0, 1, 1), 6))
    engine.begin_step()
    while not any(isinstance(swap.event, SwapIn) for swap in engine.plans[0].swaps):
        engine.end_step(next_token)
        assert engine.has_work, "nobody came back"
        engine.begin_step()
    engine.abort(1)
    assert not any(isinstance(event, SwapIn) for event in engine.end_step(next_token).device)


def test_all_sequences_of_a_request_are_swapped_together_or_none() -> None:
    engine, follower = followed(replace(SWAPPING, num_blocks=6, num_host_blocks=3))
    engine.add(request(0, (1, 0, 1), 7))
    engine.add(request(1, (0, 1, 1), 4, seq_ids=(1, 2)))
    run(engine)
    assert events(follower, Preempt), "the story needs a preemption"
    assert not events(follower, SwapOut), "four host blocks would be needed"


def test_a_full_host_pool_means_recomputation() -> None:
    engine, follower = followed(replace(SWAPPING, num_host_blocks=1))
    engine.add(request(0, (1, 0, 1), 6))
    engine.add(request(1, (0, 1, 1), 6))
    run(engine)
    assert events(follower, Preempt) == [Preempt(1)]
    assert not events(follower, SwapOut)


# Priorities and admission


def test_a_smaller_priority_is_served_first() -> None:
    engine, follower = followed(replace(SMALL, policy=Policy.PRIORITY, max_num_seqs=1))
    for i, priority in enumerate((2, 1, 2, 0)):
        engine.add(request(i, (1,), 1, priority=priority))
    run(engine)
    assert [event.request_id for event in events(follower, Admit)] == [3, 1, 0, 2]


def test_preempt_1_the_last_in_the_order_of_service_is_preempted_though_it_came_first() -> None:
    engine, follower = followed(replace(SMALL, policy=Policy.PRIORITY, num_blocks=4))
    engine.add(request(0, (1, 0, 1), 6, priority=1))
    engine.add(request(1, (0, 1, 1), 6, priority=0))
    run(engine)
    assert events(follower, Preempt) == [Preempt(0)]


def test_sched_1_a_victim_that_was_not_in_the_step_gives_it_no_budget_back() -> None:
    """The second chunk of an urgent prompt takes the blocks of a request that this step has not come to."""
    config = Config(8, 1, 4, 4, policy=Policy.PRIORITY, admission_rule=AdmissionRule.OPTIMISTIC)
    engine, _ = followed(config)
    engine.add(request(0, (0, 0), 5, priority=1))
    engine.step(next_token)
    engine.add(request(1, (1,) * 8, 1))
    engine.step(next_token)
    report = engine.step(next_token)
    assert report.preempted == (Preempt(0),)
    assert [len(write.slots) for write in report.writes] == [4]


def test_whoever_is_recomputed_has_its_whole_window_again() -> None:
    """A block of request 0 has left its window when an urgent request grows and takes all that it holds."""
    config = Config(4, 1, 4, 4, window=3, policy=Policy.PRIORITY, admission_rule=AdmissionRule.OPTIMISTIC)
    engine, follower = followed(config)
    engine.add(request(0, (0,), 4, priority=1))
    engine.step(next_token)
    engine.step(next_token)
    engine.add(request(1, (1,), 3))
    num_dropped = []
    while Preempt(0) not in follower.trace:
        num_dropped.append(engine.snapshot().seqs[0].num_dropped_blocks)
        engine.step(next_token)
    assert num_dropped[-1] == 1
    run(engine)


def test_the_room_for_a_chunk_behind_a_hit_counts_the_hit() -> None:
    """Two samples are computed again. The second begins a step after the first, behind what it hits, and lacks a block."""
    config = Config(8, 2, 4, 3, prefix_cache=True, admission_rule=AdmissionRule.OPTIMISTIC)
    engine, follower = followed(config)
    engine.add(request(0, (0, 0), 8))
    engine.add(request(1, (0, 0), 6, (1, 2)))
    run(engine)
    assert events(follower, Preempt) == [Preempt(1), Preempt(1)]


def admitted_at_once(rule: AdmissionRule) -> int:
    """How many of three requests the first step admits: 4 tokens of prompt, 5 at most, 5 blocks, 2 tokens a step."""
    engine, _ = followed(replace(SMALL, num_blocks=5, max_num_batched_tokens=6, admission_rule=rule))
    for i in range(3):
        engine.add(request(i, (1, 0, 1, i % 2), 2))
    engine.step(next_token)
    return len(engine.snapshot().running)


def test_admission_rules_look_ahead_by_a_step_a_prompt_or_a_whole_request() -> None:
    counts = {rule: admitted_at_once(rule) for rule in AdmissionRule}
    assert counts == {AdmissionRule.OPTIMISTIC: 2, AdmissionRule.PROMPT: 2, AdmissionRule.NO_EVICT: 1}


def test_the_optimistic_rule_admits_what_fits_into_the_step() -> None:
    for rule, running in ((AdmissionRule.OPTIMISTIC, (0, 1)), (AdmissionRule.PROMPT, (0,))):
        engine, _ = followed(replace(SMALL, num_blocks=4, max_num_batched_tokens=6, admission_rule=rule))
        engine.add(request(0, (1, 0, 1, 0), 1))
        engine.add(request(1, (1, 0, 1, 0, 1, 0), 1))
        engine.step(next_token)
        assert {seq.request_id for seq in engine.snapshot().seqs.values()} <= {0, 1}
        admitted = engine.snapshot().running
        assert admitted == tuple(i for i in running if i in engine.snapshot().requests), rule


# A sliding window


def test_attn_3_reads_begin_at_the_first_visible_position() -> None:
    engine, follower = followed(replace(SMALL, window=3))
    engine.add(request(0, (1, 0, 1, 0), 3))
    run(engine)
    assert [(read.start, len(read.slots)) for read in events(follower, Read)] == [(0, 4), (2, 3), (3, 3)]


def test_table_10_passed_blocks_are_given_back_while_the_sequence_lives() -> None:
    engine, follower = followed(replace(SMALL, window=3))
    engine.add(request(0, (1, 0, 1, 0), 3))
    engine.step(next_token)
    state = engine.snapshot()
    assert events(follower, Slide) == [Slide(0, 1)]
    assert state.block_tables == {0: (1,)}
    assert state.seqs[0].num_dropped_blocks == 1
    assert 0 in state.free


def test_a_window_serves_a_long_answer_from_few_blocks() -> None:
    engine, _ = followed(replace(SMALL, window=2))
    engine.add(request(0, (1, 0), 12))
    most = 0
    while engine.has_work:
        engine.step(next_token)
        most = max(most, 8 - len(engine.snapshot().free))
    assert most == 1
