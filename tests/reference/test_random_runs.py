"""The reference engine is followed through random runs, event by event and step by step, and breaks no rule."""

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest

from spec.vocabulary import AdmissionRule, Policy, Recovery
from tests.reference.random_runs import Run, random_config

TIGHT: dict[str, Any] = {"num_blocks": 6, "block_size": 2, "max_num_batched_tokens": 6, "max_num_seqs": 4}
SWAPPING: dict[str, Any] = {"recovery": Recovery.SWAP, "num_host_blocks": 5}
OPTIMISTIC: dict[str, Any] = {"admission_rule": AdmissionRule.OPTIMISTIC}

FAMILIES: dict[str, dict[str, Any]] = {
    "any": {},
    "one token blocks": {"block_size": 1},
    "few blocks": TIGHT | {"num_blocks": 3},
    "tight": TIGHT | {"num_blocks": 5, "watermark_blocks": 0},
    "optimistic": TIGHT | OPTIMISTIC,
    "no evict": {"max_num_seqs": 4, "admission_rule": AdmissionRule.NO_EVICT},
    "swap": TIGHT | OPTIMISTIC | SWAPPING,
    "priority": TIGHT | {"policy": Policy.PRIORITY},
    "prefix cache": {"prefix_cache": True, "block_size": 1, "max_num_seqs": 4},
    "optimistic cache": TIGHT | OPTIMISTIC | {"prefix_cache": True},
    "window": {"window": 3, "max_num_seqs": 4},
    "window of one": {"window": 1, "max_num_seqs": 4, "block_size": 1},
    "everything": TIGHT
    | OPTIMISTIC
    | SWAPPING
    | {"num_blocks": 7, "policy": Policy.PRIORITY, "prefix_cache": True, "window": 4},
}


@cache
def run_of(family: str, seed: int, *, by_report: bool = False) -> Run:
    rng = random.Random(f"{family} {seed}")
    return Run(random_config(rng, **FAMILIES[family]), rng, by_report).go()


@pytest.mark.parametrize("family", FAMILIES)
def test_random_runs_break_no_rule_and_leave_nothing_behind(family: str) -> None:
    for seed in range(20):
        run = run_of(family, seed)
        state = run.follower.state
        assert sorted(state.free) == list(range(run.config.num_blocks)), f"{family} {seed}: a block is lost"
        assert not state.block_tables, f"{family} {seed}: a table is left"


@pytest.mark.parametrize("family", FAMILIES)
def test_random_runs_are_possible_from_their_reports_alone(family: str) -> None:
    for seed in range(100, 110):
        assert run_of(family, seed, by_report=True).follower.trace


def test_the_runs_exercise_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for family in FAMILIES:
        for seed in range(20):
            run = run_of(family, seed)
            seen.update(run.counts)
            seen.update(type(event).__name__ for event in run.follower.trace)
    calls = {"added", "refused", "fork now", "fork later", "fork never", "reset True", "reset False"}
    kinds = {"Copy", "Preempt", "SwapOut", "SwapIn", "Hit", "Publish", "Slide", "Finish", "Abort"}
    assert not (calls | kinds) - seen.keys(), "these never happened"
