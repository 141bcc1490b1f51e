"""Shares: several prompts are computed in parts at a time, and none of them gets the whole budget."""

import itertools
from dataclasses import replace

import pytest

from spec.block_table import share
from spec.broken import ALICE, BOB, EMPTY, IN_SHARES, follow
from spec.vocabulary import Add, Admit, Allocate, Begin, Config, Submit, initial_state
from tests.spec.states import allows, bites, forbids, holds

LONG, BOTH = replace(ALICE, prompt=(5, 5, 5)), (Add(replace(ALICE, prompt=(5, 5, 5))), Add(replace(BOB, prompt=(6, 6))))


def test_sched_27_nobody_gets_more_than_a_share() -> None:
    holds("SCHED-27", follow(IN_SHARES, *BOTH, Begin(1), Admit(0), Allocate(0, 1, (0,))))
    holds("SCHED-27", follow(EMPTY, *BOTH, Begin(1), Admit(0), Allocate(0, 2, (0, 1))))
    bites("SCHED-27")


def test_sched_27_whoever_has_its_share_is_not_passed_over() -> None:
    step_of_both = (*BOTH, Begin(1), Admit(0), Allocate(0, 1, (0,)), Admit(1), Allocate(1, 1, (1,)), Submit(1))
    allows("SCHED-13", IN_SHARES, *step_of_both)
    allows("SCHED-13", IN_SHARES, Add(LONG), Begin(1), Admit(0), Allocate(0, 1, (0,)), Submit(1))
    forbids("SCHED-13", EMPTY, Add(LONG), Begin(1), Admit(0), Allocate(0, 1, (0,)), Submit(1))
    forbids(
        "SCHED-12",
        initial_state(replace(IN_SHARES.config, num_blocks=9)),
        *BOTH,
        Begin(1),
        Admit(0),
        Allocate(0, 1, (0,)),
        Submit(1),
    )


@pytest.mark.parametrize("budget", range(1, 9))
@pytest.mark.parametrize("most", range(1, 9))
def test_sched_27_so_many_are_left_half_computed_and_no_more(budget: int, most: int) -> None:
    """However much or little each sequence lacks: of those that get something, so many at most do not get all."""
    part = share(Config(1, max_num_batched_tokens=budget, max_num_partial_prefills=most))
    for lacks in itertools.product((1, part, part + 1, budget + 1), repeat=4):
        left, partial = budget, 0
        for tokens in lacks:
            count = min(tokens, part, left)
            left -= count
            partial += 0 < count < tokens
        assert partial <= most


def test_sched_25_where_nobody_is_served_nobody_is_passed_over_for_others() -> None:
    allows("SCHED-25", follow(EMPTY, Add(ALICE), Add(BOB), Begin(1), Admit(0), Admit(1)), Submit(1))
