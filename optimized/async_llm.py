"""``AsyncLLM``: an engine in a thread of its own, and streams of outputs for whoever awaits them."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from asyncio import AbstractEventLoop
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from optimized.engine_thread import (
    Abandon,
    Abort,
    Add,
    Ask,
    EngineBusy,
    EngineStopped,
    EngineThread,
    Mailbox,
    Stream,
)
from optimized.llm import LLM
from optimized.outputs import OutputKind, RequestOutput, news
from optimized.prompts import Conversation, Prompt
from optimized.request_times import Buckets
from optimized.sampling import SamplingParams, demand_number
from optimized.snapshot import Look
from optimized.stats import Stats
from optimized.waste import Slots
from spec.engine import InvalidRequest
from spec.vocabulary import Token

MAX_TIMEOUT_S = 1e9

T = TypeVar("T")


@dataclass(frozen=True)
class Health:
    """How the engine's thread is: a step that takes too long, or none for too long, is for the caller to judge."""

    is_running: bool
    """Whether requests are taken."""
    num_unfinished: int
    seconds_in_step: float | None
    """For how long the step has taken that is being run; None between two steps."""
    seconds_since_step: float | None
    """For how long no step has ended; None before the first one."""
    seconds_without_progress: float | None
    """For how long there has been something to do and no step has ended, whoever is in its way; None if there is nothing."""
    num_restarts: int
    """How often the engine has died and was made anew."""
    num_violations: int
    """How often it died because it broke a rule, and somebody looked."""


LONG_TEXT = 1 << 16
"""Characters, or tokens, that take longer to read than others should have to wait."""


def _size(text: object) -> int:
    """How long a prompt or a message is, in whatever form it comes."""
    if isinstance(text, Mapping):
        return sum(map(_size, text.values()))
    return len(text) if isinstance(text, Sized) else 0


