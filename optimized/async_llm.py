"""``AsyncLLM``: an engine in a thread of its own, and streams of outputs for whoever awaits them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from asyncio import AbstractEventLoop
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeAlias

from optimized.llm import LLM
from optimized.model_core import Stats
from optimized.outputs import OutputKind, RequestOutput, news
from optimized.prompts import Conversation, Prompt
from optimized.sampling import SamplingParams
from spec.vocabulary import Token

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Before an engine is made anew, and after it could not be made so often."""


class EngineStopped(RuntimeError):
    """The engine was shut down, or an error ended it (``__cause__``): nobody is served any more."""


class EngineBusy(RuntimeError):
    """As many requests are unfinished, or tokens of prompts wait, as the engine takes."""

    def __init__(self, num_unfinished: int, num_waiting_tokens: int | None = None) -> None:
        what = "requests are unfinished" if num_waiting_tokens is None else "tokens of prompts have no answer yet"
        count = num_unfinished if num_waiting_tokens is None else num_waiting_tokens
        super().__init__(f"{count} {what}, and the engine takes no more")
        self.num_unfinished = num_unfinished
        self.num_waiting_tokens = num_waiting_tokens


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


class AsyncLLM:
    """``LLM`` for an event loop: ``async for output in engine.generate(prompt, params)``.

    The engine runs in one thread of its own, a step at a time, and no event loop waits for it. It takes the ``LLM``
    over: nobody else calls it from then on. The same requests in the same order get the same answers as from ``LLM``.
    Between the engine and each consumer lies one output at most: the newest, which says all that the ones before it
    did, so a slow consumer costs no memory and slows nobody. Steps do not overlap: what is in flight of a sequence is not
    scheduled again before its token is known, so each of two steps in flight would decode half of the batch, which takes
    nearly as long as all of it (SmolLM2 on a CPU, 16 requests: 3.7 s against 2.8 s; ``tests/peers/measure_overlap.py``).

    A consumer that goes away (its generator is closed, its task cancelled) ends its request before the next step is
    scheduled. An error in one request's work ends that request (``finish_reason`` ``"error"``); one that ends a step
    ends the engine, and every consumer is told by ``EngineStopped``.
    """

    def __init__(
        self, llm: LLM, max_unfinished: int | None = None, max_waiting_tokens: int | None = None, restarts: bool = False
    ) -> None:
        """``max_unfinished`` is the most requests that wait or run, ``max_waiting_tokens`` the most tokens of prompts
        that have no answer yet; more are turned down with ``EngineBusy``. A prompt that waits alone may have any length.
        An engine that dies is made anew if ``restarts``: requests that have no answer yet are tried once more.
        """
        self.llm = llm
        self._max_unfinished = max_unfinished
        self._max_waiting_tokens = max_waiting_tokens
        # Texts are read in a thread, so that neither the event loop nor the engine waits; in one, so that who asks first
        # is served first.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvproof-reader")
        # Some grammars take seconds to make, and nobody's text waits for them.
        self._grammar_maker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvproof-grammar")
        self._mailboxes: dict[AbstractEventLoop, _Mailbox] = {}
        self._num_named = 0
        self._engine = _EngineThread(llm, restarts)
        # Also at the end of the interpreter, which would otherwise pull the engine's libraries away from under it.
        self._stop = weakref.finalize(self, _EngineThread.stop, self._engine)

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
        idle = None if not engine.num_unfinished else now - max(engine.busy_since, ended or 0.0)
        since = None if ended is None else now - ended
        return Health(self.is_running, engine.num_unfinished, in_step, since, idle, engine.num_restarts)

    def stats(self) -> Stats:
        """What the cache has done, as of the last step, without waiting for one."""
        return self._engine.stats

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        output_kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> AsyncGenerator[RequestOutput]:
        """The answer as it grows; its last output is ``finished``. Outputs that nobody has fetched yet become one.

        Raises at the first output ``InvalidRequest`` for a request that can never be served and ``EngineBusy`` if as
        many are unfinished as may be, and at any output ``EngineStopped``.
        """
        self._num_named += 1
        params = sampling_params or SamplingParams()
        name = f"async-{self._num_named}" if request_id is None else request_id
        stream = _Stream(self._mailbox(), output_kind)
        self._engine.reserve(self._max_unfinished)
        try:
            checked = await stream.mailbox.loop.run_in_executor(self._reader, self.llm.prompt_of, prompt)
            if params.structured_outputs is not None:
                await stream.mailbox.loop.run_in_executor(self._grammar_maker, self.llm.grammar_of, params)
            self._engine.queue(stream, checked, self._max_waiting_tokens)
        except BaseException:
            self._engine.give_back()
            raise
        self._engine.post(_Add(stream, name, checked, params, priority, cache_salt))
        shown: RequestOutput | None = None
        try:
            while shown is None or not shown.finished:
                output = await stream.next()
                yield news(shown, output) if output_kind is OutputKind.DELTA else output
                shown = output
        finally:
            if shown is None or not shown.finished:
                self._engine.post(_Abandon(stream))

    async def abort(self, request_id: str) -> None:
        """Give a request up: its stream ends with what there is, ``finish_reason`` ``"abort"``. Unknown ids are ignored."""
        self._engine.post(_Abort(request_id))

    async def chat_prompt(self, messages: Conversation, add_generation_prompt: bool = True) -> Prompt:
        """A conversation as a prompt for ``generate``."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, self.llm.chat_prompt, messages, add_generation_prompt)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[Token]:
        """The token ids of a text. Raises ``InvalidRequest`` where there is no tokenizer."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, self.llm.encode, text, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[Token]) -> str:
        """The text of token ids. Raises ``InvalidRequest`` where there is no tokenizer."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, self.llm.decode, token_ids)

    async def shutdown(self, timeout_s: float = 0.0) -> None:
        """Take no more requests, give the unfinished ones so long to end, and stop; the rest gets ``EngineStopped``."""
        self._engine.is_open = False
        deadline = time.monotonic() + timeout_s
        while self._engine.num_unfinished and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self._stop)
        self._reader.shutdown(wait=False)
        self._grammar_maker.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    def _mailbox(self) -> _Mailbox:
        loop = asyncio.get_running_loop()
        if loop not in self._mailboxes:
            self._mailboxes = {each: box for each, box in self._mailboxes.items() if not each.is_closed()}
            self._mailboxes[loop] = _Mailbox(loop)
        return self._mailboxes[loop]


Message: TypeAlias = RequestOutput | Exception


class _Stream:
    """One request's outputs, as its event loop sees them: the newest only, since it says all that was said before."""

    def __init__(self, mailbox: _Mailbox, kind: OutputKind) -> None:
        self.mailbox = mailbox
        self.kind = kind
        self._arrived = asyncio.Event()
        self._message: Message | None = None
        self.num_waiting_tokens = 0
        """The tokens of its prompt, as long as it has no answer."""

    def arrive(self, message: Message) -> None:
        """Something came. Called in the event loop."""
        self._message = message
        self._arrived.set()

    async def next(self) -> RequestOutput:
        """The newest output, when there is a new one."""
        while (message := self._message) is None:
            self._arrived.clear()
            await self._arrived.wait()
        self._message = None
        if isinstance(message, Exception):
            raise message
        return message


