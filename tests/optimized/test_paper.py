"""The paper's numbers that need no GPU: what is exact is exact, and what was simulated lies where it was published."""

import json
from itertools import product
from pathlib import Path

import pytest

from optimized import workshop
from optimized.chart import describe
from optimized.contiguous import Allocation
from optimized.paper import (
    KINDS,
    MEANS,
    OPT_13B,
    RATIOS,
    baseline_charts,
    beside,
    charts,
    deployment,
    saved_by_samples,
    shares_in_use,
)
from optimized.simulated_beams import saved_by_beams as beam_savings
from optimized.simulated_device import SimulatedDevice
from optimized.simulation import Replica, simulate
from optimized.workload import Arrival
from spec.vocabulary import Config


def test_table_1_and_the_seven_requests_of_figure_13() -> None:
    assert OPT_13B.kv_bytes_per_token == 819_200
    assert deployment().num_slots == 15_728
    assert deployment(Allocation.CONTIGUOUS).requests_that_fit(*MEANS["ShareGPT"]) == 7


def test_a_distance_is_a_part_of_what_was_published() -> None:
    assert beside(4.0, 3.0) == {"published": 4.0, "ours": 3.0, "distance": -0.25}


def test_only_the_moments_that_count_are_in_the_means() -> None:
    """Two requests one after the other, for want of a seat; while the second waits, one runs."""
    here = deployment()
    arrivals = [Arrival(0.0, 16, 10), Arrival(0.0, 160, 5)]
    config = Config(num_blocks=16, block_size=16, max_num_seqs=1, max_model_len=2048)
    crowded, everything = (
        simulate(arrivals, Replica(config, SimulatedDevice(OPT_13B, here.rates, 16), counted=counted))
        for counted in (lambda _, waits: waits, lambda _, waits: True)
    )
    assert crowded.counted_s < everything.counted_s == pytest.approx(everything.busy_s)
    assert crowded.shares["tokens"] < everything.shares["tokens"]


def test_the_pictures_say_their_numbers() -> None:
    facts = {
        "figure_2_share_of_the_cache_in_use": {name: beside(0.5, 0.25) for name in KINDS},
        "figure_18_block_sizes": {"16": {"ShareGPT_wasted": 0.04, "Alpaca_wasted": 0.2}},
    }
    facts["figure_18_block_sizes"]["16"] |= {f"{name}_table_entries": 5 for name in MEANS}
    facts["figure_19_recovery"] = {"16": {"swap_s": 0.5, "recompute_s": 0.25}}
    bars, curves, tables, back = charts(facts)
    assert "ShareGPT: 5 at 16." in describe(tables)
    assert "swap: 0.5 at 16. recompute: 0.25 at 16." in describe(back)
    assert "paged, published 50, paged, ours 25." in describe(bars)
    assert "ShareGPT: 4 at 16. Alpaca: 20 at 16." in describe(curves)
    row = {"requests_that_fit": 7, "requests_per_s": 1.0, "largest_rate": 0.5}
    assert [describe(each).rpartition(": ")[2] for each in baseline_charts({"static": row, "other": 3})] == [
        "static 7.",
        "static 1.",
        "static 0.5.",
    ]


@pytest.mark.slow
def test_figure_2_comes_out_of_the_allocations() -> None:
    shares = [each["ours"] for each in shares_in_use().values()]
    assert shares == sorted(shares)
    assert 0.2 < shares[0] < 0.3
    assert 0.95 < shares[-1] < 0.98


@pytest.mark.slow
def test_figure_15_more_samples_save_more() -> None:
    saved = [each["ours"] for each in saved_by_samples().values()]
    assert 0.06 < saved[0] < saved[1] < saved[2] < 0.15


def test_figure_15_what_beams_share() -> None:
    """A beam step of two that come from one and the same: all blocks but the tails are shared."""
    config = Config(num_blocks=64, block_size=4, max_model_len=256)
    few, many = (beam_savings(config, [Arrival(0.0, 20, 30)], width, 10.0) for width in (2, 4))
    assert 0.3 < few < 0.5 < many < 0.75
    assert few == beam_savings(config, [Arrival(0.0, 20, 30)], 2, 10.0)
    assert beam_savings(config, [Arrival(0.0, 20, 30)], 1, 10.0) == 0.0


def test_figure_19_small_blocks_make_swapping_slow_and_recomputing_no_slower() -> None:
    devices = [deployment(block_size=size).replica().device for size in (1, 16, 256)]
    swaps = [512 // size * device.swap_seconds for size, device in zip((1, 16, 256), devices, strict=True)]
    assert swaps[0] > 10 * swaps[1] > 10 * swaps[2] > 0.0
    assert len({device.pass_seconds(512, 1, 512 * 513 // 2, 512) for device in devices}) == 1


def test_what_the_book_recorded_comes_out_again() -> None:
    """What is cheap to compute, exactly; the rest of the recording is as long as its commands."""
    recorded = json.loads((Path(__file__).parents[2] / "docs/capacity.json").read_text())
    assert recorded["paper"]["facts"]["slots"] == deployment().num_slots
    for name, kind in workshop.NAMES.items():
        facts, here = recorded["workshop"]["facts"][name], workshop.deployment(kind)
        assert facts["requests_that_fit"] == here.requests_that_fit(workshop.PROMPT, workshop.OUTPUT)
        on_paper = here.saturation_rate_on_paper(workshop.PROMPT, workshop.OUTPUT)
        assert facts["saturation_rate_on_paper"] == pytest.approx(on_paper, rel=1e-4)
    for name, kind in KINDS.items():
        row = recorded["baselines"]["facts"][f"continuous, {name}"]
        assert row["requests_that_fit"] == deployment(kind).requests_that_fit(*MEANS["ShareGPT"])
    assert recorded["baselines"]["facts"]["published_ratios"] == {f"over {name}": text for name, text in RATIOS.items()}


def test_every_position_of_the_sliders_was_recorded() -> None:
    recorded = json.loads((Path(__file__).parents[2] / "docs/capacity_explorer.json").read_text())
    lists = (recorded[name] for name in ("allocations", "prompts", "outputs"))
    assert list(recorded["runs"]) == ["|".join(map(str, position)) for position in product(*lists)]
    for each in recorded["runs"].values():
        assert len(each["points"]) == len(recorded["rates"])
        assert all(sum(point[2:]) == pytest.approx(1.0, abs=0.01) for point in each["points"])
    fit = [recorded["runs"][f"{name}|1024|256"]["fit"] for name in ("contiguous", "blocks of 16")]
    assert fit == [52, 333]
