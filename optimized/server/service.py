"""What the routes do: requests go to the engine, its outputs become answers, whole or event by event."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from optimized.async_llm import AsyncLLM, Party
from optimized.engine_thread import EngineBusy
from optimized.grammar import STOPPED
from optimized.outputs import OutputKind, RequestOutput, news
from optimized.prompts import Prompt
from optimized.sampling import BadLogits, SamplingParams
from optimized.server.answers import (
    ChatAnswer,
    ChatChoice,
    CompletionAnswer,
    CompletionChoice,
    TokenizerInfo,
    Usage,
    chat_logprobs,
    completion_logprobs,
    echoed,
    said_of,
    usage_of,
)
from optimized.server.errors import ErrorBody, RequestError, told
from optimized.server.front import Front
from optimized.server.limits import Limits
from optimized.server.metrics import Metrics
from optimized.server.questions import chat_prompt, completion_prompts
from optimized.server.readers import Readers
from optimized.server.request_log import log_request
from optimized.server.requests import ChatRequest, CompletionRequest, SamplingFields
from optimized.server.stream import DONE, event
from optimized.server.tools import GrowingCall

COMPLETION_TOKENS = 16
"""The most tokens of a completion, unless its request or the model says: OpenAI's default."""

LONGEST_TOKEN = 64
"""Characters of a token: what is longer than so many of these is not read before it is refused."""

Indexed: TypeAlias = tuple[int, RequestOutput]
logger = logging.getLogger(__name__)
encode = msgspec.json.Encoder().encode


