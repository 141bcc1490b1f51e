"""What the book says that a pool answers is what the specification's pool answers."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from spec.conformance.door import judged_pool
from spec.engine import Pool
from spec.model_pool import ModelPool
from spec.scope import Move
from spec.vocabulary import Config, initial_state

PAGE = (Path(__file__).parents[2] / "docs" / "judge-your-engine.md").read_text()
TABLE = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|$", PAGE, re.MULTILINE))
TOKENS = (0, 1, 0)


def events_of(*moves: Move, window: int | None = None) -> list[str]:
    """The names of the events of the last call."""
    config = Config(num_blocks=8, block_size=2, num_host_blocks=8, prefix_cache=window is None, window=window)
    pool, answer = ModelPool(initial_state(config)), None
    for move in moves:
        answer = move.call(pool)
    assert isinstance(answer, tuple)
    return [type(event).__name__ for event in answer]


def row(call: str, *left_out: str) -> list[str]:
    """The events that the table names, without some of those in brackets."""
    assert all(f"[`{name}`]" in TABLE[call] for name in left_out)
    return [name for name in re.findall(r"`(\w+)`", TABLE[call]) if name not in left_out]


FIRST = Move("allocate", 0, TOKENS)
CALLS = {
    "allocate": [
        ([FIRST], ["Hit", "Slide"], None),
        ([FIRST, Move("publish", 0), Move("allocate", 1, TOKENS)], ["Slide"], None),
        ([FIRST], ["Hit"], 1),
    ],
    "append": [
        ([FIRST, Move("append", 0, (1,))], ["Copy", "Slide"], None),
        ([FIRST, Move("fork", 0, child=1), Move("append", 0, (1,))], ["Slide"], None),
        ([FIRST, Move("append", 0, TOKENS)], ["Copy"], 1),
    ],
    "fork": [([FIRST, Move("fork", 0, child=1)], [], None)],
    "release": [([FIRST, Move("release", 0)], [], None)],
    "swap_out": [([FIRST, Move("swap_out", 0)], [], None)],
    "swap_in": [([FIRST, Move("swap_out", 0), Move("swap_in", 0)], [], None)],
    "publish": [([FIRST, Move("publish", 0)], [], None)],
    "reset": [([FIRST, Move("publish", 0), Move("release", 0), Move("reset")], [], None)],
    "rollback": [([FIRST, Move("rollback", 0, number=1)], [], None)],
    "submit": [([FIRST, Move("submit", 0, number=0)], [], None)],
    "complete": [([FIRST, Move("submit", 0, number=0), Move("complete", number=0)], [], None)],
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_answered_with_these_events(call: str) -> None:
    for moves, left_out, window in CALLS[call]:
        assert events_of(*moves, window=window) == row(call, *left_out)


def test_the_table_has_every_call() -> None:
    calls = {name for name in vars(Pool) if not name.startswith("_")} - {"profile", "snapshot"}
    assert CALLS.keys() == calls
    assert calls <= TABLE.keys()


class Reserving(ModelPool):
    """A pool that keeps block 0 for itself."""

    profile = replace(ModelPool.profile, num_reserved_blocks=1)

    def __init__(self, config: Config) -> None:
        super().__init__(initial_state(config, self.profile.choices))


def test_a_pool_that_keeps_a_block_is_judged_without_it() -> None:
    judged = judged_pool(Reserving, Config(num_blocks=3, block_size=1))
    assert judged.call(Move("allocate", 0, (0, 0, 0))) is None
    after = judged.call(Move("allocate", 0, (0, 0)))
    assert after is not None
    assert after.block_tables == {0: (1, 2)}
