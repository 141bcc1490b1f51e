"""A story: commands for an engine, and what its memory looks like after each. See README.txt beside this file.

Blocks have names of the story's own, since engines may choose any free block: a block that comes into use gets the
lowest name that is not in use. So a story reads the same whichever engine runs it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from spec.conformance.judge import JudgedEngine
from spec.engine import Capability, Engine, EngineFactory, Profile
from spec.picture import caption_of, memory_map, text
from spec.replay import replay, step
from spec.vocabulary import (
    Admit,
    Append,
    BlockId,
    CacheKey,
    Config,
    Copy,
    Event,
    Evict,
    Finish,
    Fork,
    Hit,
    Policy,
    Preempt,
    Prefix,
    Publish,
    Recovery,
    Request,
    SeqId,
    Slot,
    State,
    SwapIn,
    SwapOut,
    Token,
    Write,
)


def next_token(seq: SeqId, tokens: Prefix) -> Token:
    """What a sequence says next: 100 times its number plus its length, so that one can see who said it when."""
    return 100 * (seq + 1) + len(tokens)


class Names:
    """The story's names of blocks, kept up to date after each event."""

    def __init__(self) -> None:
        self.names: dict[BlockId, int] = {}

    def follow(self, used: Iterable[BlockId]) -> None:
        """These blocks are in use, in this order; the others have lost their names."""
        used = list(dict.fromkeys(used))
        self.names = {block: name for block, name in self.names.items() if block in used}
        for block in used:
            if block not in self.names:
                taken = set(self.names.values())
                self.names[block] = next(name for name in range(len(taken) + 1) if name not in taken)

    def order(self, num_blocks: int) -> dict[BlockId, int]:
        """A name for every block; those not in use come last."""
        unused = [name for name in range(num_blocks) if name not in self.names.values()]
        rest = (block for block in range(num_blocks) if block not in self.names)
        return {**self.names, **dict(zip(rest, unused, strict=True))}


def used_blocks(s: State) -> Iterator[BlockId]:
    """The blocks of tables, then of steps, then those that are only cached."""
    for table in s.block_tables.values():
        yield from table
    for flight in s.flights.values():
        yield from flight.holds
    yield from sorted(
        s.cached, key=lambda block: (len(s.cached[block].tokens), s.cached[block].tokens, s.cached[block].salt)
    )


