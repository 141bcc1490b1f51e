"""The search: its counts, its shortest ways, its situations, and its tie to the proofs."""

import json
import os
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from typer.testing import CliRunner

from optimized.cli import app
from spec import model_pool
from spec.canonical import canonical
from spec.engine import InvalidField
from spec.explore import Exploration, explore, story
from spec.model_pool import ModelPool
from spec.proofs.edges import check_edge
from spec.scope import CACHE, FLIGHTS, LENSES, PLAIN, ROLLBACK, SWAP, Move, Scope, moves
from spec.situation import QUANTITIES, situation
from spec.vocabulary import BlockId, Config, Event, InvalidConfig, State, initial_state

FOUR = Config(num_blocks=4, block_size=2)
CACHED = replace(FOUR, prefix_cache=True)
THREE = replace(CACHED, num_blocks=3)

SMALL = {
    "cache": Scope(replace(THREE, num_host_blocks=2), 2, 4, 1, operations=PLAIN | CACHE | SWAP),
    "window": Scope(replace(FOUR, window=3, num_host_blocks=2), 2, 5, 2, operations=PLAIN | SWAP | ROLLBACK),
    "rollback": Scope(THREE, 2, 4, 1, max_append=2, operations=PLAIN | CACHE | ROLLBACK),
    "flight": Scope(THREE, 2, 3, 1, max_flights=2, operations=PLAIN | CACHE | FLIGHTS),
    "fork": Scope(FOUR, 3, 4, 2, operations=PLAIN),
}
"""The lenses once more, in less than a second each."""


def counts(found: Exploration) -> tuple[int, int, int, int]:
    """States, edges, refusals, depth."""
    return found.num_states, found.num_edges, found.num_refusals, found.depth


# A number that changes says that the meaning has changed. Change it here only if that was wanted.


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "cache": (276, 1_762, 213, 13),
        "window": (169, 1_031, 66, 4),
        "rollback": (187, 1_698, 189, 10),
        "flight": (627, 3_831, 932, 10),
        "fork": (240, 1_502, 485, 8),
    }.items(),
)
def test_a_small_lens_has_as_many_states_as_ever(name: str, expected: tuple[int, ...]) -> None:
    found = explore(SMALL[name])
    assert found.violation is None
    assert counts(found) == expected


LENS_COUNTS = {
    "cache": (11_141, 105_308, 8_129, 20),
    "window": (3_986, 38_560, 8_283, 6),
    "rollback": (5_603, 91_000, 7_038, 20),
    "flight": (8_168, 67_505, 11_012, 14),
    "fork": (872, 6_714, 4_234, 7),
    "together": (3_587, 36_743, 4_024, 12),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), LENS_COUNTS.items())
def test_a_lens_has_as_many_states_as_ever(name: str, expected: tuple[int, ...]) -> None:
    """And in the smallest lens every edge is an instance of proved transitions, at night in one that slides, too."""
    taken: Counter[str] = Counter()
    on_edge = (lambda *edge: taken.update(check_edge(*edge))) if name in PROVED else None
    found = explore(LENSES[name].small, on_edge=on_edge)
    assert found.violation is None
    assert counts(found) == expected
    assert (found.num_events, taken.total()) == PROVED.get(name, (found.num_events, 0))


SOAK = os.environ.get("KVPROOF_TIER") == "soak"
PROVED = {"fork": (14_907, 17_127), **({"window": (81_262, 93_122)} if SOAK else {})}
"""Events, and the transitions that they are: an event may be several on end."""

LARGE_COUNTS = {
    "cache": (50_967, 665_130, 84_942, 21),
    "window": (12_161, 114_087, 34_099, 6),
    "rollback": (26_769, 340_708, 27_143, 24),
    "flight": (40_000, 375_669, 80_891, 24),
    "fork": (9_363, 91_355, 71_239, 9),
    "together": (117_593, 1_369_676, 169_363, 25),
}


@pytest.mark.skipif(not SOAK, reason="takes many minutes; runs in the tier soak")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), LARGE_COUNTS.items())
def test_a_large_lens_has_as_many_states_as_ever(name: str, expected: tuple[int, ...]) -> None:
    found = explore(LENSES[name].large)
    assert found.violation is None
    assert counts(found) == expected


def test_the_page_has_these_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs/explored.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(?:[^|\d]+\|)? ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (\d+) \|$", page, re.MULTILINE)
    shown = [(name, tuple(int(number.replace(",", "")) for number in numbers)) for name, *numbers in rows]
    assert shown == [*LENS_COUNTS.items(), *LARGE_COUNTS.items()]


# States up to renaming


