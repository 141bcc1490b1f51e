"""A plan is a value: it goes through JSON, and between schedule and commit anything may happen."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from optimized.capacity import num_blocks_for
from optimized.engine import EngineCore, SymbolicEngine
from optimized.plan import BlockCopy, Plan, Swap
from optimized.symbolic_device import SymbolicDevice
from spec.conformance.judge import Follower
from spec.engine import InvalidField
from spec.vocabulary import AdmissionRule, Config, Policy, Recovery, Request
from tests.optimized.driver import Caller, config_for, next_token

TIGHT = Config(num_blocks=4, block_size=2, max_num_seqs=4, max_num_batched_tokens=6, max_model_len=16)


def plans(seed: int) -> Iterator[Plan]:
    """The plans of a random run."""
    made: list[Plan] = []

    class Recorder(SymbolicDevice):
        def run(self, plan: Plan) -> object:
            made.append(plan)
            return super().run(plan)

    config = config_for(seed, SymbolicEngine.profile.capabilities)
    engine = SymbolicEngine(config)
    engine.device = engine.core.device = Recorder(config.block_size, next_token)
    Caller(config, [engine], seed).run(num_calls=60)
    yield from made


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_is_the_same_after_json(seed: int) -> None:
    for plan in plans(seed):
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert hash(again) == hash(plan)


def test_alloc_5_what_is_aborted_between_schedule_and_commit_is_free_when_the_step_ends() -> None:
    device = SymbolicDevice(TIGHT.block_size, next_token)
    core = EngineCore(TIGHT, device, Follower(TIGHT, "optimized"))
    core.add(Request(0, (0, 1), max_tokens=3, seq_ids=(0, 1)))
    core.add(Request(1, (0,), max_tokens=3, seq_ids=(2,)))
    plan = core.schedule()
    core.abort(0)
    assert core.snapshot().running == (1,)
    assert core.scheduler.pool.num_free == 2
    outcome = core.commit(plan, device.run(plan))
    assert outcome.seq_ids == (2,)
    assert core.snapshot().running == (1,)
    assert core.scheduler.pool.num_free == 3


def test_a_request_that_comes_between_schedule_and_commit_waits() -> None:
    device = SymbolicDevice(TIGHT.block_size, next_token)
    core = EngineCore(TIGHT, device, Follower(TIGHT, "optimized"))
    core.add(Request(0, (0, 1, 0), max_tokens=3, seq_ids=(0,)))
    plan = core.schedule()
    core.add(Request(1, (0,), max_tokens=3, seq_ids=(2,)))
    core.commit(plan, device.run(plan))
    assert core.snapshot().waiting == (1,)


def test_copies_for_a_victim_are_not_made_and_those_for_others_are() -> None:
    """Two requests share their half-filled prompts. There are blocks for one copy each, and the second needs two."""
    config = Config(num_blocks=4, block_size=2, max_num_seqs=5, max_num_batched_tokens=8, max_model_len=16)
    core = EngineCore(config, SymbolicDevice(config.block_size, next_token), Follower(config, "optimized"))
    core.add(Request(0, (0,), max_tokens=2, seq_ids=(0, 1)))
    core.add(Request(1, (1,), max_tokens=2, seq_ids=(2, 3, 4)))
    core.step()
    plan = core.schedule()
    assert plan.preempted == (1,)
    assert plan.copies == (BlockCopy(0, 0, 0, 2),)
    assert plan.seq_ids == (0, 1)
    core.commit(plan, core.device.run(plan))
    while core.has_work:
        core.step()
    assert core.stats()["num_blocks_copied"] == 1  # whoever is recomputed shares nothing


def test_a_victim_of_its_own_leaves_a_chunk_before_it_in_the_step() -> None:
    """The urgent request 1 has a chunk; request 0 behind it has a block for its first sample and none for its second."""
    config = Config(5, 4, 4, 6, policy=Policy.PRIORITY, admission_rule=AdmissionRule.OPTIMISTIC)
    core = EngineCore(config, SymbolicDevice(config.block_size, next_token), Follower(config, "optimized"))
    core.add(Request(0, (0, 1, 0), max_tokens=3, seq_ids=(0, 1), priority=1))
    core.step()
    core.add(Request(1, (1, 1, 0, 0, 1, 1, 0), max_tokens=2, seq_ids=(2,)))
    core.step()
    plan = core.schedule()
    assert plan.preempted == (0,)
    assert plan.seq_ids == (2,)
    assert plan.positions == (4, 5, 6)
    core.commit(plan, core.device.run(plan))
    while core.has_work:
        core.step()


def test_sched_25_nobody_comes_in_while_a_running_request_lacks_blocks_and_a_step_is_in_flight() -> None:
    """One block is free. Request 1 needs two for the rest of its prompt, request 2 would need one."""
    config = Config(9, 1, 4, 4, admission_rule=AdmissionRule.OPTIMISTIC)
    core = EngineCore(config, SymbolicDevice(config.block_size, next_token), Follower(config, "optimized"))
    core.add(Request(0, (0,), max_tokens=4, seq_ids=(0,)))
    core.add(Request(1, (1,) * 8, max_tokens=1, seq_ids=(1,)))
    core.step()
    plans = [core.schedule()]
    assert plans[0].seq_ids == (0, 1)
    core.add(Request(2, (0,), max_tokens=1, seq_ids=(2,)))
    assert core.scheduler.pool.num_free == 1
    plans.append(core.schedule())
    assert plans[1].seq_ids == ()
    for plan in plans:
        core.commit(plan, core.device.run(plan))
    while core.has_work:
        core.step()


def test_a_request_goes_to_host_memory_and_comes_back() -> None:
    config = replace(TIGHT, num_host_blocks=4, recovery=Recovery.SWAP, admission_rule=AdmissionRule.OPTIMISTIC)
    core = EngineCore(config, SymbolicDevice(config.block_size, next_token), Follower(config, "optimized"))
    core.add(Request(0, (0, 1, 0), max_tokens=4, seq_ids=(0,)))
    core.add(Request(1, (1, 1, 0), max_tokens=4, seq_ids=(1,)))
    swaps: list[Swap] = []
    while core.has_work:
        plan = core.schedule()
        swaps += plan.swaps
        core.commit(plan, core.device.run(plan))
    assert swaps == [Swap(True, 1, (2, 3), (0, 1)), Swap(False, 1, (2, 3), (0, 1))]
    assert [swap.out for swap in swaps] == [True, False]


def test_a_sequence_may_be_released_alone() -> None:
    core = EngineCore(TIGHT, SymbolicDevice(TIGHT.block_size, lambda seq, prefix: 0), Follower(TIGHT, "optimized"))
    core.add(Request(0, (0, 1), max_tokens=3, seq_ids=(0, 1)))
    core.step()
    core.release(0)
    assert list(core.snapshot().seqs) == [1]
    core.release(1)
    assert not core.has_work
    assert core.scheduler.pool.num_free == TIGHT.num_blocks


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5, float("nan")])
def test_a_fraction_of_the_memory_is_one(fraction: float) -> None:
    with pytest.raises(InvalidField):
        num_blocks_for(1000, fraction, weights=0, activation_peak=0, bytes_per_block=10)
