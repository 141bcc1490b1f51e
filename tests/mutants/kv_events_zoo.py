"""Sabotaged engines that their KV events give away: those that an engine tells itself, or what its cache names, told as vLLM does."""

import json

from spec.engine import EngineFactory
from spec.kv_events import StreamMonitor, StreamViolation
from spec.vocabulary import CacheKey, Config, Request
from tests.mutants.sabotage import Mutant

_CACHED = Config(num_blocks=4, block_size=2, max_num_seqs=2, max_model_len=8, prefix_cache=True)
_PROMPTS = ((1, 2, 3, 4, 5), (1, 2, 3), (6, 7, 8, 9))


def _fault(name: str, old: str, new: str, rule: str, row: str) -> Mutant:
    return Mutant(name, "reference", "scheduler.py", old, new, rule, row)


KV_EVENTS_ZOO = [
    _fault(
        "a block is published before it is full",
        "first, stop = scheduled.start // size, scheduled.stop // size",
        "first, stop = scheduled.start // size, -(-scheduled.stop // size)",
        "CACHE-2",
        "B-098",
    ),
]


def kv_events_killer(factory: EngineFactory) -> str:
    """The id of the first rule that the KV events of an engine break, which serves a few prompts twice."""
    engine, monitor, known = factory(_CACHED), StreamMonitor(), set[CacheKey]()
    told: list[dict[str, object]] = []
    if (core := getattr(engine, "core", None)) is not None:
        core.tell_kv_events(told.append)
    for number, prompt in enumerate(_PROMPTS * 2):
        engine.add(Request(number, prompt, max_tokens=2, seq_ids=(number,)))
        while engine.snapshot().requests:
            engine.step(lambda seq, tokens: 0)
            cached = set(engine.snapshot().cached.values())
            events = [_removed(key) for key in known - cached]
            events += [_stored(key) for key in sorted(cached - known, key=lambda key: len(key.tokens))]
            if core is not None:
                events = told[:]
                told.clear()
            try:
                monitor.follow([json.dumps(event).encode() + b"\n" for event in events], "kv.jsonl")
            except StreamViolation as violation:
                return violation.rule.id
            known = cached
    return "survived"


def _stored(key: CacheKey) -> dict[str, object]:
    size = _CACHED.block_size
    start = (len(key.tokens) - 1) // size * size
    facts = {"parent_block_hash": str(key.tokens[:start]) if start else None, "token_ids": key.tokens[start:]}
    return {"type": "BlockStored", "block_hashes": [str(key.tokens)], "block_size": size, **facts}


def _removed(key: CacheKey) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [str(key.tokens)]}
