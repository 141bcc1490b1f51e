"""The engine off the event loop: the same answers, whoever goes away, whatever breaks, however slow somebody reads."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from optimized import LLM, AsyncLLM, EngineBusy, EngineStopped, OutputKind, RequestOutput, SamplingParams
from optimized.checkpoint import Checkpoint
from optimized.cli.reference_core import ReferenceCore
from optimized.model_core import TorchCore
from optimized.plan import Plan
from spec.engine import InvalidRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["hello", "a much longer prompt than that", "x", "hello hello"]
PARAMS = [GREEDY, SamplingParams(n=3, temperature=1.0, max_tokens=9, seed=4), GREEDY, SamplingParams(max_tokens=5)]


class Gate:
    """Lets an engine's steps through one by one, and counts them."""

    def __init__(self, llm: LLM) -> None:
        core = llm._core
        assert isinstance(core, TorchCore)
        self.num_steps = 0
        self.error: Exception | None = None
        self._steps = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)
        self._run = core.device.run
        core.device.run = self.run  # type: ignore[method-assign]

    def run(self, plan: Plan) -> Sequence[Any]:
        self._entered.release()
        self._steps.acquire()
        if self.error is not None:
            raise self.error
        self.num_steps += 1
        return self._run(plan)

    def open(self, num_steps: int = 1 << 20) -> None:
        self._steps.release(num_steps)

    async def entered(self) -> None:
        """When the engine is in the next step."""
        await asyncio.to_thread(self._entered.acquire)


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    [*_, output] = [output async for output in stream]
    return output


async def refusal(stream: AsyncIterator[RequestOutput]) -> Exception:
    with pytest.raises(Exception) as refused:
        await last(stream)
    return refused.value


def num_free_blocks(llm: LLM) -> int:
    core = llm._core
    assert isinstance(core, TorchCore)
    return core.core.scheduler.pool.num_free


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OutputKind)
def test_the_answers_are_those_of_llm(tiny: Checkpoint, llm: LLM, kind: OutputKind) -> None:
    expected = llm.generate(PROMPTS, PARAMS)

    async def run() -> list[list[RequestOutput]]:
        async def collect(prompt: str, params: SamplingParams) -> list[RequestOutput]:
            return [each async for each in engine.generate(prompt, params, output_kind=kind)]

        async with AsyncLLM(LLM(tiny, block_size=4, num_gpu_blocks_override=40, preemption_mode="swap")) as engine:
            return await asyncio.gather(*map(collect, PROMPTS, PARAMS))

    for streamed, answer in zip(asyncio.run(run()), expected, strict=True):
        assert [each.finished for each in streamed] == [False] * (len(streamed) - 1) + [True]
        assert len(streamed) == 1 or kind is not OutputKind.FINAL_ONLY
        for index, output in enumerate(answer.outputs):
            pieces = [each.outputs[index] for each in streamed]
            told = pieces if kind is OutputKind.DELTA else pieces[-1:]
            assert "".join(piece.text for piece in told) == output.text
            assert [token for piece in told for token in piece.token_ids] == output.token_ids
            assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (output.finish_reason, output.stop_reason)


def test_what_a_slow_consumer_has_missed_comes_at_once(llm: LLM) -> None:
    gate = Gate(llm)

    async def run() -> list[list[int]]:
        async with AsyncLLM(llm) as engine:
            stream = engine.generate("hello", GREEDY, output_kind=OutputKind.DELTA)
            first = asyncio.ensure_future(anext(stream))
            gate.open(1)
            pieces = [(await first).outputs[0].token_ids]
            gate.open(5)
            for _ in range(7):  # the engine is in its seventh step, so six have been told
                await gate.entered()
            await asyncio.sleep(0)
            pieces.append((await anext(stream)).outputs[0].token_ids)
            gate.open()
            return [*pieces, *[each.outputs[0].token_ids async for each in stream]]

    pieces = asyncio.run(run())
    assert [len(piece) for piece in pieces[:2]] == [1, 5]
    assert sum(map(len, pieces)) == 12


def test_a_more_urgent_request_is_served_first(tiny: Checkpoint) -> None:
    llm = LLM(tiny, max_num_seqs=1, scheduling_policy="priority")
    gate, done = Gate(llm), list[str]()

    async def ask(engine: AsyncLLM, name: str, priority: int) -> None:
        await last(engine.generate("x", GREEDY, name, priority=priority))
        done.append(name)

    async def run() -> None:
        async with AsyncLLM(llm) as engine:
            running = asyncio.create_task(ask(engine, "first", 5))
            await gate.entered()
            waiting = [asyncio.create_task(ask(engine, name, p)) for name, p in (("later", 2), ("urgent", 1))]
            while engine._engine._inbox.qsize() < 2:
                await asyncio.sleep(0.001)
            gate.open()
            await asyncio.gather(running, *waiting)

    asyncio.run(run())
    assert done == ["first", "urgent", "later"]


