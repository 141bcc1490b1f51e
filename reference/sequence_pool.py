"""A block pool without a scheduler: sequences are named by the caller, run at once, and are written at once."""

from copy import deepcopy
from dataclasses import replace

from reference.pool import BlockPool, blocks_needed, slots_of
from spec.engine import Admission, Capability, EvictionOrder, InvalidField, Profile, UnknownId
from spec.vocabulary import (
    Append,
    Begin,
    BlockId,
    Complete,
    Config,
    Copy,
    Event,
    Fork,
    Hit,
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
    Write,
)

Answer = tuple[Event, ...] | Admission

POOL_PROFILE = Profile(
    name="reference",
    capabilities=frozenset(
        {
            Capability.FORK,
            Capability.COPY_ON_WRITE,
            Capability.SWAP,
            Capability.PREFIX_CACHE,
            Capability.WINDOW,
            Capability.ROLLBACK,
            Capability.OVERLAP,
        }
    ),
    eviction_order=EvictionOrder.LRU,
)


class SequencePool:
    """Block pool and sequences. Each operation first asks whether there is room, then does everything at once."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.pool = BlockPool(config)
        self.seqs: dict[SeqId, Seq] = {}

    @property
    def profile(self) -> Profile:
        return POOL_PROFILE

    def clone(self) -> "SequencePool":
        """A pool of its own in the same state."""
        return deepcopy(self)

    def allocate(self, seq: SeqId, tokens: Prefix) -> Answer:
        """A new sequence with these tokens; the longest cached prefix is hit, the rest is written."""
        self._demand_new(seq)
        if not tokens:
            raise InvalidField("tokens", tokens, "at least one token")
        size, fresh = self.config.block_size, Seq(seq, tokens, num_prompt_tokens=len(tokens))
        if blocks_needed(len(tokens), size) > self.config.num_blocks:
            return Admission.NEVER
        hits: tuple[BlockId, ...] = self.pool.longest_hit(tokens, salt="") if self.config.prefix_cache else ()
        num_free_hits = sum(1 for block in hits if self.pool.ref_count[block] == 0)
        if num_free_hits + blocks_needed(len(tokens), size) - len(hits) > self.pool.num_free:
            return Admission.LATER
        self.seqs[seq] = fresh
        self.pool.tables[seq] = ()
        events: list[Event] = [Start(seq, tokens)]
        if hits:
            self.pool.hit(seq, hits)
            self.seqs[seq] = replace(fresh, num_computed_tokens=len(hits) * size)
            events.append(Hit(seq, hits))
        return (*events, *self._write(seq))

    def append(self, seq: SeqId, tokens: Prefix) -> Answer:
        """More tokens for a running sequence, written at once; a shared tail is copied first."""
        self._demand_running(seq)
        if not tokens:
            raise InvalidField("tokens", tokens, "at least one token")
        old = self.seqs[seq]
        growth = self.pool.growth(seq, old, old.num_tokens + len(tokens))
        if len(self.pool.tables[seq]) + growth > self.config.num_blocks:
            return Admission.NEVER
        if self.pool.blocks_to_take(seq, old, len(tokens)) > self.pool.num_free:
            return Admission.LATER
        self.seqs[seq] = replace(old, tokens=old.tokens + tokens)
        return (Append(seq, tokens), *self._write(seq))

    def _write(self, seq_id: SeqId) -> list[Event]:
        """Room for all the tokens that are not computed yet, and their K and V."""
        seq = self.seqs[seq_id]
        start, stop = seq.num_computed_tokens, seq.num_tokens
        events: list[Event] = list(self.pool.extend(seq_id, seq, stop - start))
        self.pool.give_back(event.source for event in events if isinstance(event, Copy))
        first_kept = seq.num_dropped_blocks * self.config.block_size
        slots = slots_of(self.pool.tables[seq_id], first_kept, start, stop, self.config.block_size)
        self.seqs[seq_id] = replace(seq, num_computed_tokens=stop)
        return [*events, Write(seq_id, start, slots), *self._slide(seq_id)]

    def _slide(self, seq_id: SeqId) -> list[Event]:
        """The blocks that no later token sees leave the table."""
        seq, window = self.seqs[seq_id], self.config.window
        if window is None:
            return []
        first_visible = max(0, seq.num_computed_tokens - window + 1)
        num_blocks = first_visible // self.config.block_size - seq.num_dropped_blocks
        if num_blocks <= 0:
            return []
        self.pool.drop_front(seq_id, num_blocks)
        self.seqs[seq_id] = replace(seq, num_dropped_blocks=seq.num_dropped_blocks + num_blocks)
        return [Slide(seq_id, num_blocks)]

    def fork(self, parent: SeqId, child: SeqId) -> Answer:
        """A new sequence that shares everything with its parent."""
        self._demand_running(parent)
        self._demand_new(child)
        self.pool.fork(parent, child)
        self.seqs[child] = self.seqs[parent]
        return (Fork(parent, child),)

    def release(self, seq: SeqId) -> tuple[Event, ...]:
        """The sequence, running or swapped, is gone."""
        self._demand_live(seq)
        self.pool.drop(seq)
        del self.seqs[seq]
        return (Release(seq),)

    def swap_out(self, seq: SeqId) -> Answer:
        """The whole table goes to host memory, or nothing does. A window can have emptied the table: nothing to do."""
        self._demand_running(seq)
        num_blocks = len(self.pool.tables[seq])
        if num_blocks == 0:
            return ()
        if num_blocks > self.config.num_host_blocks:
            return Admission.NEVER
        if num_blocks > len(self.pool.host_free):
            return Admission.LATER
        return (SwapOut(seq, self.pool.swap_out(seq)),)

    def swap_in(self, seq: SeqId) -> Answer:
        """The whole table comes back from host memory, or nothing does."""
        if seq not in self.pool.host_tables:
            raise UnknownId("swapped sequence", seq)
        if len(self.pool.host_tables[seq]) > self.pool.num_free:
            return Admission.LATER
        return (SwapIn(seq, self.pool.swap_in(seq)),)

    def publish(self, seq: SeqId) -> tuple[Event, ...]:
        """Enter the full blocks of the sequence into the prefix cache, those whose key is not there yet."""
        self._demand_running(seq)
        own = self.seqs[seq]
        num_full = own.num_computed_tokens // self.config.block_size
        indices = range(own.num_dropped_blocks, num_full)
        return tuple(Publish(seq, index) for index in indices if self.pool.publish(seq, own, index, salt=""))

    def reset(self) -> Answer:
        """Empty the prefix cache, unless a cached block is in use."""
        return (Reset(),) if self.pool.reset() else Admission.LATER

    def rollback(self, seq: SeqId, num_tokens: int) -> tuple[Event, ...]:
        """Take back the last tokens: ``num_tokens`` are left."""
        self._demand_running(seq)
        old, size = self.seqs[seq], self.config.block_size
        num_computed = min(old.num_computed_tokens, num_tokens)
        window = old.num_computed_tokens if self.config.window is None else self.config.window
        first_visible = max(0, num_computed - window + 1)
        if not 0 < num_tokens < old.num_tokens or first_visible < old.num_dropped_blocks * size:
            raise InvalidField("num_tokens", num_tokens, f"fewer than {old.num_tokens}, and within the window")
        self.pool.drop_end(seq, blocks_needed(num_computed, size) - old.num_dropped_blocks)
        self.seqs[seq] = replace(old, tokens=old.tokens[:num_tokens], num_computed_tokens=num_computed)
        return (Rollback(seq, num_tokens),)

    def submit(self, step_id: StepId, seqs: tuple[SeqId, ...]) -> tuple[Event, ...]:
        """A step that reads these sequences is in flight."""
        if step_id in self.pool.flights:
            raise InvalidField("step_id", step_id, "an id that no step in flight has")
        for seq in seqs:
            self._demand_running(seq)
        self.pool.submit(step_id, {}, (), readers=seqs)
        return Begin(step_id), Submit(step_id, seqs)

    def complete(self, step_id: StepId) -> tuple[Event, ...]:
        """That step is over."""
        if step_id not in self.pool.flights:
            raise UnknownId("step", step_id)
        self.pool.complete(step_id)
        return (Complete(step_id),)

    def snapshot(self) -> State:
        """What the pool is in right now."""
        return State(
            config=self.config,
            free=tuple(self.pool.free),
            ref_count=tuple(self.pool.ref_count),
            block_tables=dict(self.pool.tables),
            seqs=dict(self.seqs),
            flights=dict(self.pool.flights),
            cached=dict(self.pool.cached),
            host_free=tuple(self.pool.host_free),
            host_tables=dict(self.pool.host_tables),
        )

    def _demand_live(self, seq: SeqId) -> None:
        if seq not in self.seqs:
            raise UnknownId("sequence", seq)

    def _demand_running(self, seq: SeqId) -> None:
        if seq not in self.pool.tables:
            raise UnknownId("running sequence", seq)

    def _demand_new(self, seq: SeqId) -> None:
        if seq in self.seqs:
            raise InvalidField("seq", seq, "an id that no live sequence has")


def make_pool(config: Config) -> SequencePool:
    """An empty pool with these limits."""
    return SequencePool(config)
