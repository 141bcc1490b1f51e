"""How many users fit on a card: the questions of an operator, answered by simulations of the real engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeAlias

from optimized.capacity import num_blocks_for
from optimized.cards import Card
from optimized.contiguous import Allocation, BuddyAllocator, reserved_slots
from optimized.pool import blocks_needed
from optimized.simulated_device import ModelCost, Rates, SimulatedDevice
from optimized.simulation import Counted, Gate, Replica, Run, simulate
from optimized.workload import MAX_LEN, Arrival, PoissonTraffic
from spec.vocabulary import Config, InvalidConfig, Recovery

LEAST_REQUESTS = 50
"""So many come on average, at the least, where it is measured whether an objective holds."""
LEAST_EFFICIENCY, MAX_OVERHEAD_S = 0.001, 60.0
"""No card is beyond these, and far beyond them a clock no longer moves by a step."""
SATURATING_REQUESTS, SATURATING_ROUNDS = 600, 5
"""How many requests wait at once when the saturation rate is measured: so many at least, and so many times as fit."""

Facts: TypeAlias = dict[str, Any]
"""Names and numbers, as JSON has them."""


@dataclass(frozen=True)
class Deployment:
    """A model on a group of equal cards, and how its cache is run. Names are vLLM's where it has them."""

    cost: ModelCost
    card: Card
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    block_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    allocation: Allocation = Allocation.PAGED
    in_batches: bool = False
    enable_prefix_caching: bool = False
    swap_space_bytes: int = 0
    num_samples: int = 1
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    overhead_s: float = 0.2e-3
    activation_bytes: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.tensor_parallel_size <= 1024:
            raise InvalidConfig("tensor_parallel_size", self.tensor_parallel_size, "from 1 to 1024")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InvalidConfig("gpu_memory_utilization", self.gpu_memory_utilization, "more than 0 and at most 1")
        for name in ("compute_efficiency", "bandwidth_efficiency"):
            if not LEAST_EFFICIENCY <= getattr(self, name) <= 1.0:
                raise InvalidConfig(name, getattr(self, name), f"from {LEAST_EFFICIENCY} to 1")
        for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if not 1 <= getattr(self, name) <= MAX_LEN:
                raise InvalidConfig(name, getattr(self, name), f"from 1 to {MAX_LEN}")
        if not 0.0 <= self.overhead_s <= MAX_OVERHEAD_S:
            raise InvalidConfig("overhead", self.overhead_s, f"from 0 to {MAX_OVERHEAD_S:g} s")
        if not 1 <= self.num_samples <= self.max_num_seqs:
            raise InvalidConfig("n", self.num_samples, f"from 1 to max_num_seqs ({self.max_num_seqs})")
        if self.num_samples > 1 and self.allocation in (Allocation.POW2, Allocation.ORACLE):
            raise InvalidConfig("n", self.num_samples, f"1 with the allocation {self.allocation.value}")
        if self.num_blocks < 1 or self.num_slots < self.max_model_len:
            raise InvalidConfig(
                "model",
                self.cost.name,
                f"one that leaves room for a sequence of {self.max_model_len:,} tokens: of "
                f"{self.memory_bytes / 1e9:,.2f} GB on {self.tensor_parallel_size} x {self.card.name} "
                f"{self.gpu_memory_utilization:.0%} may be used, the weights take {self.cost.weight_bytes / 1e9:,.2f} GB, "
                f"and a token of cache {self.cost.kv_bytes_per_token:,} bytes",
            )

    @property
    def memory_bytes(self) -> int:
        """The memory of all cards."""
        return int(self.card.memory * self.tensor_parallel_size)

    @property
    def cache_bytes(self) -> int:
        """What is left for K and V beside weights and activations."""
        return num_blocks_for(
            self.memory_bytes, self.gpu_memory_utilization, int(self.cost.weight_bytes), self.activation_bytes, 1
        )

    @property
    def engine_block_size(self) -> int:
        """A contiguous reservation of the longest sequence is a block of that length."""
        return self.max_model_len if self.allocation is Allocation.CONTIGUOUS else self.block_size

    @property
    def num_slots(self) -> int:
        """The tokens that the cache has room for."""
        return self.cache_bytes // self.cost.kv_bytes_per_token

    @property
    def num_blocks(self) -> int:
        """The blocks that the cache has."""
        return self.num_slots // self.engine_block_size

    @property
    def rates(self) -> Rates:
        """What the cards reach together."""
        return Rates.of(
            self.card,
            self.compute_efficiency,
            self.bandwidth_efficiency,
            self.overhead_s,
            self.tensor_parallel_size,
        )

    @property
    def config(self) -> Config:
        """The limits of the engine. Behind a gate of contiguous pieces it never lacks a block."""
        behind_a_gate = self.allocation in (Allocation.POW2, Allocation.ORACLE)
        swap_blocks = self.swap_space_bytes // (self.engine_block_size * self.cost.kv_bytes_per_token)
        return Config(
            num_blocks=self.num_blocks + (self.max_num_seqs if behind_a_gate else 0),
            block_size=self.engine_block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            prefix_cache=self.enable_prefix_caching,
            num_host_blocks=swap_blocks,
            recovery=Recovery.SWAP if swap_blocks else Recovery.RECOMPUTE,
        )

    def requests_that_fit(self, prompt_len: float, output_len: float) -> int:
        """How many requests of the mean lengths the cache holds at once, each at its full length and with one sample."""
        length = math.ceil(prompt_len + output_len)
        if self.allocation is Allocation.PAGED:
            return self.num_blocks // blocks_needed(length, self.block_size)
        if self.allocation is Allocation.CONTIGUOUS:
            return self.num_blocks
        memory, count = BuddyAllocator(self.num_slots), 0
        size = reserved_slots(self.allocation, math.ceil(prompt_len), math.ceil(output_len), self.max_model_len)
        while memory.reserve(size) is not None:
            count += 1
        return count

    def run(self, arrivals: Sequence[Arrival], counted: Counted = lambda now, waits: True) -> Run:
        """Serve a workload to its end."""
        return simulate(arrivals, self.replica(counted))

    def replica(self, counted: Counted = lambda now, waits: True, folds: bool = True) -> Replica:
        """An engine on these cards, at time 0 and with nothing to do."""
        device = SimulatedDevice(self.cost, self.rates, self.engine_block_size)
        gate = Gate(self.allocation, self.num_slots, self.in_batches)
        return Replica(self.config, device, gate, self.num_samples, counted, folds)

    def saturation_rate(self, traffic: PoissonTraffic, seed: int = 0) -> float:
        """How many requests a second the engine finishes when there is always another one waiting.

        Measured between the first and the last fifth of the requests that are done, so that neither the empty engine at the
        start nor the emptying one at the end counts.
        """
        ends = sorted(each.latency_s for each in self.run(self.crowd(traffic, seed)).served)
        first, last = len(ends) // 5, len(ends) - len(ends) // 5 - 1
        return (last - first) / (ends[last] - ends[first])

    def crowd(self, traffic: PoissonTraffic, seed: int = 0) -> list[Arrival]:
        """So many requests at once that most of them wait for a long time."""
        seats = min(self.requests_that_fit(traffic.prompt.mean, traffic.output.mean), self.max_num_seqs)
        number = max(SATURATING_REQUESTS, SATURATING_ROUNDS * seats)
        return [each._replace(at_s=0.0) for each in replace(traffic, rate=number / traffic.duration_s).arrivals(seed)]

    def saturation_rate_on_paper(self, prompt_len: float, output_len: float) -> float:
        """The same in closed form, for an engine that computes each prompt in a pass of its own: as many requests as fit
        share the decode passes, each request pays for its prefill alone."""
        slots = min(self.requests_that_fit(prompt_len, output_len), self.max_num_seqs)
        cost, rates = self.cost, self.rates
        prefill = max(cost.flops_per_token * prompt_len / rates.flops, cost.weight_bytes / rates.bandwidth)
        keys = slots * (prompt_len + output_len) * cost.kv_bytes_per_token
        decode = max(cost.flops_per_token * slots / rates.flops, (cost.weight_bytes + keys) / rates.bandwidth)
        overhead = rates.overhead_s
        return 1.0 / (prefill + overhead + (decode + overhead) * (output_len - 1) / slots)