class Service:
    """One engine, one model, and the names that it goes by."""

    def __init__(self, engine: AsyncLLM, names: Sequence[str], limits: Limits, front: Front, readers: Readers) -> None:
        self.engine = engine
        self.names = tuple(names)
        self.limits = limits
        self.created = int(time.time())
        self.metrics = Metrics(engine, self.names[0], front, readers)
        self.is_draining = False
        self._front = front
        self._secret = None if front.shared_prefix_cache else secrets.token_bytes(32)

    def check_model(self, name: str | None) -> None:
        """Raise if another model is asked for."""
        if name is not None and name not in self.names:
            raise RequestError(
                404, "model_not_found", f"there is no model {name[:200]!r}, only {self.names[0]!r}", "model"
            )

    def salt(self, body: SamplingFields, key: bytes) -> None:
        """Callers with different keys share no cached blocks: how fast an answer begins would tell what others asked."""
        size, most = len(body.cache_salt or ""), self.limits.max_cache_salt
        if size > most:
            message = f"cache_salt: {size} characters are more than {most} (max_cache_salt)"
            raise RequestError(400, "invalid_value", message, "cache_salt")
        if key and self._secret is not None:
            own = hmac.new(self._secret, key, "sha256").hexdigest()
            body.cache_salt = f"{own} {body.cache_salt or ''}"

    def demand_room(self) -> None:
        """Raise if there is no room for one more request."""
        if self.is_draining:
            raise RequestError(503, "draining", "the server is shutting down")
        count = self.engine.health.num_unfinished + self.engine.num_reading  # whose text is read is no request yet
        if count >= self.limits.max_num_queued_reqs:
            busy = EngineBusy(count)
            self.metrics.rejected(busy)
            raise told(busy)

    def tokenizer_info(self) -> TokenizerInfo:
        """The tokens that begin and end a text, and how a conversation is written down."""
        checkpoint = self.engine.llm.checkpoint
        tokenizer = checkpoint.tokenizer
        if tokenizer is None:
            return TokenizerInfo(bos_token=None, eos_token=None, chat_template=checkpoint.chat_template)
        end = tokenizer.token(next(iter(tokenizer.eos_token_ids), None))
        begin = tokenizer.token(tokenizer.bos_token_id)
        return TokenizerInfo(bos_token=begin, eos_token=end, chat_template=checkpoint.chat_template)

    # --- completions --------------------------------------------------------------------------------------------------

    async def complete(self, body: CompletionRequest, request_id: str) -> CompletionAnswer:
        """All answers at once."""
        prompts, params = await self._completion(body)
        log_request(self._front, request_id, prompts, params)
        outputs = await self._all(prompts, params, body)
        choices = []
        for place, output in enumerate(outputs):
            prompt_text = self._pieces(output.prompt_token_ids) if body.echo else []
            for each in output.outputs:
                logprobs = None
                if body.logprobs is not None:
                    logprobs = (
                        echoed(output, each, prompt_text)
                        if body.echo
                        else completion_logprobs(each.token_ids, each.logprobs or [])
                    )
                before = (output.prompt or self._text(output.prompt_token_ids)) if body.echo else ""
                choices.append(
                    CompletionChoice(
                        index=place * body.choices + each.index,
                        text=before + each.text,
                        logprobs=logprobs,
                        finish_reason=each.finish_reason,
                        stop_reason=each.stop_reason,
                        token_ids=each.token_ids if body.return_token_ids else None,
                        prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
                    )
                )
        return CompletionAnswer(
            id=f"cmpl-{request_id}",
            created=int(time.time()),
            model=self.names[0],
            choices=choices,
            usage=usage_of(outputs),
        )

    async def stream_completion(self, body: CompletionRequest, request_id: str) -> AsyncIterator[bytes]:
        """Events of all answers, mixed as they come. Raises before the first one if the request is refused."""
        prompts, params = await self._completion(body)
        log_request(self._front, request_id, prompts, params)
        head = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.names[0],
        }
        offsets: dict[int, int] = {}

        def chunks(place: int, output: RequestOutput) -> list[dict[str, Any]]:
            made = []
            for each in output.outputs:
                if not each.token_ids and not each.text and each.finish_reason is None:
                    continue
                index, logprobs = place * body.choices + each.index, None
                if body.logprobs is not None:
                    found = completion_logprobs(each.token_ids, each.logprobs or [], offsets.get(index, 0))
                    offsets[index] = offsets.get(index, 0) + sum(map(len, found.tokens))
                    logprobs = found.model_dump()
                choice = {
                    "index": index,
                    "text": each.text,
                    "logprobs": logprobs,
                    "finish_reason": each.finish_reason,
                    "stop_reason": each.stop_reason,
                }
                if body.return_token_ids:
                    choice["token_ids"] = each.token_ids
                made.append({**head, "choices": [choice]})
            return made

        return await self._events(prompts, params, body, head, chunks)

    async def _completion(self, body: CompletionRequest) -> tuple[list[Prompt], SamplingParams]:
        self.check_model(body.model)
        body.check()
        body.check_limits(self.limits, logprobs=body.logprobs)
        self._check_counts(len(body.prompts()), body.choices)
        await self._check_costs(body)
        prompts = await completion_prompts(self.engine, body)
        asked = body.prompt_logprobs if body.prompt_logprobs is not None else body.logprobs if body.echo else None
        most = body.max_tokens or (None if "max_tokens" in self.engine.llm.defaults else COMPLETION_TOKENS)
        return prompts, body.sampling(most, body.logprobs, asked)

    # --- chat ---------------------------------------------------------------------------------------------------------

    async def chat(self, body: ChatRequest, request_id: str) -> ChatAnswer:
        """All answers at once."""
        prompts, params = await self._chat(body)
        log_request(self._front, request_id, prompts, params)
        outputs = await self._all(prompts, params, body)
        [output] = outputs
        choices, calls, num_top = [], body.calls, body.top_logprobs or 0
        for each in output.outputs:
            message, reason = said_of(each, calls)
            logprobs = chat_logprobs(each.token_ids, each.logprobs or [], num_top) if body.logprobs else None
            choices.append(
                ChatChoice(
                    index=each.index,
                    message=message,
                    logprobs=logprobs,
                    finish_reason=reason,
                    stop_reason=each.stop_reason,
                    token_ids=each.token_ids if body.return_token_ids else None,
                )
            )
        return ChatAnswer(
            id=f"chatcmpl-{request_id}",
            created=int(time.time()),
            model=self.names[0],
            choices=choices,
            usage=usage_of(outputs),
        )

    async def stream_chat(self, body: ChatRequest, request_id: str) -> AsyncIterator[bytes]:
        """Events of all answers: the role, the text, the end."""
        prompts, params = await self._chat(body)
        log_request(self._front, request_id, prompts, params)
        head = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self.names[0],
        }
        begun: set[int] = set()
        growing: dict[int, GrowingCall] | None = {} if body.calls else None

        def chunks(_: int, output: RequestOutput) -> list[dict[str, Any]]:
            made = []
            for each in output.outputs:
                if each.index not in begun:
                    begun.add(each.index)
                    delta = {"role": "assistant", "content": "" if growing is None else None}
                    made.append({**head, "choices": [{"index": each.index, "delta": delta, "finish_reason": None}]})
                if not each.token_ids and not each.text and each.finish_reason is None:
                    continue
                choice: dict[str, Any] = {
                    "index": each.index,
                    "delta": {"content": each.text},
                    "finish_reason": each.finish_reason,
                }
                if growing is not None:
                    call = growing.setdefault(each.index, GrowingCall())
                    choice["delta"] = call.delta(each.text, each.finish_reason is not None)
                    if each.finish_reason is not None and call.is_whole:
                        choice["finish_reason"] = "tool_calls"
                if body.logprobs:
                    found = chat_logprobs(each.token_ids, each.logprobs or [], body.top_logprobs or 0)
                    choice["logprobs"] = found.model_dump()
                if body.return_token_ids:
                    choice["token_ids"] = each.token_ids
                if each.finish_reason is not None:
                    choice["stop_reason"] = each.stop_reason
                made.append({**head, "choices": [choice]})
            return made

        return await self._events(prompts, params, body, head, chunks)

    async def _chat(self, body: ChatRequest) -> tuple[list[Prompt], SamplingParams]:
        self.check_model(body.model)
        body.check()
        body.check_limits(self.limits, top_logprobs=body.top_logprobs)
        await self._check_costs(body)
        self._check_counts(1, body.choices)
        params = body.sampling(
            body.most_tokens, (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs
        )
        return [await chat_prompt(self.engine, body)], params

    async def _check_costs(self, body: SamplingFields) -> None:
        """Raise for bad words of more tokens than are taken, and a grammar that is too large. A token has a byte at least."""
        body.check_structure(self.limits)
        words, most = body.bad_words or (), self.limits.max_bad_word_tokens
        count = 0
        for word in words:
            if len(word) > LONGEST_TOKEN * most:
                count = most + 1
            count += len(await self.engine.tokenize(word, False)) if count <= most else 0
        if count > most:
            message = f"bad_words: they have more than {most} tokens (max_bad_word_tokens)"
            raise RequestError(400, "invalid_value", message, "bad_words")

    # --- both ---------------------------------------------------------------------------------------------------------

    def _check_counts(self, num_prompts: int, choices: int) -> None:
        most = self.limits
        if num_prompts > most.max_prompts:
            message = f"there are {num_prompts} prompts, at most {most.max_prompts} are taken (max_prompts)"
            raise RequestError(400, "too_many_prompts", message, "prompt")
        if num_prompts * choices > most.max_choices:
            raise RequestError(
                400,
                "too_many_choices",
                f"{num_prompts} x {choices} answers are asked for, at most {most.max_choices} (max_choices)",
                "n",
            )

    async def _all(
        self, prompts: Sequence[Prompt], params: SamplingParams, body: SamplingFields
    ) -> list[RequestOutput]:
        """The finished outputs, in the order of the prompts."""
        party = Party(len(prompts))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(prompt, params, body, party)) for prompt in prompts]
        return [task.result() for task in tasks]

    async def _one(self, prompt: Prompt, params: SamplingParams, body: SamplingFields, party: Party) -> RequestOutput:
        kind = OutputKind.CUMULATIVE
        async with contextlib.aclosing(self._outputs(prompt, params, body, kind, party)) as outputs:
            newest = await anext(outputs)
            async for newest in outputs:  # noqa: B007  only the last one is whole, and each is a copy
                pass
            return newest

    async def _outputs(
        self, prompt: Prompt, params: SamplingParams, body: SamplingFields, kind: OutputKind, party: Party
    ) -> AsyncGenerator[RequestOutput]:
        """The outputs of one prompt, counted. Raises ``RequestError`` where one says that something went wrong."""
        started, first = time.monotonic(), 0.0
        total: RequestOutput | None = None
        stream = self.engine.generate(
            prompt,
            params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            timeout_s=self.limits.max_request_seconds,
            output_kind=OutputKind.CUMULATIVE,
            party=party,
        )
        try:
            async with contextlib.aclosing(stream) as outputs:
                async for output in outputs:
                    first = first or time.monotonic()
                    for each in output.outputs:
                        if each.finish_reason == "error":
                            raise self._broken(each.stop_reason)
                        if each.finish_reason == "abort":
                            raise RequestError(503, "aborted", "the request was given up")
                    yield news(total, output) if kind is OutputKind.DELTA else output
                    total = output
        except BaseException as error:
            if not isinstance(error, EngineBusy):
                self.metrics.broken_off(error)
            elif not party.is_refused:  # one request, however many prompts
                party.is_refused = True
                self.metrics.rejected(error)
            raise
        if total is not None:
            self.metrics.ended(total, params, started, first)

    def _broken(self, why: object) -> RequestError:
        """What is told of a request that had no further token, or whose work failed. The log has the rest."""
        if isinstance(why, str) and why.startswith(STOPPED):
            return RequestError(400, "grammar_too_complex", why)
        logger.error("a request ended: %s", why)
        if isinstance(why, str) and why.startswith(BadLogits.BEGINNING):
            self.metrics.corrupted()
            return RequestError(500, "numerical_error", "the model gave no numbers for this request")
        return RequestError(500, "no_token", "the work for this request failed; others go on")

    async def _events(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        body: SamplingFields,
        head: dict[str, Any],
        chunks: Callable[[int, RequestOutput], list[dict[str, Any]]],
    ) -> AsyncIterator[bytes]:
        """A stream that has begun: its first outputs are there, so whatever is wrong with the request has been raised."""
        party = Party(len(prompts))
        merged = _merged([self._outputs(prompt, params, body, OutputKind.DELTA, party) for prompt in prompts])
        try:
            first = await anext(merged)
        except BaseException:
            await merged.aclose()
            raise

        async def events() -> AsyncIterator[bytes]:
            counts: dict[int, tuple[int, int]] = {}

            def shown(place: int, output: RequestOutput) -> list[bytes]:
                before = counts.get(place, (0, 0))[1]
                new = sum(len(each.token_ids) for each in output.outputs)
                counts[place] = (len(output.prompt_token_ids), before + new)
                made = chunks(place, output)
                if body.stream_options is not None and body.stream_options.continuous_usage_stats:
                    for chunk in made:
                        chunk["usage"] = _usage(counts)
                return [event(encode(chunk)) for chunk in made]

            async with contextlib.aclosing(merged):
                try:
                    yield b"".join(shown(*first))
                    async for place, output in merged:
                        yield b"".join(shown(place, output))
                    if body.with_usage:
                        yield event(encode({**head, "choices": [], "usage": _usage(counts)}))
                except Exception as error:  # noqa: BLE001  the headers are out: it is told in the stream
                    yield _error_event(error, head["id"])
                yield DONE

        return events()

    def _text(self, token_ids: list[int]) -> str:
        tokenizer = self.engine.llm.checkpoint.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)

    def _pieces(self, token_ids: list[int]) -> list[str]:
        return [self._text([token]) for token in token_ids]


