"""The thread that owns an engine, and how it and event loops tell each other what they want and what there is."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import TypeAlias

from optimized.fault_points import FaultPoint, reach
from optimized.llm import LLM
from optimized.outputs import OutputKind, RequestOutput
from optimized.prompts import Prompt
from optimized.request_times import Buckets
from optimized.sampling import SamplingParams

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
"""Before an engine is made anew, and after it could not be made so often."""

TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    80.0,
)
"""Seconds between two tokens, and"""
STEP_BUCKETS = tuple(float(1 << power) for power in (0, *range(3, 15)))
"""tokens that a step computes: vLLM's bounds."""

TIME_BUCKETS = tuple(digit * 10.0**power for power in range(-5, 2) for digit in (1, 2.5, 5))
"""Seconds that a step takes, and the scheduler in it."""

SECONDS_A_COUNT = 1.0
"""How often the slots of the cache are counted, which takes longer than to read what is counted anyway."""


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


Message: TypeAlias = RequestOutput | Exception


class Stream:
    """One request's outputs, as its event loop sees them: the newest only, since it says all that was said before."""

    def __init__(self, mailbox: Mailbox, kind: OutputKind) -> None:
        self.mailbox = mailbox
        self.kind = kind
        self._arrived = asyncio.Event()
        self._message: Message | None = None
        self.num_waiting_tokens = 0
        """The tokens of its prompt, as long as it has no answer."""
        self.num_tokens = 0
        """The tokens of its answers."""

    def arrive(self, message: Message) -> None:
        """Something came. Called in the event loop. After an error nothing is of interest."""
        if not isinstance(self._message, Exception):
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


class Mailbox:
    """What goes from the engine's thread to one event loop: a message for each stream at most, and one wake-up for all."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._messages: dict[Stream, Message] = {}

    def put(self, stream: Stream, message: Message) -> None:
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
class Add:
    """A request came."""

    stream: Stream
    name: str
    prompt: Prompt
    params: SamplingParams
    priority: int
    cache_salt: str
    is_second_try: bool = False


@dataclass(frozen=True)
class Abort:
    """Somebody gives a request up, and its consumer is to know."""

    name: str


@dataclass(frozen=True)
class Abandon:
    """Nobody listens to a stream any more."""

    stream: Stream


@dataclass(frozen=True)
class Ask:
    """Somebody asks the engine something between two steps. Both are called in the engine's thread, and raise nothing."""

    answer: Callable[[LLM], None]
    gone: Callable[[], None]
    """There is none to ask."""


@dataclass(frozen=True)
class Stop:
    """Nobody is served any more."""


Command: TypeAlias = Add | Abort | Abandon | Ask | Stop