def renamed(s: State, device: dict[BlockId, int], host: dict[BlockId, int]) -> State:
    """The same state under the story's names. The order of the free lists is the engine's business."""
    size = s.config.block_size

    def contents(cells: dict[Slot, Prefix], names: dict[BlockId, int]) -> dict[Slot, Prefix]:
        return {names[at // size] * size + at % size: prefix for at, prefix in cells.items()}

    counts = {device[block]: count for block, count in enumerate(s.ref_count)}
    cached: dict[BlockId, CacheKey] = {device[block]: key for block, key in s.cached.items()}
    return replace(
        s,
        free=tuple(sorted(device[block] for block in s.free)),
        ref_count=tuple(counts[block] for block in sorted(counts)),
        block_tables={i: tuple(device[b] for b in table) for i, table in s.block_tables.items()},
        flights={i: replace(f, holds=tuple(device[b] for b in f.holds)) for i, f in s.flights.items()},
        cached=cached,
        host_free=tuple(sorted(host[block] for block in s.host_free)),
        host_tables={i: tuple(host[b] for b in table) for i, table in s.host_tables.items()},
        cells=contents(dict(s.cells), device),
        host_cells=contents(dict(s.host_cells), host),
    )


class Teller:
    """Runs a story's commands on one engine, every call judged, and tells what happened."""

    def __init__(self, config: Config, factory: EngineFactory) -> None:
        self.config = config
        self.judged = JudgedEngine(factory(config), config)
        self.state = self.judged.state
        self.num_told = 0
        self.device, self.host = Names(), Names()
        self.commands: dict[str, Callable[[list[str]], list[str]]] = {
            "add": self.add,
            "step": self.step,
            "fork": self.fork,
            "abort": self.abort,
            "reset": self.reset,
            "show": self.show,
        }

    def tell(self, command: str) -> list[str]:
        """The lines that a command answers with."""
        verb, *words = command.split()
        return self.commands[verb](words)

    def add(self, words: list[str]) -> list[str]:
        facts = _facts(["request", *words])
        request_id = facts["request"][0]
        request = Request(
            request_id=request_id,
            prompt=tuple(facts.get("prompt", ())),
            max_tokens=facts["max_tokens"][0],
            seq_ids=tuple(facts.get("seqs", [request_id])),
            stop_token_ids=tuple(facts.get("stop", ())),
            priority=facts.get("priority", [0])[0],
        )
        answer = "waits" if self.judged.add(request) else "refused: it can never be served here"
        return [answer, *self._news()]

    def step(self, words: list[str]) -> list[str]:
        lines: list[str] = []
        for _ in range(int(words[0]) if words else 1):
            self.judged.step(next_token)
            lines += self._news()
        return lines + self.show([])

    def fork(self, words: list[str]) -> list[str]:
        parent, child = map(int, words)
        answer = self.judged.fork(parent, child)
        return [answer.value if answer else "invalid", *self._news(), *self.show([])]

    def abort(self, words: list[str]) -> list[str]:
        self.judged.abort(int(words[0]))
        return self._news() + self.show([])

    def reset(self, words: list[str]) -> list[str]:
        return ["emptied" if self.judged.reset_cache() else "in use", *self._news(), *self.show([])]

    def show(self, words: list[str]) -> list[str]:
        return text(memory_map(renamed(self.state, *self._orders()))).splitlines()

    def check(self) -> None:
        """The model, given the events alone, is where the engine is."""
        replayed = replay(self.config, self.judged.follower.trace)
        assert text(memory_map(replayed)) == text(memory_map(self.judged.state))

    def _news(self) -> list[str]:
        """What happened since the last command, under the story's names."""
        lines = []
        for event in self.judged.follower.trace[self.num_told :]:
            before = self._orders()
            s, self.state = self.state, step(self.state, event)
            self.device.follow(used_blocks(self.state))
            self.host.follow(block for table in self.state.host_tables.values() for block in table)
            after = self._orders()
            lines += [f"  {line}" for line in _told(event, s, before[0], after[0])]
        self.num_told = len(self.judged.follower.trace)
        return lines

    def _orders(self) -> tuple[dict[BlockId, int], dict[BlockId, int]]:
        return self.device.order(self.config.num_blocks), self.host.order(self.config.num_host_blocks)


def _told(event: Event, before: State, old: dict[BlockId, int], new: dict[BlockId, int]) -> list[str]:
    """The event in words, if a reader of the story wants to know."""
    match event:
        case Write(seq=seq, slots=slots):
            return [f"seq {seq} computes {len(slots)} token{'s' if len(slots) > 1 else ''}"]
        case Append(seq=seq, tokens=tokens):
            return [f"seq {seq} says {' '.join(map(str, tokens))}"]
        case Copy(seq=seq, source=source, target=target):
            return [f"seq {seq} gets a copy of block {old[source]} in block {new[target]}"]
        case Hit(seq=seq, blocks=blocks):
            return [f"seq {seq} finds block {' '.join(str(old[block]) for block in blocks)} in the cache"]
        case Publish(seq=seq, index=index):
            block = before.block_tables[seq][index - before.seqs[seq].num_dropped_blocks]
            return [f"block {old[block]} can be found in the cache"]
        case Finish(seq=seq, reason=reason):
            return [f"seq {seq} ends: {reason.value}"]
        case SwapOut(seq=seq):
            return [f"seq {seq} moves to host memory"]
        case SwapIn(seq=seq):
            return [f"seq {seq} comes back from host memory"]
        case Evict(block=block):
            return [f"block {old[block]} leaves the cache"]
        case Fork(parent=parent, child=child):
            return [f"seq {child} is forked from seq {parent}"]
        case Admit() | Preempt():
            return [caption_of(event).lower()]
    return []


def _facts(words: list[str]) -> dict[str, list[int]]:
    """``request 0 prompt 5 6 max_tokens 2`` as names with numbers."""
    facts: dict[str, list[int]] = {}
    for word in words:
        if word.lstrip("-").isdigit():
            facts[list(facts)[-1]].append(int(word))
        else:
            facts[word] = []
    return facts


@dataclass(frozen=True)
class Story:
    """A file: lines of comment, one line of limits, commands, and what each answered."""

    path: Path
    lines: tuple[str, ...]

    @property
    def config(self) -> Config:
        (line,) = (line for line in self.lines if line.startswith("config "))
        facts = dict(word.split("=") for word in line.split()[1:])
        recovery, policy = Recovery(facts.pop("recovery", "recompute")), Policy(facts.pop("policy", "fcfs"))
        limits = {name: _value(word) for name, word in facts.items()}
        return replace(Config(num_blocks=1), **limits, recovery=recovery, policy=policy)

    @property
    def needs(self) -> frozenset[Capability]:
        """What an engine must be able to do to run the story."""
        named = [word for line in self.lines if line.startswith("needs ") for word in line.split()[1:]]
        return frozenset(map(Capability, named))

    def can_run_on(self, profile: Profile) -> bool:
        return profile.can(*self.needs)

    def told_by(self, factory: Callable[[Config], Engine]) -> str:
        """The whole file as this engine tells it."""
        teller = Teller(self.config, factory)
        told: list[str] = []
        for line in self.lines:
            if line.startswith(("#", "config ", "needs ")) or not line:
                told.append(line)
            elif line.startswith("> "):
                told += [line, *teller.tell(line[2:])]
        teller.check()
        return "\n".join(told) + "\n"


def _value(word: str) -> int | bool:
    return word == "True" if word in ("True", "False") else int(word)


def read_story(path: Path) -> Story:
    return Story(path, tuple(path.read_text(encoding="utf-8").splitlines()))
