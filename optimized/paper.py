"""What follows from bookkeeping alone in Kwon et al. 2023: the published numbers, this engine's, and the distance.

OPT-13B on one A100 of 40 GB, with the paper's room for K and V. The paper replays lengths of ShareGPT and Alpaca; here
they are synthesized: exponential with the means that its figure 11 gives, cut at 2,048 tokens. Its own engine took longer
for a pass than the roofline does, so where a number depends on time (figure 13) fewer requests run at once here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from optimized.cards import CARDS
from optimized.chart import Bars, Curve, Curves
from optimized.contiguous import Allocation
from optimized.planner import Deployment, Objective, largest_rate
from optimized.pool import blocks_needed
from optimized.simulated_beams import saved_by_beams as beam_savings
from optimized.simulated_device import ModelCost
from optimized.workload import Lengths, PoissonTraffic

LAYERS, HIDDEN, DTYPE_BYTES = 40, 5120, 2
OPT_13B = ModelCost(
    name="opt-13b",
    weight_bytes=26e9,
    kv_bytes_per_token=2 * LAYERS * HIDDEN * DTYPE_BYTES,
    flops_per_token=2.0 * LAYERS * 12 * HIDDEN**2,
    flops_per_sample=2.0 * 50_272 * HIDDEN,
    flops_per_pair=4.0 * LAYERS * HIDDEN,
    reduced_bytes_per_token=0.0,
    activation_bytes_per_token=0.0,
    max_model_len=2048,
    pieces_per_block=2 * LAYERS,
)
"""26 GB of weights (figure 1); four matrices of attention and two of a layer four times as wide."""
KV_BYTES = 12 * 2**30
"""Table 1: 12 GB and 15.7 K slots of 800 KiB."""
MEANS = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}
RATES = {"ShareGPT": 2.0, "Alpaca": 30.0}
KINDS = {
    "Orca (Max)": Allocation.CONTIGUOUS,
    "Orca (Pow2)": Allocation.POW2,
    "Orca (Oracle)": Allocation.ORACLE,
    "paged": Allocation.PAGED,
}
SHARES_IN_USE = dict(zip(KINDS, (0.204, 0.268, 0.382, 0.963), strict=True))
BATCHED = {
    "ShareGPT": dict(zip(KINDS, (7.00, 9.81, 13.62, 30.42), strict=True)),
    "Alpaca": dict(zip(KINDS, (7.00, 43.24, 72.75, 132.44), strict=True)),
}
SAVED_BY_SAMPLES = {2: 0.0609, 4: 0.0853, 6: 0.0979}
SAVED_BY_BEAMS = {2: 0.3756, 4: 0.5313, 6: 0.5516}
PERPLEXITIES = (3.0, 10.0, 30.0)
"""How uncertain a next token is where beams are simulated: the middle one counts, the others show how little it matters."""
NUM_SEARCHES = 90
RECOVERED_TOKENS = 512
SWAP_BYTES = 64 * 2**30
BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
RATIOS = {
    "continuous, Orca (Oracle)": "1.7 to 2.7",
    "continuous, Orca (Max)": "2.7 to 8",
    "static, Orca (Max)": "up to 22",
}
"""Figure 12, with ShareGPT: how many times the rate of each at the same latency; the last is FasterTransformer."""
NORMALIZED_S = 0.1
"""The latency for each token of the answer at which rates are compared. The paper compares curves; the value is ours."""
Say = Callable[[str], None]


def deployment(allocation: Allocation = Allocation.PAGED, block_size: int = 16, num_samples: int = 1) -> Deployment:
    """The memory of the paper under one of its allocations."""
    card = replace(CARDS["a100-40gb"], memory=OPT_13B.weight_bytes + KV_BYTES)
    return Deployment(
        OPT_13B,
        card,
        gpu_memory_utilization=1.0,
        block_size=block_size,
        max_model_len=2048,
        max_num_seqs=256,
        max_num_batched_tokens=2560,
        allocation=allocation,
        num_samples=num_samples,
    )


def traffic(name: str, rate: float | None = None, duration_s: float = 300.0) -> PoissonTraffic:
    """Requests with the means of a data set; at the rate of figure 13, if no other is asked for."""
    prompt, output = (Lengths("exponential", mean) for mean in MEANS[name])
    return PoissonTraffic(RATES[name] if rate is None else rate, duration_s, prompt, output, 2048)


def paper(progress: Say = lambda _: None) -> dict[str, Any]:
    """All of it, as facts."""
    return {
        "model": OPT_13B.name,
        "slots": deployment().num_slots,
        "lengths": "exponential with the published means, cut at 2,048 tokens",
        "figure_2_share_of_the_cache_in_use": shares_in_use(progress),
        "figure_13_mean_batched_requests": {name: batched(name, progress) for name in MEANS},
        "figure_15_share_of_blocks_saved_by_parallel_samples": saved_by_samples(progress),
        "figure_15_share_of_blocks_saved_by_beams": saved_by_beams(progress),
        "figure_18_block_sizes": block_sizes(progress),
        "figure_19_recovery": recovery(progress),
    }


def beside(published: float, ours: float) -> dict[str, float]:
    """Both, and how far ours is from what was published."""
    return {"published": published, "ours": ours, "distance": ours / published - 1.0}


def shares_in_use(progress: Say = lambda _: None) -> dict[str, dict[str, float]]:
    """The part of the cache that holds tokens while somebody waits, with lengths like ShareGPT's."""
    shares = {}
    for name, kind in KINDS.items():
        progress(f"figure 2, {name}")
        here = deployment(kind)
        run = here.run(here.crowd(traffic("ShareGPT")), counted=lambda _, waits: waits)
        shares[name] = beside(SHARES_IN_USE[name], run.shares["tokens"])
    return shares