def renamed(s: State, blocks: tuple[BlockId, ...]) -> State:
    """The state with block b called ``blocks[b]``."""
    size = s.config.block_size
    counted = {blocks[b]: count for b, count in enumerate(s.ref_count)}
    return replace(
        s,
        free=tuple(blocks[b] for b in s.free),
        ref_count=tuple(counted[b] for b in range(s.config.num_blocks)),
        block_tables={i: tuple(blocks[b] for b in table) for i, table in s.block_tables.items()},
        cached={blocks[b]: key for b, key in s.cached.items()},
        cells={blocks[at // size] * size + at % size: prefix for at, prefix in s.cells.items()},
    )


def reached(scope: Scope, most: int) -> list[State]:
    """The first states of a scope."""
    states = [initial_state(scope.config)]
    for state in states:
        for move in moves(state, scope):
            pool = ModelPool(state)
            if isinstance(move.call(pool), tuple):
                states.append(pool.state)
        if len(states) >= most:
            break
    return states[:most]


def test_the_names_of_blocks_do_not_count() -> None:
    for state in reached(replace(SMALL["cache"], operations=PLAIN | CACHE), 300):
        assert {canonical(renamed(state, blocks)) for blocks in permutations(range(3))} == {canonical(state)}


def test_the_names_of_sequences_do_not_count() -> None:
    for state in reached(SMALL["fork"], 300):
        names = dict(zip(state.seqs, reversed(list(state.seqs)), strict=True))
        other = replace(
            state,
            seqs={names[i]: seq for i, seq in state.seqs.items()},
            block_tables={names[i]: table for i, table in state.block_tables.items()},
        )
        assert canonical(other) == canonical(state)


def test_the_names_of_tokens_do_not_count_and_their_sharing_does() -> None:
    def key(*prompts: tuple[int, ...]) -> object:
        pool = ModelPool(initial_state(FOUR))
        for seq, prompt in enumerate(prompts):
            pool.allocate(seq, prompt)
        return canonical(pool.state)

    assert key((0, 1), (0, 0)) == key((7, 5), (7, 8)) == key((7, 7), (7, 5))
    assert key((0, 1), (0, 0)) != key((0, 1), (0, 1))
    assert key((0, 1), (0, 0)) != key((0, 1), (1, 1))


def test_new_tokens_are_tried_once() -> None:
    """The first token of an empty pool has no other to differ from; the second has one."""
    empty = initial_state(FOUR)
    scope = Scope(FOUR, max_tokens=2, num_token_values=9)
    assert [move.tokens for move in moves(empty, scope)] == [(0,), (0, 0)]
    pool = ModelPool(empty)
    pool.allocate(0, (0, 0))
    tokens = [move.tokens for move in moves(pool.state, scope) if move.operation == "allocate"]
    assert tokens == [(0,), (1,), (0, 0), (0, 1), (1, 0)]


# The shortest way to what is wrong, and to what one looks for


def never_copies(s: State, block: BlockId) -> bool:
    return False


def test_a_violation_comes_with_the_shortest_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "must_copy", never_copies)
    found = explore(SMALL["fork"])
    assert [rule.id for rule in found.broken] == ["COW-2"]
    assert [move.operation for move in found.path] == ["allocate", "fork", "append"]
    assert "COW-2 does not hold" in str(found.violation)


def test_a_wrong_state_is_found_as_well_as_a_wrong_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def loses_a_block(s: State, event: Event) -> State:
        after = step(s, event)
        return replace(after, free=after.free[1:]) if event == model_pool.Release(1) else after

    step = model_pool.step
    monkeypatch.setattr(model_pool, "step", loses_a_block)
    found = explore(SMALL["fork"])
    assert [rule.id for rule in found.broken] == ["ALLOC-3"]
    assert [move.operation for move in found.path] == ["allocate", "allocate", "release"]


def test_a_story_shows_a_map_for_each_call() -> None:
    found = explore(SMALL["fork"], reach=situation("ref_count>=3"))
    assert [str(move) for move in found.path] == ["allocate(0, (0,))", "fork(0, 1)", "fork(0, 2)"]
    maps = story(FOUR, found.path)
    assert [picture.caption for picture in maps] == ["an empty pool", *map(str, found.path)]
    assert all(before != after for before, after in pairwise(maps))
    assert maps[-1].blocks[0].seq_ids == (0, 1, 2)


def test_nothing_is_reached_that_is_not_there() -> None:
    found = explore(SMALL["fork"], reach=situation("swapped"))
    assert (found.state, found.path) == (None, ())
    assert counts(found) == counts(explore(SMALL["fork"]))


@pytest.mark.parametrize(
    ("text", "lens"),
    [
        ("sequence==0", "fork"),
        ("shared_block>=2", "fork"),
        ("free==0 and shared_block", "fork"),
        ("equal_blocks", "fork"),
        ("cached_free_block>=2 and running", "cache"),
        ("cached_shared_block", "cache"),
        ("swapped>=1 and running>=1", "cache"),
        ("cached_tail", "rollback"),
        ("held_by_steps_only and free==0", "flight"),
        ("in_flight>=2 and sequence==0", "flight"),
        ("dropped_block", "window"),
    ],
)
def test_a_situation_is_reached(text: str, lens: str) -> None:
    found = explore(SMALL[lens], reach=situation(text))
    assert found.state is not None
    assert situation(text)(found.state)


def test_every_quantity_says_what_it_counts() -> None:
    assert all((quantity.__doc__ or "").startswith(("How many", "The most")) for quantity in QUANTITIES.values())


@pytest.mark.parametrize("text", ["", "blocks", "ref_count>=", "ref_count>=-1", "free or swapped", "__import__('os')"])
def test_a_situation_that_nobody_knows_is_refused(text: str) -> None:
    with pytest.raises(InvalidField, match="ref_count"):
        situation(text)


# The twin in TLA+, which TLC has counted


def test_the_twin_has_the_scope_of_the_lens_and_its_page_has_the_count() -> None:
    """The count itself is that of ``test_a_lens_has_as_many_states_as_ever``."""
    scope, docs = LENSES["cache"].small, Path(__file__).parents[2] / "docs"
    constants = dict(re.findall(r"^    (\w+) = (.*)$", (docs / "tla/Cache.cfg").read_text(), re.MULTILINE))
    sizes = {name: text.count(",") + 1 if "{" in text else int(text) for name, text in constants.items()}
    assert sizes == {
        "Blocks": scope.config.num_blocks,
        "Seqs": scope.max_seqs,
        "BlockSize": scope.config.block_size,
        "MaxTokens": scope.max_tokens,
        "Tokens": scope.num_token_values,
        "HostBlocks": scope.config.num_host_blocks,
    }
    assert (scope.max_append, scope.operations) == (1, PLAIN | CACHE | SWAP)
    num_states, _, _, depth = LENS_COUNTS["cache"]
    page = (docs / "outside-evidence.md").read_text()
    rows = re.findall(
        r"^\| (?:`kvproof spec explore --lens cache`|TLC, .*?) \| ([\d,]+) \| (\d+) \|", page, re.MULTILINE
    )
    assert rows == [(f"{num_states:,}", str(depth))] * 2
    assert f", {num_states} distinct states found, 0 states left on queue." in page
    assert f"The depth of the complete state graph search is {depth + 1}." in page


# Every edge is an instance of proved transitions


def proved(scope: Scope) -> tuple[int, Counter[str]]:
    """How many events the edges of a scope are, and which transitions of the proofs these are."""
    taken: Counter[str] = Counter()
    found = explore(scope, on_edge=lambda before, event, after: taken.update(check_edge(before, event, after)))
    assert found.violation is None
    return found.num_events, taken


@pytest.mark.slow
def test_every_edge_of_a_small_lens_is_proved() -> None:
    num_events, taken = proved(replace(SMALL["fork"], num_token_values=1))
    assert (num_events, taken.total()) == (925, 953)


# The command


def run(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["spec", "explore", *options])
    return result.exit_code, result.output


@pytest.mark.slow
def test_the_command_prints_the_counts_of_a_lens() -> None:
    status, text = run("--lens", "fork")
    assert status == 0
    assert "872 states up to renaming, 6,714 transitions, 4,234 refusals, at most 7 calls deep" in text
    assert "rules holds" in text


@pytest.mark.slow
def test_the_command_sums_up_in_json() -> None:
    status, text = run("--lens", "fork", "--json")
    facts = json.loads(text)
    assert status == 0
    assert (facts["num_states"], facts["broken"]) == (872, [])
    assert [each["lens"] for each in facts["lenses"]] == ["fork"]


def test_the_command_shows_the_way_to_a_situation() -> None:
    status, text = run("--lens", "fork", "--reach", "ref_count>=3")
    assert status == 0
    assert "ref_count>=3: yes, after 3 calls, in the lens fork" in text
    assert "fork(0, 2)" in text
    assert " 0 x3" in text


@pytest.mark.slow
def test_the_command_says_that_there_is_no_such_state() -> None:
    status, text = run("--lens", "fork", "--reach", "ref_count>=4")
    assert (status, text) == (0, "ref_count>=4: no, in none of 872 states of fork\n")
    assert json.loads(run("--lens", "fork", "--reach", "ref_count>=4", "--json")[1])["reached"] is False


def test_the_command_shows_a_violation_and_the_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "must_copy", never_copies)
    status, text = run("--lens", "fork")
    assert status == 1
    assert "COW-2 does not hold: A write goes only into a block" in text
    assert "append(" in text
    assert "slots" in text


@pytest.mark.parametrize(
    "options", [("--lens", "nothing"), ("--scope", "huge"), ("--reach", "luck"), ("--lens", "fcfs", "--reach", "free")]
)
def test_the_command_refuses_what_it_does_not_know(options: tuple[str, ...]) -> None:
    status, text = run(*options)
    assert status == 2
    assert "it must be" in text


def test_moves_print_as_calls() -> None:
    assert str(Move("allocate", 1, (0, 1))) == "allocate(1, (0, 1))"
    assert str(Move("submit", 1, number=4)) == "submit(4, (1,))"
    assert str(Move("complete", number=4)) == "complete(4)"
    assert str(Move("reset")) == "reset()"


@pytest.mark.parametrize("nothing", [{"max_seqs": 0}, {"max_tokens": -1}, {"num_token_values": 0}, {"max_flights": -1}])
def test_a_scope_of_nothing_is_refused(nothing: dict[str, int]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(nothing))):
        Scope(Config(num_blocks=2), **nothing)