class _Mailbox:
    """What goes from the engine's thread to one event loop: a message for each stream at most, and one wake-up for all."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._messages: dict[_Stream, Message] = {}

    def put(self, stream: _Stream, message: Message) -> None:
        """Called in the engine's thread. Raises ``RuntimeError`` if the loop is closed."""
        with self._lock:
            is_first = not self._messages
            self._messages[stream] = message
        if is_first:
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            messages, self._messages = self._messages, {}
        for stream, message in messages.items():
            stream.arrive(message)


@dataclass(frozen=True)
class _Add:
    """A request came."""

    stream: _Stream
    name: str
    prompt: Prompt
    params: SamplingParams
    priority: int
    cache_salt: str
    is_second_try: bool = False


@dataclass(frozen=True)
class _Abort:
    """Somebody gives a request up, and its consumer is to know."""

    name: str


@dataclass(frozen=True)
class _Abandon:
    """Nobody listens to a stream any more."""

    stream: _Stream


@dataclass(frozen=True)
class _Stop:
    """Nobody is served any more."""


_Command: TypeAlias = _Add | _Abort | _Abandon | _Stop


class _EngineThread:
    """The thread that owns the engine. It does what it was told since the last step, and then the next step."""

    def __init__(self, llm: LLM, restarts: bool = False) -> None:
        self.is_open = True
        self.is_restarting = False
        self.num_restarts = 0
        self.busy_since = time.monotonic()
        """When there was something to do after there was nothing."""
        self.num_unfinished = 0
        self.num_waiting_tokens = 0
        self.step_started: float | None = None
        self.step_ended: float | None = None
        self.stats = llm.stats()
        self._llm = llm
        self._restarts = restarts
        self._unanswered: dict[_Stream, _Add] = {}
        """Requests that are in the engine and have no answer yet."""
        self._is_told_to_stop = threading.Event()
        self._names: dict[_Stream, str] = {}
        self._streams: dict[str, _Stream] = {}
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._lock = threading.Lock()
        """Guards ``num_unfinished``, ``num_waiting_tokens`` and the end: after that nothing comes into the inbox that nobody reads."""
        self._has_ended = False
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvproof-engine", daemon=True)
        self._thread.start()

    # --- called by others ---------------------------------------------------------------------------------------------

    def reserve(self, max_unfinished: int | None) -> None:
        """A place for one more request, which ``give_back`` or the request's end gives back."""
        with self._lock:
            if not self.is_open or self.is_restarting:
                raise self._stopped()
            if not self.num_unfinished:
                self.busy_since = time.monotonic()
            if max_unfinished is not None and self.num_unfinished >= max_unfinished:
                raise EngineBusy(self.num_unfinished)
            self.num_unfinished += 1

    def queue(self, stream: _Stream, prompt: Mapping[str, Any], max_waiting_tokens: int | None) -> None:
        """Let its prompt wait, until there is an answer, or nobody waits for one."""
        count = len(prompt["prompt_token_ids"])
        with self._lock:
            waiting = self.num_waiting_tokens
            if max_waiting_tokens is not None and waiting and waiting + count > max_waiting_tokens:
                raise EngineBusy(self.num_unfinished, waiting)
            stream.num_waiting_tokens = count
            self.num_waiting_tokens += count

    def give_back(self, stream: _Stream | None = None) -> None:
        """A request is over, or never was one."""
        with self._lock:
            self.num_unfinished -= 1
            if stream is not None:
                self._answered(stream)

    def _answered(self, stream: _Stream) -> None:
        """Its prompt waits no longer. Called with the lock."""
        self.num_waiting_tokens -= stream.num_waiting_tokens
        stream.num_waiting_tokens = 0

    def post(self, command: _Command) -> None:
        """The engine does it before its next step. One that has ended does not; it says so to a request that comes."""
        with self._lock:
            if not self._has_ended:
                self._inbox.put(command)
            elif isinstance(command, _Add):
                self.num_unfinished -= 1
                self._answered(command.stream)
                command.stream.arrive(self._stopped())

    def stop(self) -> None:
        """The thread ends after the step that it is in; whoever is not served to the end is told."""
        self.is_open = False
        self._is_told_to_stop.set()
        self.post(_Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._serve_until_it_dies():
                pass
        except BaseException as error:  # noqa: BLE001  whatever it is, those who wait must not wait for ever
            self._cause = error
        self.is_open, self.step_started = False, None
        with self._lock:
            self._has_ended = True
        for stream in list(self._names):
            self._forget(stream)
            self._tell(stream, self._stopped())
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Add):
                self.give_back(command.stream)
                self._tell(command.stream, self._stopped())

    def _serve_until_it_dies(self) -> bool:
        """Serve. True: it was told to stop. False: it has died, and is like new."""
        try:
            while self._obey():
                self._step()
        except Exception as error:
            if not self._restarts:
                raise
            logger.exception("the engine has died and is made anew")
            self._begin_again(error)
            return self._is_told_to_stop.is_set()
        return True

    def _begin_again(self, cause: Exception) -> None:
        """A new engine. Requests without an answer are tried once more, in their order; all others are told."""
        self.is_restarting, self.step_started = True, None
        self._cause = cause
        again = [add for add in self._unanswered.values() if not add.is_second_try]
        for stream in list(self._names):
            if stream in self._unanswered and not self._unanswered[stream].is_second_try:
                del self._streams[self._names.pop(stream)]
            else:
                self._forget(stream)
                self._tell(stream, self._stopped())
        self._unanswered.clear()
        pause = FIRST_PAUSE_S
        while not self._is_told_to_stop.wait(pause):
            try:
                self._llm.restart()
                break
            except Exception:
                logger.exception("the engine could not be made anew")
                pause = min(2 * pause, LONGEST_PAUSE_S)
        if self._is_told_to_stop.is_set():
            for add in again:
                self.give_back(add.stream)
                self._tell(add.stream, self._stopped())
            return
        self.num_restarts += 1
        self._cause, self.is_restarting = None, False
        self.step_ended = time.monotonic()
        for add in again:
            self._add(replace(add, is_second_try=True))

    def _stopped(self) -> EngineStopped:
        """Why nobody is served any more; each consumer raises one of its own."""
        cause = self._cause
        if cause is None:
            return EngineStopped("the engine was shut down")
        stopped = EngineStopped(f"an error ended the engine: {type(cause).__name__}: {cause}")
        stopped.__cause__ = cause
        return stopped

    def _obey(self) -> bool:
        """Do what was asked; if there is no request, wait until there is something to do. False: it is time to stop."""
        for _ in range(self._inbox.qsize() or 1):
            try:
                command = self._inbox.get(block=not self._streams)
            except Empty:
                return True
            match command:
                case _Stop():
                    return False
                case _Add():
                    self._add(command)
                case _Abandon(stream) if stream in self._names:
                    self._llm.abort(self._names[stream])
                    self._forget(stream)
                case _Abort(name) if name in self._streams:
                    stream, output = self._streams[name], self._llm.abort(name)
                    self._forget(stream)
                    if output is not None:
                        self._tell(stream, output)
        return True

    def _add(self, command: _Add) -> None:
        try:
            self._llm.add_request(command.name, command.prompt, command.params, command.priority, command.cache_salt)
        except Exception as error:  # noqa: BLE001  whatever is wrong with one request is only its consumer's concern
            self.give_back(command.stream)
            self._tell(command.stream, error)
        else:
            self._streams[command.name] = command.stream
            self._names[command.stream] = command.name
            if self._restarts:
                self._unanswered[command.stream] = command

    def _step(self) -> None:
        self.step_started = time.monotonic()
        outputs = self._llm.step()
        self.step_ended, self.step_started = time.monotonic(), None
        self.stats = self._llm.stats()
        for output in outputs:
            stream = self._streams[output.request_id]
            self._unanswered.pop(stream, None)
            if stream.num_waiting_tokens:
                with self._lock:
                    self._answered(stream)
            if output.finished:
                self._forget(stream)
            if output.finished or stream.kind is not OutputKind.FINAL_ONLY:
                self._tell(stream, output)

    def _tell(self, stream: _Stream, message: Message) -> None:
        try:
            stream.mailbox.put(stream, message)
        except RuntimeError:  # its event loop is closed: nobody is there to hear it
            if stream in self._names:
                self._llm.abort(self._names[stream])
                self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        del self._streams[self._names.pop(stream)]
        self._unanswered.pop(stream, None)
        self.give_back(stream)