def batched(trace: str, progress: Say = lambda _: None) -> dict[str, dict[str, float]]:
    """How many requests run at once on average while they come, at the rate of figure 13; and while somebody waits, which
    does not depend on how long a pass takes."""
    load = traffic(trace, duration_s=600.0 / RATES[trace])
    means = {}
    for name, kind in KINDS.items():
        progress(f"figure 13, {trace}, {name}")
        here = deployment(kind)
        run = here.run(load.arrivals(0), counted=lambda now, _: now <= load.duration_s)
        full = here.run(here.crowd(load), counted=lambda _, waits: waits)
        means[name] = beside(BATCHED[trace][name], run.mean_running) | {"while_somebody_waits": full.mean_running}
    return means


def saved_by_samples(progress: Say = lambda _: None) -> dict[str, dict[str, float]]:
    """Blocks that several samples of one prompt share, as a part of those that there would be without sharing; lengths
    like Alpaca's, at a rate at which nobody is preempted."""
    saved = {}
    for number, published in SAVED_BY_SAMPLES.items():
        progress(f"figure 15, {number} samples")
        here = deployment(num_samples=number)
        run = here.run(traffic("Alpaca", 10.0, 60.0).arrivals(0))
        saved[f"n={number}"] = beside(published, run.num_spared_block_steps / run.num_unshared_block_steps)
    return saved


def saved_by_beams(progress: Say = lambda _: None) -> dict[str, dict[str, float]]:
    """The same for the beams of a search. Which of them live on depends on probabilities, and these are drawn: see
    ``simulated_beams``."""
    here = deployment()
    config, arrivals = replace(here.config, max_num_batched_tokens=4096), traffic("Alpaca", 10.0, 60.0).arrivals(0)
    saved = {}
    for width, published in SAVED_BY_BEAMS.items():
        progress(f"figure 15, {width} beams")
        found = {each: beam_savings(config, arrivals[:NUM_SEARCHES], width, each) for each in PERPLEXITIES}
        least, most = min(found.values()), max(found.values())
        saved[f"{width} beams"] = beside(published, found[PERPLEXITIES[1]]) | {"least": least, "most": most}
    return saved


