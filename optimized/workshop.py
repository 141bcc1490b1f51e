"""The workshop *Running out of cache*: Llama 3 8B on one H100, contiguous reservation against paging.

Its text gives mean lengths of 1,000 and 250 tokens, its simulation uses 1,024 and 256; these are the simulation's. Its
arithmetic takes two operations for each of the 8.03 thousand million weights and each token, embedding and head included,
and nothing for activations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from optimized.cards import CARDS
from optimized.chart import Bars, Curve, Curves
from optimized.contiguous import Allocation
from optimized.known_models import cost_of
from optimized.planner import Deployment, Spread, percentile, summary
from optimized.simulation import Run
from optimized.workload import Lengths, PoissonTraffic

PROMPT, OUTPUT = 1024, 256
NUM_WEIGHTS = 8.03e9
RATE, DURATION_S, NUM_SEEDS = 18.0, 60.0, 20
RATES = (2.0, 6.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0, 24.0, 28.0)
NAMES = {"contiguous": Allocation.CONTIGUOUS, "paged": Allocation.PAGED}


def deployment(allocation: Allocation) -> Deployment:
    """The card of the workshop, with the rates that it assumes: 60 % of the operations, 80 % of the bandwidth, 0.2 ms a pass."""
    cost = cost_of("llama-3-8b")
    cost = replace(cost, weight_bytes=2 * NUM_WEIGHTS, flops_per_token=2 * NUM_WEIGHTS, flops_per_sample=0.0)
    # Every prompt that has arrived is computed in the next pass, beside the decodes.
    return Deployment(cost, CARDS["h100"], allocation=allocation, max_num_batched_tokens=1 << 16)


def traffic(rate: float = RATE) -> PoissonTraffic:
    """Requests of the workshop, for one minute."""
    return PoissonTraffic(rate, DURATION_S, Lengths("exponential", PROMPT), Lengths("exponential", OUTPUT), 8192)


def workshop(
    num_seeds: int = NUM_SEEDS, rates: Sequence[float] = RATES, progress: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Its numbers and both of its pictures, as facts. The draws differ from its own; medians come with their quartiles."""
    facts: dict[str, object] = {}
    fit = {}
    for name, allocation in NAMES.items():
        here = deployment(allocation)
        fit[name] = here.requests_that_fit(PROMPT, OUTPUT)
        runs = [_run(here, RATE, seed, name, progress) for seed in range(num_seeds)]
        progress(f"{name}, saturated")
        facts[name] = {
            "requests_that_fit": fit[name],
            "share_of_a_reservation_in_use": _share(here),
            "median_ttft_s": Spread.of([_median_ttft(run) for run in runs]).facts,
            "saturation_rate_on_paper": here.saturation_rate_on_paper(PROMPT, OUTPUT),
            "saturation_rate": here.saturation_rate(traffic()),
            "at_the_rate": summary(runs),
            "median_ttft_s_at_rates": {
                f"{rate:g}": Spread.of(
                    [_median_ttft(_run(here, rate, seed, name, progress)) for seed in range(min(3, num_seeds))]
                ).facts
                for rate in rates
            },
        }
    here = deployment(Allocation.PAGED)
    return {
        "model": here.cost.name,
        "gpu": here.card.name,
        "cache_bytes": here.cache_bytes,
        "kv_bytes_per_token": here.cost.kv_bytes_per_token,
        "rate": RATE,
        "duration_s": DURATION_S,
        "seeds": num_seeds,
        "ratio": fit["paged"] / fit["contiguous"],
        **facts,
    }


def charts(facts: dict[str, Any]) -> list[Bars | Curves]:
    """Both pictures of the workshop, from its facts. The saturation rates are those in closed form, one prompt a pass."""
    fit = tuple((name, float(facts[name]["requests_that_fit"])) for name in NAMES)
    curves = tuple(
        Curve(
            name,
            tuple(
                (float(rate), each["median"], each["low"], each["high"])
                for rate, each in facts[name]["median_ttft_s_at_rates"].items()
            ),
        )
        for name in NAMES
    )
    marks = tuple((facts[name]["saturation_rate_on_paper"], f"{name} saturated") for name in NAMES)
    return [
        Bars("Requests of 1,024 + 256 tokens that fit at once", fit),
        Curves(
            "Median time to the first token, with quartiles", "requests a second", "seconds", curves, marks, log=True
        ),
    ]


def _run(here: Deployment, rate: float, seed: int, name: str, progress: Callable[[str], None]) -> Run:
    progress(f"{name}, {rate:g} requests a second, draw {seed + 1}")
    return here.run(traffic(rate).arrivals(seed))


def _median_ttft(run: Run) -> float:
    return percentile([each.first_token_s for each in run.served], 50)


def _share(here: Deployment) -> float:
    """The part of what one request of the mean lengths sets aside that its tokens fill; in pages half of the last is left."""
    length = PROMPT + OUTPUT
    if here.allocation is Allocation.CONTIGUOUS:
        return length / here.max_model_len
    return length / (length + statistics.fmean(range(here.block_size)))
