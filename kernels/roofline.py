"""Bytes and operations of each kernel, as functions of its arguments: the floor that stands beside every measured time.

``*_work`` is what any kernel must do: each live cell once, each input and output once. ``*_traffic`` is what ours asks
for, from the first-level cache on: a prefill chunk reads its keys again for each tile of queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.arguments import first_key
from kernels.attention_plan import AttentionPlan
from kernels.fp8 import SCALE_BYTES
from kernels.tile_shape import COPY_TILE, power_of_two

INDEX_BYTES = 4  # of a table entry and of a length


@dataclass(frozen=True)
class Work:
    bytes: int
    operations: int = 0  # a multiplication and an addition are two

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def floor_s(self, *, bytes_per_s: float, operations_per_s: float) -> float:
        """The least time on a machine with these two limits."""
        return max(self.bytes / bytes_per_s, self.operations / operations_per_s)


@dataclass(frozen=True)
class Heads:
    """The shape of attention in one layer."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    element_bytes: int = 2
    is_fp8: bool = False  # the cache; the others have ``element_bytes``

    @property
    def group(self) -> int:
        return self.num_query_heads // self.num_kv_heads

    @property
    def cell_bytes(self) -> int:
        """K or V of one token in the cache."""
        if self.is_fp8:
            return self.num_kv_heads * (self.head_size + SCALE_BYTES // 2)
        return self.num_kv_heads * self.head_size * self.element_bytes

    @property
    def query_bytes(self) -> int:
        """The query, or the output, of one token."""
        return self.num_query_heads * self.head_size * self.element_bytes


def visible_keys(num_queries: int, seq_len: int, window: int | None = None) -> int:
    """The keys that each query sees, summed over the queries.

    >>> visible_keys(3, 5), visible_keys(3, 5, window=4), visible_keys(3, 2)
    (12, 11, 3)
    """
    fewest = max(seq_len - num_queries, 0)
    pairs = _triangle(seq_len) - _triangle(fewest)
    if window is not None:
        pairs -= _triangle(seq_len - window) - _triangle(fewest - window)
    return pairs


def reachable_keys(num_queries: int, seq_len: int, window: int | None = None) -> int:
    """The keys that some query sees.

    >>> reachable_keys(3, 5), reachable_keys(1, 5, window=4), reachable_keys(0, 5)
    (5, 4, 0)
    """
    return seq_len - first_key(num_queries, seq_len, window) if num_queries else 0


def reachable_blocks(num_queries: int, seq_len: int, block_size: int, window: int | None = None) -> int:
    """The table entries that lead to those keys."""
    if reachable_keys(num_queries, seq_len, window) == 0:
        return 0
    return -(-seq_len // block_size) - first_key(num_queries, seq_len, window) // block_size


def attention_work(
    query_lens: Sequence[int], seq_lens: Sequence[int], heads: Heads, *, block_size: int, window: int | None = None
) -> Work:
    """K, V, queries, output, tables and lengths once; two products of 2 * head_size operations a visible key."""
    seqs = list(zip(query_lens, seq_lens, strict=True))
    keys = sum(reachable_keys(*seq, window) for seq in seqs)
    blocks = sum(reachable_blocks(*seq, block_size, window) for seq in seqs)
    pairs = sum(visible_keys(*seq, window) for seq in seqs)
    moved = 2 * keys * heads.cell_bytes + 2 * sum(query_lens) * heads.query_bytes
    moved += (blocks + len(seqs) + len(seqs) + 1) * INDEX_BYTES
    return Work(moved, pairs * heads.num_query_heads * 4 * heads.head_size)


def split_work(plan: AttentionPlan, heads: Heads) -> Work:
    """What splits of their own add: each partial (acc, m, l) is written once and read once, then folded."""
    partials = plan.num_partials * heads.num_query_heads
    return Work(partials * (heads.head_size + 2) * 4 * 2, partials * (heads.head_size + 1) * 3)


def attention_traffic(plan: AttentionPlan, heads: Heads) -> Work:
    """The K and V bytes that our kernel asks for, and the operations of its matrix products, padding included."""
    keys = operations = 0
    for launch in plan.launches:
        shape = launch.shape
        for seq, first, split, partial in launch.tiles.tolist():
            if seq < 0:
                continue
            num_queries, seq_len = plan.query_lens[seq], plan.seq_lens[seq]
            last = min(first + shape.rows // heads.group, num_queries) - 1
            end = max(seq_len - num_queries + last + 1, 0)
            begin = min(first_key(num_queries - first, seq_len, plan.window), end)
            if partial >= 0:
                begin, end = max(begin, split * shape.split_tokens), min(end, (split + 1) * shape.split_tokens)
            keys += end - begin
            turns = -(-end // shape.tile_tokens) - begin // shape.tile_tokens
            operations += turns * shape.tile_tokens * shape.rows * 4 * power_of_two(heads.head_size)
    return Work(2 * keys * heads.cell_bytes, operations * heads.num_kv_heads)


def write_work(num_tokens: int, num_padding: int, heads: Heads) -> Work:
    """K and V of each token read and written; its slot read, and that of padding too."""
    return Work(4 * num_tokens * heads.cell_bytes + (num_tokens + num_padding) * 8)


def copy_work(num_copies: int, heads: Heads, *, block_size: int) -> Work:
    """Both caches of each block read and written; the pair of ids read by each piece."""
    pieces = -(-block_size * heads.num_kv_heads * heads.head_size // COPY_TILE)
    return Work(num_copies * (4 * block_size * heads.cell_bytes + pieces * 16))


def pack_work(num_packed: int, heads: Heads, *, block_size: int) -> Work:
    """Both caches of each block read, the same written; its id read by each piece."""
    pieces = -(-block_size * heads.num_kv_heads * heads.head_size // COPY_TILE)
    return Work(num_packed * (4 * block_size * heads.cell_bytes + pieces * 8))


def rotate_write_work(num_tokens: int, heads: Heads, *, rotary_size: int) -> Work:
    """The query read and written, K and V read and written, a row of cosines and sines, a position and a slot."""
    return Work(num_tokens * (2 * heads.query_bytes + 4 * heads.cell_bytes + rotary_size * 4 + 16))


def norm_work(num_tokens: int, hidden_size: int, *, element_bytes: int, has_residual: bool) -> Work:
    """Rows read and written, with a residual twice as many; the weight once."""
    rows = 4 if has_residual else 2
    return Work((num_tokens * rows + 1) * hidden_size * element_bytes, num_tokens * hidden_size * 4)


def silu_mul_work(num_tokens: int, size: int, *, element_bytes: int) -> Work:
    """Two rows read, one written."""
    return Work(3 * num_tokens * size * element_bytes, num_tokens * size * 5)


def draw_tokens_work(num_samples: int, vocab_size: int) -> Work:
    """The logits once; a temperature, three limits and a key read, a token written."""
    return Work(num_samples * (vocab_size * 4 + 48))


def _triangle(number: int) -> int:
    return number * (number + 1) // 2 if number > 0 else 0
