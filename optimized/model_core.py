"""An engine core with a real model behind it: which device, which numbers, how many blocks, and then step by step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from optimized.capacity import DEFAULT_CPU_CACHE_BYTES, FP8_SCALE_BYTES, bytes_per_block, num_blocks_for
from optimized.checkpoint import Checkpoint, ModelConfig
from optimized.cpu_path import QUANTIZATIONS, CpuPath, cpu_path, demand_narrow, num_threads
from optimized.device import Failure, PassFailed, Sampled
from optimized.fault_points import FaultPoint, reach
from optimized.plan import Plan, live_part
from optimized.poison import is_asked_for, lost_blocks
from optimized.pool import blocks_needed
from optimized.snapshot import Look, look_at
from optimized.stats import Stats
from optimized.step import Outcome
from optimized.waste import Slots, slots_of
from spec.engine import Observer
from spec.vocabulary import AdmissionRule, Config, InvalidConfig, Policy, Recovery, Request, RequestId, SeqId, Token

if TYPE_CHECKING:
    import torch

    from optimized.beam_search import BeamSearch
    from optimized.grammar import Barred
    from optimized.llama import LlamaModel
    from optimized.sampling import SamplingParams
    from optimized.torch_device import TorchDevice
    from optimized.vector_model import VectorModel

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8")
DEVICES = ("auto", "cpu", "cuda")
PREEMPTION_MODES = ("auto", "recompute", "swap")
MAX_NUM_SEQS = 1 << 16
SCHEDULING_POLICIES = tuple(each.value for each in Policy)
ADMISSION_RULES = tuple(each.value for each in AdmissionRule)

MakeObserver: TypeAlias = Callable[[Config], Observer]
"""Somebody to watch an engine with these limits."""


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """What a caller says about the engine; names and meanings are vLLM's. None is chosen by device and model.

    ``swap_space`` is host memory in GiB for preempted requests, unless told as much as the cache has. With
    ``preemption_mode`` ``swap`` they go there while there is room, with ``recompute`` never, with ``auto`` if a
    ``swap_space`` is given. A request is admitted if there is room for what ``admission_rule`` says and ``watermark_blocks``
    are left: its next step (``optimistic``), all its tokens so far (``prompt``), or all it may ever have (``no_evict``).
    Under the ``scheduling_policy`` ``static`` nobody is admitted once one of those who run has got a token. With more than
    one of ``max_num_partial_prefills`` a step computes of each prompt that share of ``max_num_batched_tokens`` at most.
    With ``overlap_steps`` the next step is scheduled before a step runs, and no block that it may touch is free before it
    ends; the same is computed, in more steps.
    """

    block_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_partial_prefills: int = 1
    max_model_len: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    preemption_mode: str = "auto"
    swap_space: float | None = None
    scheduling_policy: str = "fcfs"
    admission_rule: str = "prompt"
    watermark_blocks: int = 0
    overlap_steps: bool = False
    seed: int = 0
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if str(each.type).startswith("int") and value is not None:
                least = 0 if each.name in ("seed", "watermark_blocks") else 1
                if type(value) is not int or not least <= value < 1 << 63:
                    raise InvalidConfig(each.name, value, f"a whole number, at least {least}")
                if each.name == "max_num_seqs" and value > MAX_NUM_SEQS:
                    limit = f"at most {MAX_NUM_SEQS:,}: a step has a row for each, as wide as the vocabulary"
                    raise InvalidConfig(each.name, value, limit)
            elif each.type == "bool" and type(value) is not bool:
                raise InvalidConfig(each.name, value, "True or False")
        if type(self.gpu_memory_utilization) not in (int, float) or not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidConfig("gpu_memory_utilization", self.gpu_memory_utilization, "more than 0 and at most 1")
        space = self.swap_space
        if space is not None and not (type(space) in (int, float) and 0.0 <= space < 1 << 20):
            raise InvalidConfig("swap_space", self.swap_space, "a number of GiB, at least 0")
        if self.swap_space and self.preemption_mode == "recompute":
            raise InvalidConfig("swap_space", self.swap_space, "left out where preemption_mode is recompute")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise InvalidConfig("quantization", self.quantization, f"{' or '.join(QUANTIZATIONS)}, or left out")
        choices_of = {
            "dtype": DTYPES,
            "kv_cache_dtype": KV_CACHE_DTYPES,
            "device": DEVICES,
            "preemption_mode": PREEMPTION_MODES,
            "scheduling_policy": SCHEDULING_POLICIES,
            "admission_rule": ADMISSION_RULES,
        }
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise InvalidConfig(name, getattr(self, name), f"one of {', '.join(choices)}")

    def limits(self, model: ModelConfig, *, max_num_seqs: int, max_num_batched_tokens: int) -> Config:
        """The limits of an engine for this model but for its number of blocks, which is 1; the rest are defaults."""
        longest = self.max_model_len or model.max_model_len
        if longest > model.max_model_len:
            raise InvalidConfig("max_model_len", longest, f"at most what the model was made for, {model.max_model_len}")
        return Config(
            num_blocks=1,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs or max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max_num_batched_tokens,
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_model_len=longest,
            prefix_cache=self.enable_prefix_caching,
            policy=Policy(self.scheduling_policy),
            admission_rule=AdmissionRule(self.admission_rule),
            window=None if model.sliding_window is None or model.sliding_window >= longest else model.sliding_window,
        )

    def sized(self, limits: Config, num_blocks: int, block_bytes: int) -> Config:
        """The limits with so many blocks, and with host blocks if preempted requests are to be swapped."""
        config = replace(limits, num_blocks=num_blocks, watermark_blocks=self.watermark_blocks)
        if self.preemption_mode == "recompute" or (self.preemption_mode == "auto" and not self.swap_space):
            return config
        num_host_blocks = num_blocks if self.swap_space is None else int(self.swap_space * 2**30) // block_bytes
        present = memory_present()
        if num_host_blocks * block_bytes > present:
            most = f"at most this machine's memory, {present / 2**30:.1f}"
            raise InvalidConfig("swap_space", self.swap_space or num_blocks * block_bytes / 2**30, most)
        return replace(config, recovery=Recovery.SWAP, num_host_blocks=num_host_blocks)

    def num_blocks_in_memory(self, limits: Config, block_bytes: int, default_bytes: int) -> int:
        """How many blocks the cache has in this machine's main memory; unless told, no more than can be of use.

        That is what all running sequences can fill, and as much again for what the prefix cache keeps of others.
        """
        memory = self.kv_cache_memory_bytes or default_bytes
        num_blocks = num_blocks_for(memory, 1.0, weights=0, activation_peak=0, bytes_per_block=block_bytes)
        if self.kv_cache_memory_bytes is None:
            most = limits.max_num_seqs * blocks_needed(limits.max_model_len, limits.block_size)
            num_blocks = min(num_blocks, most * (2 if limits.prefix_cache else 1))
        num_blocks = self.num_gpu_blocks_override or num_blocks
        if num_blocks < 1:
            raise InvalidConfig("kv_cache_memory_bytes", memory, f"at least one block, {block_bytes:,} bytes")
        present = memory_present()
        if num_blocks * block_bytes > present:
            name = "num_gpu_blocks_override" if self.num_gpu_blocks_override else "kv_cache_memory_bytes"
            most = present if name == "kv_cache_memory_bytes" else present // block_bytes
            raise InvalidConfig(name, getattr(self, name) or memory, f"at most this machine's memory, {most:,}")
        return num_blocks


def memory_present() -> int:
    """This machine's main memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class ModelCore(Protocol):
    """What ``LLM`` drives: requests go in, tokens come out."""

    @property
    def config(self) -> Config: ...

    def check(self, request: Request, params: SamplingParams) -> None:
        """Raise ``InvalidRequest`` if the request can never be served, or never like that."""
        ...

    def add(self, request: Request, params: SamplingParams, seed: int, barred: Barred) -> None:
        """Let a request wait; each of its sequences is sampled with these parameters and this seed."""
        ...

    def add_beams(self, request: Request, search: BeamSearch) -> None:
        """Let a request wait whose sequences are the beams of a search."""
        ...

    def step(self) -> Outcome:
        """One step. If it raises, whoever drives it forgets every request."""
        ...

    def abort(self, request_id: RequestId) -> None: ...

    def release(self, seq_id: SeqId) -> None:
        """Whatever this sequence would say is of no interest."""
        ...

    def reset_cache(self) -> bool:
        """Empty the prefix cache, if no block of it is in use."""
        ...

    def restart(self) -> None:
        """Be like new, with the same model: no request, no block and no cached prefix survives."""
        ...

    def stats(self) -> Stats: ...

    def slots(self) -> Slots | None:
        """Where the slots of the cache are, if it can be told."""
        ...

    def look(self) -> Look: ...


