"""What the bookkeeping costs, without a model: the time of ``schedule`` and ``commit`` alone, over a fixed workload.

The work is that of the script for vLLM's scheduler in ``tests/peers``: 1,000 requests with prompts of 64 to 1,024 tokens and
answers of 16 to 256, at most 256 sequences and 8,192 tokens in a step, blocks of 16. With a prefix cache every prompt begins
with the same 512 tokens.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable

from optimized.scheduler import Scheduler
from spec.vocabulary import Config, Request, Token

NUM_REQUESTS, VOCAB_SIZE, SHARED_LEN, LONG_PROMPT = 1000, 32_000, 512, 100_000


def limits(num_blocks: int, prefix_cache: bool, max_num_seqs: int = 256) -> Config:
    """The limits of the engine."""
    return Config(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=1 << 20,
        prefix_cache=prefix_cache,
    )


def workload(prefix_cache: bool, num_requests: int = NUM_REQUESTS) -> list[Request]:
    """The requests, the same every time."""
    draw = random.Random(0)
    shared = [draw.randrange(VOCAB_SIZE) for _ in range(SHARED_LEN)] if prefix_cache else []
    requests = []
    for number in range(num_requests):
        prompt = shared + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(64, 1024))]
        requests.append(Request(number, tuple(prompt), draw.randint(16, 256), (number,)))
    return requests


def bench_scheduler(
    num_blocks: int = 8192,
    prefix_cache: bool = False,
    num_waiting: int = 0,
    num_requests: int = NUM_REQUESTS,
    max_num_seqs: int = 256,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, object]:
    """Serve the workload, with so many more requests queued behind it, and say what a token and a step cost.

    The queued ones are never served: the clock stops when the workload is done or, if some are queued, when all of the
    workload runs.
    """
    started = time.perf_counter()
    scheduler = Scheduler(limits(num_blocks, prefix_cache, max_num_seqs))
    startup_s = time.perf_counter() - started
    for request in workload(prefix_cache, num_requests):
        scheduler.add(request)
    prompt: tuple[Token, ...] = (1,)
    for number in range(num_waiting):
        scheduler.add(Request(num_requests + number, prompt, 1, (num_requests + number,)))
    gc.collect()  # what it took to make the requests is not the scheduler's time
    spent, num_steps, num_out, num_scheduled, left = 0.0, 0, 0, 0, num_requests
    while left and (not num_waiting or len(scheduler.waiting) > num_waiting):
        before = time.perf_counter()
        plan = scheduler.schedule()
        spent += time.perf_counter() - before
        tokens: tuple[Token, ...] = (7,) * len(plan.sample_rows)
        before = time.perf_counter()
        outcome = scheduler.commit(plan, tokens)
        spent += time.perf_counter() - before
        left -= sum(seq_id < num_requests for seq_id, _ in outcome.finished)
        num_steps, num_out, num_scheduled = num_steps + 1, num_out + len(tokens), num_scheduled + plan.num_tokens
        if num_steps % 100 == 0:
            progress(f"{num_requests - left} of {num_requests} requests")
    return {
        "engine": "kvproof-scheduler",
        "prefix": prefix_cache,
        "num_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "waiting_behind": num_waiting,
        "steps": num_steps,
        "scheduled_tokens": num_scheduled,
        "tokens_out": num_out,
        "us_per_token_out": round(1e6 * spent / num_out, 2),
        "us_per_step": round(1e6 * spent / num_steps, 1),
        "preemptions": scheduler.counters.num_preemptions,
        "startup_s": round(startup_s, 4),
    }


def bench_lookup(prompt_len: int = LONG_PROMPT) -> dict[str, float]:
    """How long the first step of a long prompt takes to schedule when nothing of it is cached, and when all is.

    The second time, hits are all but the last block, and no more is left than a token to compute.
    """
    config = limits(prompt_len // 16 * 2 + 64, prefix_cache=True)
    scheduler, prompt, found = Scheduler(config), tuple(range(prompt_len)), {}
    for number, name in enumerate(("lookup_cold_ms", "lookup_warm_ms")):
        before = time.perf_counter()
        scheduler.add(Request(number, prompt, 1, (number,)))
        plan = scheduler.schedule()
        found[name] = round(1e3 * (time.perf_counter() - before), 2)
        while True:
            scheduler.commit(plan, (7,) * len(plan.sample_rows))
            if not scheduler.requests:
                break
            plan = scheduler.schedule()
    return found


def bench_memory(num_blocks: int) -> dict[str, float]:
    """The bytes of Python memory that a pool takes for each of its blocks, and for each block in its prefix cache."""
    tracemalloc.start()
    scheduler = Scheduler(limits(num_blocks, prefix_cache=True))
    empty, _ = tracemalloc.get_traced_memory()
    count = min(num_blocks - 1, 4096)
    scheduler.add(Request(0, tuple(range(count * 16)), 1, (0,)))
    while scheduler.requests:
        plan = scheduler.schedule()
        scheduler.commit(plan, (7,) * len(plan.sample_rows))
    del plan
    full, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "bytes_per_block": round(empty / num_blocks, 1),
        "bytes_per_cached_block": round((full - empty) / count, 1),
    }
