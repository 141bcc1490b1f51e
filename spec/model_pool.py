"""A pool that follows the specification alone, its free choices made one way."""

from spec.allocator import blocks_needed
from spec.block_table import room, slots_of
from spec.choices import EvictionOrder
from spec.engine import Admission, Capability, Profile
from spec.prefix_cache import find, key_of, longest_hit, may_reset
from spec.replay import step
from spec.sharing import blocks_lacking, growth, must_copy
from spec.vocabulary import (
    Allocate,
    Append,
    Begin,
    Complete,
    Copy,
    Event,
    Fork,
    Hit,
    Prefix,
    Publish,
    Release,
    Reset,
    Rollback,
    SeqId,
    Slide,
    Start,
    State,
    StepId,
    Submit,
    SwapIn,
    SwapOut,
    Write,
    all_blocks,
)

Answer = tuple[Event, ...] | Admission
Step = tuple[State, Event, State]


class ModelPool:
    """A pool whose state is a ``State`` and whose operations are transitions: the block that has been free longest is
    taken, and the longest cached prefix is hit. ``steps`` are those of the last call."""

    profile = Profile("model", frozenset(Capability), eviction_order=EvictionOrder.LRU)

    def __init__(self, state: State) -> None:
        self.state = state
        self.steps: list[Step] = []

    def clone(self) -> "ModelPool":
        """A pool of its own in the same state."""
        return ModelPool(self.state)

    def snapshot(self) -> State:
        return self.state

    def allocate(self, seq: SeqId, tokens: Prefix) -> Answer:
        if blocks_needed(len(tokens), self.state.config.block_size) > len(all_blocks(self.state)):
            return Admission.NEVER
        before = self.state
        self._do(Start(seq, tokens), first=True)
        hits = self._hits(seq)
        if hits:
            self._do(hits)
        return self._write(seq, before)

    def _hits(self, seq: SeqId) -> Hit | None:
        s = self.state
        if not s.cached:
            return None
        found = (find(s, key_of(s, seq, index)) for index in range(longest_hit(s, seq)))
        blocks = tuple([block for block in found if block is not None])
        return Hit(seq, blocks) if blocks else None

    def append(self, seq: SeqId, tokens: Prefix) -> Answer:
        before = self.state
        longer = before.seqs[seq].num_tokens + len(tokens)
        if len(before.block_tables[seq]) + growth(before, seq, longer) > len(all_blocks(before)):
            return Admission.NEVER
        self._do(Append(seq, tokens), first=True)
        return self._write(seq, before)

    def _write(self, seq: SeqId, before: State) -> Answer:
        """Room for every token that the sequence has, and the write of them; or else back to where it was."""
        s = self.state
        start, stop = s.seqs[seq].num_computed_tokens, s.seqs[seq].num_tokens
        index = start // s.config.block_size - s.seqs[seq].num_dropped_blocks
        if blocks_lacking(s, (seq,)) > len(s.free):
            self.state = before
            return Admission.LATER
        if start % s.config.block_size and must_copy(s, s.block_tables[seq][index]):
            s = self._do(Copy(seq, index, s.block_tables[seq][index], s.free[0]))
        count = growth(s, seq, stop)
        s = self._do(Allocate(seq, stop - room(s.seqs[seq]), s.free[:count]))
        s = self._do(Write(seq, start, slots_of(s, seq, start, stop)))
        if s.config.window is not None:
            passed = (stop - s.config.window + 1) // s.config.block_size - s.seqs[seq].num_dropped_blocks
            if passed > 0:
                self._do(Slide(seq, passed))
        return self._answer()

    def fork(self, parent: SeqId, child: SeqId) -> Answer:
        return self._only(Fork(parent, child))

    def release(self, seq: SeqId) -> tuple[Event, ...]:
        return self._only(Release(seq))

    def swap_out(self, seq: SeqId) -> Answer:
        s = self.state
        count = len(s.block_tables[seq])
        if count > len(s.host_free):
            return Admission.NEVER if count > s.config.num_host_blocks else Admission.LATER
        return self._only(SwapOut(seq, s.host_free[:count])) if count else self._nothing()

    def swap_in(self, seq: SeqId) -> Answer:
        s = self.state
        count = len(s.host_tables[seq])
        return Admission.LATER if count > len(s.free) else self._only(SwapIn(seq, s.free[:count]))

    def publish(self, seq: SeqId) -> tuple[Event, ...]:
        self._nothing()
        own = self.state.seqs[seq]
        for index in range(own.num_dropped_blocks, own.num_computed_tokens // self.state.config.block_size):
            if find(self.state, key_of(self.state, seq, index)) is None:
                self._do(Publish(seq, index))
        return self._answer()

    def reset(self) -> Answer:
        return self._only(Reset()) if may_reset(self.state) else Admission.LATER

    def rollback(self, seq: SeqId, num_tokens: int) -> tuple[Event, ...]:
        return self._only(Rollback(seq, num_tokens))

    def submit(self, step_id: StepId, seqs: tuple[SeqId, ...]) -> tuple[Event, ...]:
        self._do(Begin(step_id), first=True)
        self._do(Submit(step_id, seqs))
        return self._answer()

    def complete(self, step_id: StepId) -> tuple[Event, ...]:
        return self._only(Complete(step_id))

    def _do(self, event: Event, *, first: bool = False) -> State:
        after = step(self.state, event)
        if first:
            self.steps = []
        self.steps.append((self.state, event, after))
        self.state = after
        return after

    def _only(self, event: Event) -> tuple[Event, ...]:
        self._do(event, first=True)
        return (event,)

    def _nothing(self) -> tuple[Event, ...]:
        self.steps = []
        return ()

    def _answer(self) -> tuple[Event, ...]:
        return tuple([event for _, event, _ in self.steps])
