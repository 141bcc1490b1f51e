"""Steps that overlap, behind ``LLM`` and ``AsyncLLM``: every event is judged, and everybody says what he says otherwise."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from optimized import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from optimized.batch_tensors import BatchTensors, StepTensors
from optimized.checkpoint import Checkpoint
from optimized.cli.reference_core import ReferenceCore
from optimized.model_core import TorchCore
from optimized.plan import Plan
from optimized.torch_device import TorchDevice
from spec.conformance.judge import Follower
from spec.vocabulary import Config, InvalidConfig
from tests.llm.test_faults import poisoned
from tests.llm.test_llm import PROMPTS, core_of, tokens
from tests.optimized.test_batch_tensors import made_anew, said

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(n=3, temperature=1.0, max_tokens=9, seed=4),
    SamplingParams(temperature=0.8, seed=2, max_tokens=12, stop=["a", "e", "t"]),
    SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1),
]


def overlapping(tiny: Checkpoint, **args: Any) -> LLM:
    """One whose steps overlap, and are judged."""

    def follow(config: Config) -> Follower:
        return Follower(config, "optimized")

    return LLM(tiny, overlap_steps=True, make_observer=follow, block_size=4, **args)


class Flights:
    """Counts how many steps were in flight when one was run."""

    def __init__(self, core: TorchCore) -> None:
        self.most = 0
        self._core, self._run = core, core.device.run
        core.device.run = self.run  # type: ignore[method-assign]

    def run(self, plan: Plan) -> Sequence[Any]:
        self.most = max(self.most, len(self._core.core.scheduler.flights))
        return self._run(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        {"num_gpu_blocks_override": 64},
        {"num_gpu_blocks_override": 33, "max_num_seqs": 4, "admission_rule": "optimistic"},
        {"num_gpu_blocks_override": 33, "max_num_seqs": 4, "preemption_mode": "swap"},
        {"num_gpu_blocks_override": 64, "max_num_partial_prefills": 2},
    ],
    ids=str,
)
def test_everybody_says_the_same_though_steps_overlap(tiny: Checkpoint, llm: LLM, limits: dict[str, Any]) -> None:
    ahead = overlapping(tiny, max_num_batched_tokens=6, **limits)
    flights = Flights(core_of(ahead))
    for _ in range(2):  # the second time with a warm cache
        assert tokens(ahead.generate(PROMPTS, PARAMS)) == tokens(llm.generate(PROMPTS, PARAMS))
    assert flights.most == 2
    assert ahead.reset_prefix_cache()
    assert ahead.stats().num_free_blocks == limits["num_gpu_blocks_override"]


def test_a_step_in_flight_keeps_its_tensors(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is drawn and searched, and whoever fails: a model is told what the plan says, until the tokens are there."""
    filled, compute, told = BatchTensors.filled, TorchDevice.compute, list[StepTensors]()

    def filling(kept: BatchTensors, plan: Plan) -> StepTensors:
        told.append(filled(kept, plan))
        return told[-1]

    def computing(device: TorchDevice, plan: Plan) -> Sequence[Any]:
        answers = compute(device, plan)
        if plan.seq_ids:
            assert said(told.pop(), plan) == made_anew(plan)
        return answers

    monkeypatch.setattr(BatchTensors, "filled", filling)
    monkeypatch.setattr(TorchDevice, "compute", computing)
    ahead = overlapping(tiny, num_gpu_blocks_override=33, max_num_seqs=4, max_num_batched_tokens=6)
    flights = Flights(core_of(ahead))
    ahead.generate(PROMPTS, PARAMS)
    ahead.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=5))
    assert flights.most == 2


def test_whoever_is_given_up_while_two_steps_are_in_flight_leaves_nothing(tiny: Checkpoint) -> None:
    ahead = overlapping(tiny, num_gpu_blocks_override=64, max_num_batched_tokens=4)
    for steps in range(6):
        for name in ("a", "b"):
            ahead.add_request(name, PROMPTS[1], PARAMS[0])
        for _ in range(steps):
            ahead.step()
        ahead.abort("a")
        ahead.abort("b")
        assert not core_of(ahead).core.scheduler.flights
        assert ahead.reset_prefix_cache()
        assert core_of(ahead).core.scheduler.pool.num_free == 64


def test_the_last_request_that_fails_leaves_no_step_in_flight(tiny: Checkpoint) -> None:
    """In the middle of its prompt, of which the next part is in flight already; and while it answers."""
    for first in (4, 14):
        ahead = overlapping(tiny, num_gpu_blocks_override=64, max_num_batched_tokens=4)
        poisoned(ahead, lambda _, position, first=first: position >= first)
        [answer] = ahead.generate("a longer one", PARAMS[0])
        assert answer.outputs[0].finish_reason == "error"
        assert not core_of(ahead).core.scheduler.flights
        assert ahead.stats().num_free_blocks == core_of(ahead).core.scheduler.pool.num_free == 64


def test_beams_are_found_though_steps_overlap(tiny: Checkpoint, llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    ahead = overlapping(tiny, num_gpu_blocks_override=64)
    assert tokens(ahead.beam_search(PROMPTS, params)) == tokens(llm.beam_search(PROMPTS, params))


def test_an_engine_off_the_event_loop_overlaps_its_steps_too(tiny: Checkpoint, llm: LLM) -> None:
    ahead = overlapping(tiny, num_gpu_blocks_override=64, max_num_batched_tokens=8)
    flights = Flights(core_of(ahead))

    async def serve() -> list[list[list[int]]]:
        async with AsyncLLM(ahead) as engine:

            async def ask(prompt: str, params: SamplingParams) -> list[list[int]]:
                [*_, last] = [output async for output in engine.generate(prompt, params)]
                return [output.token_ids for output in last.outputs]

            return await asyncio.gather(*map(ask, PROMPTS, PARAMS))

    assert asyncio.run(serve()) == tokens(llm.generate(PROMPTS, PARAMS))
    assert flights.most == 2


def test_the_reference_engine_serves_whole_steps(tiny: Checkpoint) -> None:
    with pytest.raises(InvalidConfig, match="overlap_steps is True, it must be False: the reference engine"):
        LLM(tiny, overlap_steps=True, make_core=ReferenceCore)
