"""The simulator beside arithmetic that is done again here, from the words of the scheduler and without its code."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimized.cards import CARDS
from optimized.contiguous import Allocation
from optimized.planner import Deployment
from optimized.simulated_device import ModelCost, Rates, SimulatedDevice
from optimized.simulation import Replica, simulate
from optimized.workload import Arrival
from spec.vocabulary import Config

COST = ModelCost("toy", 8e6, 1000, 2e4, 3e4, 5e2, 0.0, 0.0, 256)
RATES = Rates(flops=1e9, bandwidth=1e9, overhead_s=5e-4, host_link=1e9)


def pass_s(parts: list[tuple[int, int]], num_samples: int) -> float:
    """A pass that computes so many tokens of sequences which then are so long: the slower of arithmetic and memory."""
    num_pairs = sum(length - back for count, length in parts for back in range(count))
    flops = 2e4 * sum(count for count, _ in parts) + 3e4 * num_samples + 5e2 * num_pairs
    return max(flops / 1e9, (8e6 + 1000 * sum(length for _, length in parts)) / 1e9) + 5e-4


def served_by_hand(arrivals: list[Arrival], budget: int) -> list[tuple[float, float]]:
    """When each has its first and its last token, if there is always room: first who runs, then who waits, up to the budget."""
    now, begun = 0.0, list[int]()
    done, got, first, last = [0] * len(arrivals), [0] * len(arrivals), {}, {}
    while len(last) < len(arrivals):
        coming = [i for i, each in enumerate(arrivals) if i not in begun]
        begun += [i for i in coming if arrivals[i].at_s <= now]
        live, left, parts, counts = (
            [i for i in begun if i not in last],
            budget,
            list[tuple[int, int]](),
            dict[int, int](),
        )
        if not live:
            now = min(arrivals[i].at_s for i in coming)
            continue
        for i in live:
            count = min(arrivals[i].prompt_len + got[i] - done[i], left)
            if count:
                counts[i], left = count, left - count
                done[i] += count
                parts.append((count, done[i]))
        sampled = [i for i in counts if done[i] == arrivals[i].prompt_len + got[i]]
        now += pass_s(parts, len(sampled))
        for i in sampled:
            got[i] += 1
            first.setdefault(i, now)
            if got[i] == arrivals[i].output_len:
                last[i] = now
    return [(first[i], last[i]) for i in range(len(arrivals))]


def simulated(arrivals: list[Arrival], budget: int) -> list[tuple[float, float]]:
    config = Config(num_blocks=4096, block_size=4, max_num_seqs=64, max_num_batched_tokens=budget)
    run = simulate(arrivals, Replica(config, SimulatedDevice(COST, RATES, 4)))
    assert sum(each.arrival.output_len for each in run.served) == run.num_output_tokens
    by_arrival = {
        each.arrival: (each.arrival.at_s + each.first_token_s, each.arrival.at_s + each.latency_s)
        for each in run.served
    }
    return [by_arrival[each] for each in arrivals]


def test_three_requests_whose_passes_can_be_written_down() -> None:
    """The second one comes in the first pass of the first and waits for its end; the third finds an idle engine."""
    arrivals = [Arrival(0.0, 4, 3), Arrival(0.001, 6, 2), Arrival(9.0, 2, 1)]
    one = pass_s([(4, 4)], 1)
    two = one + pass_s([(1, 5), (6, 6)], 2)
    three = two + pass_s([(1, 6), (1, 7)], 2)
    assert one == pytest.approx((8e6 + 4 * 1000) / 1e9 + 5e-4)
    assert simulated(arrivals, 64) == [
        pytest.approx((one, three)),
        pytest.approx((two, three)),
        pytest.approx((9.0 + pass_s([(2, 2)], 1),) * 2),
    ]


@given(
    lengths=st.lists(
        st.tuples(st.floats(0.0, 0.2), st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=8, unique=True
    ),
    budget=st.integers(8, 64),
)
def test_times_are_those_of_passes_that_are_added_up_here(lengths: list[tuple[float, int, int]], budget: int) -> None:
    arrivals = sorted(Arrival(*each) for each in lengths)
    for ours, by_hand in zip(simulated(arrivals, budget), served_by_hand(arrivals, budget), strict=True):
        assert ours == pytest.approx(by_hand)


# --- what fits ---------------------------------------------------------------------------------------------------------


def kinds(memory_tokens: int, block_size: int = 4) -> Iterator[Deployment]:
    """Paged, powers of two, and the longest: each with room for so many tokens."""
    card = replace(CARDS["l4"], memory=COST.weight_bytes + memory_tokens * COST.kv_bytes_per_token)
    for allocation in (Allocation.PAGED, Allocation.POW2, Allocation.CONTIGUOUS):
        yield Deployment(
            COST,
            card,
            gpu_memory_utilization=1.0,
            block_size=block_size,
            max_model_len=256,
            max_num_seqs=64,
            allocation=allocation,
        )


@given(memory=st.integers(256, 4000), more=st.integers(0, 2000), prompt=st.integers(1, 200), output=st.integers(1, 56))
def test_more_memory_never_holds_fewer_requests(memory: int, more: int, prompt: int, output: int) -> None:
    for small, large in zip(kinds(memory), kinds(memory + more), strict=True):
        assert small.requests_that_fit(prompt, output) <= large.requests_that_fit(prompt, output)


@given(memory=st.integers(256, 4000), prompt=st.integers(4, 200), output=st.integers(1, 56))
def test_pages_hold_the_most_and_the_longest_reservations_the_fewest(memory: int, prompt: int, output: int) -> None:
    """For sequences that fill a block: a shorter one wastes more of it than of the next power of two."""
    paged, pow2, contiguous = (each.requests_that_fit(prompt, output) for each in kinds(memory))
    assert paged >= pow2 >= contiguous


@pytest.mark.slow
@given(
    lengths=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 56)), min_size=1, max_size=20),
    memory=st.integers(256, 1000),
)
def test_every_token_is_computed_once_unless_somebody_is_preempted(lengths: list[tuple[int, int]], memory: int) -> None:
    arrivals = [Arrival(0.001 * number, *each) for number, each in enumerate(lengths)]
    for here in kinds(memory):
        replica = here.replica()
        run, counters = simulate(arrivals, replica), replica.core.stats()
        assert sorted(each.arrival for each in run.served) == arrivals
        assert counters["num_tokens_sampled"] == sum(output for _, output in lengths)
        stored = sum(prompt + output - 1 for prompt, output in lengths)
        assert counters["num_tokens_computed"] >= stored
        assert (counters["num_tokens_computed"] == stored) == (run.num_preemptions == 0)
        assert counters["num_free_blocks"] == replica.core.config.num_blocks
