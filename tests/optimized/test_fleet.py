"""Fleets: a router chooses as it says, and a coarse model says what it is."""

from collections import deque
from dataclasses import replace

import pytest

from optimized.cards import CARDS
from optimized.coarse import CoarseModel, CoarseReplica
from optimized.fleet import Behind, Fleet, Router, error_of, route, together
from optimized.known_models import cost_of
from optimized.planner import Deployment
from optimized.simulation import Replica, Run
from optimized.workload import Arrival, Lengths, PoissonTraffic

HERE = Deployment(cost_of("smollm2-135m"), CARDS["l4"], max_model_len=256, max_num_seqs=8)
LOAD = PoissonTraffic(600.0, 0.5, Lengths("exponential", 60), Lengths("exponential", 30), 256)
MODEL = CoarseModel(0.001, 0.0001, 0.00001, 8)


class Recorder:
    """A replica that remembers what it was offered."""

    def __init__(self, replica: Behind) -> None:
        self.replica = replica
        self.offered: list[Arrival] = []

    @property
    def quiet_until_s(self) -> float:
        return self.replica.quiet_until_s

    def offer(self, arrival: Arrival) -> None:
        self.offered.append(arrival)
        self.replica.offer(arrival)

    def advance(self, until_s: float = float("inf")) -> None:
        self.replica.advance(until_s)

    def num_open(self, at_s: float) -> int:
        return self.replica.num_open(at_s)

    def result(self) -> Run:
        return self.replica.result()


@pytest.mark.parametrize("coarse", [False, True])
def test_the_least_loaded_replica_is_the_one_whose_fewest_requests_have_not_ended(coarse: bool) -> None:
    """Seen from the end: when each request had ended is known then, whatever was left behind at which moment."""
    arrivals = LOAD.arrivals(0)
    replicas = [Recorder(CoarseReplica(MODEL) if coarse else HERE.replica()) for _ in range(4)]
    runs = route(arrivals, replicas, Router.LEAST_LOADED)
    assert sum(len(run.served) for run in runs) == len(arrivals) > 200
    ends = [{each.arrival: each.arrival.at_s + each.latency_s for each in run.served} for run in runs]
    offered = [deque(replica.offered) for replica in replicas]
    there: list[list[Arrival]] = [[] for _ in replicas]
    for arrival in arrivals:
        loads = [sum(end[each] > arrival.at_s for each in held) for end, held in zip(ends, there, strict=True)]
        chosen = loads.index(min(loads))
        assert offered[chosen].popleft() == arrival
        there[chosen].append(arrival)


def test_round_robin_hands_requests_out_in_turn() -> None:
    replicas = [Recorder(HERE.replica()) for _ in range(3)]
    arrivals = LOAD.arrivals(0)
    route(arrivals, replicas, Router.ROUND_ROBIN)
    assert [replica.offered for replica in replicas] == [arrivals[first::3] for first in range(3)]


def test_a_fleet_of_one_is_its_deployment() -> None:
    arrivals = LOAD.arrivals(0)
    whole, alone = Fleet(HERE, 1).run(arrivals), HERE.run(arrivals)
    assert whole.served == alone.served
    assert (whole.end_s, whole.shares, whole.num_steps) == (alone.end_s, alone.shares, alone.num_steps)


def test_a_fleet_whose_steps_are_folded_is_the_one_whose_steps_are_not() -> None:
    """To the last bit, although the router looks at replicas in the middle of what is folded."""
    arrivals = LOAD.arrivals(3)
    plain = [HERE.replica(folds=False) for _ in range(4)]
    one_by_one = together(route(arrivals, plain, Router.LEAST_LOADED))
    assert Fleet(HERE, 4).run(arrivals) == one_by_one == Fleet(HERE, 4).run(arrivals)


def test_what_replicas_saw_adds_up() -> None:
    runs = [HERE.run(LOAD.arrivals(seed)) for seed in (0, 1)]
    whole = together(runs)
    assert whole.num_steps == runs[0].num_steps + runs[1].num_steps
    assert whole.end_s == max(run.end_s for run in runs)
    assert sum(whole.shares.values()) == pytest.approx(1.0)


def test_a_coarse_replica_serves_one_request_in_as_many_passes_as_tokens() -> None:
    replica = CoarseReplica(replace(MODEL, prompt_s_per_token=0.0))
    replica.offer(Arrival(1.0, 10, 5))
    replica.advance()
    [served] = replica.result().served
    assert served.first_token_s == pytest.approx(0.0011)
    assert served.latency_s == pytest.approx(5 * 0.0011)


def test_a_coarse_replica_lets_nobody_pass_when_its_seats_are_taken() -> None:
    replica = CoarseReplica(replace(MODEL, num_seats=1))
    for number in range(3):
        replica.offer(Arrival(0.0, 10 + number, 5))
    assert replica.num_open(0.0) == 3
    replica.advance()
    assert [each.arrival.prompt_len for each in replica.result().served] == [10, 11, 12]


@pytest.mark.slow
def test_a_coarse_model_is_near_the_engine_where_it_was_fitted() -> None:
    """Simulated times do not depend on the machine, so they may be asserted."""
    fleet = Fleet(HERE, 2, coarse=CoarseModel.fitted(HERE, LOAD))
    load = replace(LOAD, rate=fleet.saturation_rate(LOAD) / 2, duration_s=2.0)
    errors = error_of(fleet, load.arrivals(7))
    assert abs(errors["requests_per_s"]["error"]) < 0.05
    assert abs(errors["latency_s_p50"]["error"]) < 0.15
    assert isinstance(fleet.deployment.replica(), Replica)
