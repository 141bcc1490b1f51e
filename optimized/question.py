"""What an operator asks of a plan, in the words of the command line, and its answer; a sweep asks it again and again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from optimized.cards import card_named
from optimized.chart import Bars, Curve, Curves
from optimized.coarse import CoarseModel
from optimized.contiguous import Allocation
from optimized.fleet import Fleet, Router, error_of
from optimized.known_models import cost_of
from optimized.model_core import PREEMPTION_MODES
from optimized.planner import Deployment, Facts, Objective, largest_rate, summary, times
from optimized.workload import Arrival, Lengths, PoissonTraffic, read_arrivals
from spec.vocabulary import InvalidConfig

MAX_POINTS, MAX_SWAP_GIB = 500, 1 << 20
NOT_SWEPT = ("workload", "slo", "seeds", "coarse")
FARTHEST_MARK = 1.5
"""How far beyond the last rate of a sweep the saturation rate is still drawn: farther, it would push the curves together."""
CHECKED_S, CHECKED_REPLICAS = 3600.0, 2
"""For how long, and with how many replicas of the fleet, a coarse model is compared with the engine."""


@dataclass(frozen=True)
class Question:
    """A model on cards, how its cache is run, and who comes. Each field is an option of ``kvproof plan``."""

    model: str = "llama-3-8b"
    gpu: str = "h100"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    replicas: int = 1
    router: str = "least-loaded"
    coarse: bool = False
    allocation: str = "paged"
    batching: str = "continuous"
    rate: float = 10.0
    duration: float = 60.0
    prompt_len: str = "exponential:1024"
    output_len: str = "exponential:256"
    workload: Path | None = None
    shared_len: int = 0
    prefix_share: float = 1.0
    n: int = 1
    preemption_mode: str = "auto"
    swap_space: float | None = None
    slo: str | None = None
    seeds: int = 3
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    overhead_ms: float = 0.2

    @property
    def deployment(self) -> Deployment:
        """Raises ``InvalidConfig`` where the model does not fit or a name is not known."""
        cost = cost_of(self.model)
        if self.allocation not in [kind.value for kind in Allocation]:
            names = ", ".join(kind.value for kind in Allocation)
            raise InvalidConfig("allocation", self.allocation, f"one of {names}")
        if self.batching not in ("continuous", "static"):
            raise InvalidConfig("batching", self.batching, "continuous or static")
        if self.preemption_mode not in PREEMPTION_MODES:
            raise InvalidConfig("preemption_mode", self.preemption_mode, f"one of {', '.join(PREEMPTION_MODES)}")
        if self.swap_space is not None and not 0.0 <= self.swap_space <= MAX_SWAP_GIB:
            raise InvalidConfig("swap_space", self.swap_space, f"from 0 to {MAX_SWAP_GIB} GiB")
        if self.swap_space and self.preemption_mode == "recompute":
            raise InvalidConfig("swap_space", self.swap_space, "left out where preemption_mode is recompute")
        without_swap = Deployment(
            cost,
            card_named(self.gpu),
            tensor_parallel_size=self.tensor_parallel_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            block_size=self.block_size,
            max_model_len=self._longest(cost.max_model_len),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            allocation=Allocation(self.allocation),
            in_batches=self.batching == "static",
            enable_prefix_caching=self.shared_len > 0,
            num_samples=self.n,
            compute_efficiency=self.compute_efficiency,
            bandwidth_efficiency=self.bandwidth_efficiency,
            overhead_s=self.overhead_ms / 1000.0,
            activation_bytes=int(cost.activation_bytes_per_token * self.max_num_batched_tokens),
        )
        if self.preemption_mode == "swap" and self.swap_space is None:
            return replace(without_swap, swap_space_bytes=without_swap.cache_bytes)
        return replace(without_swap, swap_space_bytes=int((self.swap_space or 0.0) * (1 << 30)))

    @property
    def fleet(self) -> Fleet:
        """The replicas, each with its engine. Raises ``InvalidConfig`` for a router that is not known."""
        if self.router not in [each.value for each in Router]:
            raise InvalidConfig("router", self.router, f"one of {', '.join(each.value for each in Router)}")
        return Fleet(self.deployment, self.replicas, Router(self.router))

    def _longest(self, of_the_model: int) -> int:
        return self.max_model_len if self.max_model_len is not None else min(of_the_model, 8192)

    @property
    def traffic(self) -> PoissonTraffic:
        """Raises ``InvalidConfig`` for lengths and rates that cannot be."""
        prompt, output = Lengths.read(self.prompt_len, "prompt_len"), Lengths.read(self.output_len, "output_len")
        longest = self.deployment.max_model_len
        if not 0 <= self.shared_len <= longest:
            raise InvalidConfig("shared_len", self.shared_len, f"from 0 to max_model_len ({longest})")
        if prompt.mean + output.mean > longest:
            limit = f"together with output_len ({self.output_len}) at most max_model_len ({longest}) on average"
            raise InvalidConfig("prompt_len", self.prompt_len, limit)
        if self.prefix_share != 1.0 and not self.shared_len:
            raise InvalidConfig("prefix_share", self.prefix_share, "left out without --shared-len")
        share = self.prefix_share if self.shared_len else 0.0
        return PoissonTraffic(self.rate, self.duration, prompt, output, longest, self.shared_len, share)

    @property
    def draws(self) -> list[list[Arrival]]:
        """The requests of the workload file, or as many draws of the traffic as there are seeds."""
        if not 1 <= self.seeds <= 1000:
            raise InvalidConfig("seeds", self.seeds, "from 1 to 1000")
        traffic = self.traffic
        if self.workload is not None and self.coarse:
            raise InvalidConfig(
                "workload",
                str(self.workload),
                "left out with --coarse, which is fitted on --prompt-len and --output-len",
            )
        if self.workload is not None:
            return [read_arrivals(self.workload, traffic.max_model_len)]
        draws = [arrivals for seed in range(self.seeds) if (arrivals := traffic.arrivals(seed))]
        if not draws:
            raise InvalidConfig("rate", self.rate, f"high enough that a request comes within {self.duration:g} s")
        return draws

    def answer(
        self,
        say: Callable[[str], None] = lambda _: None,
        saturation: Callable[[Deployment, PoissonTraffic], float] = Deployment.saturation_rate,
    ) -> Facts:
        """What comes out, as facts for a table or JSON; times in seconds. ``say`` hears what is being done."""
        objective = None if self.slo is None else Objective.read(self.slo)
        fleet, traffic, draws, runs = self.fleet, self.traffic, self.draws, []
        deployment, unit = fleet.deployment, replace(traffic, rate=1.0)
        facts: Facts = {}
        if self.coarse:
            say("fitting the coarse model on the engine")
            fleet = replace(fleet, coarse=CoarseModel.fitted(deployment, unit))
            facts["coarse"] = self._checked(fleet, draws[0], say)
        for number, arrivals in enumerate(draws, start=1):
            say(f"draw {number} of {len(draws)}")
            runs.append(fleet.run(arrivals, say))
        say("the saturation rate")
        facts["saturation_rate"] = self.replicas * saturation(deployment, unit)
        if objective is not None:
            facts["largest_rate_within_slo"] = largest_rate(fleet, traffic, objective, progress=say)
        fit = deployment.requests_that_fit(traffic.prompt.mean, traffic.output.mean)
        cards = f"{self.tensor_parallel_size} x {deployment.card.name}"
        return {
            "model": deployment.cost.name,
            "gpu": cards if self.replicas == 1 else f"{self.replicas} replicas on {cards} each, {self.router}",
            "cache_bytes": deployment.cache_bytes * self.replicas,
            "kv_bytes_per_token": deployment.cost.kv_bytes_per_token,
            "num_blocks": deployment.num_blocks * self.replicas,
            "block_size": deployment.engine_block_size,
            "requests_that_fit": fit * self.replicas,
            "requests_that_run_at_once": min(fit, self.max_num_seqs // self.n) * self.replicas,
            "requests": sum(len(run.served) for run in runs),
            **(times(runs) if self.coarse else summary(runs)),
            **facts,
        }

    def title(self, answer: Facts) -> str:
        """Over its pictures."""
        fit, rate = answer["requests_that_fit"], answer["saturation_rate"]
        return f"{self.model} on {answer['gpu']}: {fit:,} requests fit, saturated at {rate:.4g} a second"

    @staticmethod
    def charts(answer: Facts) -> list[Bars | Curves]:
        """Three pictures of an answer: how long the first token and the others take, and where the slots of the cache are."""
        first, other = (tuple((p, each["median"]) for p, each in answer[name].items()) for name in ("ttft_s", "tpot_s"))
        slots = tuple((name, 100.0 * each["median"]) for name, each in answer.get("slots", {}).items())
        return [
            Bars("Seconds to the first token", first, num_kinds=1),
            Bars("Seconds for each other token", other, num_kinds=1),
            *([Bars("Percent of the cache: in use, kept for later, never used, nobody's", slots)] if slots else []),
        ]

    def _checked(self, fleet: Fleet, arrivals: Sequence[Arrival], say: Callable[[str], None]) -> Facts:
        """What a coarse model is, and how far it is off: for an hour, with as many of the requests as some of the replicas get."""
        few = replace(fleet, num_replicas=min(self.replicas, CHECKED_REPLICAS))
        hour = [each for each in arrivals if each.at_s <= CHECKED_S][:: max(1, self.replicas // few.num_replicas)]
        return {
            "note": "these times are those of a fitted queue, not of the engine",
            "checked": f"{few.num_replicas} replicas, {len(hour)} requests in {hour[-1].at_s:.0f} s, both ways",
            "errors": error_of(few, hour, lambda far: say(f"checking the coarse model, {far}")),
        }


@dataclass(frozen=True)
class Sweep:
    """The values that one field of a question takes, one after the other."""

    name: str
    values: tuple[int | float | str, ...]

    @staticmethod
    def read(text: str) -> Sweep:
        """``rate=1:40`` and ``block_size=8:64:8`` with both ends, or ``allocation=paged,oracle``. Raises ``InvalidConfig``.

        >>> Sweep.read("rate=1:3").values, Sweep.read("block_size=8:32:8").values
        ((1.0, 2.0, 3.0), (8, 16, 24, 32))
        """
        name, _, given = text.partition("=")
        name = name.strip().replace("-", "_")
        kinds = {field.name: str(field.type) for field in fields(Question)}
        if name not in kinds or name in NOT_SWEPT:
            names = ", ".join(kind for kind in kinds if kind not in NOT_SWEPT)
            raise InvalidConfig("sweep", text, f"NAME=FIRST:LAST[:STEP] or NAME=A,B,... with NAME one of {names}")
        try:
            values = tuple(_values(given.strip(), kinds[name]))
        except ValueError:
            values = ()
        if not 1 <= len(values) <= MAX_POINTS:
            limit = f"FIRST:LAST[:STEP] with numbers that rise, or values with commas; at most {MAX_POINTS} of them"
            raise InvalidConfig("sweep", text, limit)
        return Sweep(name, values)

    @property
    def numbers(self) -> list[float] | None:
        """The values as numbers, if all of them are, and if they are enough for a line."""
        try:
            return [float(value) for value in self.values] if len(self.values) > 1 else None
        except ValueError:
            return None

    def ask(self, question: Question, say: Callable[[str], None] = lambda _: None) -> Iterator[Facts]:
        """The answers, each when it is there, with its value first. Raises ``InvalidConfig`` at once if one of the values is impossible."""
        changes: list[Facts] = [{self.name: value} for value in self.values]
        asked = [replace(question, **change) for change in changes]
        if question.slo is not None:
            Objective.read(question.slo)  # a word that is wrong is said before the first simulation
        for each in asked:
            _ = each.traffic, each.fleet  # and its deployment: all say what they do not take
        saturation = cache(Deployment.saturation_rate)
        for value, each in zip(self.values, asked, strict=True):
            answer = each.answer(say, saturation)
            yield {self.name: value} | answer | {self.name: value}

    def charts(self, answers: list[Facts]) -> list[Bars | Curves]:
        """Pictures of the answers: how long the first token takes, how much is done, and what fits where that is not always the same."""
        numbers = self.numbers
        if numbers is None:
            names = [str(value) for value in self.values]
            fit = tuple(zip(names, (float(each["requests_that_fit"]) for each in answers), strict=True))
            done = tuple(zip(names, (each["requests_per_s"]["median"] for each in answers), strict=True))
            return [Bars("Requests that fit", fit), Bars("Requests finished a second", done)]
        label = self.name.replace("_", " ") + (", requests a second" if self.name == "rate" else "")
        saturation = answers[0]["saturation_rate"]
        is_near = self.name == "rate" and saturation <= FARTHEST_MARK * max(numbers)
        marks = ((saturation, "saturated"),) if is_near else ()
        first = tuple(_curve(f"{p}", numbers, [each["ttft_s"] for each in answers], p) for p in ("p50", "p99"))
        done_curve = Curve("finished", _points(numbers, [each["requests_per_s"] for each in answers]))
        fits = [float(each["requests_that_fit"]) for each in answers]
        fit_curve = Curve("fit", tuple((x, fit, fit, fit) for x, fit in zip(numbers, fits, strict=True)))
        return [
            Curves("Time to the first token", label, "seconds", first, marks, log=True),
            Curves("Requests finished a second", label, "requests", (done_curve,), marks),
            *([Curves("Requests that fit", label, "requests", (fit_curve,))] if len(set(fits)) > 1 else []),
        ]


def _values(given: str, kind: str) -> Iterator[int | float | str]:
    parts = given.split(":")
    whole = kind.startswith("int")
    if len(parts) in (2, 3) and "," not in given and (kind != "str" or parts[0][:1].isdigit()):
        start, stop, step = float(parts[0]), float(parts[1]), float(parts[2]) if len(parts) == 3 else 1.0
        if not (math.isfinite(start) and math.isfinite(stop) and 0.0 < step < math.inf and start <= stop):
            raise ValueError(given)
        count = math.floor((stop - start) / step + 1e-9) + 1
        texts = [f"{start + i * step:.12g}" for i in range(min(count, MAX_POINTS + 1))]
    else:
        texts = [text.strip() for text in given.split(",") if text.strip()]
    for text in texts:
        yield int(text) if whole else float(text) if kind.startswith("float") else text


def _points(numbers: list[float], spreads: list[dict[str, float]]) -> tuple[tuple[float, float, float, float], ...]:
    return tuple(
        (x, spread["median"], spread["low"], spread["high"]) for x, spread in zip(numbers, spreads, strict=True)
    )


def _curve(name: str, numbers: list[float], times: list[Facts], percentile: str) -> Curve:
    return Curve(name, _points(numbers, [each[percentile] for each in times]))
