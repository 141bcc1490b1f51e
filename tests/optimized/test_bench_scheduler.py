"""The benchmark of the bookkeeping: it serves what it says, and memory, which is no matter of luck, keeps its limits."""

import json
import subprocess
import sys

import pytest

from optimized.bench_scheduler import bench_lookup, bench_scheduler, workload


@pytest.mark.slow
def test_all_of_the_workload_is_served() -> None:
    requests = workload(prefix_cache=False, num_requests=12)
    facts = bench_scheduler(1024, num_requests=12)
    assert facts["tokens_out"] >= sum(request.max_tokens for request in requests)
    assert facts["scheduled_tokens"] >= sum(len(request.prompt) + request.max_tokens - 1 for request in requests)
    assert bench_scheduler(1024, prefix_cache=True, num_requests=4)["prefix"] is True


@pytest.mark.slow
def test_who_waits_behind_the_workload_is_never_served_and_changes_no_step() -> None:
    few, many = (bench_scheduler(1024, num_waiting=count, num_requests=12, max_num_seqs=4) for count in (1, 50))
    counts = ("steps", "scheduled_tokens", "tokens_out")
    assert [few[name] for name in counts] == [many[name] for name in counts]
    assert many["steps"] > 10


def test_a_pool_and_its_cache_cost_the_bytes_that_are_promised() -> None:
    """In a process of its own: what other threads of this one take meanwhile would be counted too."""
    asked = "import json; from optimized.bench_scheduler import bench_memory; print(json.dumps(bench_memory(8192)))"
    facts = json.loads(subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True).stdout)
    assert facts["bytes_per_block"] <= 32
    assert facts["bytes_per_cached_block"] <= 400


def test_a_look_up_is_timed_cold_and_warm() -> None:
    assert bench_lookup(2000).keys() == {"lookup_cold_ms", "lookup_warm_ms"}
