"""Both engines' pools beside the specification: over every state of a scope, with every call."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import optimized
import reference
from reference.pool import BlockPool
from spec.choices import EvictionOrder
from spec.engine import Admission, PoolFactory, Profile
from spec.lockstep import Lockstep, walk
from spec.scope import CACHE, FLIGHTS, LENSES, PLAIN, ROLLBACK, SWAP, Scope, needs
from spec.vocabulary import Append, BlockId, Config, Event, Prefix, SeqId
from tests.mutants.sabotage import Mutant, sabotaged

THREE = Config(num_blocks=3, block_size=2)
CACHED = replace(THREE, prefix_cache=True)
WINDOW = Config(num_blocks=4, block_size=2, window=3, num_host_blocks=1)

SMALL = {
    "cache": Scope(replace(CACHED, num_host_blocks=1), 2, 4, 1, operations=PLAIN | CACHE | SWAP),
    "window": Scope(WINDOW, 2, 5, 1, max_append=2, operations=PLAIN | SWAP | ROLLBACK),
    "rollback": Scope(CACHED, 2, 4, 1, max_append=2, operations=PLAIN | CACHE | ROLLBACK),
    "flight": Scope(CACHED, 2, 3, 1, max_flights=2, operations=PLAIN | CACHE | FLIGHTS),
    "fork": Scope(THREE, 3, 5, 1, max_append=2, operations=PLAIN),
}
TWO_TOKENS = replace(SMALL["rollback"], num_token_values=2)
"""The lenses once more, in a tenth of a second each."""

POOLS: dict[str, PoolFactory] = {"reference": reference.make_pool, "optimized": optimized.make_pool}


def can_be_driven(make: PoolFactory, scope: Scope) -> bool:
    """Whether the pool has what the scope needs."""
    return needs(scope) <= make(scope.config).profile.capabilities


def sentence_of(found: Lockstep) -> str:
    return "" if found.fault is None else f"{found.fault.move}: {found.fault.sentence}"


@pytest.mark.parametrize(
    "lens", [pytest.param(lens, marks=[pytest.mark.slow] if lens == "flight" else []) for lens in SMALL]
)
@pytest.mark.parametrize("engine", POOLS)
def test_a_pool_does_what_the_specification_does(engine: str, lens: str) -> None:
    if not can_be_driven(POOLS[engine], SMALL[lens]):
        pytest.skip(f"the pool of {engine} does not declare what the lens {lens} needs")
    found = walk(SMALL[lens], POOLS[engine])
    assert sentence_of(found) == ""
    assert (found.num_states, found.num_operations) == {
        "cache": (183, 4280),
        "window": (48, 1215),
        "rollback": (187, 5406),
        "flight": (627, 14082),
        "fork": (66, 1362),
    }[lens]
    assert found.num_refusals > 0
    assert found.num_mistakes > 0


@pytest.mark.slow
@pytest.mark.parametrize("lens", LENSES)
@pytest.mark.parametrize("engine", POOLS)
def test_a_pool_does_what_the_specification_does_in_a_whole_lens(engine: str, lens: str) -> None:
    scope = LENSES[lens].small
    if not can_be_driven(POOLS[engine], scope):
        pytest.skip(f"the pool of {engine} does not declare what the lens {lens} needs")
    if engine == "reference" and WHOLE[lens][1] > 130_000 and os.environ.get("KVPROOF_TIER") != "soak":
        pytest.skip("takes half a minute or more, and the small lens is walked in every run; runs in the tier soak")
    found = walk(scope, POOLS[engine])
    assert sentence_of(found) == ""
    assert (found.num_states, found.num_operations) == WHOLE[lens]


WHOLE = {
    "cache": (11_141, 330_120),
    "window": (3_986, 138_485),
    "rollback": (5_603, 243_784),
    "flight": (8_168, 218_377),
    "fork": (872, 22_892),
    "together": (3_587, 128_675),
}
"""States and calls: those that make sense, and those that are the caller's mistake."""


def test_a_pool_that_cannot_be_cloned_replays_the_shortest_path() -> None:
    class Plain:
        """What the protocol asks for, and no more."""

        def __init__(self, config: Config) -> None:
            self._pool = reference.make_pool(config)

        def __getattr__(self, name: str) -> object:
            if name == "clone":
                raise AttributeError(name)
            return getattr(self._pool, name)

    found = walk(SMALL["fork"], Plain)  # type: ignore[arg-type]  # it has the methods of the pool in it
    assert sentence_of(found) == ""
    assert found.num_states == 66