MakeCore: TypeAlias = Callable[[Checkpoint, EngineArgs, MakeObserver | None], ModelCore]


class TorchCore:
    """The engine core with a torch device."""

    def __init__(self, checkpoint: Checkpoint, args: EngineArgs, make_observer: MakeObserver | None = None) -> None:
        import torch

        on_gpu = chosen_device(args.device)[0] == "cuda"
        limits = args.limits(
            checkpoint.config,
            max_num_seqs=256 if on_gpu else 64,
            max_num_batched_tokens=8192 if on_gpu else 512,
        )
        config = checkpoint.config
        path = None if on_gpu else cpu_path(config, args.dtype, args.block_size, kv_cache_dtype=args.kv_cache_dtype)
        if args.quantization is not None:
            demand_narrow(path, args.quantization)
        dtype: torch.dtype = getattr(torch, chosen_dtype(args.dtype) if path is None else path.dtype)
        in_fp8 = args.kv_cache_dtype == "fp8"
        cell = (1, FP8_SCALE_BYTES) if in_fp8 else (dtype.itemsize, 0)
        heads = (config.num_layers, config.num_kv_heads, config.head_size)
        block_bytes = bytes_per_block(args.block_size, *heads, *cell)
        cache_dtype = torch.float8_e4m3fn if in_fp8 else dtype
        model: LlamaModel | VectorModel
        if path is None:
            from optimized.gpu_room import num_blocks_on_gpu
            from optimized.llama import LlamaModel

            model = LlamaModel(checkpoint.config, checkpoint.tensors, dtype, "cuda", cache_dtype)
            num_blocks = num_blocks_on_gpu(args, limits, model, block_bytes)
        else:
            num_blocks = args.num_blocks_in_memory(limits, block_bytes, DEFAULT_CPU_CACHE_BYTES)
            threads = num_threads(args.threads)
            torch.set_num_threads(threads)
            model = cpu_model(checkpoint, path, dtype, cache_dtype, threads, args.quantization)
        self.config = args.sized(limits, num_blocks, block_bytes)
        self._make_observer, self._name, self._model = make_observer, str(checkpoint.path), model
        self._overlaps = args.overlap_steps
        self._begin()

    def _begin(self) -> None:
        from optimized.engine import EngineCore

        reach(FaultPoint.REMAKE)
        self.device_seconds = 0.0
        self.device = self._made_device()
        observer = self._make_observer(self.config) if self._make_observer is not None else None
        self.core = EngineCore(self.config, self.device, observer, model=self._name)

    def _made_device(self) -> TorchDevice:
        from optimized.torch_device import TorchDevice

        return TorchDevice(self._model, self.config, self._tokens_of, poisons=is_asked_for())

    def restart(self) -> None:
        vars(self).pop("core", None)  # before there is another cache
        vars(self).pop("device", None)
        self._begin()

    def check(self, request: Request, params: SamplingParams) -> None:
        self.core.scheduler.check(request)

    def add(self, request: Request, params: SamplingParams, seed: int, barred: Barred) -> None:
        from optimized.torch_device import SeqSampling

        self.core.add(request)
        for ordinal, seq_id in enumerate(request.seq_ids):
            progress = None if barred.grammar is None else barred.grammar.progress()
            self.device.sampling[seq_id] = SeqSampling(
                params, seed, ordinal, len(request.prompt), request.stop_token_ids, barred.words, progress
            )

    def add_beams(self, request: Request, search: BeamSearch) -> None:
        self.core.add(request)
        self.device.beams.update(dict.fromkeys(request.seq_ids, search))

    def step(self) -> Outcome:
        reach(FaultPoint.SCHEDULE)
        plan, failed = self.core.next_plan(self._overlaps), list[tuple[RequestId, Failure]]()
        if plan is None:
            return Outcome()
        try:
            try:
                sampled = self.run(plan)
            except PassFailed as error:
                sampled, failed = self._without_those_that_fail(plan, error)
        except BaseException:
            self._give_up(plan)
            raise
        reach(FaultPoint.COMMIT)
        outcome = self.core.commit(plan, sampled)
        outcome.failed += failed
        outcome.device_seconds, self.device_seconds = self.device_seconds, 0.0
        outcome.scheduled = plan.seq_ids
        outcome.logprobs, outcome.prompt_logprobs = self.device.logprobs, self.device.prompt_logprobs
        self._forget([seq_id for seq_id, _ in outcome.finished])
        if outcome.failed:
            self._forget_ended()
        if self.device.poisons:
            self.device.lose(lost_blocks(self.core.scheduler.pool))
        return outcome

    def run(self, plan: Plan) -> Sequence[Sampled]:
        """What the device makes of a plan."""
        started = time.perf_counter()
        try:
            return self.device.run(plan)
        finally:
            self.device_seconds += time.perf_counter() - started

    def _without_those_that_fail(
        self, plan: Plan, error: PassFailed
    ) -> tuple[list[Sampled], list[tuple[RequestId, Failure]]]:
        """A plan again, without the requests on which it fails, which end: the others' tokens are what they would be.

        Raises the error where that is not to be had: if the device does not compute at all, if it fails on everybody, or
        with a search of several beams, which remembers what it has chosen.
        """
        cause = error.__cause__ or error
        if self.device.beams:
            raise cause
        broken = self._failing(plan, list(plan.seq_ids))
        self.device.demand_alive()
        if len(broken) == len(plan.seq_ids) > 1:
            raise cause
        scheduler, failure = self.core.scheduler, Failure(f"the model failed on it: {type(cause).__name__}")
        logger.error("a step failed on %d of %d sequences", len(broken), len(plan.seq_ids), exc_info=cause)
        requests = dict.fromkeys(scheduler.seqs[seq_id].request.request.request_id for seq_id in broken)
        for request_id in requests:
            self.core.abort(request_id)  # and not this core's own: the step is not over
        rest, kept = live_part(plan, scheduler.seqs)
        sampled: list[Sampled] = [failure] * len(plan.sample_rows)
        for index, token in zip(kept, self.device.compute(rest) if rest.seq_ids else (), strict=True):
            sampled[index] = token
        return sampled, [(request_id, failure) for request_id in requests]

    def _failing(self, plan: Plan, seq_ids: Sequence[SeqId]) -> list[SeqId]:
        """Those of these sequences on which the device fails, of which there are some. O(log sequences) passes for each."""
        if len(seq_ids) == 1:
            return list(seq_ids)
        found, middle = list[SeqId](), len(seq_ids) // 2
        for half in (seq_ids[:middle], seq_ids[middle:]):
            try:
                self.device.compute(live_part(plan, set(half))[0])
            except MemoryError:
                raise
            except Exception:  # noqa: BLE001  whatever a kernel, a mask or a sampler raises
                found += self._failing(plan, half)
        return found

    def abort(self, request_id: RequestId) -> None:
        live = self.core.scheduler.requests.get(request_id)
        seq_ids = () if live is None else (*live.request.seq_ids, *(seq.seq_id for seq in live.seqs))
        self.core.abort(request_id)
        self._forget(seq_ids)

    def release(self, seq_id: SeqId) -> None:
        self.core.release(seq_id)
        self._forget([seq_id])

    def reset_cache(self) -> bool:
        return self.core.reset_cache()

    def look(self) -> Look:
        return look_at(self.core.scheduler)

    def stats(self) -> Stats:
        scheduler = self.core.scheduler
        counters, pool = scheduler.counters, scheduler.pool
        spared = counters.num_spared_block_steps
        return Stats(
            blocks_prompt_shared=pool.peak_shared,
            blocks_copied=counters.num_blocks_copied,
            num_preemptions=counters.num_preemptions,
            blocks_swapped_out=counters.num_blocks_swapped_out,
            hit_tokens=counters.num_hit_tokens,
            steps=counters.num_steps,
            num_blocks=self.config.num_blocks,
            queried_tokens=counters.num_queried_tokens,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_free_blocks=pool.num_free,
            num_cached_blocks=0 if scheduler.cache is None else scheduler.cache.num_cached,
            blocks_saved=round(spared / max(1, spared + counters.num_block_steps), 4),
            tokens_computed=counters.num_tokens_computed,
            tokens_sampled=counters.num_tokens_sampled,
        )

    def slots(self) -> Slots:
        return slots_of(self.core.scheduler)

    def _tokens_of(self, seq_id: SeqId) -> Sequence[Token]:
        return self.core.scheduler.seqs[seq_id].tokens

    def _give_up(self, plan: Plan) -> None:
        """Somebody interrupted a step, so nobody knows what it has written: no request and no cached block survives."""
        self.core.commit(plan, [Failure("the step was interrupted")] * len(plan.sample_rows))
        for request_id in tuple(self.core.scheduler.requests):
            self.core.abort(request_id)
        self._forget_ended()
        self.core.reset_cache()

    def _forget(self, seq_ids: Sequence[SeqId]) -> None:
        """Sequences that have ended need no sampling, and are no beams; the last ones leave no step in flight."""
        for seq_id in seq_ids:
            self.device.sampling.pop(seq_id, None)
            self.device.beams.pop(seq_id, None)
        self.core.end_idle_steps()

    def _forget_ended(self) -> None:
        """The same when nobody says who they are. O(requests)."""
        requests = self.core.scheduler.requests.values()
        live = {seq_id for each in requests for seq_id in each.request.seq_ids} | self.core.scheduler.seqs.keys()
        self._forget([i for i in (*self.device.sampling, *self.device.beams) if i not in live])


