"""Every step of the executable specification is an instance of proved transitions."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest

from spec.explore import Exploration, Scope, explore
from spec.proofs.edges import Unexplained, check_edge
from spec.proofs.transitions import TRANSITIONS
from spec.replay import step
from spec.vocabulary import Allocate, Config, Copy, Event, Fork, Start, State, Write, initial_state


def follow(scope: Scope) -> tuple[Exploration, Counter[str]]:
    """Explore the scope, every edge checked; how often each transition was taken."""
    taken: Counter[str] = Counter()

    def on_edge(before: State, event: Event, after: State) -> None:
        taken.update(check_edge(before, event, after))

    return explore(scope, on_edge=on_edge), taken


def lens(*operations: str, max_flights: int = 0, max_tokens: int = 4, **limits: object) -> Scope:
    """A small scope with these operations."""
    config = Config(**{"num_blocks": 3, "block_size": 2, **limits})  # type: ignore[arg-type]
    return Scope(
        config, 2, max_tokens, 1, max_flights, frozenset({"allocate", "append", "fork", "release", *operations})
    )


@pytest.mark.slow
def test_steps_of_the_swap_scope_are_proved_transitions() -> None:
    found, taken = follow(lens("publish", "swap_out", "swap_in", num_host_blocks=2, prefix_cache=True))
    assert found.broken == ()
    assert taken.keys() >= {
        "start",
        "allocate",
        "hit",
        "copy",
        "write",
        "fork",
        "release",
        "publish",
        "swap_out",
        "swap_in",
    }


@pytest.mark.slow
def test_steps_of_the_flight_scope_are_proved_transitions() -> None:
    found, taken = follow(lens("submit", "complete", max_flights=2))
    assert found.broken == ()
    assert taken.keys() >= {"begin", "submit", "complete"}


def test_steps_of_the_window_scope_are_proved_transitions() -> None:
    found, taken = follow(lens(window=2, max_tokens=6))
    assert found.broken == ()
    assert taken["slide"] > 0


@pytest.mark.slow
def test_steps_of_the_cache_scope_are_proved_transitions() -> None:
    scope = lens("publish", "reset", "rollback", prefix_cache=True)
    found, taken = follow(replace(scope, num_token_values=2))
    assert found.broken == ()
    assert taken.keys() >= {"publish", "reset", "rollback", "hit", "copy"}


@pytest.mark.slow
def test_every_transition_but_those_of_late_writes_is_taken_somewhere() -> None:
    seen: Counter[str] = Counter()
    for scope in (
        lens("publish", "reset", "rollback", "swap_out", "swap_in", num_host_blocks=2, prefix_cache=True, max_tokens=3),
        lens("submit", "complete", max_flights=1, max_tokens=3),
        lens(window=2, max_tokens=5),
    ):
        seen += follow(scope)[1]
    # The specification's writes are over when they are an event; the core's need not be.
    assert TRANSITIONS.keys() - seen.keys() == {"schedule", "land", "evict"}


def run(events: Iterable[Event]) -> State:
    state = initial_state(Config(num_blocks=3, block_size=2))
    for event in events:
        state = step(state, event)
    return state


TWO_TOKENS = (Start(0, (5, 6, 7)), Allocate(0, 3, (0, 1)), Write(0, 0, (0, 1, 2)))


def test_a_fork_that_does_not_count_is_not_explained() -> None:
    before, event = run(TWO_TOKENS), Fork(0, 1)
    after = step(before, event)
    wrong = replace(after, ref_count=(1, 1, 0))
    assert check_edge(before, event, after) == ("fork",)
    with pytest.raises(Unexplained, match="ref_count is something else afterwards"):
        check_edge(before, event, wrong)


def test_a_write_into_a_shared_block_is_not_explained() -> None:
    shared = step(run(TWO_TOKENS), Fork(0, 1))
    longer = replace(shared.seqs[0], tokens=(5, 6, 7, 8))
    before = step(replace(shared, seqs={**shared.seqs, 0: longer}), Allocate(0, 1, ()))
    event = Write(0, 3, (3,))
    with pytest.raises(Unexplained, match="the guard of write does not hold"):
        check_edge(before, event, step(before, event))


def test_a_copy_of_a_block_with_one_holder_is_not_explained() -> None:
    before, event = run(TWO_TOKENS), Copy(0, 1, 1, 2)
    with pytest.raises(Unexplained, match="the guard of copy does not hold"):
        check_edge(before, event, step(before, event))


def test_a_state_that_loses_contents_is_not_explained() -> None:
    before, event = run(TWO_TOKENS[:2]), TWO_TOKENS[2]
    after = step(before, event)
    wrong = replace(after, cells={**after.cells, 2: (9, 9, 9)})
    with pytest.raises(Unexplained, match=r"device\.kv is something else afterwards"):
        check_edge(before, event, wrong)