@dataclass(frozen=True)
class Spread:
    """A number over several draws of the traffic: its median and its quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)

    @property
    def facts(self) -> dict[str, float]:
        """The three numbers by name."""
        return asdict(self)


@dataclass(frozen=True)
class Objective:
    """What users must not wait longer for, in seconds: the first token, and each one after it, at the 99th percentile; or
    the whole answer divided by its length, on average."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    normalized_s: float = math.inf

    @staticmethod
    def read(text: str) -> Objective:
        """``ttft=0.5,tpot=0.05,normalized=0.1``, in seconds. Raises ``InvalidConfig``.

        >>> Objective.read("ttft=0.5")
        Objective(ttft_s=0.5, tpot_s=inf, normalized_s=inf)
        """
        given: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.partition("=")
            name = name.strip()
            try:
                given[name] = math.nan if name in given else float(number)
            except ValueError:
                given[name] = math.nan
        if not given.keys() <= {"ttft", "tpot", "normalized"} or not all(value > 0.0 for value in given.values()):
            raise InvalidConfig("slo", text, "ttft=SECONDS, tpot=SECONDS, normalized=SECONDS, or several with commas")
        return Objective(**{f"{name}_s": value for name, value in given.items()})

    def holds(self, run: Run) -> bool:
        """Whether 99 of 100 requests got what was promised, and all of them on average."""
        first = percentile([each.first_token_s for each in run.served], 99)
        other = percentile([each.seconds_per_token for each in run.served], 99)
        mean = statistics.fmean(each.normalized_latency_s for each in run.served)
        return first <= self.ttft_s and other <= self.tpot_s and mean <= self.normalized_s


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that ``percent`` of them do not exceed: the nearest rank.

    >>> percentile([3.0, 1.0, 2.0], 50), percentile([3.0, 1.0, 2.0], 99)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


