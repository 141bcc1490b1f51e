"""What the prefix cache tells of itself: judged as a stream, beside what it holds, whatever a caller does."""

import json

import pytest

import spec.replay  # noqa: F401  enters the rules
from optimized.engine import SymbolicEngine, make_engine
from optimized.kv_events import KvEvent
from spec.kv_events import FIELDS, StreamMonitor
from spec.vocabulary import Config, Recovery, Request
from tests.optimized.driver import Caller, config_for, next_token

SEEDS = range(60)


def listening(config: Config) -> tuple[SymbolicEngine, list[KvEvent]]:
    engine, told = make_engine(config), list[KvEvent]()
    engine.core.tell_kv_events(told.append)
    return engine, told


def follow(told: list[KvEvent]) -> dict[object, int]:
    """How often each hash is stored, after the rules of such a stream have judged it."""
    monitor = StreamMonitor()
    monitor.follow([json.dumps(event).encode() + b"\n" for event in told], "kv.jsonl")
    return {block_hash: each.count for names in monitor.stored.values() for block_hash, each in names.items()}


def cached(engine: SymbolicEngine) -> dict[object, int]:
    cache = engine.core.scheduler.cache
    assert cache is not None
    return {record.digest.hex(): 1 for record in map(cache.of_block.__getitem__, cache.cached_blocks()) if record}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_of_anything_keeps_the_rules_and_ends_with_what_is_cached(seed: int) -> None:
    config = config_for(seed, SymbolicEngine.profile.capabilities)
    engine, told = listening(config)
    Caller(config, [engine], seed).run(num_calls=60)
    if config.prefix_cache:
        assert follow(told) == cached(engine)
    else:
        assert not told


def test_every_kind_of_event_is_told_with_fields_that_vllm_has() -> None:
    kinds: set[object] = set()
    for seed in SEEDS:
        config = config_for(seed, SymbolicEngine.profile.capabilities)
        engine, told = listening(config)
        Caller(config, [engine], seed).run(num_calls=30)
        kinds |= {event["type"] for event in told}
        assert all(event.keys() - {"type"} <= set(FIELDS[str(event["type"])]) for event in told)
    assert kinds == FIELDS.keys()


def test_a_run_of_blocks_is_one_event_that_names_parent_tokens_and_salt() -> None:
    engine, told = listening(Config(num_blocks=16, block_size=2, prefix_cache=True, max_num_batched_tokens=4))
    engine.add(Request(0, (1, 2, 3, 4, 5, 1 << 40, 7), max_tokens=1, seq_ids=(0,), cache_salt="mine"))
    engine.step(next_token)
    engine.step(next_token)
    first, second = told
    assert (first["parent_block_hash"], first["token_ids"], first["extra_keys"]) == (
        None,
        [1, 2, 3, 4],
        [["mine"], None],
    )
    assert first["block_hashes"][-1] == second["parent_block_hash"]  # type: ignore[index]
    assert (second["token_ids"], second["extra_keys"]) == ([5, 1 << 40], None)


def test_a_block_that_comes_back_from_host_memory_has_its_parents_stored_first() -> None:
    """What it was swapped out of is evicted meanwhile, parents and all."""
    config = Config(
        num_blocks=6,
        block_size=2,
        max_num_seqs=2,
        num_host_blocks=8,
        prefix_cache=True,
        recovery=Recovery.SWAP,
        max_model_len=12,
    )
    engine, told = listening(config)
    for number in range(2):
        engine.add(Request(number, (number, 8, 9), max_tokens=9, seq_ids=(number,)))
    while engine.core.has_work:
        engine.step(lambda seq, prefix: 3)
    assert engine.core.stats()["num_blocks_swapped_out"]
    stored = [block_hash for event in told if event["type"] == "BlockStored" for block_hash in event["block_hashes"]]  # type: ignore[attr-defined]
    assert len(stored) > len(set(stored)), "nothing was evicted and stored again"
    assert follow(told) == cached(engine)


def test_an_emptied_cache_is_one_event() -> None:
    engine, told = listening(Config(num_blocks=16, block_size=2, prefix_cache=True))
    engine.add(Request(0, (1, 2, 3), max_tokens=3, seq_ids=(0,)))
    while engine.core.has_work:
        engine.step(lambda seq, prefix: 3)
    assert engine.core.reset_cache()
    assert told[-1] == {"type": "AllBlocksCleared"}
    assert [event["type"] for event in told].count("BlockRemoved") == 0
    assert follow(told) == cached(engine) == {}