def recovery(progress: Say = lambda _: None) -> dict[str, dict[str, float]]:
    """What it takes to bring back a preempted sequence of ``RECOVERED_TOKENS`` tokens, out and in over the bus or computed
    again in one pass, by block size; and how many requests a second a crowd gets done either way. A copy of K or V of a
    block in one layer is a transfer, and each takes ``simulated_device.PIECE_S`` besides."""
    facts: dict[str, dict[str, float]] = {}
    tokens = RECOVERED_TOKENS
    for size in BLOCK_SIZES:
        progress(f"figure 19, blocks of {size}")
        here = deployment(block_size=size)
        device = here.replica().device
        swap_s = 2 * blocks_needed(tokens, size) * device.swap_seconds
        recompute_s = device.pass_seconds(tokens, 1, tokens * (tokens + 1) // 2, tokens)
        facts[f"{size}"] = {"swap_s": swap_s, "recompute_s": recompute_s, "ratio": recompute_s / swap_s}
        if size >= 8:  # with smaller blocks the simulation takes minutes, and the time of a transfer says it all
            crowd = here.crowd(traffic("ShareGPT"))
            for name, space in (("swap", SWAP_BYTES), ("recompute", 0)):
                run = replace(here, swap_space_bytes=space).run(crowd)
                facts[f"{size}"] |= {
                    f"{name}_requests_per_s": len(run.served) / run.end_s,
                    f"{name}_preemptions": float(run.num_preemptions),
                }
    return facts


def block_sizes(progress: Say = lambda _: None) -> dict[str, dict[str, float]]:
    """What the ends of last blocks waste, and how long a block table is, by block size. What a kernel loses by small
    blocks is not bookkeeping: the paper found 16 to 128 best for ShareGPT and 16 to 32 for Alpaca."""
    facts: dict[str, dict[str, float]] = {}
    for size in BLOCK_SIZES:
        facts[f"{size}"] = {}
        for name, (prompt, output) in MEANS.items():
            progress(f"figure 18, blocks of {size}, {name}")
            here = deployment(block_size=size)
            run = here.run(here.crowd(traffic(name)), counted=lambda _, waits: waits)
            facts[f"{size}"][f"{name}_wasted"] = max(0.0, 1.0 - run.share_of_reserved)
            facts[f"{size}"][f"{name}_table_entries"] = blocks_needed(round(prompt + output), size)
    return facts


def baselines(progress: Say = lambda _: None) -> dict[str, Any]:
    """Static and continuous batching, each with every allocation: what fits, what is done, and the largest rate at which a
    token of an answer takes ``NORMALIZED_S`` on average."""
    load, objective = traffic("ShareGPT", duration_s=120.0), Objective(normalized_s=NORMALIZED_S)
    rates, facts = {}, {}
    for in_batches in (True, False):
        for name, kind in KINDS.items():
            label = f"{'static' if in_batches else 'continuous'}, {name}"
            progress(label)
            here = replace(deployment(kind), in_batches=in_batches)
            rates[label] = largest_rate(here, load, objective)
            facts[label] = {
                "requests_that_fit": here.requests_that_fit(*MEANS["ShareGPT"]),
                "requests_per_s": here.saturation_rate(load),
                "largest_rate": rates[label],
            }
    best = rates["continuous, paged"]
    ratios = {f"over {name}": best / rate for name, rate in rates.items() if rate and rate != best}
    return {
        "normalized_latency_s": NORMALIZED_S,
        **facts,
        "ratio_of_the_largest_rates": ratios,
        "published_ratios": {f"over {name}": text for name, text in RATIOS.items()},
    }


def charts(facts: dict[str, Any]) -> list[Bars | Curves]:
    """Figure 2, the two sides of the block size that are bookkeeping, and figure 19, as pictures."""
    shares = facts["figure_2_share_of_the_cache_in_use"]
    bars = [(f"{name}, {who}", 100.0 * each[who]) for name, each in shares.items() for who in ("published", "ours")]
    sizes, back = facts["figure_18_block_sizes"], facts["figure_19_recovery"]

    def curve(name: str, of: dict[str, dict[str, float]], what: str, times: float = 1.0) -> Curve:
        points = [(float(size), times * each[what]) for size, each in of.items()]
        return Curve(name, tuple((size, y, y, y) for size, y in points))

    return [
        Bars("Percent of the cache that holds tokens", tuple(bars), num_kinds=2),
        Curves(
            "Wasted at the end of last blocks",
            "tokens per block",
            "percent of what is set aside",
            tuple(curve(name, sizes, f"{name}_wasted", 100.0) for name in MEANS),
            log_x=True,
        ),
        Curves(
            "Length of a block table",
            "tokens per block",
            "entries",
            tuple(curve(name, sizes, f"{name}_table_entries") for name in MEANS),
            log=True,
            log_x=True,
        ),
        Curves(
            f"To bring back {RECOVERED_TOKENS} tokens of a preempted sequence",
            "tokens per block",
            "seconds",
            (curve("swap", back, "swap_s"), curve("recompute", back, "recompute_s")),
            log=True,
            log_x=True,
        ),
    ]


def baseline_charts(facts: dict[str, Any]) -> list[Bars | Curves]:
    """What each pair of batching and allocation does."""
    rows = {name: each for name, each in facts.items() if isinstance(each, dict) and "largest_rate" in each}
    fields = {
        "requests_that_fit": "Requests that fit at once",
        "requests_per_s": "Requests finished a second, when more always wait",
        "largest_rate": "Largest rate at which a token of an answer takes 0.1 s on average",
    }
    return [
        Bars(caption, tuple((name, float(each[field])) for name, each in rows.items()))
        for field, caption in fields.items()
    ]
