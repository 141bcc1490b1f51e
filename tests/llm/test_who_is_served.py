"""``LLM`` on a tiny random model: who is admitted, and when, changes nothing that anybody says."""

from typing import Any

import pytest

from optimized import LLM, SamplingParams
from optimized.checkpoint import Checkpoint
from spec.engine import InvalidRequest
from tests.llm.test_llm import GREEDY, PROMPTS, tokens


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["optimistic", "prompt", "no_evict"])
def test_whoever_is_admitted_says_the_same(tiny: Checkpoint, llm: LLM, rule: str) -> None:
    tight = LLM(tiny, block_size=4, num_gpu_blocks_override=14, admission_rule=rule, watermark_blocks=1)
    assert tokens(tight.generate(PROMPTS, GREEDY)) == tokens(llm.generate(PROMPTS, GREEDY))
    assert (tight.stats().num_preemptions == 0) is (rule == "no_evict")


def test_prompts_that_are_computed_in_parts_say_the_same(tiny: Checkpoint, llm: LLM) -> None:
    """Nine steps of two shares: the short one is there before the long one is, which takes a whole budget otherwise."""
    long, short = [[*range(40)], [7, 8, 9]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    shared = LLM(tiny, max_num_batched_tokens=8, max_num_partial_prefills=2)
    alone = LLM(tiny, max_num_batched_tokens=8)
    assert (
        tokens(shared.generate(long, short)) == tokens(alone.generate(long, short)) == tokens(llm.generate(long, short))
    )
    for engine, is_first in ((shared, True), (alone, False)):
        one, two = (answer.metrics for answer in engine.generate(long, short))
        assert one is not None and two is not None and one.first_token is not None and two.first_token is not None
        assert (two.first_token < one.first_token) is is_first


def test_nobody_joins_a_static_batch(tiny: Checkpoint, llm: LLM) -> None:
    static = LLM(tiny, scheduling_policy="static", max_num_seqs=2)
    one, two, three = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (3, 12, 3))
    for name, params in (("a", one), ("b", two), ("c", three)):
        static.add_request(name, PROMPTS[0], params)
    done, order = {}, []
    while static.has_unfinished_requests():
        for answer in static.step():
            if answer.finished:
                done[answer.request_id] = answer
                order.append(answer.request_id)
    assert order == ["a", "b", "c"]
    assert done["c"].metrics.begun > done["b"].metrics.last_token  # type: ignore[union-attr]  # it has begun
    assert tokens([done["b"]]) == tokens(llm.generate(PROMPTS[0], two))


def test_prompts_are_served_in_the_order_of_their_priorities(tiny: Checkpoint) -> None:
    urgent = LLM(tiny, scheduling_policy="priority", max_num_seqs=1)
    one, two, three = urgent.generate(PROMPTS[:3], GREEDY, priority=[2, 0, 1])
    started = [answer.metrics.begun for answer in (two, three, one) if answer.metrics is not None]
    assert started == sorted(started)
    assert len(set(started)) == 3
    assert tokens(urgent.generate(PROMPTS[:3], GREEDY, priority=5)) == tokens([one, two, three])


@pytest.mark.parametrize(
    ("policy", "priority", "said"),
    [
        ("priority", [1], r"priority is '1 of them', it must be one for all, or one for each of 2 prompts"),
        ("priority", [1, True], r"priority is \[1, True\], it must be a whole number, or a list of them"),
        ("priority", 0.5, r"priority is 0.5, it must be a whole number, or a list of them"),
        ("priority", [0, 1 << 63], r"priority is 9223372036854775808, it must be a whole number of at most 64 bits"),
        ("fcfs", [0, 1], r"priority is 1, it must be 0, unless the scheduling policy is priority"),
    ],
)
def test_priorities_that_make_no_sense_are_refused(tiny: Checkpoint, policy: str, priority: Any, said: str) -> None:
    llm = LLM(tiny, scheduling_policy=policy)
    with pytest.raises(InvalidRequest, match=said):
        llm.generate(PROMPTS[:2], GREEDY, priority=priority)
    assert not llm.has_unfinished_requests()