class EngineThread:
    """The thread that owns the engine. It does what it was told since the last step, and then the next step."""

    def __init__(self, llm: LLM, restarts: bool = False) -> None:
        self.is_open = True
        self.is_restarting = False
        self.num_restarts = 0
        self.num_violations = 0
        self.busy_since = time.monotonic()
        """When there was something to do after there was nothing."""
        self.num_unfinished = 0
        self.num_aside = 0
        """Of these, the ones whose grammar is being made: nobody owes them progress meanwhile."""
        self.num_waiting_tokens = 0
        self.step_started: float | None = None
        self.step_ended: float | None = None
        self.stats = llm.stats()
        self.token_intervals = Buckets(TOKEN_BUCKETS)
        self.step_tokens = Buckets(STEP_BUCKETS)
        self.step_times = Buckets(TIME_BUCKETS)
        self.scheduler_times = Buckets(TIME_BUCKETS)
        """What steps take beside the device: to schedule, to record, to read tokens."""
        self.slots = llm.slots()
        self._slots_at = time.monotonic()
        self._llm = llm
        self._restarts = restarts
        self._unanswered: dict[Stream, Add] = {}
        """Requests that are in the engine and have no answer yet."""
        self._is_told_to_stop = threading.Event()
        self._names: dict[Stream, str] = {}
        self._streams: dict[str, Stream] = {}
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._lock = threading.Lock()
        """Guards the counts of requests and tokens, and the end: after that nothing comes into the inbox that nobody reads."""
        self._has_ended = False
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvproof-engine", daemon=True)
        self._thread.start()

    # --- called by others ---------------------------------------------------------------------------------------------

    def reserve(self, max_unfinished: int | None) -> None:
        """A place for one more prompt, which ``give_back`` or the prompt's end gives back."""
        with self._lock:
            if not self.is_open or self.is_restarting:
                raise self._stopped()
            if self.num_unfinished == self.num_aside:
                self.busy_since = time.monotonic()
            if max_unfinished is not None and self.num_unfinished >= max_unfinished:
                raise EngineBusy(self.num_unfinished)
            self.num_unfinished += 1

    @contextmanager
    def aside(self) -> Iterator[None]:
        """One of the unfinished requests is not ready for the engine, and takes its time."""
        with self._lock:
            self.num_aside += 1
        try:
            yield
        finally:
            with self._lock:
                if self.num_unfinished == self.num_aside:
                    self.busy_since = time.monotonic()
                self.num_aside -= 1

    def queue(self, lengths: Mapping[Stream, int], max_waiting_tokens: int | None) -> None:
        """Let the prompts of one request wait, each until there is an answer, or nobody waits for one. All or none."""
        count = sum(lengths.values())
        with self._lock:
            waiting = self.num_waiting_tokens
            if max_waiting_tokens is not None and waiting and waiting + count > max_waiting_tokens:
                raise EngineBusy(self.num_unfinished, waiting)
            for stream, length in lengths.items():
                stream.num_waiting_tokens = length
            self.num_waiting_tokens += count

    def give_back(self, stream: Stream | None = None) -> None:
        """A request is over, or never was one."""
        with self._lock:
            self.num_unfinished -= 1
            if stream is not None:
                self._answered(stream)

    def _answered(self, stream: Stream) -> None:
        """Its prompt waits no longer. Called with the lock."""
        self.num_waiting_tokens -= stream.num_waiting_tokens
        stream.num_waiting_tokens = 0

    def post(self, command: Command) -> None:
        """The engine does it before its next step. One that has ended does not; it says so to a request that comes."""
        with self._lock:
            if not self._has_ended:
                self._inbox.put(command)
            elif isinstance(command, Add):
                self.num_unfinished -= 1
                self._answered(command.stream)
                command.stream.arrive(self._stopped())
            elif isinstance(command, Ask):
                command.gone()

    def stop(self) -> None:
        """The thread ends after the step that it is in; whoever is not served to the end is told."""
        self.is_open = False
        self._is_told_to_stop.set()
        self.post(Stop())
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
            if isinstance(command, Add):
                self.give_back(command.stream)
                self._tell(command.stream, self._stopped())
            elif isinstance(command, Ask):
                command.gone()

    def _serve_until_it_dies(self) -> bool:
        """Serve. True: it was told to stop. False: it has died, and is like new."""
        try:
            while self._obey():
                self._step()
        except Exception as error:
            if not self._restarts:
                raise
            logger.exception("the engine has died and is made anew")
            # An engine knows no rule, only that somebody who watches it may.
            self.num_violations += type(error).__name__ == "RuleViolation"
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
                case Stop():
                    return False
                case Add():
                    self._add(command)
                case Ask(answer):
                    answer(self._llm)
                case Abandon(stream) if stream in self._names:
                    self._llm.abort(self._names[stream])
                    self._forget(stream)
                case Abort(name) if name in self._streams:
                    stream, output = self._streams[name], self._llm.abort(name)
                    self._forget(stream)
                    if output is not None:
                        self._tell(stream, output)
        return True

    def _add(self, command: Add) -> None:
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
        reach(FaultPoint.TURN)
        has_work = bool(self._streams)  # or else somebody only wanted to look
        started = time.monotonic()
        if has_work:
            self.step_started = started
        on_device = self._llm.device_seconds
        outputs = self._llm.step()
        now, on_device = time.monotonic(), self._llm.device_seconds - on_device
        before, self.stats = self.stats, self._llm.stats()
        if has_work:
            self.step_ended, self.step_started = now, None
            self.step_times.add(now - started)
            self.scheduler_times.add(max(0.0, now - started - on_device))
        if self.stats.tokens_computed > before.tokens_computed:
            self.step_tokens.add(self.stats.tokens_computed - before.tokens_computed)
        for output in outputs:
            stream = self._streams[output.request_id]
            self._count_tokens(stream, output)
            self._unanswered.pop(stream, None)
            if stream.num_waiting_tokens:
                with self._lock:
                    self._answered(stream)
            if output.finished:
                self._forget(stream)
            if output.finished or stream.kind is not OutputKind.FINAL_ONLY:
                self._tell(stream, output)
        if not self._streams or now - self._slots_at > SECONDS_A_COUNT:
            self.slots, self._slots_at = self._llm.slots(), now

    def _count_tokens(self, stream: Stream, output: RequestOutput) -> None:
        """How long its newest tokens took; the first ones took what it takes to begin."""
        count, times = sum([len(each.token_ids) for each in output.outputs]), output.metrics
        new, stream.num_tokens = count - stream.num_tokens, count
        if new and times is not None and times.token_before is not None and times.last_token is not None:
            self.token_intervals.add(times.last_token - times.token_before, new)

    def _tell(self, stream: Stream, message: Message) -> None:
        try:
            stream.mailbox.put(stream, message)
        except RuntimeError:  # its event loop is closed: nobody is there to hear it
            if stream in self._names:
                self._llm.abort(self._names[stream])
                self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        del self._streams[self._names.pop(stream)]
        self._unanswered.pop(stream, None)
        self.give_back(stream)
