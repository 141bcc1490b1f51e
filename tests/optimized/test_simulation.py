"""Simulated cards under the real scheduler: what is exact is exact, and what the workshop says comes out."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimized.cards import CARDS
from optimized.chart import HEIGHT, LEFT, WIDTH, Curve, Curves, svg
from optimized.contiguous import Allocation, BuddyAllocator, power_of_two_above, reserved_slots
from optimized.engine import EngineCore
from optimized.known_models import cost_of
from optimized.planner import Deployment, Objective, largest_rate, percentile
from optimized.simulated_device import ModelCost, Rates, SimulatedDevice
from optimized.simulation import Gate, Replica, simulate
from optimized.waste import slots_of
from optimized.workload import Arrival, Lengths, PoissonTraffic, fitted, read_arrivals
from optimized.workshop import NAMES, OUTPUT, PROMPT, charts, deployment, traffic
from spec.vocabulary import Config, InvalidConfig, Recovery, Request

SMALL = ModelCost("small", 1e6, 100, 1e3, 0.0, 10.0, 0.0, 0.0, 64)
RATES = Rates(flops=1e9, bandwidth=1e9, overhead_s=1e-4, host_link=1e8)


# --- contiguous memory ------------------------------------------------------------------------------------------------


@given(num_slots=st.integers(1, 200), calls=st.lists(st.integers(-8, 40).filter(bool), max_size=60))
def test_pieces_never_overlap_and_all_come_back(num_slots: int, calls: list[int]) -> None:
    memory, held = BuddyAllocator(num_slots), {}
    for call in calls:
        if call > 0:
            start = memory.reserve(call)
            if start is not None:
                held[start] = call
                assert 0 <= start
                assert start + power_of_two_above(call) <= num_slots
        elif held:
            start = sorted(held)[call % len(held)]
            memory.release(start)
            del held[start]
        spans = sorted((start, start + size) for start, size in held.items())
        assert all(stop <= later for (_, stop), (later, _) in pairwise(spans))
        assert memory.num_reserved == sum(held.values())
    for start in held:
        memory.release(start)
    largest = 1 << (num_slots.bit_length() - 1)
    assert memory.reserve(largest) is not None


def test_external_fragmentation_is_room_that_nobody_can_use() -> None:
    memory = BuddyAllocator(16)
    starts = [memory.reserve(4) for _ in range(4)]
    assert starts == [0, 4, 8, 12]
    memory.release(0)
    memory.release(8)
    assert memory.num_reserved == 8
    assert memory.reserve(8) is None
    memory.release(4)
    assert memory.reserve(8) == 0


def test_what_is_set_aside() -> None:
    sizes = [reserved_slots(kind, 20, 30, 2048) for kind in (Allocation.CONTIGUOUS, Allocation.POW2, Allocation.ORACLE)]
    assert sizes == [2048, 52, 50]
    assert reserved_slots(Allocation.POW2, 2000, 48, 2048) == 2048


def test_thirty_tokens_in_a_slot_of_2048_waste_985_of_a_thousand() -> None:
    here = Deployment(cost_of("llama-2-13b"), CARDS["a100-80gb"], max_model_len=2048, allocation=Allocation.CONTIGUOUS)
    assert here.cost.kv_bytes_per_token == 819_200
    assert round(1 - 30 / here.engine_block_size, 3) == 0.985


# --- where the slots are ----------------------------------------------------------------------------------------------


@given(
    block_size=st.integers(1, 8),
    num_samples=st.integers(1, 3),
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=6),
    prefix_cache=st.booleans(),
)
def test_the_four_classes_add_up_at_every_moment(
    block_size: int, num_samples: int, lengths: list[tuple[int, int]], prefix_cache: bool
) -> None:
    config = Config(
        num_blocks=96, block_size=block_size, max_num_seqs=6, max_num_batched_tokens=16, prefix_cache=prefix_cache
    )
    core = EngineCore(config, SimulatedDevice(SMALL, RATES, block_size))
    for number, (prompt, output) in enumerate(lengths):
        ids = tuple(range(number * num_samples, (number + 1) * num_samples))
        if prompt + output <= 96 * block_size // num_samples - block_size:
            core.add(Request(number, (0,) * prompt, output, ids))
    while core.has_work:
        core.step()
        slots = slots_of(core.scheduler)
        assert min(slots.tokens, slots.reserved, slots.internal, slots.external) >= 0
        assert slots.total == config.num_slots
        stored = {
            (seq.table[position // block_size], position % block_size)
            for request in core.scheduler.running
            for seq in request.seqs
            for position in range(seq.num_computed)
        }
        assert slots.tokens == len(stored)
        assert slots.external == core.scheduler.pool.num_free * block_size
    assert slots_of(core.scheduler).external == config.num_slots


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_pass_takes_the_longer_of_computing_and_reading() -> None:
    slow_memory = SimulatedDevice(SMALL, replace(RATES, bandwidth=1e6), 4)
    core = EngineCore(Config(num_blocks=8, block_size=4), slow_memory)
    core.add(Request(0, (0,) * 5, 2, (0,)))
    plan = core.schedule()
    assert slow_memory.seconds(plan) == pytest.approx((1e6 + 5 * 100) / 1e6 + 1e-4)
    slow_compute = SimulatedDevice(SMALL, replace(RATES, flops=1e5), 4)
    assert slow_compute.seconds(plan) == pytest.approx((5 * 1e3 + 15 * 10.0) / 1e5 + 1e-4)


def test_a_token_is_there_when_its_pass_is_over() -> None:
    device = SimulatedDevice(SMALL, RATES, 4)
    run = simulate([Arrival(2.0, 5, 3)], Replica(Config(num_blocks=8, block_size=4), device))
    [served] = run.served
    assert served.first_token_s == pytest.approx(device.busy_s - 2 * (served.seconds_per_token))
    assert run.end_s == pytest.approx(2.0 + device.busy_s)
    assert run.num_steps == 3


def test_cards_that_share_a_model_compute_faster_and_pay_for_their_sums() -> None:
    cost = cost_of("llama-3-8b")
    one, two = (Deployment(cost, CARDS["h100"], tensor_parallel_size=size) for size in (1, 2))
    assert two.rates.flops == 2 * one.rates.flops
    assert two.cache_bytes > 2 * one.cache_bytes
    assert two.saturation_rate_on_paper(1024, 256) > one.saturation_rate_on_paper(1024, 256)


# --- folded steps -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    lengths=st.lists(
        st.tuples(st.floats(0.0, 0.02), st.integers(1, 20), st.integers(1, 40), st.integers(0, 20)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(32, 60),
    block_size=st.integers(4, 8),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(2, 24),
    recovery=st.sampled_from(Recovery),
    gate=st.sampled_from([Gate(), Gate(in_batches=True), Gate(Allocation.ORACLE, 64), Gate(Allocation.POW2, 100)]),
    pauses=st.lists(st.floats(0.0, 0.05), max_size=3),
    prefix_cache=st.booleans(),
    num_samples=st.integers(1, 2),
)
def test_folded_steps_leave_what_the_same_steps_one_by_one_leave(
    lengths: list[tuple[float, int, int, int]],
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    recovery: Recovery,
    gate: Gate,
    pauses: list[float],
    prefix_cache: bool,
    num_samples: int,
) -> None:
    """To the last bit: times, shares, counters, which block is free in which place, and what the prefix cache holds."""
    num_samples = 1 if gate.num_slots else num_samples
    config = Config(
        num_blocks=num_blocks + (64 if gate.num_slots else 0),
        block_size=block_size,
        max_num_seqs=max(max_num_seqs, num_samples),
        max_num_batched_tokens=budget,
        max_model_len=64,
        num_host_blocks=8,
        recovery=recovery,
        prefix_cache=prefix_cache,
    )
    arrivals = sorted(fitted(Arrival(*each), 64) for each in lengths)
    replicas = [
        Replica(config, SimulatedDevice(SMALL, RATES, block_size), gate, num_samples, lambda _, waits: not waits, folds)
        for folds in (False, True)
    ]
    for until_s in (*sorted(pauses), math.inf):
        for replica in replicas:
            while len(arrivals) > replica.num_offered and arrivals[replica.num_offered].at_s <= until_s:
                replica.offer(arrivals[replica.num_offered])
            replica.advance(until_s)
        one_by_one, folded = replicas
        assert one_by_one.result() == folded.result()
        assert one_by_one.core.snapshot() == folded.core.snapshot()
        assert one_by_one.core.stats() == folded.core.stats()


def test_most_steps_of_a_quiet_engine_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(SMALL, RATES, 4)
    plans: list[object] = []
    monkeypatch.setattr(device, "run", lambda plan: plans.append(plan) or SimulatedDevice.run(device, plan))
    run = simulate([Arrival(0.0, 5, 50)], Replica(Config(num_blocks=16, block_size=4), device))
    assert run.num_steps == 50
    assert len(plans) == 2


# --- baselines --------------------------------------------------------------------------------------------------------

PLATE = Deployment(SMALL, replace(CARDS["l4"], memory=1.1e6), gpu_memory_utilization=1.0, max_model_len=64)


def test_the_longest_contiguous_reservation_is_paging_with_one_block() -> None:
    arrivals = [Arrival(0.001 * number, 3 + number % 7, 1 + number % 9) for number in range(40)]
    paged = replace(PLATE, allocation=Allocation.CONTIGUOUS)
    config = Config(num_blocks=4096, block_size=4, max_model_len=64, max_num_seqs=1024)
    gate = Gate(Allocation.ORACLE, 64 * paged.num_blocks)
    gated = simulate(arrivals, Replica(config, SimulatedDevice(SMALL, PLATE.rates, 4), gate))
    assert len(gated.served) == 40
    run = paged.run(arrivals)
    assert run.peak_running <= paged.num_blocks == 15
    assert len(run.served) == 40


@pytest.mark.parametrize("allocation", Allocation)
@pytest.mark.parametrize("in_batches", [False, True])
def test_everybody_is_served_under_every_allocation(allocation: Allocation, in_batches: bool) -> None:
    arrivals = [Arrival(0.0005 * number, 3 + number % 20, 1 + number % 30) for number in range(60)]
    here = replace(PLATE, allocation=allocation, in_batches=in_batches)
    run = here.run(arrivals)
    assert sorted(each.arrival for each in run.served) == arrivals
    assert math.isclose(sum(run.shares.values()), 1.0)
    assert min(run.shares.values()) >= 0.0


def test_neither_paging_nor_continuous_batching_alone_is_enough() -> None:
    arrivals = [Arrival(0.0, 3, 1 + 37 * number % 60) for number in range(200)]
    ends = {
        (allocation, in_batches): replace(PLATE, allocation=allocation, in_batches=in_batches).run(arrivals).end_s
        for allocation in (Allocation.PAGED, Allocation.CONTIGUOUS)
        for in_batches in (False, True)
    }
    both = ends[Allocation.PAGED, False]
    assert both < ends[Allocation.PAGED, True]
    assert both < ends[Allocation.CONTIGUOUS, False]


# --- the workshop -----------------------------------------------------------------------------------------------------


def test_the_workshop_s_numbers_come_out() -> None:
    contiguous, paged = deployment(Allocation.CONTIGUOUS), deployment(Allocation.PAGED)
    assert round(paged.cache_bytes / 1e9) == 56
    assert contiguous.requests_that_fit(PROMPT, OUTPUT) == 52
    assert paged.requests_that_fit(PROMPT, OUTPUT) == 333
    assert paged.num_blocks == 26_674
    rates = [here.saturation_rate_on_paper(PROMPT, OUTPUT) for here in (contiguous, paged)]
    assert [round(rate, 1) for rate in rates] == [13.5, 20.6]
    assert rates[0] < 18 < rates[1]


def test_the_workshop_s_shares_come_out_of_the_engine() -> None:
    """The shares of the reserved cache that hold tokens, which hardly depend on the draw; no waiting time is asserted."""
    arrivals = [arrival for arrival in traffic().arrivals(0) if arrival.at_s < 15.0]
    shares = {
        kind: deployment(kind).run(arrivals).share_of_reserved for kind in (Allocation.CONTIGUOUS, Allocation.PAGED)
    }
    assert 0.14 < shares[Allocation.CONTIGUOUS] < 0.17
    assert round(shares[Allocation.PAGED], 2) == 0.99


# --- questions --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_largest_rate_keeps_what_was_promised() -> None:
    here = replace(PLATE, max_num_seqs=8)
    load = PoissonTraffic(50.0, 0.1, Lengths("fixed", 10), Lengths("exponential", 8), 64)
    objective = Objective.read("ttft=0.02")
    rate = largest_rate(here, load, objective)
    assert 0.0 < rate <= here.saturation_rate(load)
    assert objective.holds(here.run(replace(load, rate=rate).arrivals(0)))
    assert largest_rate(here, load, Objective.read("ttft=0.000001")) == 0.0
    short = replace(load, duration_s=1e-6)  # at a low rate nobody would come in it
    assert largest_rate(here, short, objective) > 0.0


@pytest.mark.slow
def test_the_saturation_rate_is_that_of_a_full_engine() -> None:
    """With a crowd hardly larger than the engine, the short answers of the first batch passed for the rate: 39 a second
    came out where the first token begins to wait at 24."""
    contiguous, paged = (deployment(kind).saturation_rate(traffic()) for kind in NAMES.values())
    assert 13.5 < contiguous < 16
    assert 20.6 < paged < 24


def test_the_pictures_of_the_workshop_come_from_its_facts() -> None:
    spread = {"median": 2.0, "low": 1.0, "high": 4.0}
    one = {
        "requests_that_fit": 52,
        "median_ttft_s_at_rates": {"2": spread, "6": spread},
        "saturation_rate_on_paper": 5.0,
    }
    drawn = svg(charts({"contiguous": one, "paged": {**one, "requests_that_fit": 333}}), "Running out of cache")
    words = ElementTree.fromstring(drawn).findtext("{http://www.w3.org/2000/svg}desc")
    assert words is not None
    assert "contiguous 52, paged 333" in words
    assert "paged: 2 at 2, 2 at 6." in words
    assert "contiguous saturated at 5." in words


def test_a_chart_has_room_for_every_point() -> None:
    curve = Curve("rising", ((1.0, 0.002, 0.001, 0.003), (9.0, 70.0, 50.0, 90.0)))
    for log in (False, True):
        drawn = svg([Curves("A chart", "x", "y", (curve, curve), ((4.0, "here"),), log)], "a chart")
        places = re.findall(r"([\d.-]+) ([\d.-]+)(?=[LZ\"])", " ".join(re.findall(r'd="M([^"hv]*")', drawn)))
        assert len(places) == 2 * (4 + 2)
        assert all(LEFT <= float(x) <= WIDTH and 0.0 <= float(y) <= HEIGHT + 60 for x, y in places)


def test_traffic_is_a_function_of_its_seed() -> None:
    load = PoissonTraffic(20.0, 10.0, Lengths("exponential", 100), Lengths("uniform", 50), 512, 32, 0.5)
    arrivals = load.arrivals(1)
    assert arrivals == load.arrivals(1) != load.arrivals(2)
    assert 140 < len(arrivals) < 270
    assert all(each.prompt_len + each.output_len <= 512 for each in arrivals)
    assert {each.shared_len > 0 for each in arrivals} == {True, False}
    assert 40 < fmean(each.output_len for each in arrivals) < 60


def test_a_shared_prefix_is_stored_once_and_hit() -> None:
    here = replace(PLATE, enable_prefix_caching=True, block_size=4)
    load = PoissonTraffic(200.0, 1.0, Lengths("fixed", 20), Lengths("fixed", 4), 64, 16, 1.0)
    run = here.run(load.arrivals(0))
    assert run.num_hit_tokens / run.num_queried_tokens > 0.6


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Deployment(cost_of("llama-3-70b"), CARDS["h100"]), "the weights take 141.11 GB"),
        (lambda: PoissonTraffic(0.0, 1.0, Lengths("fixed", 1), Lengths("fixed", 1), 8), "rate is 0.0, it must be more"),
        (lambda: Lengths.read("normal:5", "prompt_len"), "prompt_len is 'normal:5'"),
        (lambda: Lengths.read("nan", "prompt_len"), "prompt_len is 'nan'"),
        (lambda: Objective.read("latency=1"), "slo is 'latency=1'"),
        (lambda: cost_of("gpt-5"), "model is 'gpt-5', it must be one of smollm2-135m"),
        (lambda: replace(PLATE, num_samples=2, allocation=Allocation.ORACLE), "n is 2, it must be 1 with"),
    ],
)
def test_what_makes_no_sense_is_said_with_its_numbers(call: object, sentence: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidConfig) as caught:
        call()
    assert sentence in str(caught.value)


def test_a_workload_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    lines = [
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 5, "n": 1, "arrival_s": 2.5},
        {"prompt_len": 60, "max_tokens": 9},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert read_arrivals(path, 64) == [Arrival(0.0, 60, 4), Arrival(2.5, 3, 5)]
    path.write_text(json.dumps(lines[0]) + '\n{"prompt_len": 0, "max_tokens": 3}')
    with pytest.raises(InvalidConfig, match="prompt_len in load.jsonl line 2 is 0"):
        read_arrivals(path, 64)
    path.write_text('{"prompt_len": 64, "max_tokens": 3}')
    with pytest.raises(InvalidConfig, match=r"prompt_len in load.jsonl line 1 is 64, it must be below max_model_len"):
        read_arrivals(path, 64)
    path.write_text("{")
    with pytest.raises(InvalidConfig, match="load.jsonl line 1"):
        read_arrivals(path, 64)


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (1, 50, 51, 99, 100)] == [1.0, 2.0, 3.0, 4.0, 4.0]