def test_two_event_loops_share_an_engine(llm: LLM) -> None:
    engine, texts = AsyncLLM(llm), list[str]()

    def ask() -> None:
        texts.append(asyncio.run(last(engine.generate("hello", GREEDY))).outputs[0].text)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(texts)) == 1
    asyncio.run(engine.shutdown())
    assert num_free_blocks(llm) == llm.config.num_blocks


# --- going away -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "cancelled", "aborted"])
def test_who_goes_away_is_gone_before_the_next_step(llm: LLM, how: str) -> None:
    gate = Gate(llm)

    async def read(stream: AsyncIterator[RequestOutput], outputs: list[RequestOutput]) -> None:
        async for output in stream:
            outputs.append(output)

    async def run() -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        async with AsyncLLM(llm) as engine, aclosing(engine.generate("hello", GREEDY, "mine")) as stream:
            first = asyncio.ensure_future(anext(stream))
            gate.open(1)
            outputs.append(await first)
            reading = asyncio.create_task(read(stream, outputs)) if how != "closed" else None
            for _ in range(2):
                await gate.entered()  # the second step is on its way
            if how == "aborted":
                await engine.abort("mine")
            elif reading is not None:
                reading.cancel()
                await asyncio.wait([reading])
            else:
                await stream.aclose()
            gate.open()
            while engine.health.num_unfinished:
                await asyncio.sleep(0.001)
            if how == "aborted" and reading is not None:
                await reading
        return outputs

    outputs = asyncio.run(run())
    assert gate.num_steps == 2
    assert num_free_blocks(llm) == llm.config.num_blocks
    assert not llm.has_unfinished_requests()
    if how == "aborted":
        assert (outputs[-1].finished, outputs[-1].outputs[0].finish_reason) == (True, "abort")
        assert len(outputs[-1].outputs[0].token_ids) == 2


def test_a_shutdown_waits_as_long_as_it_is_told(llm: LLM) -> None:
    gate = Gate(llm)

    async def run() -> tuple[RequestOutput, Exception, Exception]:
        engine = AsyncLLM(llm)
        answer = asyncio.create_task(last(engine.generate("hello", GREEDY)))
        await gate.entered()
        stopping = asyncio.create_task(engine.shutdown(timeout_s=60))
        await asyncio.sleep(0)
        refused = await refusal(engine.generate("x", GREEDY))
        gate.open()
        await stopping
        assert not engine.is_running
        return await answer, refused, await refusal(engine.generate("x", GREEDY))

    answer, *refused = asyncio.run(run())
    assert len(answer.outputs[0].token_ids) == 12
    for error in refused:
        assert (type(error), str(error)) == (EngineStopped, "the engine was shut down")


def test_a_shutdown_at_once_tells_everybody(llm: LLM) -> None:
    gate = Gate(llm)

    async def run() -> list[Exception]:
        engine = AsyncLLM(llm)
        waiting = [asyncio.create_task(refusal(engine.generate(prompt, GREEDY))) for prompt in PROMPTS]
        await gate.entered()
        stopping = asyncio.create_task(engine.shutdown())
        await asyncio.sleep(0.01)
        gate.open()
        await stopping
        return await asyncio.gather(*waiting)

    for error in asyncio.run(run()):
        assert (type(error), str(error)) == (EngineStopped, "the engine was shut down")


# --- what breaks ------------------------------------------------------------------------------------------------------


def test_an_engine_that_dies_tells_everybody_who_waits(llm: LLM) -> None:
    gate = Gate(llm)
    gate.error = MemoryError("no room for the step")

    async def run() -> list[Exception]:
        async with AsyncLLM(llm) as engine:
            waiting = [asyncio.create_task(refusal(engine.generate(prompt, GREEDY))) for prompt in PROMPTS]
            await gate.entered()
            gate.open()
            errors = await asyncio.gather(*waiting)
            assert not engine.is_running
            assert engine.health.num_unfinished == 0
            return [*errors, await refusal(engine.generate("x", GREEDY))]

    errors = asyncio.run(run())
    assert len(set(map(id, errors))) == len(PROMPTS) + 1
    for error in errors:
        assert str(error) == "an error ended the engine: MemoryError: no room for the step"
        assert error.__cause__ is gate.error


def test_a_text_that_breaks_ends_its_own_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("hello", GREEDY)[0].outputs[0].token_ids

    async def run() -> list[RequestOutput]:
        async with AsyncLLM(llm) as engine:
            good = asyncio.create_task(last(engine.generate("hello", GREEDY)))
            bad = asyncio.create_task(last(engine.generate("x", SamplingParams(n=2, seed=1, logprobs=1))))
            return await asyncio.gather(good, bad)

    def broken(logprobs: object, tokenizer: object) -> None:
        if logprobs is not None:
            raise ArithmeticError("the table of names is torn")

    monkeypatch.setattr("optimized.llm.named", broken)
    good, bad = asyncio.run(run())
    assert good.outputs[0].token_ids == expected
    for output in bad.outputs:
        assert (output.finish_reason, output.stop_reason) == ("error", "ArithmeticError: the table of names is torn")
    assert num_free_blocks(llm) == llm.config.num_blocks


