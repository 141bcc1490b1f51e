"""The block pool without a scheduler: sequences are named by the caller, run at once and are written at once.

The same free list, reference counts and prefix cache as in the engine, judged operation by operation.
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy

from optimized.placement import num_passed_blocks
from optimized.plan import slots_of
from optimized.pool import BlockPool, blocks_needed
from optimized.prefix_cache import PrefixCache, Record
from optimized.sequences import PooledSeq
from spec.engine import Admission, Capability, EvictionOrder, InvalidField, Profile, UnknownId
from spec.vocabulary import (
    Allocate,
    Append,
    Begin,
    BlockId,
    Complete,
    Config,
    Copy,
    Event,
    Flight,
    Fork,
    Hit,
    HostBlockId,
    Prefix,
    Publish,
    Release,
    Reset,
    Rollback,
    Seq,
    SeqId,
    Slide,
    Start,
    State,
    StepId,
    Submit,
    SwapIn,
    SwapOut,
    Token,
    Write,
)

Answer = tuple[Event, ...] | Admission

CAPABILITIES = frozenset(
    {
        Capability.FORK,
        Capability.COPY_ON_WRITE,
        Capability.SWAP,
        Capability.PREFIX_CACHE,
        Capability.WINDOW,
        Capability.ROLLBACK,
        Capability.OVERLAP,
    }
)


class CallersSeq(PooledSeq):
    """A sequence without a request: it and its forks are called after the first of them."""

    __slots__ = ("family", "num_prompt_tokens")

    def __init__(self, family: SeqId, num_prompt_tokens: int, tokens: list[Token], chain: list[Record]) -> None:
        super().__init__(tokens, chain)
        self.family = family
        self.num_prompt_tokens = num_prompt_tokens


class SequencePool:
    """A ``Pool`` of the specification: each operation first asks whether there is room, then does everything at once."""

    profile = Profile("optimized", CAPABILITIES, eviction_order=EvictionOrder.LRU)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.cache = PrefixCache(config.num_blocks, config.block_size) if config.prefix_cache else None
        self.pool = BlockPool(config.num_blocks, self.cache)
        self.host_free: deque[HostBlockId] = deque(range(config.num_host_blocks))
        self.seqs: dict[SeqId, CallersSeq] = {}

    def clone(self) -> SequencePool:
        """A pool of its own in the same state."""
        return deepcopy(self)

    def allocate(self, seq: SeqId, tokens: Prefix) -> Answer:
        self._demand_new(seq)
        if not tokens:
            raise InvalidField("tokens", tokens, "at least one token")
        size = self.config.block_size
        num_blocks = blocks_needed(len(tokens), size)
        if num_blocks > self.config.num_blocks:
            return Admission.NEVER
        chain = [] if self.cache is None else [self.cache.root("")]
        made = CallersSeq(seq, len(tokens), list(tokens), chain)
        hits: tuple[BlockId, ...] = ()
        if self.cache is not None:
            hits = tuple(self.cache.find(made.chain, tokens, limit=(len(tokens) - 1) // size))
        if num_blocks - self.pool.num_in_use(hits) > self.pool.num_free:
            return Admission.LATER
        self.seqs[seq] = made
        self.pool.share(hits)
        made.table, made.num_computed = hits, len(hits) * size
        found = (Hit(seq, hits),) if hits else ()
        return (Start(seq, tokens), *found, *self._write(seq))

    def append(self, seq: SeqId, tokens: Prefix) -> Answer:
        own = self._running(seq)
        if not tokens:
            raise InvalidField("tokens", tokens, "at least one token")
        num_blocks = blocks_needed(len(own.tokens) + len(tokens), self.config.block_size) - own.num_dropped_blocks
        if num_blocks > self.config.num_blocks:
            return Admission.NEVER
        if num_blocks - len(own.table) + self._must_copy(own) > self.pool.num_free:
            return Admission.LATER
        own.tokens += tokens
        return (Append(seq, tokens), *self._write(seq))

    def _must_copy(self, own: PooledSeq) -> bool:
        """COW-2: whether the next token goes into a block that others name, or that the cache may hand to anybody."""
        if own.num_computed % self.config.block_size == 0:
            return False
        tail = own.table[-1]
        cached = self.cache is not None and self.cache.of_block[tail] is not None
        return cached or self.pool.num_entries(tail) > 1

    def _write(self, seq: SeqId) -> list[Event]:
        """Room for all the tokens that are not computed yet, and their K and V."""
        own, size = self.seqs[seq], self.config.block_size
        start, stop = own.num_computed, len(own.tokens)
        events: list[Event] = []
        source = own.table[-1] if self._must_copy(own) else None
        if source is not None:
            target = self.pool.take()
            events.append(Copy(seq, len(own.table) - 1, source, target))
            own.table = (*own.table[:-1], target)
        blocks = self.pool.take_many(blocks_needed(stop, size) - own.num_dropped_blocks - len(own.table))
        own.table += blocks
        if source is not None:
            self.pool.drop_holder(source)
        own.num_computed = stop
        first_kept = own.num_dropped_blocks * size
        slots = tuple(slots_of(own.table, start - first_kept, stop - first_kept, size))
        return [*events, Allocate(seq, stop - start, blocks), Write(seq, start, slots), *self._slide(seq)]

    def _slide(self, seq: SeqId) -> list[Event]:
        """The blocks that no later token sees leave the table."""
        own, window = self.seqs[seq], self.config.window
        if window is None:
            return []
        count = num_passed_blocks(own.num_computed, window, self.config.block_size) - own.num_dropped_blocks
        if count <= 0:
            return []
        self.pool.release(own.table[:count])
        own.table = own.table[count:]
        own.num_dropped_blocks += count
        return [Slide(seq, count)]

    def fork(self, parent: SeqId, child: SeqId) -> Answer:
        own = self._running(parent)
        self._demand_new(child)
        made = CallersSeq(own.family, own.num_prompt_tokens, own.tokens.copy(), own.chain.copy())
        own.share_with(made)
        self.pool.share(made.table)
        self.seqs[child] = made
        return (Fork(parent, child),)

    def release(self, seq: SeqId) -> tuple[Event, ...]:
        if seq not in self.seqs:
            raise UnknownId("sequence", seq)
        own = self.seqs.pop(seq)
        self.pool.release(own.table)
        self.host_free.extend(own.host_table)
        return (Release(seq),)

    def swap_out(self, seq: SeqId) -> Answer:
        """The whole table goes to host memory, or nothing does. A window can have emptied it: nothing to do."""
        own = self._running(seq)
        if not own.table:
            return ()
        if len(own.table) > self.config.num_host_blocks:
            return Admission.NEVER
        if len(own.table) > len(self.host_free):
            return Admission.LATER
        own.host_table = tuple(self.host_free.popleft() for _ in own.table)
        self.pool.release(own.table)
        own.table = ()
        return (SwapOut(seq, own.host_table),)

    def swap_in(self, seq: SeqId) -> Answer:
        """The whole table comes back from host memory, or nothing does."""
        if seq not in self.seqs or not self.seqs[seq].host_table:
            raise UnknownId("swapped sequence", seq)
        own = self.seqs[seq]
        if len(own.host_table) > self.pool.num_free:
            return Admission.LATER
        own.table = self.pool.take_many(len(own.host_table))
        self.host_free.extend(own.host_table)
        own.host_table = ()
        return (SwapIn(seq, own.table),)

    def publish(self, seq: SeqId) -> tuple[Event, ...]:
        own = self._running(seq)
        if self.cache is None:
            return ()
        dropped, num_full = own.num_dropped_blocks, own.num_computed // self.config.block_size
        published = self.cache.publish(own.chain, own.tokens, dropped, own.table[: max(0, num_full - dropped)])
        return tuple(Publish(seq, index) for index in published)

    def reset(self) -> Answer:
        blocks = [] if self.cache is None else self.cache.cached_blocks()
        if self.pool.num_in_use(blocks):
            return Admission.LATER
        if self.cache is not None:
            self.cache.clear()
        return (Reset(),)

    def rollback(self, seq: SeqId, num_tokens: int) -> tuple[Event, ...]:
        own = self._running(seq)
        dropped, size, window = own.num_dropped_blocks, self.config.block_size, self.config.window
        # COW-8: whatever the next token sees is still there.
        seen = window is None or num_passed_blocks(num_tokens, window, size) >= dropped
        if not seen or not 0 < num_tokens < len(own.tokens):
            raise InvalidField("num_tokens", num_tokens, f"fewer than {len(own.tokens)}, and within the window")
        kept = blocks_needed(num_tokens, size) - dropped
        self.pool.release(own.table[kept:])
        own.table = own.table[:kept]
        own.num_computed = num_tokens
        del own.tokens[num_tokens:]
        del own.chain[1 + num_tokens // size :]
        return (Rollback(seq, num_tokens),)

    def submit(self, step_id: StepId, seqs: tuple[SeqId, ...]) -> tuple[Event, ...]:
        if step_id in self.pool.submitted:
            raise InvalidField("step_id", step_id, "an id that no step in flight has")
        self.pool.submit(step_id, [block for seq in seqs for block in self._running(seq).table])
        return (Begin(step_id), Submit(step_id, seqs))

    def complete(self, step_id: StepId) -> tuple[Event, ...]:
        if step_id not in self.pool.submitted:
            raise UnknownId("step", step_id)
        self.pool.drop_holds(self.pool.retire(step_id))
        return (Complete(step_id),)

    def snapshot(self) -> State:
        cache = self.cache
        return State(
            config=self.config,
            free=tuple(self.pool.free_list()),
            ref_count=tuple(self.pool.ref_count),
            block_tables={i: own.table for i, own in self.seqs.items() if not own.host_table},
            seqs={
                i: Seq(
                    own.family, tuple(own.tokens), own.num_prompt_tokens, own.num_computed, 0, own.num_dropped_blocks
                )
                for i, own in self.seqs.items()
            },
            flights={
                i: Flight(blocks=frozenset(step.blocks), holds=tuple(step.holds), submitted=True)
                for i, step in self.pool.submitted.items()
            },
            cached={} if cache is None else {block: cache.key_of(block) for block in cache.cached_blocks()},
            host_free=tuple(self.host_free),
            host_tables={i: own.host_table for i, own in self.seqs.items() if own.host_table},
        )

    def _running(self, seq: SeqId) -> CallersSeq:
        own = self.seqs.get(seq)
        if own is None or own.host_table:
            raise UnknownId("running sequence", seq)
        return own

    def _demand_new(self, seq: SeqId) -> None:
        if seq in self.seqs:
            raise InvalidField("seq", seq, "an id that no live sequence has")


def make_pool(config: Config) -> SequencePool:
    """An empty pool with these limits."""
    return SequencePool(config)