class NewestFirst(BlockPool):
    """Takes the block that became free last."""

    def take(self) -> BlockId:
        self.free.insert(0, self.free.pop())
        return super().take()


class Newest(reference.SequencePool):
    """A pool that takes blocks in an order of its own, and says so."""

    profile = Profile("newest", reference.make_pool(THREE).profile.capabilities, eviction_order=EvictionOrder.ANY)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pool = NewestFirst(config)


def test_a_pool_that_takes_any_free_block_is_followed() -> None:
    """Its events are allowed; which block is taken is not compared."""
    found = walk(SMALL["cache"], Newest)
    assert sentence_of(found) == ""
    assert found.num_states > 183


def test_a_pool_that_says_lru_and_takes_the_newest_block_is_found() -> None:
    class Liar(Newest):
        profile = reference.make_pool(THREE).profile

    found = walk(SMALL["cache"], Liar)
    assert "the events are allowed, and are not those of the specification" in sentence_of(found)


def test_a_pool_that_answers_a_mistake_is_told_which_rule_its_events_break() -> None:
    class Obliging(reference.SequencePool):
        def append(self, seq: SeqId, tokens: Prefix) -> Admission | tuple[Event, ...]:
            return super().append(seq, tokens) if seq in self.seqs else (Append(seq, tokens),)

    fault = walk(SMALL["fork"], Obliging).fault
    assert fault is not None and fault.rule == "API-2"
    assert fault.sentence.startswith("API-2 does not hold")


def test_what_a_pool_keeps_to_itself_is_found_by_the_calls_that_show_it() -> None:
    """The state after a release is one that was there before; only the call after it shows what the pool remembers."""

    class Grudging(reference.SequencePool):
        released = False

        def release(self, seq: SeqId) -> tuple[Event, ...]:
            self.released = True
            return super().release(seq)

        def fork(self, parent: SeqId, child: SeqId) -> Admission | tuple[Event, ...]:
            return Admission.LATER if self.released else super().fork(parent, child)

    fault = walk(SMALL["fork"], Grudging).fault
    assert fault is not None
    assert fault.move.operation == "fork"
    assert "release" in {move.operation for move in fault.path}
    pool = Grudging(THREE)
    for move in fault.path:
        move.call(pool)
    assert fault.move.call(pool) is Admission.LATER


# Teeth


@dataclass(frozen=True)
class Tooth:
    """A sabotaged pool, and with which call it dies. Without a rule it does what is allowed, and not what it should."""

    scope: Scope
    num_operations: int
    mutant: Mutant


def tooth(scope: Scope, num_operations: int, name: str, file: str, old: str, new: str, rule: str = "") -> Tooth:
    package, _, file = file.partition("/")
    return Tooth(scope, num_operations, Mutant(name, package, file, old, new, rule))


