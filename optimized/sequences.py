"""Live requests and their sequences, as the scheduler keeps them; what others see of them are values of ``spec``."""

from __future__ import annotations

from optimized.prefix_cache import Record
from spec.vocabulary import BlockId, HostBlockId, Request, SeqId, Token


class LiveRequest:
    """A request between the door and its end, with its live sequences in the order in which they were made."""

    __slots__ = ("key", "num_preemptions", "num_unborn", "request", "running", "seqs")

    def __init__(self, request: Request, key: tuple[int, int], chain: list[Record]) -> None:
        self.request = request
        self.key = key
        """Its place in the order of service: a smaller one is served first."""
        self.seqs: list[LiveSeq] = [LiveSeq(request.seq_ids[0], self, list(request.prompt), chain)]
        self.num_unborn = len(request.seq_ids) - 1
        """How many sequences are still to be forked when the prompt is computed."""
        self.num_preemptions = 0
        self.running = False

    @property
    def num_seats(self) -> int:
        """How many of ``max_num_seqs`` it takes while it runs."""
        return len(self.seqs) + self.num_unborn

    @property
    def most_tokens_stored(self) -> int:
        """The most tokens of one sequence that are ever in the cache: the last one needs no slot."""
        return len(self.request.prompt) + self.request.max_tokens - 1


class PooledSeq:
    """A line of tokens and the blocks that hold it. ``table`` is a tuple, so that a plan can hold it without a copy: it
    changes once a block."""

    __slots__ = ("chain", "host_table", "num_computed", "num_dropped_blocks", "table", "tokens")

    def __init__(self, tokens: list[Token], chain: list[Record]) -> None:
        self.tokens = tokens
        self.num_computed = 0
        self.num_dropped_blocks = 0
        """How many blocks a sliding window has taken from the table's front; entry 0 is the first one after them."""
        self.table: tuple[BlockId, ...] = ()
        self.host_table: tuple[HostBlockId, ...] = ()
        self.chain = chain
        """What the prefix cache knows of its full blocks: a root and their records. Empty without a cache."""

    def share_with(self, child: PooledSeq) -> None:
        """The child, which has the same tokens, has computed what this one has, in the same blocks."""
        child.num_computed = self.num_computed
        child.num_dropped_blocks = self.num_dropped_blocks
        child.table = self.table


class LiveSeq(PooledSeq):
    """A live sequence of a request."""

    __slots__ = ("max_tokens", "num_scheduled", "request", "seq_id", "stop")

    def __init__(self, seq_id: SeqId, request: LiveRequest, tokens: list[Token], chain: list[Record]) -> None:
        super().__init__(tokens, chain)
        self.seq_id = seq_id
        self.request = request
        self.max_tokens = len(request.request.prompt) + request.request.max_tokens
        """Prompt and output together never get longer."""
        self.stop = frozenset(request.request.stop_token_ids)
        self.num_scheduled = 0

    def fork(self, child_id: SeqId) -> LiveSeq:
        """A sequence with the same tokens and the same table."""
        child = LiveSeq(child_id, self.request, self.tokens.copy(), self.chain.copy())
        self.share_with(child)
        return child
