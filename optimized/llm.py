"""``LLM``: prompts in, text out, with vLLM's names for what both have."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from optimized.checkpoint import Checkpoint, load_checkpoint
from optimized.fault_points import FaultPoint, reach
from optimized.generation_defaults import AUTO, defaults_of, params_by_default
from optimized.grammar import Barred, Grammar, Grammars
from optimized.model_core import EngineArgs, MakeCore, MakeObserver, TorchCore
from optimized.outputs import OpenRequest, RequestOutput, named, open_output
from optimized.progress import progress_bar
from optimized.prompts import (
    Conversation,
    Prompt,
    checked_ids,
    conversations_of,
    demand_priority,
    params_for,
    priorities_for,
    prompts_of,
    spelled,
    text_and_ids,
)
from optimized.sampling import SamplingParams, demand_text, derived_seed
from optimized.snapshot import Look
from optimized.stats import Stats
from optimized.waste import Slots
from spec.engine import InvalidField, InvalidRequest
from spec.vocabulary import Config, FinishReason, InvalidConfig, Request, RequestId, SeqId, Token

if TYPE_CHECKING:
    from tqdm import tqdm

    from optimized.beam_search import BeamSearchParams

Made: TypeAlias = tuple[Request, OpenRequest, SamplingParams, Barred]
"""A request as the engine sees it, as its caller sees it, how it is sampled, and what may not come."""

T = TypeVar("T")


class LLM:
    """A model and its engine.

    ``model`` is a GGUF file, a Hugging Face directory, ORG/NAME of the hub, a loaded checkpoint, or None for the default
    model; what is not on this machine is fetched once. Everything happens in the caller's thread. ``generation_config`` says whose ``generation_config.json``
    has the defaults of sampling: the model's (``auto``), nobody's (``vllm``), or that of another file or folder.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Checkpoint | None = None,
        *,
        block_size: int = 16,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_partial_prefills: int = 1,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        preemption_mode: str = "auto",
        swap_space: float | None = None,
        scheduling_policy: str = "fcfs",
        admission_rule: str = "prompt",
        watermark_blocks: int = 0,
        overlap_steps: bool = False,
        seed: int = 0,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        quantization: str | None = None,
        generation_config: str = AUTO,
        override_generation_config: Mapping[str, Any] | None = None,
        make_observer: MakeObserver | None = None,
        make_core: MakeCore = TorchCore,
    ) -> None:
        args = EngineArgs(
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_partial_prefills=max_num_partial_prefills,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_gpu_blocks_override=num_gpu_blocks_override,
            enable_prefix_caching=enable_prefix_caching,
            preemption_mode=preemption_mode,
            swap_space=swap_space,
            scheduling_policy=scheduling_policy,
            admission_rule=admission_rule,
            watermark_blocks=watermark_blocks,
            overlap_steps=overlap_steps,
            seed=seed,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            device=device,
            threads=threads,
            quantization=quantization,
        )
        if not isinstance(model, str | os.PathLike | Checkpoint | None):
            raise InvalidConfig("model", model, "a file, a folder, a checkpoint, or None")
        path = Path(model) if isinstance(model, str | os.PathLike) else None
        self.checkpoint = model if isinstance(model, Checkpoint) else load_checkpoint(path)
        self.defaults = defaults_of(self.checkpoint, generation_config, override_generation_config)
        self.seed = seed
        self.grammars = Grammars(self.checkpoint)
        self._core = make_core(self.checkpoint, args, make_observer)
        self._open: dict[RequestId, OpenRequest] = {}
        self._names: dict[str, OpenRequest] = {}
        self._unbegun: set[RequestId] = set()
        self._seqs: dict[SeqId, OpenRequest] = {}
        self._num_requests, self._num_seqs, self.device_seconds = 0, 0, 0.0

    @property
    def config(self) -> Config:
        """The limits of the engine."""
        return self._core.config

    def get_default_sampling_params(self) -> SamplingParams:
        """What is meant where no sampling parameters are given."""
        return params_by_default(self.defaults)

    def stats(self) -> Stats:
        """What the cache has done so far."""
        return self._core.stats()

    def look(self) -> Look:
        """The engine between two steps, block by block."""
        return self._core.look()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing changes, while one of its blocks is in use."""
        return self._core.reset_cache()

    def slots(self) -> Slots | None:
        """Where the slots of the cache are now, by what keeps them from being used."""
        return self._core.slots()

    # --- all at once --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        cache_salt: str = "",
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Continue every prompt; answers come in the order of the prompts.

        If one prompt or its parameters are invalid, nothing is done. ``sampling_params`` and ``priority``, of which a
        smaller one is served first if that is the scheduling policy, are for all, or one for each. They share cached
        blocks with each other, and with what else has the same ``cache_salt``.
        """
        return self._run(prompts_of(prompts), self._read, sampling_params, use_tqdm, cache_salt, priority)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, in the model's chat template."""

        def read(conversation: Conversation) -> tuple[str | None, list[Token]]:
            return self._read_chat(conversation, add_generation_prompt)

        return self._run(conversations_of(messages), read, sampling_params, use_tqdm, cache_salt)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """The likeliest answers to every prompt, ``params.beam_width`` of them, the best first.

        ``cumulative_logprob`` is the sum that its score is made of. If one prompt is invalid, nothing is done.
        """
        from optimized.beam_search import Searches

        self._demand_idle()
        for name in ("max_num_seqs", "max_num_batched_tokens"):  # all beams of a search go on in the same step
            if params.beam_width > getattr(self._core.config, name):
                limit = f"at most {name} ({getattr(self._core.config, name)})"
                raise InvalidField("beam_width", params.beam_width, limit)
        read, first = [self._read(prompt) for prompt in prompts_of(prompts)], self._num_requests
        self._num_requests += len(read)
        searches = Searches(self._core, params, self._next_seq_id)
        with progress_bar(len(read), use_tqdm) as bar:
            ends = self.checkpoint.config.eos_token_ids
            found = searches.run([ids for _, ids in read], first, ends, bar.update)
        return [
            search.output(str(first + index), *prompt, self.checkpoint.tokenizer)
            for index, (prompt, search) in enumerate(zip(read, found, strict=True))
        ]

    def _demand_idle(self) -> None:
        """Raise unless every request is done: whoever serves several to their end steps alone."""
        if self._open:
            raise InvalidRequest(
                f"{len(self._open)} requests are unfinished: step until they are done, or abort them, before this"
            )

    def _next_seq_id(self) -> SeqId:
        self._num_seqs += 1
        return self._num_seqs - 1

    def chat_prompt(
        self, messages: Conversation, add_generation_prompt: bool = True, tools: Conversation | None = None
    ) -> Prompt:
        """A conversation as a prompt for ``add_request``; the template may tell the model what ``tools`` there are."""
        text, token_ids = self._read_chat(messages, add_generation_prompt, tools)
        return {"prompt": text, "prompt_token_ids": token_ids}

    # --- step by step -------------------------------------------------------------------------------------------------

    def prompt_of(self, prompt: Prompt) -> dict[str, Any]:
        """A prompt with its token ids, checked, for ``add_request``; any thread may ask."""
        text, token_ids = self._read(prompt)
        self._demand_room(len(token_ids))  # before it is counted among those that wait
        return {"prompt": text, "prompt_token_ids": token_ids}

    def grammar_of(self, params: SamplingParams) -> Grammar | None:
        """What answers must look like, made and kept for ``add_request``, which may take seconds; any thread may ask."""
        return None if params.structured_outputs is None else self.grammars.grammar(params.structured_outputs)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Let a request wait. Raises ``InvalidRequest`` and changes nothing if it can never be served.

        A smaller ``priority`` is served first, if that is the scheduling policy. Requests share cached blocks only with
        those of the same ``cache_salt``.
        """
        if not isinstance(request_id, str) or request_id in self._names:
            raise InvalidField("request_id", request_id, "a text that no unfinished request has for its id")
        demand_text("cache_salt", cache_salt)
        reach(FaultPoint.ADD_REQUEST)
        params = sampling_params or self.get_default_sampling_params()
        made = self._make(request_id, *self._read(prompt), params, priority=priority, cache_salt=cache_salt)
        self._core.check(made[0], made[2])
        self._add(made)

    def step(self) -> list[RequestOutput]:
        """One step of the engine: the requests that got tokens or ended, as they stand now."""
        return [request.shown() for request in self._advance()]

    def abort(self, request_id: str) -> RequestOutput | None:
        """Give a request up: what it got as far as. An unknown or finished id is ignored."""
        request = self._names.get(request_id)
        if request is None:
            return None
        self._end(request, FinishReason.ABORT.value)
        self._close(request)
        return request.shown()

    def restart(self) -> None:
        """Be like new after an error: no request and no cached block survives, the model does."""
        self._core.restart()
        self._forget_all()

    def _forget_all(self) -> None:
        self._open.clear()
        self._names.clear()
        self._unbegun.clear()
        self._seqs.clear()

    def max_tokens_left(self, prompt: Prompt, n: int = 1) -> int:
        """The most tokens that ``n`` answers to this prompt can have: the ``max_tokens=None`` of sampling."""
        return self._max_tokens(len(self._read(prompt)[1]), SamplingParams(n=n, max_tokens=None))

    def has_unfinished_requests(self) -> bool:
        """Whether there is a reason to step."""
        return bool(self._open)

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _run(
        self,
        several: Sequence[T],
        read: Callable[[T], tuple[str | None, list[Token]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        cache_salt: str,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Check all, then add all, then step until they are done."""
        self._demand_idle()
        demand_text("cache_salt", cache_salt)
        priorities = priorities_for(len(several), priority)
        params = params_for(len(several), sampling_params, self.get_default_sampling_params())
        made: list[Made] = []
        for index, each in enumerate(several):
            try:
                made.append(self._make(None, *read(each), params[index], made, priorities[index], cache_salt))
                self._core.check(made[-1][0], made[-1][2])
            except InvalidRequest as error:
                if len(several) > 1:
                    error.add_note(f"This is about prompt {index + 1} of {len(several)}.")
                raise
        for each_made in made:
            self._add(each_made)
        with progress_bar(len(made), use_tqdm) as bar:
            self._finish_all(bar)
        return [each[1].shown() for each in made]

    def _finish_all(self, bar: tqdm[Any]) -> None:
        started, num_tokens = time.perf_counter(), 0
        try:
            while self._open:
                for request in self._advance():
                    num_tokens += len(request.outputs)
                    bar.update(request.finished)
                if not bar.disable:
                    speed = num_tokens / (time.perf_counter() - started)
                    bar.set_postfix_str(f"{speed:.1f} tokens/s", refresh=False)
                    bar.refresh()
        finally:
            # Nobody is left to hear them if this was interrupted.
            for request in tuple(self._open.values()):
                self._core.abort(request.request_id)
                self._close(request)

    def _read(self, prompt: Prompt) -> tuple[str | None, list[Token]]:
        """The text of a prompt, if it has one, and its token ids."""
        text, token_ids = text_and_ids(prompt)
        if token_ids is None:
            token_ids = self.encode(text or "", add_special_tokens=True)
        return text, self._checked(token_ids)

    def _read_chat(
        self, messages: Conversation, add_generation_prompt: bool, tools: Conversation | None = None
    ) -> tuple[str, list[Token]]:
        """The text of a conversation, which names its special tokens itself, and its token ids."""
        text = self.checkpoint.chat_text(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return text, self._checked(self.encode(text, add_special_tokens=False))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[Token]:
        """The token ids of a text. Raises ``InvalidRequest`` if the model has no tokenizer."""
        if self.checkpoint.tokenizer is None:
            raise InvalidRequest(f"{self.checkpoint.name} has no tokenizer: give a prompt as token ids")
        return self.checkpoint.tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[Token]) -> str:
        """The text of token ids, special ones included. Raises ``InvalidRequest`` if the model has no tokenizer."""
        if self.checkpoint.tokenizer is None:
            raise InvalidRequest(f"{self.checkpoint.name} has no tokenizer: tokens have no text")
        return self.checkpoint.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _checked(self, token_ids: object) -> list[Token]:
        return checked_ids(token_ids, self.checkpoint.config.vocab_size)

    def _make(
        self,
        name: str | None,
        prompt: str | None,
        token_ids: list[Token],
        params: SamplingParams,
        before: Sequence[Made] = (),
        priority: int = 0,
        cache_salt: str = "",
    ) -> Made:
        """A request that is not added yet, and will be after those ``before``."""
        tokenizer = self.checkpoint.tokenizer
        if params.n > self._core.config.max_num_seqs:
            raise InvalidField("n", params.n, f"at most max_num_seqs ({self._core.config.max_num_seqs})")
        if tokenizer is None and (params.stop or params.bad_words):
            raise InvalidRequest(f"{self.checkpoint.name} has no tokenizer: stop strings and bad words have no meaning")
        params.demand_known(self.checkpoint.config.vocab_size)
        demand_priority(priority, self._core.config.policy)
        max_tokens = self._max_tokens(len(token_ids), params)
        if params.min_tokens > max_tokens:
            raise InvalidField("min_tokens", params.min_tokens, f"at most {max_tokens}, for which there is room")
        request_id = self._num_requests + len(before)
        first = self._num_seqs if not before else before[-1][0].seq_ids[-1] + 1
        seq_ids = tuple(range(first, first + params.n))
        model_ends = () if params.ignore_eos else self.checkpoint.config.eos_token_ids
        ends = (*(params.stop_token_ids or ()), *model_ends)
        if not set(params.forced_token_ids[: params.min_tokens]).isdisjoint(ends):
            limit = f"without a token that ends the answer among the first {params.min_tokens}, its min_tokens"
            raise InvalidField("forced_token_ids", list(params.forced_token_ids), limit)
        request = Request(
            request_id,
            tuple(token_ids),
            max_tokens,
            seq_ids,
            stop_token_ids=ends,
            priority=priority,
            # A hit would spare the work that is asked for, and the same prompt's blocks are of use to nobody else.
            cache_salt=f"prompt_logprobs of request {request_id}"
            if params.prompt_logprobs is not None
            else f"salt {cache_salt}"
            if cache_salt
            else "",
        )
        outputs = {seq_id: open_output(index, params, tokenizer) for index, seq_id in enumerate(seq_ids)}
        opened = OpenRequest(str(request_id) if name is None else name, request_id, prompt, token_ids, outputs)
        if params.prompt_logprobs is not None:
            opened.prompt_logprobs = [None] * len(token_ids)
        return request, opened, params, Barred(spelled(params.bad_words or (), self.encode), self.grammar_of(params))

    def _demand_room(self, num_prompt_tokens: int) -> None:
        """Raise unless there is room for an answer in the context."""
        if num_prompt_tokens >= self.config.max_model_len:
            limit = f"below max_model_len ({self.config.max_model_len}), so that there is room for an answer"
            raise InvalidField("the number of prompt tokens", num_prompt_tokens, limit)

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """What the caller or else the model says, or what is left of the context and, for each sample, of the cache."""
        config = self._core.config
        self._demand_room(num_prompt_tokens)
        if params.max_tokens is not None:
            return params.max_tokens
        # The last token needs no slot.
        room = config.num_blocks // params.n * config.block_size + 1
        left = max(1, min(config.max_model_len, room) - num_prompt_tokens)
        return min(left, max(params.min_tokens, int(self.defaults.get("max_tokens", left))))

    def _add(self, made: Made) -> None:
        request, opened, params, barred = made
        seed = params.seed if params.seed is not None else derived_seed(self.seed, request.request_id)
        self._core.add(request, params, seed, barred)
        self._num_requests = request.request_id + 1
        self._num_seqs = request.seq_ids[-1] + 1
        self._open[request.request_id] = self._names[opened.name] = opened
        self._unbegun.add(request.request_id)
        self._seqs.update(dict.fromkeys(request.seq_ids, opened))

    def _advance(self) -> Iterable[OpenRequest]:
        """One step: the requests that got tokens or ended."""
        started = time.monotonic()
        try:
            outcome = self._core.step()
        except BaseException:
            self._forget_all()
            raise
        self.device_seconds += outcome.device_seconds
        for request_id in outcome.preempted:
            self._open[request_id].num_preemptions += 1
        for seq_id in outcome.scheduled if self._unbegun else ():
            self._seqs[seq_id].begin(started, outcome.num_hit_tokens.get(seq_id, 0))
            self._unbegun.discard(self._seqs[seq_id].request_id)
        touched, tokenizer = dict[RequestId, OpenRequest](), self.checkpoint.tokenizer
        ends: dict[SeqId, FinishReason] = dict(outcome.finished)
        for seq_id, token in zip(outcome.seq_ids, outcome.tokens, strict=True):
            request = self._seqs.get(seq_id)
            if request is None or request.outputs[seq_id].finish_reason is not None:
                continue  # its request has just ended, by what went wrong with another sequence of it
            output = request.outputs[seq_id]
            try:
                output.take(token, ends.get(seq_id), named(outcome.logprobs.get(seq_id), tokenizer))
            except Exception as error:  # noqa: BLE001  what goes wrong with one text ends its own request only
                self._end(request, "error", f"{type(error).__name__}: {error}")
            else:
                if output.finish_reason is not None and seq_id not in ends:
                    self._core.release(seq_id)
            touched[request.request_id] = request
        for seq_id, found in outcome.prompt_logprobs.items():
            if (request := self._seqs.get(seq_id)) is not None:
                try:
                    request.take_prompt(found, tokenizer)
                except Exception as error:  # noqa: BLE001  so it is here
                    touched[request.request_id] = request
                    self._end(request, "error", f"{type(error).__name__}: {error}")
        for request_id, failure in outcome.failed:
            touched[request_id] = self._open[request_id]
            self._end(self._open[request_id], "error", failure.reason)
        now = time.monotonic()
        for request in touched.values():
            request.clock.tell(now)
            if request.finished:
                self._close(request)
        return touched.values()

    def _end(self, request: OpenRequest, reason: str, why: str | None = None) -> None:
        """No sequence of the request goes on."""
        self._core.abort(request.request_id)
        for output in request.outputs.values():
            output.end(reason, why)

    def _close(self, request: OpenRequest) -> None:
        del self._open[request.request_id]
        self._unbegun.discard(request.request_id)
        del self._names[request.name]
        for seq_id in request.outputs:
            del self._seqs[seq_id]