def chosen_device(device: str = "auto") -> tuple[str, str]:
    """The device that the engine takes, and why."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device", device, f"one that is there: {_no_gpu()}")
    if device != "auto":
        return device, "it was asked for"
    if torch.cuda.is_available():
        return "cuda", f"torch finds {torch.cuda.get_device_name()}"
    return "cpu", _no_gpu()


def _no_gpu() -> str:
    """Why there is no GPU."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without GPUs"
    return f"torch {torch.__version__} finds no GPU"


def chosen_dtype(dtype: str) -> str:
    """The type of weights, activations and cache on a GPU."""
    return "bfloat16" if dtype == "auto" else dtype


def cpu_model(
    checkpoint: Checkpoint,
    path: CpuPath,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    threads: int,
    quantization: str | None = None,
) -> LlamaModel | VectorModel:
    """The model for this path."""
    if path.is_vector:
        from optimized.vector_model import VectorModel

        groups = None
        if quantization == "gguf":
            from optimized.gguf_groups import groups_of

            groups = groups_of(checkpoint)
        return VectorModel(checkpoint.config, checkpoint.tensors, threads, quantization == "int8", groups)
    from optimized.llama import LlamaModel

    return LlamaModel(checkpoint.config, checkpoint.tensors, dtype, "cpu", cache_dtype)