def _usage(counts: dict[int, tuple[int, int]]) -> dict[str, int]:
    prompt, completion = (sum(values) for values in zip(*counts.values(), strict=True))
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion).model_dump()


def _error_event(error: Exception, request_id: str) -> bytes:
    """What a stream says when it can not go on: the headers are out."""
    if isinstance(error, TimeoutError):
        error = RequestError(408, "timeout", "the request took too long")
    found = told(error)
    if found is not error and found.status == 500:  # one that is ours, of which its client is told nothing
        logger.error("request %s failed", request_id, exc_info=error)
    return event(ErrorBody(error=found.detail).model_dump_json().encode())


async def _merged(streams: Sequence[AsyncGenerator[RequestOutput]]) -> AsyncGenerator[Indexed]:
    """Outputs of several streams as they come, each with the place of its stream. An error of one ends all."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    pending: dict[asyncio.Task[RequestOutput], int] = {
        asyncio.ensure_future(_next(stream)): place for place, stream in enumerate(streams)
    }
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = pending.pop(task)
                try:
                    output = task.result()
                except _Ended:
                    continue
                pending[asyncio.ensure_future(_next(streams[place]))] = place
                yield place, output
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[RequestOutput]) -> RequestOutput:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise _Ended from None


class _Ended(Exception):
    """A stream is at its end. A task can not raise ``StopAsyncIteration``."""


async def begun_late(begin: asyncio.Future[AsyncIterator[bytes]], request_id: str) -> AsyncIterator[bytes]:
    """A stream whose first event did not come in time: what is wrong with its request is told in the stream."""
    try:
        events = await begin
    except Exception as error:  # noqa: BLE001
        yield _error_event(error, request_id)
        yield DONE
        return
    async with contextlib.aclosing(events) as begun:  # type: ignore[type-var]  # they are generators
        async for each in begun:
            yield each


async def unless_gone(work: Awaitable[Any], gone: Awaitable[None]) -> Any:  # Any: whatever the work gives
    """The result of some work, which is cancelled when its client goes away first; None then."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return None
        return task.result()
    finally:
        leaving.cancel()
        task.cancel()
