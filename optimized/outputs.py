"""What a caller is given for a prompt, in vLLM's shape, and how it grows: tokens, text, the stop strings in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum

from optimized.fault_points import FaultPoint, reach
from optimized.request_times import Clock, RequestTimes
from optimized.sampling import Logprob, SamplingParams
from optimized.tokenizer import Detokenizer, Tokenizer
from spec.vocabulary import FinishReason, RequestId, SeqId, Token


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation. The token that ended it is in ``token_ids`` and not in ``text``, unless that was asked for.

    ``finish_reason`` is None while it goes on, then ``"stop"``, ``"length"``, ``"abort"`` if somebody gave it up, or
    ``"error"`` if the model had no token for it. ``stop_reason`` says more: the stop string, the id of a stop token that the caller asked for, or what went
    wrong; None for the model's own end token. ``logprobs`` has, for each token, its own entry and those of the likeliest
    tokens, if they were asked for, and ``cumulative_logprob`` the sum over the answer.
    """

    index: int
    text: str
    token_ids: list[Token]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[Token, Logprob]] | None = None
    cumulative_logprob: float | None = None

    def finished(self) -> bool:
        """Whether it goes no further."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt, the same list each time, and its continuations. While they grow, ``text`` is final as far as it goes: it is never taken back.

    ``prompt_logprobs``, if asked for, has an entry for each token of the prompt; the first, which nothing comes before,
    is None. ``metrics`` says when what happened to it, ``num_hit_tokens`` how many tokens of the prompt the prefix cache had when it began.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[Token]
    outputs: list[CompletionOutput]
    finished: bool
    num_preemptions: int = 0
    prompt_logprobs: list[dict[Token, Logprob] | None] | None = None
    metrics: RequestTimes | None = field(default=None, compare=False)
    num_hit_tokens: int = field(default=0, compare=False)


class OutputKind(Enum):
    """What each output of a stream has: all so far, what is new since the one before, or only the end, with all."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


def news(before: RequestOutput | None, now: RequestOutput) -> RequestOutput:
    """What an output says that an earlier one of the same request did not: texts, tokens and their log probabilities."""
    if before is None:
        return now
    outputs = [_news(old, new) for old, new in zip(before.outputs, now.outputs, strict=True)]
    # One for each token of each stream: dataclasses.replace takes several times as long.
    return RequestOutput(
        now.request_id,
        now.prompt,
        now.prompt_token_ids,
        outputs,
        now.finished,
        now.num_preemptions,
        metrics=now.metrics,
        num_hit_tokens=now.num_hit_tokens,
    )


def _news(before: CompletionOutput, now: CompletionOutput) -> CompletionOutput:
    count, logprobs = len(before.token_ids), now.logprobs
    return CompletionOutput(
        now.index,
        now.text[len(before.text) :],
        now.token_ids[count:],
        now.finish_reason,
        now.stop_reason,
        None if logprobs is None else logprobs[count:],
        now.cumulative_logprob,
    )


def named(logprobs: dict[Token, Logprob] | None, tokenizer: Tokenizer | None) -> dict[Token, Logprob] | None:
    """Each token with its text, where there are texts."""
    if logprobs is None or tokenizer is None:
        return logprobs
    return {
        token: replace(each, decoded_token=tokenizer.decode([token], skip_special_tokens=False))
        for token, each in logprobs.items()
    }


