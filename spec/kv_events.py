"""The KV events that vLLM publishes (stored, removed, cleared), judged by the rules of the prefix cache.

A stream is one JSON value a line: an event, or a batch of events, each as an object (``{"type": "BlockStored", ...}``) or as
an array (``["BlockStored", ...]``), the two ways in which vLLM's ``vllm.distributed.kv_events`` are written. It must begin
with the engine, or after an ``AllBlocksCleared``. The same block hash may be stored several times, in blocks of its own;
each is removed once.
"""

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from spec.rules import RULES, Rule
from spec.trace import Place
from spec.vocabulary import Token

BlockHash: TypeAlias = int | str
Home: TypeAlias = tuple[object, object, object]
"""Where hashes have a meaning: the data-parallel rank, the medium, the group of layers."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""The fields of each event, in the order in which arrays have them; those that a later vLLM adds are passed over."""


class StreamViolation(Exception):
    """An event of a stream breaks a rule of the prefix cache."""

    def __init__(self, rule: Rule, event: str, before: str, now: str) -> None:
        lines = [
            f"{rule.id} does not hold: {rule.sentence}",
            "  engine    unknown: a stream of KV events",
            f"  event     {event}",
            f"  before    {before}",
            f"  now       {now}",
            f"  read      docs/rules.html#rule-{rule.id}",
        ]
        super().__init__("\n".join(lines))
        self.rule = rule


@dataclass
class Stored:
    """What a hash stands for, and in how many blocks."""

    parent: BlockHash | None
    tokens: tuple[Token, ...]
    count: int = 1

    def __str__(self) -> str:
        times = "" if self.count == 1 else f", {self.count} times"
        return f"parent {self.parent!r}, tokens {reprlib.repr(self.tokens)}{times}"


JUDGED = ("CACHE-1", "CACHE-2", "CACHE-9")
"""The rules that such a stream can break: chain and contents, whole blocks, and removal of what is there."""


@dataclass
class StreamMonitor:
    """Follows a stream. Raises ``StreamViolation``."""

    num_events: int = 0
    line: int = 0
    stored: dict[Home, dict[BlockHash, Stored]] = field(default_factory=dict)

    def follow(self, lines: Iterable[bytes], file: str) -> int:
        """Judge a whole stream, and say how many events it has. Raises ``TraceError`` at a line that is wrong."""
        for self.line, line in enumerate(lines, start=1):
            place = Place(file, self.line)
            for rank, kind, facts in _events(_value(line, place), place):
                self.num_events += 1
                if kind == "BlockStored":
                    self._store(rank, facts, place)
                elif kind == "BlockRemoved":
                    self._remove(rank, facts, place)
                else:
                    for home in [home for home in self.stored if home[0] == rank]:
                        del self.stored[home]
        return self.num_events

    def _store(self, rank: object, facts: Mapping[str, object], place: Place) -> None:
        hashes, tokens = _hashes(facts, place), _tokens(facts, place)
        size, parent = facts.get("block_size"), facts.get("parent_block_hash")
        if type(size) is not int or size < 1:
            raise place.error("block_size", f"is {size!r}, it must be a whole number, at least 1")
        if parent is not None and not _is_hash(parent):
            raise place.error("parent_block_hash", f"is {reprlib.repr(parent)}, it must be a hash or null")
        names = self.stored.setdefault((rank, facts.get("medium"), facts.get("group_idx")), {})
        event = f"BlockStored(block_hashes={hashes}, parent_block_hash={parent!r}, block_size={size})"
        if len(tokens) != len(hashes) * size:
            raise _broken("CACHE-2", event, "", f"{len(tokens)} tokens for {len(hashes)} blocks of {size}")
        if parent is not None and parent not in names and facts.get("kv_cache_spec_sliding_window") is None:
            raise _broken("CACHE-1", event, _shown(names, hashes), f"nothing is stored under the parent {parent!r}")
        for index, block_hash in enumerate(hashes):
            new = Stored(_parent(parent), tokens[index * size : (index + 1) * size])
            old = names.get(block_hash)
            if old is None:
                names[block_hash] = new
            elif (old.parent, old.tokens) == (new.parent, new.tokens):
                old.count += 1
            else:
                raise _broken("CACHE-1", event, f"{{{block_hash!r}: {old}}}", f"{{{block_hash!r}: {new}}}")
            parent = block_hash

    def _remove(self, rank: object, facts: Mapping[str, object], place: Place) -> None:
        hashes, names = _hashes(facts, place), self.stored.get((rank, facts.get("medium"), facts.get("group_idx")), {})
        for block_hash in hashes:
            if block_hash not in names:
                event = f"BlockRemoved(block_hashes={hashes})"
                raise _broken("CACHE-9", event, _shown(names, hashes), f"nothing is stored under {block_hash!r}")
            names[block_hash].count -= 1
            if not names[block_hash].count:
                del names[block_hash]


def _broken(rule_id: str, event: str, before: str, now: str) -> StreamViolation:
    return StreamViolation(RULES[rule_id], event, before or "{}", now)


def _shown(names: Mapping[BlockHash, Stored], hashes: Sequence[BlockHash]) -> str:
    return "{" + ", ".join(f"{each!r}: {names[each]}" for each in hashes if each in names) + "}"


def is_stream(line: bytes) -> bool:
    """Whether a file that begins with this line holds such events, and not a log of ours."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) or (
        isinstance(value, dict) and ("type" in value or {"ts", "events"} <= value.keys())
    )


def _value(line: bytes, place: Place) -> object:
    if not line.endswith(b"\n"):
        raise place.error(None, "the stream is cut off")
    try:
        value: object = json.loads(line)
    except UnicodeDecodeError as error:
        raise place.error(None, f"byte {error.start + 1} is no UTF-8") from None
    except (ValueError, RecursionError):
        raise place.error(None, "this is no JSON") from None
    return value


def _events(value: object, place: Place) -> Iterator[tuple[object, str, Mapping[str, object]]]:
    """The rank, the kind and the fields of each event of a line."""
    match value:
        case {"ts": _, "events": list(events), **rest}:
            rank = rest.get("data_parallel_rank")
        case [int() | float(), list(events), *more]:
            rank = more[0] if more else None
        case _:
            rank, events = None, [value]
    for event in events:
        match event:
            case {"type": str(kind)}:
                facts: Mapping[str, object] = event
            case [str(kind), *parts]:
                facts = dict(zip(FIELDS.get(kind, ()), parts, strict=False))
            case _:
                raise place.error(None, f"{reprlib.repr(event)} is no KV event")
        if kind not in FIELDS:
            raise place.error("type", f"is {kind!r}, it must be one of {', '.join(FIELDS)}")
        yield rank, kind, facts


def _is_hash(value: object) -> bool:
    return type(value) in (int, str)


def _parent(value: object) -> BlockHash | None:
    return value if isinstance(value, int | str) else None


def _hashes(facts: Mapping[str, object], place: Place) -> list[BlockHash]:
    value = facts.get("block_hashes")
    if not isinstance(value, list) or not all(map(_is_hash, value)):
        raise place.error("block_hashes", f"is {reprlib.repr(value)}, it must be a list of hashes")
    return value


def _tokens(facts: Mapping[str, object], place: Place) -> tuple[Token, ...]:
    value = facts.get("token_ids")
    if not isinstance(value, list) or any(type(each) is not int for each in value):
        raise place.error("token_ids", f"is {reprlib.repr(value)}, it must be a list of whole numbers")
    return tuple(value)