def test_a_request_that_is_refused_is_the_only_one_to_hear_of_it(llm: LLM) -> None:
    gate = Gate(llm)

    async def run() -> tuple[RequestOutput, list[Exception]]:
        async with AsyncLLM(llm) as engine:
            answer = asyncio.create_task(last(engine.generate("hello", GREEDY, "mine")))
            await gate.entered()
            wrong = [
                asyncio.create_task(refusal(engine.generate(prompt, params, name, priority=priority)))
                for prompt, params, name, priority in (
                    ("", GREEDY, None, 0),
                    ([3, 262], GREEDY, None, 0),
                    ("x", SamplingParams(n=17), None, 0),
                    ("x", GREEDY, "mine", 0),
                    ("x", GREEDY, None, 1),
                )
            ]
            gate.open()
            errors = await asyncio.gather(*wrong)
            return await answer, errors

    answer, errors = asyncio.run(run())
    assert answer.outputs[0].finish_reason == "length"
    assert all(isinstance(error, InvalidRequest) for error in errors)


def test_no_more_requests_than_there_are_places(llm: LLM) -> None:
    gate = Gate(llm)

    async def run() -> tuple[Exception, RequestOutput]:
        async with AsyncLLM(llm, max_unfinished=2) as engine:
            assert isinstance(await refusal(engine.generate("", GREEDY)), InvalidRequest)  # takes no place for long
            answers = [asyncio.create_task(last(engine.generate("x", GREEDY))) for _ in range(2)]
            await gate.entered()
            refused = await refusal(engine.generate("x", GREEDY))
            assert engine.health.num_unfinished == 2
            gate.open()
            await asyncio.gather(*answers)
            return refused, await last(engine.generate("x", GREEDY))

    refused, answer = asyncio.run(run())
    assert isinstance(refused, EngineBusy)
    assert str(refused) == "2 requests are unfinished, and the engine takes no more"
    assert answer.finished


def test_health_and_stats_wait_for_nobody(llm: LLM) -> None:
    gate = Gate(llm)

    async def run() -> None:
        async with AsyncLLM(llm) as engine:
            assert (engine.health.seconds_in_step, engine.health.seconds_since_step) == (None, None)
            answer = asyncio.create_task(last(engine.generate("x", GREEDY)))
            await gate.entered()
            health = engine.health
            assert health.is_running
            assert health.seconds_in_step is not None
            assert engine.stats().steps == 0
            gate.open()
            await answer
            assert engine.stats().steps == 12
            assert engine.health.seconds_since_step is not None

    asyncio.run(run())


@pytest.mark.slow
def test_a_program_that_forgets_its_engine_ends_all_the_same(tiny: Checkpoint) -> None:
    program = f"""
import asyncio
from optimized import LLM, AsyncLLM, SamplingParams
async def main():
    engine = AsyncLLM(LLM({str(tiny.path)!r}))
    async for output in engine.generate("x", SamplingParams(max_tokens=50, ignore_eos=True)):
        print("an answer")
        globals()["engine"] = engine
        return
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "an answer\n", "")


def test_an_engine_that_is_busy_with_others_is_not_taken_over(llm: LLM) -> None:
    llm.add_request("mine", "hello", GREEDY)
    with pytest.raises(InvalidRequest, match="the LLM has unfinished requests"):
        AsyncLLM(llm)
    llm.abort("mine")

    async def go() -> None:
        async with AsyncLLM(llm) as engine:
            for wrong in (-1.0, float("nan"), "soon"):
                assert "timeout_s is " in str(await refusal(engine.generate("x", timeout_s=wrong)))  # type: ignore[arg-type]
            assert engine.health.num_unfinished == 0
            assert (await last(engine.generate("hello", GREEDY))).finished

    asyncio.run(go())


def test_the_prefix_cache_is_emptied_between_two_steps(llm: LLM) -> None:
    gate = Gate(llm)

    async def go() -> list[bool]:
        async with AsyncLLM(llm) as engine:
            asked = asyncio.create_task(last(engine.generate([*range(9)], GREEDY)))
            await gate.entered()
            gate.open(2)
            for _ in range(2):
                await gate.entered()  # two blocks of the prompt are cached, and in use
            early = asyncio.create_task(engine.reset_prefix_cache())
            while not engine._engine._inbox.qsize():
                await asyncio.sleep(0.001)
            gate.open()
            answers = [await early]
            await asked
            answers.append(await engine.reset_prefix_cache())
        with pytest.raises(EngineStopped):
            await engine.reset_prefix_cache()
        return answers

    assert asyncio.run(go()) == [False, True]
    assert llm.stats().num_cached_blocks == 0


def test_a_question_that_can_not_be_answered_ends_nobody(tiny: Checkpoint) -> None:
    async def go() -> None:
        async with AsyncLLM(LLM(tiny, block_size=4, make_core=ReferenceCore)) as engine:
            with pytest.raises(InvalidRequest, match="the reference engine is not watched"):
                await engine.look()
            assert (await last(engine.generate("x", SamplingParams(temperature=0.0, max_tokens=1)))).finished

    asyncio.run(go())