class OutputText:
    """Text that grows by tokens and ends before the first stop string in it, or, ``with_stop``, right after it.

    As long as ``can_stop`` is False, a stop string that comes to its end is text like any other.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[str] = (), with_stop: bool = False) -> None:
        self.text = ""
        self.can_stop = True
        self._with_stop = with_stop
        self.stopped_by: str | None = None
        self._is_final = False
        self._detokenizer = detokenizer
        self._stop = tuple(stop)

    def add(self, token_id: Token) -> None:
        """The text of one more token. A text that has stopped or is finished stays as it is."""
        if self._detokenizer is not None and not self._is_final:
            self._extend(self._detokenizer.add(token_id))

    def finish(self) -> None:
        """No further token comes, so half a character is all there will be of it."""
        if self._detokenizer is not None and not self._is_final:
            self._extend(self._detokenizer.finish())
        self._is_final = True

    @property
    def settled(self) -> str:
        """The text without an end that the next tokens could turn into a stop string."""
        held = 0 if self._is_final else max(map(self._held_by, self._stop), default=0)
        return self.text[: len(self.text) - held]

    def _held_by(self, stop: str) -> int:
        """How many of the last characters are the beginning of this stop string."""
        longest = min(len(stop) - 1, len(self.text))
        return next((count for count in range(longest, 0, -1) if self.text.endswith(stop[:count])), 0)

    def _extend(self, more: str) -> None:
        start = len(self.text)
        self.text += more
        if not self.can_stop:
            return
        # An occurrence that is new ends in the new text.
        places = [(self.text.find(stop, max(0, start - len(stop) + 1)), stop) for stop in self._stop]
        found = [(place, stop) for place, stop in places if place >= 0]
        if found:
            place, self.stopped_by = min(found, key=lambda each: each[0])
            end = place + len(self.stopped_by) if self._with_stop else place
            self.text, self._is_final = self.text[:end], True


@dataclass
class OpenOutput:
    """A continuation on its way. ``named_stops`` are the stop tokens that the caller asked for by id, ``with_stop`` says
    that what ends it is shown, and ``logprobs`` are collected if there is a list for them."""

    index: int
    text: OutputText
    named_stops: frozenset[Token] = frozenset()
    with_stop: bool = False
    min_tokens: int = 0
    logprobs: list[dict[Token, Logprob]] | None = None
    token_ids: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def take(self, token: Token, end: FinishReason | None, logprobs: dict[Token, Logprob] | None = None) -> None:
        """The next token, what it means to the engine, and what the model thought of it."""
        reach(FaultPoint.OUTPUT_TEXT)
        self.token_ids.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        self.text.can_stop = len(self.token_ids) > self.min_tokens
        if end is not FinishReason.STOP or self.with_stop:
            self.text.add(token)
        if end is not None:
            self.text.finish()
            self.finish_reason = end.value
            self.stop_reason = token if end is FinishReason.STOP and token in self.named_stops else None
        if self.text.stopped_by is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP.value, self.text.stopped_by

    def end(self, reason: str, why: str | None = None) -> None:
        """It goes no further, though nothing in it says so; what it has is what it gets."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, why
            with suppress(Exception):  # if it ends because its text has broken, there is no more of it
                self.text.finish()

    def shown(self) -> CompletionOutput:
        """The continuation as it stands."""
        logprobs = self.logprobs
        return CompletionOutput(
            self.index,
            self.text.settled,
            self.token_ids.copy(),
            self.finish_reason,
            self.stop_reason,
            None if logprobs is None else logprobs.copy(),
            None
            if logprobs is None
            else sum(each[t].logprob for t, each in zip(self.token_ids, logprobs, strict=True)),
        )


def open_output(index: int, params: SamplingParams, tokenizer: Tokenizer | None) -> OpenOutput:
    """A continuation that has no token yet, of a request with these parameters."""
    return OpenOutput(
        index,
        OutputText(
            None if tokenizer is None else tokenizer.detokenizer(params.skip_special_tokens),
            params.stop or (),
            params.include_stop_str_in_output,
        ),
        named_stops=frozenset(params.stop_token_ids or ()),
        with_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        logprobs=None if params.logprobs is None else [],
    )


@dataclass
class OpenRequest:
    """A request on its way; ``outputs`` has one continuation for each of its sequences."""

    name: str
    request_id: RequestId
    prompt: str | None
    prompt_token_ids: list[Token]
    outputs: dict[SeqId, OpenOutput]
    num_preemptions: int = 0
    prompt_logprobs: list[dict[Token, Logprob] | None] | None = None
    clock: Clock = field(default_factory=Clock)
    num_hit_tokens: int = 0

    def begin(self, now: float, num_hit_tokens: int) -> None:
        """It is scheduled, for the first time or again: only the first time counts."""
        if self.clock.times.begun is None:
            self.clock.begin(now)
            self.num_hit_tokens = num_hit_tokens

    def take_prompt(self, found: Mapping[int, dict[Token, Logprob]], tokenizer: Tokenizer | None) -> None:
        """What the model thought of the prompt's tokens at these places, if that is asked for."""
        if self.prompt_logprobs is not None:
            for position, logprobs in found.items():
                self.prompt_logprobs[position] = named(logprobs, tokenizer)

    @property
    def finished(self) -> bool:
        """Whether no continuation goes on."""
        return all(output.finish_reason is not None for output in self.outputs.values())

    def shown(self) -> RequestOutput:
        """The request as it stands."""
        outputs = [output.shown() for output in self.outputs.values()]
        return RequestOutput(
            self.name,
            self.prompt,
            self.prompt_token_ids,
            outputs,
            self.finished,
            self.num_preemptions,
            None if self.prompt_logprobs is None else self.prompt_logprobs.copy(),
            self.clock.times,
            self.num_hit_tokens,
        )