class Serving(Protocol):
    """What can be asked how it serves: a deployment, or a fleet of them."""

    def run(self, arrivals: Sequence[Arrival]) -> Run: ...
    def saturation_rate(self, traffic: PoissonTraffic, seed: int = 0) -> float: ...


def largest_rate(
    serving: Serving,
    traffic: PoissonTraffic,
    objective: Objective,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> float:
    """The largest rate, to one part in 32 of the saturation rate, at which the objective holds; 0 if it never does.

    With one draw of the traffic, scaled: the same requests come closer together, for as long as it takes until some have come.
    """
    most = serving.saturation_rate(traffic, seed)
    low, high = 0, 32
    while high - low > 1:
        middle = (low + high) // 2
        rate = most * middle / 32
        progress(f"{rate:.2f} requests a second")
        scaled = replace(traffic, rate=rate, duration_s=max(traffic.duration_s, LEAST_REQUESTS / rate))
        if objective.holds(serving.run(scaled.arrivals(seed))):
            low = middle
        else:
            high = middle
    return most * low / 32


def times(runs: Sequence[Run]) -> Facts:
    """How long requests took and how many were done, over the draws of a traffic; in seconds."""

    def percentiles(value: str) -> dict[str, dict[str, float]]:
        numbers = [
            sorted([getattr(each, value) for each in run.served]) for run in runs
        ]  # once, not for each percentile
        return {
            f"p{percent}": Spread.of([percentile(each, percent) for each in numbers]).facts for percent in (50, 90, 99)
        }

    return {
        "ttft_s": percentiles("first_token_s"),
        "tpot_s": percentiles("seconds_per_token"),
        "latency_s": percentiles("latency_s"),
        "normalized_latency_s": _spread(runs, lambda run: statistics.fmean(x.normalized_latency_s for x in run.served)),
        "requests_per_s": _spread(runs, lambda run: len(run.served) / run.end_s),
        "output_tokens_per_s": _spread(runs, lambda run: run.num_output_tokens / run.end_s),
    }


def summary(runs: Sequence[Run]) -> Facts:
    """What the draws of a traffic have in common, as facts for a table or JSON: the times, and where the cache went."""
    return {
        **times(runs),
        "share_of_reserved_with_tokens": _spread(runs, lambda run: run.share_of_reserved),
        "slots": {name: Spread.of([run.shares[name] for run in runs]).facts for name in runs[0].shares},
        "mean_running": _spread(runs, lambda run: run.mean_running),
        "peak_running": _spread(runs, lambda run: float(run.peak_running)),
        "preemptions": _spread(runs, lambda run: float(run.num_preemptions)),
        "hit_rate": _spread(runs, lambda run: run.num_hit_tokens / max(1, run.num_queried_tokens)),
    }


def _spread(runs: Sequence[Run], value: Callable[[Run], float]) -> dict[str, float]:
    return Spread.of([value(run) for run in runs]).facts
