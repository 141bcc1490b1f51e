"""The mirror: a ``State`` in lists and counters that are edited in place, but for the contents of the slots.

What a transition does to a ``State``, the methods here do in time that does not depend on the size of the pool.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spec.block_table import share
from spec.choices import EvictionOrder, Publication
from spec.vocabulary import (
    BlockId,
    CacheKey,
    Flight,
    Policy,
    Prefix,
    Request,
    RequestId,
    Seq,
    SeqId,
    Slot,
    State,
    StepId,
    Token,
    service_order,
)

MOST_NODES = 1 << 20
"""Prefixes that are remembered before those that nobody needs are forgotten."""


@dataclass(slots=True)
class LiveSeq:
    """A sequence. ``chain`` has the nodes of its full blocks, as far as somebody asked for them."""

    request_id: RequestId
    tokens: list[Token]
    num_prompt: int
    computed: int = 0
    scheduled: int = 0
    dropped: int = 0
    chain: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LiveStep:
    """A step in flight. ``blocks`` of a submitted one are those of ``tables``, made into a set when first asked for."""

    budget: int
    scheduled: dict[SeqId, int] = field(default_factory=dict)
    holds: list[BlockId] = field(default_factory=list)
    written: set[Slot] = field(default_factory=set)
    readers: set[SeqId] = field(default_factory=set)
    submitted: bool = False
    preempting: bool = False
    num_copies: int = 0
    tables: list[tuple[BlockId, ...]] = field(default_factory=list)
    held_at_submit: tuple[BlockId, ...] = ()
    known: frozenset[BlockId] | None = None
    stops: dict[SeqId, int] = field(default_factory=dict)

    @property
    def blocks(self) -> frozenset[BlockId]:
        if self.known is None:
            self.known = frozenset(self.held_at_submit).union(*self.tables)
        return self.known


class Mirror:
    """All of a ``State`` but ``cells`` and ``host_cells``."""

    def __init__(self, state: State) -> None:
        self.load(state)

    def load(self, s: State) -> None:
        """Be this state. O(pool)."""
        self.config, self.choices, self.share = s.config, s.choices, share(s.config)
        self.free = dict.fromkeys(s.free)
        self.ref_count = list(s.ref_count)
        self.tables = dict(s.block_tables)
        self.seqs = {i: self._live(q) for i, q in s.seqs.items()}
        self.requests = dict(s.requests)
        self.arrivals = {i: service_order(s, i) for i in s.requests}
        self.num_arrivals = len(s.requests)
        self.waiting, self.running = list(s.waiting), list(s.running)
        self.num_preemptions = dict(s.num_preemptions)
        self.steps = {i: self._step(f) for i, f in s.flights.items()}
        self.host_free, self.host_tables = s.host_free, dict(s.host_tables)
        self.drawn = None if s.drawn is None else dict(s.drawn)
        # What follows from the above, so that nobody counts it twice.
        self.num_holds = Counter(block for f in s.flights.values() for block in f.holds)
        self.seqs_of: dict[RequestId, list[SeqId]] = {}
        for i, q in s.seqs.items():
            self.seqs_of.setdefault(q.request_id, []).append(i)
        self.num_running = sum(len(self.seqs_of.get(i, ())) for i in s.running)
        self.at_end = {i for i, q in self.seqs.items() if self.ends(q)}
        self.find_open()
        self._nodes: dict[tuple[int, Prefix], int] = {}
        self._parts: list[tuple[int, Prefix]] = []
        self._roots: dict[str, int] = {}
        self._salts: dict[int, str] = {}
        self.cached = {block: self._node_of(key) for block, key in s.cached.items()}
        self.block_of = {node: block for block, node in self.cached.items()}

    @property
    def is_preempting(self) -> bool:
        """Whether the step that is being scheduled has preempted somebody."""
        return any(live.preempting and not live.submitted for live in self.steps.values())

    def state(self) -> State:
        """The state. O(pool)."""
        return State(
            config=self.config,
            free=tuple(self.free),
            ref_count=tuple(self.ref_count),
            block_tables=dict(self.tables),
            seqs={
                i: Seq(q.request_id, tuple(q.tokens), q.num_prompt, q.computed, q.scheduled, q.dropped)
                for i, q in self.seqs.items()
            },
            requests=dict(self.requests),
            waiting=tuple(self.waiting),
            running=tuple(self.running),
            num_preemptions=dict(self.num_preemptions),
            flights={i: self._flight(live) for i, live in self.steps.items()},
            cached={block: self._key_of(node) for block, node in self.cached.items()},
            host_free=self.host_free,
            host_tables=dict(self.host_tables),
            drawn=None if self.drawn is None else dict(self.drawn),
            choices=self.choices,
        )

    def _live(self, q: Seq) -> LiveSeq:
        return LiveSeq(
            q.request_id,
            list(q.tokens),
            q.num_prompt_tokens,
            q.num_computed_tokens,
            q.num_scheduled_tokens,
            q.num_dropped_blocks,
        )

    def _step(self, f: Flight) -> LiveStep:
        return LiveStep(
            budget=self.config.max_num_batched_tokens - sum(f.scheduled.values()),
            scheduled=dict(f.scheduled),
            holds=list(f.holds),
            written=set(f.written),
            readers=set(f.readers),
            submitted=f.submitted,
            preempting=f.preempting,
            num_copies=f.num_copies,
            known=f.blocks,
            stops=dict(f.stops),
        )

    def _flight(self, live: LiveStep) -> Flight:
        return Flight(
            dict(live.scheduled),
            live.blocks if live.submitted else frozenset(),
            tuple(live.holds),
            frozenset(live.written),
            frozenset(live.readers),
            live.submitted,
            live.preempting,
            live.num_copies,
            dict(live.stops),
        )

    # Blocks

    def take(self, blocks: Iterable[BlockId]) -> None:
        """These free blocks have a holder, and are forgotten by the cache."""
        for block in blocks:
            del self.free[block]
            self.ref_count[block] += 1
            if block in self.cached:
                self.uncache(block)

    def uncache(self, block: BlockId) -> None:
        """The cache forgets the block. An equal one, if the engine keeps such, is found from now on."""
        node = self.cached.pop(block)
        del self.block_of[node]
        if self.choices.publishes_equal_blocks:
            self.block_of.update((node, equal) for equal, other in self.cached.items() if other == node)

    def evicts(self, blocks: Sequence[BlockId]) -> bool:
        """Whether the cached ones among these blocks are those that have been free longest, if that was declared."""
        left = {block for block in blocks if block in self.cached}
        if not left or self.choices.eviction_order is not EvictionOrder.LRU:
            return True
        for block in self.free:
            if block in self.cached:
                if block not in left:
                    return False
                left.discard(block)
                if not left:
                    return True
        return False

    def give_back(self, blocks: Iterable[BlockId]) -> None:
        """These blocks, in this order, lose a holder; a submitted step that may touch one holds it to its end."""
        for block in blocks:
            if self.ref_count[block] > 1:
                self.ref_count[block] -= 1
                continue
            step = max((i for i, live in self.steps.items() if live.submitted and block in live.blocks), default=None)
            if step is not None:
                self.hold(self.steps[step], block)
            else:
                self.ref_count[block] = 0
                self.free[block] = None

    def written(self) -> Iterable[Slot]:
        """The slots that hold something: those of computed tokens, or all, where only what is written can be found."""
        size = self.config.block_size
        if self.choices.publication is Publication.AFTER_COMPUTE:
            return range(self.config.num_slots)
        tables = ((self.tables[i], q.computed - q.dropped * size) for i, q in self.seqs.items() if i in self.tables)
        return [at for table, count in tables for at in slots_of_table(table, 0, count, size)]

    def hold(self, live: LiveStep, block: BlockId) -> None:
        live.holds.append(block)
        self.num_holds[block] += 1

    def num_entries(self, block: BlockId) -> int:
        """How many tables name the block: its holders but for the steps."""
        return self.ref_count[block] - self.num_holds[block]

    def must_copy(self, block: BlockId) -> bool:
        return block in self.cached or self.num_entries(block) > 1

    # Requests and sequences

    def add(self, request: Request) -> None:
        i = request.request_id
        self.requests[i] = request
        priority = request.priority if self.config.policy is Policy.PRIORITY else 0
        self.arrivals[i] = (priority, self.num_arrivals)
        self.num_arrivals += 1
        self.seqs[request.seq_ids[0]] = LiveSeq(i, list(request.prompt), len(request.prompt))
        self.seqs_of[i] = [request.seq_ids[0]]
        insort(self.waiting, i, key=self.arrivals.__getitem__)

    def num_unborn(self, request: Request) -> int:
        """How many sequences of the request are still to be forked, once its prompt is computed."""
        first = self.seqs.get(request.seq_ids[0]) if len(request.seq_ids) > 1 else None
        if first is None or len(first.tokens) > first.num_prompt:
            return 0
        return sum(1 for i in request.seq_ids if i not in self.seqs)

    def overlaps(self) -> bool:
        """Whether a submitted step is in flight."""
        return any(live.submitted for live in self.steps.values())

    def is_promised(self, seq: SeqId) -> bool:
        """Whether a sequence that is still to be forked has this id, or one that a step in flight computes."""
        if any(seq in live.scheduled for live in self.steps.values()):
            return True
        many = (request for request in self.requests.values() if len(request.seq_ids) > 1)
        return any(seq in request.seq_ids and self.num_unborn(request) for request in many)

    def num_seats(self, request_id: RequestId) -> int:
        return len(self.seqs_of[request_id]) + self.num_unborn(self.requests[request_id])

    def ends(self, q: LiveSeq) -> bool:
        """Whether the sequence must not be given another token. False for one that no scheduler serves."""
        request, num_output = self.requests.get(q.request_id), len(q.tokens) - q.num_prompt
        if request is None:
            return False
        return (num_output > 0 and q.tokens[-1] in request.stop_token_ids) or num_output >= request.max_tokens

    def is_behind(self, request_id: RequestId, live: LiveStep) -> bool:
        """Whether a sequence of the request has tokens that no step has computed or computes, and not its share of this."""
        for seq in self.seqs_of[request_id]:
            q = self.seqs[seq]
            if q.computed + q.scheduled < len(q.tokens) and live.scheduled.get(seq, 0) < self.share:
                return True
        return False

    def serves_in_order(self, live: LiveStep) -> bool:
        """Whether the step computes nothing for who is behind somebody it passes over."""
        passed = False
        for request_id in self.running:
            mine = self.seqs_of[request_id]
            if passed and not live.scheduled.keys().isdisjoint(mine):
                return False
            left = (self.seqs[seq] for seq in mine if seq not in live.scheduled)
            passed = passed or any(q.computed + q.scheduled < len(q.tokens) for q in left)
        return True

    def unschedule(self, seq: SeqId) -> None:
        """Steps that are not submitted yet forget the sequence."""
        for live in self.steps.values():
            if not live.submitted:
                live.budget += live.scheduled.pop(seq, 0)

    def forget(self, seq: SeqId) -> None:
        """The sequence, which is not in host memory, is gone; with the last one of a request, so is the request."""
        self.give_back(reversed(self.tables.pop(seq, ())))
        self.unschedule(seq)
        request_id = self.seqs.pop(seq).request_id
        self.at_end.discard(seq)
        siblings, runs = self.seqs_of[request_id], request_id in self.running
        siblings.remove(seq)
        self.num_running -= runs
        if not siblings:
            del self.seqs_of[request_id]
            self.requests.pop(request_id, None)
            self.num_preemptions.pop(request_id, None)
            if runs:
                self.running.remove(request_id)
            elif request_id in self.waiting:
                self.waiting.remove(request_id)
            self.arrivals.pop(request_id, None)

    # Steps

    def find_open(self) -> None:
        """Which step is being scheduled, if one is."""
        number = max((i for i, live in self.steps.items() if not live.submitted), default=None)
        self.open = None if number is None else self.steps[number]

    def step_of(self, seq: SeqId) -> LiveStep | None:
        """The oldest step that computes the sequence, if there is one."""
        if len(self.steps) == 1:
            (live,) = self.steps.values()
            return live if seq in live.scheduled else None
        number: StepId | None = min((i for i, live in self.steps.items() if seq in live.scheduled), default=None)
        return None if number is None else self.steps[number]

    # Prefixes: a node stands for all tokens up to the end of a full block, under a salt; equal ones are the same number

    def node(self, q: LiveSeq, index: int) -> int:
        """The node of full block ``index`` of the sequence."""
        size = self.config.block_size
        while len(q.chain) <= index:
            start = len(q.chain) * size
            request = self.requests.get(q.request_id)
            parent = q.chain[-1] if q.chain else self._root(request.cache_salt if request else "")
            q.chain.append(self._child(parent, tuple(q.tokens[start : start + size])))
        return q.chain[index]

    def forget_prefixes(self) -> None:
        """Those that neither the cache nor a sequence needs, when there are many. O(pool), and seldom."""
        if len(self._parts) > MOST_NODES + 8 * len(self.cached):
            self.load(self.state())

    def _root(self, salt: str) -> int:
        if salt not in self._roots:
            self._roots[salt] = root = -1 - len(self._roots)
            self._salts[root] = salt
        return self._roots[salt]

    def _child(self, parent: int, part: Prefix) -> int:
        node = self._nodes.setdefault((parent, part), len(self._parts))
        if node == len(self._parts):
            self._parts.append((parent, part))
        return node

    def _node_of(self, key: CacheKey) -> int:
        node, size = self._root(key.salt), self.config.block_size
        for start in range(0, len(key.tokens), size):
            node = self._child(node, key.tokens[start : start + size])
        return node

    def _key_of(self, node: int) -> CacheKey:
        parts = list[Prefix]()
        while node >= 0:
            node, part = self._parts[node]
            parts.append(part)
        return CacheKey(tuple(token for part in reversed(parts) for token in part), self._salts[node])


def slots_of_table(table: tuple[BlockId, ...], start: int, count: int, size: int) -> list[Slot]:
    """The slots of ``count`` positions of a table from ``start`` on, block by block; fewer where the table ends."""
    slots = list[Slot]()
    for index in range(start // size, min(-(-(start + count) // size), len(table))):
        first, low, high = table[index] * size, start - index * size, start + count - index * size
        slots += range(first + max(low, 0), first + min(high, size))
    return slots
