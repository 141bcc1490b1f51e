"""The free list and the queue, beside a list that does the same the slow way."""

import random
import sys
from collections import Counter
from types import FrameType

import pytest

from optimized.engine import EngineCore
from optimized.pool import BlockPool
from optimized.sequences import LiveRequest
from optimized.symbolic_device import SymbolicDevice
from optimized.waiting import WaitingQueue
from spec.vocabulary import Config, Request


@pytest.mark.parametrize("seed", range(20))
def test_the_free_list_is_first_in_first_out_and_can_lose_its_middle(seed: int) -> None:
    rng = random.Random(seed)
    pool, free = BlockPool(9), list(range(9))
    used: list[int] = []
    known: set[int] = set()  # was taken once, so that a hit may take it from the middle
    most_shared = 0
    for _ in range(300):
        if free and rng.random() < 0.5:
            block = pool.take()
            assert block == free.pop(0)
            used.append(block)
            known.add(block)
        elif used and rng.random() < 0.7:
            block = used.pop(rng.randrange(len(used)))
            pool.drop_holder(block)
            if block not in used:
                free.append(block)
        elif known:
            block = rng.choice(sorted(known))
            pool.add_holder(block)
            if block in free:
                free.remove(block)
            used.append(block)
        assert list(pool.free_list()) == free
        assert pool.num_free == len(free)
        assert list(pool.ref_count) == [used.count(block) for block in range(9)]
        num_shared = sum(used.count(block) > 1 for block in range(9))
        most_shared = max(most_shared, num_shared)
        assert (pool.num_shared, pool.peak_shared) == (num_shared, most_shared)
        assert pool.num_spared == len(used) - len(set(used))
        assert pool.num_in_use(range(9)) == len(set(used))


@pytest.mark.parametrize("seed", range(20))
def test_the_queue_is_sorted_whoever_leaves(seed: int) -> None:
    rng = random.Random(seed)
    queue, waiting = WaitingQueue(), list[LiveRequest]()
    for number in range(200):
        if rng.random() < 0.5:
            request = LiveRequest(Request(number, (0,), 1, (number,)), (rng.randint(0, 2), number), [])
            queue.push(request)
            waiting = sorted([*waiting, request], key=lambda each: each.key)
        elif waiting and rng.random() < 0.5:
            queue.remove(waiting.pop(rng.randrange(len(waiting))))
        elif waiting:
            request = waiting.pop(0)
            assert queue.pop() is request
            if rng.random() < 0.5:  # preempted: it comes back to its place
                queue.push(request)
                waiting.insert(0, request)
        assert queue.in_order() == waiting
        assert len(queue) == len(waiting)
        assert queue.head() is (waiting[0] if waiting else None)
        assert len(queue._heap) <= 2 * len(waiting) + 1, "whoever has left is forgotten in time"


def test_nobody_leaves_an_empty_queue() -> None:
    with pytest.raises(IndexError, match="nobody waits"):
        WaitingQueue().pop()


def test_a_step_does_the_same_work_however_many_wait_and_however_large_the_pool_is() -> None:
    """Calls are counted, not seconds, and only those of the engine's own code: the interpreter has calls of its own."""

    def calls_of_steps(num_waiting: int, num_blocks: int) -> Counter[str]:
        config = Config(num_blocks=num_blocks, max_num_seqs=16)
        core = EngineCore(config, SymbolicDevice(16, lambda seq, prefix: 0))
        for number in range(num_waiting):
            core.add(Request(number, (0, 1), max_tokens=100, seq_ids=(number,)))
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, argument: object) -> None:
            if frame.f_globals["__name__"].startswith("optimized."):
                calls[f"{frame.f_code.co_qualname} {event}"] += 1

        sys.setprofile(count)
        for _ in range(60):
            plan = core.schedule()
            core.commit(plan, (0,) * len(plan.sample_rows))
        sys.setprofile(None)
        return calls

    assert calls_of_steps(2_000, 100_000) == calls_of_steps(200, 1_000)
