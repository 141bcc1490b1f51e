"""What breaks inside: the fault of one request is its own, and an engine that has died is made anew."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from optimized import LLM, AsyncLLM, EngineStopped, RequestOutput, SamplingParams
from optimized.checkpoint import Checkpoint
from optimized.fault_points import FaultPoint, NthTime, deciding
from optimized.model_core import TorchCore
from optimized.plan import Plan

PROMPTS = [f"prompt {place} of many, the longer the better"[: 12 + place] for place in range(32)]
PARAMS = [
    SamplingParams(temperature=0.0 if place % 2 else 1.0, seed=place, max_tokens=8, ignore_eos=True)
    for place in range(32)
]
POISONED = 11
"""Requests are numbered from 0, and so are their sequences."""


def core_of(llm: LLM) -> TorchCore:
    core = llm._core
    assert isinstance(core, TorchCore)
    return core


def poisoned(llm: LLM, is_hit: Callable[[int, int], bool]) -> list[int]:
    """The device fails on a sequence at a position that is hit; how many sequences there were each time."""
    device, sizes = core_of(llm).device, list[int]()
    compute = device.compute

    def failing(plan: Plan) -> Sequence[Any]:
        for place, seq_id in enumerate(plan.seq_ids):
            if is_hit(seq_id, plan.positions[plan.query_start[place]]):
                sizes.append(len(plan.seq_ids))
                raise RuntimeError("the kernel at 0x7f00deadbeef has failed")
        return compute(plan)

    device.compute = failing  # type: ignore[method-assign]
    return sizes


def tokens(answers: Sequence[RequestOutput]) -> list[list[int]]:
    return [answer.outputs[0].token_ids for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 8, 20], ids=["at the start", "in a later part of its prompt", "while it answers"])
@pytest.mark.parametrize(
    "extra", [{}, {"preemption_mode": "swap", "num_gpu_blocks_override": 120}], ids=["", "swapping"]
)
def test_a_poisoned_request_fails_alone(tiny: Checkpoint, first: int, extra: dict[str, Any]) -> None:
    def make() -> LLM:
        return LLM(tiny, block_size=4, max_num_seqs=32, max_num_batched_tokens=40, **extra)

    expected = make().generate(PROMPTS, PARAMS)
    llm = make()
    sizes = poisoned(llm, lambda seq_id, position: seq_id == POISONED and position >= first)
    answers = llm.generate(PROMPTS, PARAMS)
    assert max(sizes) > 1
    [output] = answers[POISONED].outputs
    assert (output.finish_reason, output.stop_reason) == ("error", "the model failed on it: RuntimeError")
    del answers[POISONED]
    assert tokens(answers) == tokens(expected[:POISONED] + expected[POISONED + 1 :])
    assert {answer.outputs[0].finish_reason for answer in answers} == {"length"}
    core = core_of(llm)
    assert core.core.scheduler.pool.num_free == llm.config.num_blocks
    assert not core.device.sampling
    # Nothing that was not computed is found in the cache by the next one with the same prompt.
    assert tokens(llm.generate(PROMPTS[POISONED : POISONED + 1], PARAMS[POISONED])) == tokens([expected[POISONED]])


def test_a_device_that_fails_on_everybody_is_no_fault_of_a_request(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4)
    poisoned(llm, lambda *_: True)
    with pytest.raises(RuntimeError, match="the kernel at"):
        llm.generate(PROMPTS[:3], PARAMS[:3])
    assert not llm.has_unfinished_requests()
    llm.restart()
    expected = LLM(tiny, block_size=4).generate(PROMPTS[:3], PARAMS[:3])
    assert tokens(llm.generate(PROMPTS[:3], PARAMS[:3])) == tokens(expected)


def test_an_engine_that_died_is_made_anew_and_tries_again_what_had_no_answer(tiny: Checkpoint) -> None:
    expected = LLM(tiny, block_size=4, max_num_seqs=1).generate(PROMPTS[:3], PARAMS[:3])
    llm = LLM(tiny, block_size=4, max_num_seqs=1)
    step, num_steps = llm.step, [0]

    def dying() -> list[RequestOutput]:
        num_steps[0] += 1
        if num_steps[0] == 4:
            raise RuntimeError("the device is gone")
        return step()

    llm.step = dying  # type: ignore[method-assign]

    async def run() -> list[Any]:
        async with AsyncLLM(llm, restarts=True) as engine:
            waiting = [asyncio.create_task(last(engine, place)) for place in range(3)]
            found = await asyncio.gather(*waiting, return_exceptions=True)
            health = engine.health
            assert (health.is_running, health.num_unfinished, health.num_restarts) == (True, 0, 1)
            assert engine._engine.num_waiting_tokens == 0
            return list(found)

    died, *others = asyncio.run(run())
    assert isinstance(died, EngineStopped)
    assert tokens(others) == tokens(expected[1:])
    assert core_of(llm).core.scheduler.pool.num_free == llm.config.num_blocks


async def last(engine: AsyncLLM, place: int) -> RequestOutput:
    [*_, output] = [output async for output in engine.generate(PROMPTS[place], PARAMS[place])]
    return output


def test_a_request_that_kills_the_engine_is_tried_twice(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4, max_num_seqs=1)
    step = llm.step

    def dying() -> list[RequestOutput]:
        outputs = step()
        if any(output.prompt == PROMPTS[0] for output in outputs):
            raise RuntimeError("the device is gone")
        return outputs

    llm.step = dying  # type: ignore[method-assign]

    async def run() -> list[int]:
        async with AsyncLLM(llm, restarts=True) as engine:
            with pytest.raises(EngineStopped, match="an error ended the engine: RuntimeError: the device is gone"):
                await last(engine, 0)
            while not engine.is_running:
                await asyncio.sleep(0.01)
            assert engine.health.num_restarts == 2
            return (await last(engine, 1)).outputs[0].token_ids

    assert len(asyncio.run(run())) == 8


def test_a_text_that_breaks_ends_its_own_request(tiny: Checkpoint) -> None:
    """Also that of a prompt's tokens: it ended the engine, for everybody."""
    asked = [
        SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=3),
    ]
    llm = LLM(tiny, block_size=4)
    expected = llm.generate(PROMPTS[:2], asked)
    for point, n in ((FaultPoint.TOKENIZER_DECODE, 5), (FaultPoint.OUTPUT_TEXT, 1)):
        with deciding(NthTime(point, n)):
            broken, sound = llm.generate(PROMPTS[:2], asked)
        assert (broken.outputs[0].finish_reason, broken.outputs[0].stop_reason) == (
            "error",
            f"RuntimeError: the fault point {point.title}",
        )
        assert tokens([sound]) == tokens(expected[1:])
        assert core_of(llm).core.scheduler.pool.num_free == llm.config.num_blocks
    assert tokens(llm.generate(PROMPTS[:2], asked)) == tokens(expected)
