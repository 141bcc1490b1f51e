"""A fleet: equal replicas of one deployment, and a router that hands each request to one of them as it comes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from optimized.coarse import CoarseModel, CoarseReplica
from optimized.planner import Deployment, Facts, times
from optimized.simulation import Run
from optimized.workload import Arrival, PoissonTraffic
from spec.vocabulary import InvalidConfig

MAX_REPLICAS = 4096


class Router(Enum):
    """ROUND_ROBIN hands requests out in turn. LEAST_LOADED takes the replica that has the fewest requests which have not
    ended, the first of equal ones."""

    ROUND_ROBIN = "round-robin"
    LEAST_LOADED = "least-loaded"


class Behind(Protocol):
    """What a router asks of a replica behind it; requests are offered in the order of their time."""

    @property
    def quiet_until_s(self) -> float:
        """No request ends before."""

    def offer(self, arrival: Arrival) -> None: ...
    def advance(self, until_s: float = math.inf) -> None: ...
    def num_open(self, at_s: float) -> int: ...
    def result(self) -> Run: ...


def route(
    arrivals: Sequence[Arrival],
    replicas: Sequence[Behind],
    router: Router,
    say: Callable[[str], None] = lambda _: None,
) -> list[Run]:
    """Serve all arrivals, which are in the order of their time; what each replica saw. ``say`` hears how far it is.

    A replica is looked at only when a request may have ended there: until then it can be left behind.
    """
    for number, arrival in enumerate(arrivals):
        if not number % SAID_EVERY:
            say(f"request {number:,} of {len(arrivals):,}")
        if router is Router.ROUND_ROBIN:
            chosen = replicas[number % len(replicas)]
        else:
            at_s = arrival.at_s
            for replica in replicas:
                if replica.quiet_until_s < at_s:
                    replica.advance(at_s)
            loads = [replica.num_open(at_s) for replica in replicas]
            chosen = replicas[loads.index(min(loads))]
        chosen.offer(arrival)
    runs = []
    for number, replica in enumerate(replicas, start=1):
        say(f"replica {number} of {len(replicas)}, to its end")
        replica.advance()
        runs.append(replica.result())
    return runs


@dataclass(frozen=True)
class Fleet:
    """So many replicas of a deployment behind a router. It answers what a deployment answers. With a ``coarse`` model that
    model stands in for the engine."""

    deployment: Deployment
    num_replicas: int
    router: Router = Router.LEAST_LOADED
    coarse: CoarseModel | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_replicas <= MAX_REPLICAS:
            raise InvalidConfig("replicas", self.num_replicas, f"from 1 to {MAX_REPLICAS}")

    def run(self, arrivals: Sequence[Arrival], say: Callable[[str], None] = lambda _: None) -> Run:
        """Serve a workload to its end: the runs of all replicas as one, on one clock."""
        return together(route(arrivals, [self._replica() for _ in range(self.num_replicas)], self.router, say))

    def _replica(self) -> Behind:
        return self.deployment.replica() if self.coarse is None else CoarseReplica(self.coarse)

    def saturation_rate(self, traffic: PoissonTraffic, seed: int = 0) -> float:
        """That of all replicas, if each always has another request waiting."""
        return self.num_replicas * self.deployment.saturation_rate(traffic, seed)


def error_of(fleet: Fleet, arrivals: Sequence[Arrival], say: Callable[[str], None] = lambda _: None) -> Facts:
    """The coarse model and the exact engine with the same requests: both, and how far the coarse one is off."""
    exact, coarse = (times([each.run(arrivals, say)]) for each in (replace(fleet, coarse=None), fleet))
    pairs = {
        f"{name}_{percent}": (exact[name][percent], coarse[name][percent]) for name in TIMES for percent in PERCENTS
    }
    pairs["requests_per_s"] = exact["requests_per_s"], coarse["requests_per_s"]
    return {
        name: {
            "exact": a["median"],
            "coarse": b["median"],
            "error": b["median"] / a["median"] - 1.0 if a["median"] else 0.0,
        }
        for name, (a, b) in pairs.items()
    }


def together(runs: Sequence[Run]) -> Run:
    """What several replicas saw, as one run: sums, the last end, the highest peak; means are over all of them."""
    whole = Run(end_s=max(run.end_s for run in runs), peak_running=max(run.peak_running for run in runs))
    for run in runs:
        whole.served += run.served
        for name in whole.slot_s:
            whole.slot_s[name] += run.slot_s[name]
        for name in SUMS:
            setattr(whole, name, getattr(whole, name) + getattr(run, name))
    return whole


SAID_EVERY = 500
TIMES, PERCENTS = ("ttft_s", "tpot_s", "latency_s"), ("p50", "p90", "p99")
SUMS = (
    "busy_s",
    "counted_s",
    "num_steps",
    "num_preemptions",
    "num_hit_tokens",
    "num_queried_tokens",
    "num_spared_block_steps",
    "num_unshared_block_steps",
    "running_s",
)
