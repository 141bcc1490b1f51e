"""The benchmark of the bookkeeping: it serves what it says, and memory, which is no matter of luck, keeps its limits."""

from optimized.bench_scheduler import bench_lookup, bench_memory, bench_scheduler, workload


def test_all_of_the_workload_is_served_and_nothing_behind_it() -> None:
    requests = workload(prefix_cache=False, num_requests=12)
    facts = bench_scheduler(1024, num_waiting=50, num_requests=12)
    assert facts["tokens_out"] >= sum(request.max_tokens for request in requests)
    assert facts["scheduled_tokens"] >= sum(len(request.prompt) + request.max_tokens - 1 for request in requests)
    assert facts["waiting_behind"] == 50
    assert bench_scheduler(1024, prefix_cache=True, num_requests=4)["prefix"] is True


def test_a_pool_and_its_cache_cost_the_bytes_that_are_promised() -> None:
    facts = bench_memory(8192)
    assert facts["bytes_per_block"] <= 32
    assert facts["bytes_per_cached_block"] <= 400


def test_a_look_up_is_timed_cold_and_warm() -> None:
    assert bench_lookup(2000).keys() == {"lookup_cold_ms", "lookup_warm_ms"}