TEETH = [
    tooth(
        SMALL["fork"],
        26,
        "a fork takes no reference to the last block",
        "reference/pool.py",
        "for block in self.tables[parent]:",
        "for block in self.tables[parent][:-1]:",
        "ALLOC-2",
    ),
    tooth(
        SMALL["fork"],
        220,
        "a shared block is written in place",
        "reference/pool.py",
        "return self.num_entries(block) > 1 or block in self.cached",
        "return block in self.cached",
        "COW-2",
    ),
    tooth(
        SMALL["cache"],
        409,
        "the beginning of a prefix is evicted before its end",
        "reference/pool.py",
        "for block in reversed(tuple(blocks)):",
        "for block in tuple(blocks):",
    ),
    tooth(
        SMALL["flight"],
        183,
        "a block is free while a step reads it",
        "reference/pool.py",
        "if self.ref_count[block] == 1 and readers:",
        "if self.ref_count[block] == 2 and readers:",
        "ALLOC-5",
    ),
    tooth(
        SMALL["cache"],
        497,
        "a key names two blocks",
        "reference/pool.py",
        "if self.find(key) is not None:\n            return False",
        "if self.find(key) in self.tables[seq_id]:\n            return False",
        "CACHE-8",
    ),
    tooth(
        SMALL["cache"],
        340,
        "the last token is hit too",
        "reference/pool.py",
        "range((len(tokens) - 1) // size)",
        "range(len(tokens) // size)",
        "CACHE-4",
    ),
    tooth(
        SMALL["cache"],
        214,
        "host blocks are lost at a swap-in",
        "reference/pool.py",
        "self.tables[seq_id] = blocks\n        self.host_free.extend(host_blocks)",
        "self.tables[seq_id] = blocks\n        self.host_free.extend(host_blocks[1:])",
        "SWAP-1",
    ),
    tooth(
        SMALL["cache"],
        1_420,
        "a hit of a free block is thought to cost nothing",
        "reference/sequence_pool.py",
        "num_free_hits + blocks_needed(len(tokens), size) - len(hits) > self.pool.num_free",
        "blocks_needed(len(tokens), size) - len(hits) > self.pool.num_free",
    ),
    tooth(
        SMALL["cache"],
        1_152,
        "a block that is handed out can still be found",
        "reference/pool.py",
        "        self.cached.pop(block, None)\n",
        "",
        "CACHE-1",
    ),
    tooth(
        SMALL["fork"],
        58,
        "a refused append leaves its tokens behind",
        "reference/sequence_pool.py",
        "        if self.pool.blocks_to_take(seq, old,",
        "        self.seqs[seq] = replace(old, tokens=old.tokens + tokens)\n        if self.pool.blocks_to_take(seq, old,",
        "API-1",
    ),
    tooth(
        SMALL["window"],
        10,
        "a block leaves the window one token early",
        "reference/sequence_pool.py",
        "first_visible = max(0, seq.num_computed_tokens - window + 1)",
        "first_visible = max(0, seq.num_computed_tokens - window + 2)",
        "TABLE-10",
    ),
    tooth(
        SMALL["cache"],
        232,
        "a swap-in wants one block more than it needs",
        "optimized/sequence_pool.py",
        "if len(own.host_table) > self.pool.num_free:",
        "if len(own.host_table) >= self.pool.num_free:",
    ),
    tooth(
        TWO_TOKENS,
        2_392,
        "the cache remembers what was taken back",
        "optimized/sequence_pool.py",
        "        del own.chain[1 + num_tokens // size :]\n",
        "",
    ),
    tooth(
        TWO_TOKENS,
        18_221,
        "a fork and its parent know the same records for ever",
        "optimized/sequence_pool.py",
        "own.tokens.copy(), own.chain.copy())",
        "own.tokens.copy(), own.chain)",
    ),
    tooth(
        SMALL["fork"],
        220,
        "only the third holder of a block copies it",
        "optimized/sequence_pool.py",
        "return cached or self.pool.num_entries(tail) > 1",
        "return cached or self.pool.num_entries(tail) > 2",
        "COW-2",
    ),
    tooth(
        SMALL["cache"],
        1_344,
        "a free block that is hit counts as free",
        "optimized/pool.py",
        "            self._unlink(block)\n            self.num_free -= 1\n            return\n",
        "            self._unlink(block)\n            return\n",
    ),
]


EACH = [pytest.param(tooth, marks=[pytest.mark.slow] if tooth.num_operations > 10_000 else []) for tooth in TEETH]


@pytest.mark.parametrize("tooth", EACH, ids=lambda tooth: tooth.mutant.name)
def test_a_sabotaged_pool_is_found(tooth: Tooth, tmp_path: Path) -> None:
    with sabotaged(tooth.mutant, tmp_path) as package:
        found = walk(tooth.scope, package.make_pool)
    assert found.fault is not None
    assert (found.fault.rule or "") == tooth.mutant.rule
    assert found.num_operations == tooth.num_operations


def test_what_a_refused_call_has_changed_is_shown(tmp_path: Path) -> None:
    tooth = next(tooth for tooth in TEETH if tooth.mutant.rule == "API-1")
    with sabotaged(tooth.mutant, tmp_path) as package:
        found = walk(tooth.scope, package.make_pool)
    assert found.fault is not None
    assert "event     Refuse(call=Append(seq=0, tokens=(0, 0)))" in found.fault.sentence
    before, now = (line for line in found.fault.sentence.splitlines() if "seqs {0: Seq(" in line)
    assert "tokens=(0, 0, 0)," in before and "tokens=(0, 0, 0, 0, 0)," in now


def test_a_fault_says_how_one_gets_there(tmp_path: Path) -> None:
    with sabotaged(TEETH[0].mutant, tmp_path) as package:
        found = walk(TEETH[0].scope, package.make_pool)
    assert found.fault is not None
    assert [str(move) for move in (*found.fault.path, found.fault.move)] == ["allocate(0, (0,))", "fork(0, 1)"]
