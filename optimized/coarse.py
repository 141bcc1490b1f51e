"""A coarse model of a replica, for whole days: not the engine, but a queue whose four numbers are fitted on the engine.

All requests that run get a token in every pass, and a pass takes longer the more they are. Who comes when the seats are
taken waits, first come first served; whoever comes in holds all of them up while his prompt is computed. What this
leaves out: preemptions, the prefix cache, blocks, and that a long sequence costs more than a short one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from optimized.planner import Deployment
from optimized.simulation import Run, Served
from optimized.workload import Arrival, PoissonTraffic

PARTS_OF_SATURATION = (0.1, 0.3, 0.5, 0.7, 0.9)
FITTED_REQUESTS = 600
"""Each of these rates is simulated with the exact engine, with so many requests."""
ROUNDS = 5
"""How often the fit begins again with what it found, since how much of a prompt a pass hides depends on the pass."""


@dataclass(frozen=True)
class CoarseModel:
    """A pass takes ``pass_s`` and ``pass_s_per_running`` for each request that runs, a prompt ``prompt_s_per_token`` for each
    token as far as it is longer than the pass; ``num_seats`` requests run while others wait."""

    pass_s: float
    pass_s_per_running: float
    prompt_s_per_token: float
    num_seats: int

    @staticmethod
    def fitted(deployment: Deployment, traffic: PoissonTraffic) -> CoarseModel:
        """Least squares of the busy time of the exact engine, with the lengths of the traffic, below its saturation rate."""
        import numpy as np

        most = deployment.saturation_rate(traffic)
        loads = [
            replace(traffic, rate=most * part, duration_s=FITTED_REQUESTS / (most * part))
            for part in PARTS_OF_SATURATION
        ]
        runs = [deployment.run(load.arrivals(seed=1)) for load in loads]
        rates, cost = deployment.rates, deployment.cost
        per_token = cost.flops_per_token / rates.flops
        pass_s, per_running = cost.weight_bytes / rates.bandwidth + rates.overhead_s, 0.0
        for _ in range(ROUNDS):
            held_up = [
                sum([max(0.0, per_token * each.arrival.prompt_len - pass_s) for each in run.served]) for run in runs
            ]
            sizes = np.array([[run.num_steps, run.num_output_tokens] for run in runs], dtype=float)
            left = np.array([run.busy_s - held for run, held in zip(runs, held_up, strict=True)])
            scale = np.array([run.busy_s for run in runs])  # every rate counts the same
            pass_s, per_running = np.linalg.lstsq(sizes / scale[:, None], left / scale, rcond=None)[0].tolist()
        full = deployment.run(deployment.crowd(traffic), counted=lambda _, waits: waits)
        seats = round(full.mean_running) if full.counted_s else deployment.max_num_seqs
        return CoarseModel(pass_s, per_running, per_token, max(1, seats))


class CoarseReplica:
    """A replica of a fleet that is such a queue. An arrival and an end cost O(log(running requests))."""

    def __init__(self, model: CoarseModel) -> None:
        self.model = model
        self.run = Run()
        self.quiet_until_s = math.inf
        self._now = 0.0
        self._held_up_s = 0.0  # how long nobody gets a token, for the prompts that came in
        self._passes = 0.0  # how many there were
        self._running: list[tuple[float, int, Arrival, float]] = []  # a heap, by the pass in which they end
        self._waiting: deque[Arrival] = deque()
        self._num_let_in = 0

    def offer(self, arrival: Arrival) -> None:
        self.advance(arrival.at_s)
        self._waiting.append(arrival)
        self._let_in()

    def advance(self, until_s: float = math.inf) -> None:
        """Every end up to then."""
        while self._running and self.quiet_until_s <= until_s:
            self._move(self.quiet_until_s)
            _, _, arrival, first_token_s = heappop(self._running)
            self.run.served.append(Served(arrival, first_token_s, max(first_token_s, self._now - arrival.at_s)))
            self._let_in()
        if until_s < math.inf:
            self._move(until_s)

    def num_open(self, at_s: float) -> int:
        return len(self._running) + len(self._waiting)

    def result(self) -> Run:
        self.run.end_s = self._now
        return self.run

    @property
    def _pass_s(self) -> float:
        return self.model.pass_s + self.model.pass_s_per_running * len(self._running)

    def _move(self, now: float) -> None:
        seconds = now - self._now
        if self._running:
            held_up = min(seconds, self._held_up_s)
            self._held_up_s -= held_up
            self._passes += (seconds - held_up) / self._pass_s
            self.run.busy_s += seconds
        self._now = now

    def _let_in(self) -> None:
        """A request comes in with the next pass: on average half of one is still to go if others run."""
        model = self.model
        while self._waiting and len(self._running) < model.num_seats:
            arrival = self._waiting.popleft()
            self._held_up_s += max(0.0, model.prompt_s_per_token * arrival.prompt_len - model.pass_s)
            to_go = 0.5 if self._running else 0.0
            first_token_s = (
                self._now - arrival.at_s + self._held_up_s + (to_go + 1.0) * (self._pass_s + model.pass_s_per_running)
            )
            heappush(
                self._running, (self._passes + to_go + arrival.output_len, self._num_let_in, arrival, first_token_s)
            )
            self._num_let_in += 1
        if self._running:
            self.quiet_until_s = (
                self._now + self._held_up_s + max(0.0, self._running[0][0] - self._passes) * self._pass_s
            )
        else:
            self.quiet_until_s = math.inf
            self._held_up_s = 0.0