class Party:
    """The prompts of one request: they are let in together, or none of them is.

    Let in one by one, two requests of several long prompts could each find the other's first prompt in its way, for ever.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._has_place = False
        self._lengths: dict[Stream, int] = {}
        self._all_read = asyncio.Event()
        self._refusal: EngineBusy | None = None
        self.is_refused = False
        """For whoever asks with it: whether that was said already."""

    def reserve(self, engine: EngineThread, max_unfinished: int | None) -> None:
        """A place for one of its prompts. Where there is one for the first, there is one for all."""
        engine.reserve(None if self._has_place else max_unfinished)
        self._has_place = True

    async def queue(
        self, engine: EngineThread, stream: Stream, prompt: Mapping[str, Any], max_waiting_tokens: int | None
    ) -> None:
        """Let one of its prompts wait for an answer, once all of them have been read. Raises ``EngineBusy``."""
        self._lengths[stream] = len(prompt["prompt_token_ids"])
        if len(self._lengths) == self._size:
            try:
                engine.queue(self._lengths, max_waiting_tokens)
            except EngineBusy as error:
                self._refusal = error
            self._all_read.set()
        await self._all_read.wait()
        if self._refusal is not None:
            raise EngineBusy(self._refusal.num_unfinished, self._refusal.num_waiting_tokens)


class AsyncLLM:
    """``LLM`` for an event loop: ``async for output in engine.generate(prompt, params)``.

    The engine runs in one thread of its own, a step at a time, and no event loop waits for it. It takes the ``LLM``
    over: nobody else calls it from then on. The same requests in the same order get the same answers as from ``LLM``.
    Between the engine and each consumer lies one output at most: the newest, which says all that the ones before it
    did, so a slow consumer costs no memory and slows nobody. Steps overlap only if the ``LLM``
    was made with ``overlap_steps=True``: what is in flight of a sequence is not scheduled again before its token is known,
    so each of two steps in flight decodes a part of the batch, which takes nearly as long as all of it (SmolLM2 on a CPU,
    16 requests: 3.7 s against 2.8 s; ``tests/peers/measure_overlap.py``).

    A consumer that goes away (its generator is closed, its task cancelled) ends its request before the next step is
    scheduled. An error in one request's work ends that request (``finish_reason`` ``"error"``); one that ends a step
    ends the engine, and every consumer is told by ``EngineStopped``.
    """

    def __init__(
        self,
        llm: LLM,
        max_unfinished: int | None = None,
        max_waiting_tokens: int | None = None,
        restarts: bool = False,
        grammars_at_once: int = 1,
    ) -> None:
        """``max_unfinished`` is the most requests that wait or run, ``max_waiting_tokens`` the most tokens of prompts
        that have no answer yet; more are turned down with ``EngineBusy``. Neither turns down who asks while nobody else
        waits or runs: a request's own prompts (``Party``) do not stand in each other's way.
        An engine that dies is made anew if ``restarts``: requests that have no answer yet are tried once more.
        ``grammars_at_once`` is how many grammars are made at the same time.
        Raises ``InvalidRequest`` if somebody's requests are in the ``LLM`` already: nobody would hear their answers.
        """
        if llm.has_unfinished_requests():
            raise InvalidRequest(
                "the LLM has unfinished requests: step until they are done, or abort them, before this"
            )
        self.llm = llm
        self._max_unfinished = max_unfinished
        self._max_waiting_tokens = max_waiting_tokens
        # Texts are read in a thread, so that neither the event loop nor the engine waits; in one, so that who asks first
        # is served first.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvproof-reader")
        # But nobody waits for a text of megabytes that somebody else has sent.
        self._long_reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvproof-long-reader")
        # Some grammars take seconds to make, and nobody's text waits for them.
        self._grammar_maker = ThreadPoolExecutor(max_workers=grammars_at_once, thread_name_prefix="kvproof-grammar")
        self.num_reading = 0
        """How many of ``chat_prompt``, ``tokenize`` and ``detokenize`` have no answer yet."""
        self._mailboxes: dict[AbstractEventLoop, Mailbox] = {}
        self._num_named = 0
        self._engine = EngineThread(llm, restarts)
        # Also at the end of the interpreter, which would otherwise pull the engine's libraries away from under it.
        self._stop = weakref.finalize(self, EngineThread.stop, self._engine)

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._engine.is_open and not self._engine.is_restarting

    @property
    def health(self) -> Health:
        """How the engine is, without waiting for it."""
        engine, now = self._engine, time.monotonic()
        started, ended = engine.step_started, engine.step_ended
        in_step = None if started is None else now - started
        idle = None if engine.num_unfinished == engine.num_aside else now - max(engine.busy_since, ended or 0.0)
        since = None if ended is None else now - ended
        return Health(
            self.is_running, engine.num_unfinished, in_step, since, idle, engine.num_restarts, engine.num_violations
        )

    def stats(self) -> Stats:
        """What the cache has done, as of the last step, without waiting for one."""
        return self._engine.stats

    def slots(self) -> Slots | None:
        """Where the slots of the cache were a second ago, or when the last step ended."""
        return self._engine.slots

    def histograms(self) -> tuple[Buckets, Buckets]:
        """Seconds between two tokens of an answer, and tokens that a step computes."""
        return self._engine.token_intervals, self._engine.step_tokens

    def step_times(self) -> tuple[Buckets, Buckets]:
        """Seconds that steps take, and those of them that are not the device's."""
        return self._engine.step_times, self._engine.scheduler_times

    async def look(self) -> Look:
        """The engine between two steps, block by block. Raises ``EngineStopped``."""
        return await self._ask(LLM.look)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing changes, while one of its blocks is in use. Raises ``EngineStopped``."""
        return await self._ask(LLM.reset_prefix_cache)

    async def _ask(self, question: Callable[[LLM], T]) -> T:
        """What the engine says between two steps."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[T] = loop.create_future()

        def settle(how: Callable[[], None]) -> None:
            if not found.done():
                how()

        def tell(how: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # nobody is there if the event loop is closed
                loop.call_soon_threadsafe(settle, how)

        def answer(llm: LLM) -> None:
            try:
                tell(partial(found.set_result, question(llm)))
            except Exception as error:  # noqa: BLE001  it is the concern of whoever asked
                tell(partial(found.set_exception, error))

        def gone() -> None:
            tell(partial(found.set_exception, EngineStopped("the engine was shut down")))

        self._engine.post(Ask(answer, gone))
        return await found

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        output_kind: OutputKind = OutputKind.CUMULATIVE,
        party: Party | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """The answer as it grows; its last output is ``finished``. Outputs that nobody has fetched yet become one.

        Raises at the first output ``InvalidRequest`` for a request that can never be served and ``EngineBusy`` if as
        many are unfinished as may be, and at any output ``EngineStopped``, or ``TimeoutError`` when its time is over.
        """
        self._num_named += 1
        if timeout_s is not None:
            demand_number("timeout_s", timeout_s, 0.0, MAX_TIMEOUT_S)
        params, party = sampling_params or self.llm.get_default_sampling_params(), party or Party(1)
        name = f"async-{self._num_named}" if request_id is None else request_id
        stream = Stream(self._mailbox(), output_kind)
        party.reserve(self._engine, self._max_unfinished)
        loop = stream.mailbox.loop
        timer = (
            None if timeout_s is None else loop.call_later(timeout_s, stream.arrive, TimeoutError("it took too long"))
        )
        try:
            checked = await loop.run_in_executor(self._reader_of(_size(prompt)), self.llm.prompt_of, prompt)
            if params.structured_outputs is not None:
                with self._engine.aside():
                    await loop.run_in_executor(self._grammar_maker, self.llm.grammar_of, params)
            await party.queue(self._engine, stream, checked, self._max_waiting_tokens)
        except BaseException:
            if timer is not None:
                timer.cancel()
            self._engine.give_back(stream)
            raise
        self._engine.post(Add(stream, name, checked, params, priority, cache_salt))
        shown: RequestOutput | None = None
        try:
            while shown is None or not shown.finished:
                output = await stream.next()
                yield news(shown, output) if output_kind is OutputKind.DELTA else output
                shown = output
        finally:
            if timer is not None:
                timer.cancel()
            if shown is None or not shown.finished:
                self._engine.post(Abandon(stream))

    async def abort(self, request_id: str) -> None:
        """Give a request up: its stream ends with what there is, ``finish_reason`` ``"abort"``. Unknown ids are ignored."""
        self._engine.post(Abort(request_id))

    async def chat_prompt(
        self, messages: Conversation, add_generation_prompt: bool = True, tools: Conversation | None = None
    ) -> Prompt:
        """A conversation as a prompt for ``generate``."""
        size = sum(map(_size, messages))
        return await self._read(size, self.llm.chat_prompt, messages, add_generation_prompt, tools)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[Token]:
        """The token ids of a text. Raises ``InvalidRequest`` where there is no tokenizer."""
        return await self._read(_size(text), self.llm.encode, text, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[Token]) -> str:
        """The text of token ids. Raises ``InvalidRequest`` where there is no tokenizer."""
        return await self._read(_size(token_ids), self.llm.decode, token_ids)

    async def shutdown(self, timeout_s: float = 0.0) -> None:
        """Take no more requests, give the unfinished ones so long to end, and stop; the rest gets ``EngineStopped``."""
        self._engine.is_open = False
        deadline = time.monotonic() + timeout_s
        while self._engine.num_unfinished and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self._stop)
        self._reader.shutdown(wait=False)
        self._long_reader.shutdown(wait=False)
        self._grammar_maker.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def _read(self, size: int, read: Callable[..., T], *arguments: Any) -> T:
        self.num_reading += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader_of(size), read, *arguments)
        finally:
            self.num_reading -= 1

    def _reader_of(self, size: int) -> ThreadPoolExecutor:
        return self._long_reader if size > LONG_TEXT else self._reader

    def _mailbox(self) -> Mailbox:
        loop = asyncio.get_running_loop()
        if loop not in self._mailboxes:
            self._mailboxes = {each: box for each, box in self._mailboxes.items() if not each.is_closed()}
            self._mailboxes[loop] = Mailbox(loop)
        return self._mailboxes[loop]
