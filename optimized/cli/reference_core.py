"""The reference engine as ``LLM`` drives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from optimized.capacity import bytes_per_block
from optimized.model_core import EngineArgs, MakeObserver
from optimized.snapshot import Look
from optimized.stats import Stats
from optimized.step import Outcome
from spec.engine import InvalidField, InvalidRequest
from spec.vocabulary import (
    Allocate,
    Append,
    Begin,
    Copy,
    Event,
    Fork,
    Hit,
    InvalidConfig,
    Preempt,
    Request,
    RequestId,
    SeqId,
    State,
    Submit,
    SwapOut,
    Write,
)

if TYPE_CHECKING:
    from optimized.beam_search import BeamSearch
    from optimized.checkpoint import Checkpoint
    from optimized.grammar import Barred
    from optimized.sampling import SamplingParams

CACHE_BYTES = 1 << 28

NOT_HERE = {
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": (),
    "logprobs": None,
    "prompt_logprobs": None,
    "forced_token_ids": (),
    "structured_outputs": None,
}
"""Sampling parameters that the reference engine does not have, with the values that say nothing."""


class ReferenceCore:
    """A core for ``LLM`` in which everything is slow and obvious, and float64."""

    def __init__(self, checkpoint: Checkpoint, args: EngineArgs, make_observer: MakeObserver | None = None) -> None:
        from reference import ReferenceModelEngine

        if args.kv_cache_dtype != "auto":
            raise InvalidConfig("kv_cache_dtype", args.kv_cache_dtype, "auto: the reference engine computes in float64")
        if args.quantization is not None:
            raise InvalidConfig("quantization", args.quantization, "left out: the reference engine computes in float64")
        if args.overlap_steps:
            raise InvalidConfig("overlap_steps", True, "False: the reference engine serves whole steps here")
        model = checkpoint.config
        limits = args.limits(model, max_num_seqs=64, max_num_batched_tokens=512)
        block_bytes = bytes_per_block(args.block_size, model.num_layers, model.num_kv_heads, model.head_size, 8)
        num_blocks = args.num_blocks_in_memory(limits, block_bytes, CACHE_BYTES)
        self.config = args.sized(limits, num_blocks, block_bytes)
        self._watcher = make_observer(self.config) if make_observer is not None else None
        arrays = checkpoint.arrays()

        def make() -> ReferenceModelEngine:
            return ReferenceModelEngine(arrays, model, self.config, self)

        self._make, self._engine = make, make()
        self._peak_shared = self._num_copies = self._num_preemptions = self._num_steps = 0
        self._num_swapped_out = self._num_hits = self._num_queried = self._num_used = self._num_spared = 0
        self._num_computed = self._num_sampled = 0
        self._hits: dict[SeqId, int] = {}

    def check(self, request: Request, params: SamplingParams) -> None:
        for name, default in NOT_HERE.items():
            if getattr(params, name) != default:
                raise InvalidField(name, getattr(params, name), f"{default!r}: the reference engine knows no other")
        self._engine.engine.check(request)

    def add(self, request: Request, params: SamplingParams, seed: int, barred: Barred) -> None:
        from reference import Sampling

        self._engine.add(request, Sampling(params.temperature, params.top_p, params.top_k, params.min_p, seed))

    def add_beams(self, request: Request, search: BeamSearch) -> None:
        raise InvalidRequest("the reference engine has no beam search")

    def step(self) -> Outcome:
        self._hits = {}
        report = self._engine.step()
        pairs = [(event.seq, token) for event in report.emitted for token in event.tokens]
        return Outcome(
            seq_ids=[seq_id for seq_id, _ in pairs],
            tokens=[token for _, token in pairs],
            preempted=[event.request_id for event in report.preempted],
            scheduled=[event.seq for event in report.device if isinstance(event, Write)],
            num_hit_tokens=self._hits,
            finished=[(event.seq, event.reason) for event in report.finished],
        )

    def abort(self, request_id: RequestId) -> None:
        self._engine.abort(request_id)

    def restart(self) -> None:
        self._engine = self._make()

    def release(self, seq_id: SeqId) -> None:
        self._engine.release(seq_id)

    def reset_cache(self) -> bool:
        return self._engine.engine.reset_cache()

    def look(self) -> Look:
        raise InvalidRequest("the reference engine is not watched while it serves")

    def stats(self) -> Stats:
        return Stats(
            blocks_prompt_shared=self._peak_shared,
            blocks_copied=self._num_copies,
            num_preemptions=self._num_preemptions,
            blocks_swapped_out=self._num_swapped_out,
            hit_tokens=self._num_hits * self.config.block_size,
            steps=self._num_steps,
            num_blocks=self.config.num_blocks,
            queried_tokens=self._num_queried,
            num_running=len(self._engine.engine.roster.running),
            num_waiting=len(self._engine.engine.roster.waiting),
            num_free_blocks=self._engine.engine.pool.num_free,
            num_cached_blocks=len(self._engine.engine.pool.cached),
            blocks_saved=round(self._num_spared / max(1, self._num_spared + self._num_used), 4),
            tokens_computed=self._num_computed,
            tokens_sampled=self._num_sampled,
        )

    def slots(self) -> None:
        return None

    def event(self, event: Event) -> None:
        """Count, and pass on to whoever watches."""
        self._num_copies += isinstance(event, Copy)
        self._num_preemptions += isinstance(event, Preempt)
        self._num_steps += isinstance(event, Begin)
        self._num_computed += len(event.slots) if isinstance(event, Write) else 0
        self._num_sampled += len(event.tokens) if isinstance(event, Append) else 0
        self._num_swapped_out += len(event.blocks) if isinstance(event, SwapOut) else 0
        if isinstance(event, Hit):
            self._num_hits += len(event.blocks)
            self._hits[event.seq] = len(event.blocks) * self.config.block_size
        if isinstance(event, Fork | Hit):
            shared = sum(count > 1 for count in self._engine.engine.pool.ref_count)
            self._peak_shared = max(self._peak_shared, shared)
        if isinstance(event, Submit):
            counts = self._engine.engine.pool.ref_count
            self._num_used += sum(count > 0 for count in counts)
            self._num_spared += sum(count - 1 for count in counts if count > 1)
        if isinstance(event, Hit | Allocate) and self.config.prefix_cache:
            seq = self._engine.engine.roster.seqs[event.seq]
            begins = isinstance(event, Hit) or seq.num_computed_tokens == 0
            self._num_queried += seq.num_tokens if begins else 0
        if self._watcher is not None:
            self._watcher.event(event)

    def settled(self, snapshot: Callable[[], State]) -> None:
        if self._watcher is not None:
            self._watcher.settled(snapshot)
