"""The block pool: which blocks are free, who holds the others, and what can be found in the prefix cache.

Lists and dictionaries, searched from the front. Every operation either returns what it did or, when there is no room,
is not called: whoever calls asks first (``num_free``, ``blocks_to_take``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from spec.vocabulary import (
    Allocate,
    BlockId,
    CacheKey,
    Config,
    Copy,
    Flight,
    HostBlockId,
    Prefix,
    Seq,
    SeqId,
    Slot,
    StepId,
)


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """The number of blocks that hold ``num_tokens`` tokens."""
    return (num_tokens + block_size - 1) // block_size


def slots_of(table: Sequence[BlockId], first_kept: int, start: int, stop: int, block_size: int) -> tuple[Slot, ...]:
    """The slots of the positions ``start`` to ``stop``; the table's first block holds position ``first_kept``."""
    slots = []
    for position in range(start, stop):
        index, offset = divmod(position - first_kept, block_size)
        slots.append(table[index] * block_size + offset)
    return tuple(slots)


def num_tokens_with_room(seq: Seq) -> int:
    """The tokens for which the sequence's table has blocks: the computed ones and those of the step in the making."""
    return seq.num_computed_tokens + seq.num_scheduled_tokens


class BlockPool:
    """Blocks, block tables, reference counts, host blocks, and the names in the prefix cache."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.free: list[BlockId] = list(range(config.num_blocks))
        self.ref_count: list[int] = [0] * config.num_blocks
        self.tables: dict[SeqId, tuple[BlockId, ...]] = {}
        self.cached: dict[BlockId, CacheKey] = {}
        self.host_free: list[HostBlockId] = list(range(config.num_host_blocks))
        self.host_tables: dict[SeqId, tuple[HostBlockId, ...]] = {}
        self.flights: dict[StepId, Flight] = {}

    @property
    def num_free(self) -> int:
        return len(self.free)

    # One block ----------------------------------------------------------------------------------------------------

    def take(self) -> BlockId:
        """The block that has been free longest; whatever the cache could find in it is forgotten."""
        block = self.free.pop(0)
        self.cached.pop(block, None)
        self.ref_count[block] = 1
        return block

    def hold(self, block: BlockId) -> None:
        """One more holder, of a block in use or of a free one that the cache still names."""
        if self.ref_count[block] == 0:
            self.free.remove(block)
        self.ref_count[block] += 1

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        """One holder less for each, the last block first, so that the end of a prefix is evicted before its start.

        ALLOC-5: a block that a step in flight reads does not become free; the step is its last holder.
        """
        for block in reversed(tuple(blocks)):
            readers = [step_id for step_id, flight in self.flights.items() if block in flight.blocks]
            if self.ref_count[block] == 1 and readers:
                flight = self.flights[max(readers)]
                self.flights[max(readers)] = replace(flight, holds=(*flight.holds, block))
                continue
            self.ref_count[block] -= 1
            if self.ref_count[block] == 0:
                self.free.append(block)

    def num_entries(self, block: BlockId) -> int:
        """How many block tables name the block."""
        return sum(table.count(block) for table in self.tables.values())

    def must_copy(self, block: BlockId) -> bool:
        """COW-2: what another sequence reads, or what the cache may hand to anybody, is not written."""
        return self.num_entries(block) > 1 or block in self.cached

    # Room for tokens ----------------------------------------------------------------------------------------------

    def tail(self, seq: Seq) -> int | None:
        """The table index of the partly filled block into which the sequence's next token goes, if there is one."""
        num_tokens = num_tokens_with_room(seq)
        if num_tokens % self.config.block_size == 0:
            return None
        return num_tokens // self.config.block_size - seq.num_dropped_blocks

    def tail_to_copy(self, seq_id: SeqId, seq: Seq) -> int | None:
        """The index of the tail, if the sequence must copy it before it writes."""
        index = self.tail(seq)
        if index is None or not self.must_copy(self.tables[seq_id][index]):
            return None
        return index

    def growth(self, seq_id: SeqId, seq: Seq, num_tokens: int) -> int:
        """How many blocks the sequence's table lacks for ``num_tokens`` tokens."""
        held = len(self.tables.get(seq_id, ())) + seq.num_dropped_blocks
        return max(0, blocks_needed(num_tokens, self.config.block_size) - held)

    def blocks_to_take(self, seq_id: SeqId, seq: Seq, num_new_tokens: int) -> int:
        """How many free blocks it takes to give the sequence room for so many more tokens."""
        copies = 0 if self.tail_to_copy(seq_id, seq) is None else 1
        return copies + self.growth(seq_id, seq, num_tokens_with_room(seq) + num_new_tokens)

    def extend(self, seq_id: SeqId, seq: Seq, num_new_tokens: int) -> tuple[Copy | Allocate, ...]:
        """Make that room. The source of a copy keeps its reference; the caller gives it back when the copy is done."""
        events: list[Copy | Allocate] = []
        index = self.tail_to_copy(seq_id, seq)
        if index is not None:
            events.append(self.copy_entry(seq_id, index))
        growth = self.growth(seq_id, seq, num_tokens_with_room(seq) + num_new_tokens)
        blocks = tuple(self.take() for _ in range(growth))
        self.tables[seq_id] = self.tables.get(seq_id, ()) + blocks
        events.append(Allocate(seq_id, num_new_tokens, blocks))
        return tuple(events)

    def copy_entry(self, seq_id: SeqId, index: int) -> Copy:
        """Put a block of the sequence's own in the place of a shared one."""
        table = list(self.tables[seq_id])
        source, target = table[index], self.take()
        table[index] = target
        self.tables[seq_id] = tuple(table)
        return Copy(seq_id, index, source, target)

    # Whole tables -------------------------------------------------------------------------------------------------

    def fork(self, parent: SeqId, child: SeqId) -> None:
        """The child shares every block of its parent."""
        for block in self.tables[parent]:
            self.hold(block)
        self.tables[child] = self.tables[parent]

    def drop(self, seq_id: SeqId) -> None:
        """The sequence gives back whatever it holds, on the device and in host memory."""
        self.give_back(self.tables.pop(seq_id, ()))
        self.host_free.extend(self.host_tables.pop(seq_id, ()))

    def drop_front(self, seq_id: SeqId, num_blocks: int) -> None:
        """The first blocks leave the table."""
        table = self.tables[seq_id]
        self.tables[seq_id] = table[num_blocks:]
        self.give_back(table[:num_blocks])

    def drop_end(self, seq_id: SeqId, num_kept: int) -> None:
        """All blocks but the first ``num_kept`` leave the table."""
        table = self.tables[seq_id]
        self.tables[seq_id] = table[:num_kept]
        self.give_back(table[num_kept:])

    def swap_out(self, seq_id: SeqId) -> tuple[HostBlockId, ...]:
        """The sequence's table moves to host blocks, entry by entry."""
        table = self.tables.pop(seq_id)
        host_blocks = tuple(self.host_free.pop(0) for _ in table)
        self.host_tables[seq_id] = host_blocks
        self.give_back(table)
        return host_blocks

    def swap_in(self, seq_id: SeqId) -> tuple[BlockId, ...]:
        """The sequence's table comes back into device blocks, entry by entry."""
        host_blocks = self.host_tables.pop(seq_id)
        blocks = tuple(self.take() for _ in host_blocks)
        self.tables[seq_id] = blocks
        self.host_free.extend(host_blocks)
        return blocks

    # Steps in flight ----------------------------------------------------------------------------------------------

    def submit(
        self, step_id: StepId, scheduled: Mapping[SeqId, int], holds: Iterable[BlockId], readers: Iterable[SeqId] = ()
    ) -> None:
        """From now on a step writes and reads the blocks of these sequences, and reads those of ``readers``."""
        blocks, sources = {block for seq_id in (*scheduled, *readers) for block in self.tables[seq_id]}, tuple(holds)
        self.flights[step_id] = Flight(
            dict(scheduled), frozenset(blocks | {*sources}), sources, submitted=True, num_copies=len(sources)
        )

    def complete(self, step_id: StepId) -> None:
        """The step is over, and gives back what it still held: what was let go meanwhile, then the sources of copies."""
        flight = self.flights.pop(step_id)
        sources, let_go = flight.holds[: flight.num_copies], flight.holds[flight.num_copies :]
        self.give_back(reversed((*let_go, *sources)))

    # The prefix cache ---------------------------------------------------------------------------------------------

    def find(self, key: CacheKey) -> BlockId | None:
        """The block that holds exactly these tokens, compared one by one."""
        for block, cached in self.cached.items():
            if cached == key:
                return block
        return None

    def longest_hit(self, tokens: Prefix, salt: str) -> tuple[BlockId, ...]:
        """The cached blocks of the longest prefix that leaves at least the last token to compute (CACHE-4, CACHE-5)."""
        blocks: list[BlockId] = []
        size = self.config.block_size
        for index in range((len(tokens) - 1) // size):
            block = self.find(CacheKey(tokens[: (index + 1) * size], salt))
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def hit(self, seq_id: SeqId, blocks: tuple[BlockId, ...]) -> None:
        """The sequence's empty table gets these cached blocks."""
        for block in blocks:
            self.hold(block)
        self.tables[seq_id] = blocks

    def publish(self, seq_id: SeqId, seq: Seq, index: int, salt: str) -> bool:
        """Name the sequence's full block ``index`` in the cache, unless another block has its key (CACHE-8)."""
        key = CacheKey(seq.tokens[: (index + 1) * self.config.block_size], salt)
        if self.find(key) is not None:
            return False
        self.cached[self.tables[seq_id][index - seq.num_dropped_blocks]] = key
        return True

    def is_lost(self, prefix: Prefix, salt: str) -> bool:
        """Whether no block can be found under this key."""
        return self.find(CacheKey(prefix, salt)) is None

    def reset(self) -> bool:
        """Forget every name, unless a named block is in use (CACHE-10)."""
        if any(self.ref_count[block] > 0 for block in self.cached):
            return False
        self.cached.clear()
        return True
