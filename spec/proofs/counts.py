"""A number of tokens as full blocks and a rest: so the proofs hold for every block size without a division."""

from typing import NamedTuple

from spec.proofs.algebra import Algebra, Term


class Count(NamedTuple):
    """``blocks * block_size + rest`` tokens, the rest from 0 up to, and without, ``block_size``."""

    blocks: Term
    rest: Term


def in_range(A: Algebra, count: Count) -> Term:
    """The count is at least 0 and its rest is smaller than a block."""
    return A.And(0 <= count.blocks, 0 <= count.rest, count.rest < A.block_size)


def at_most(A: Algebra, x: Count, y: Count) -> Term:
    """The count x is at most y."""
    return A.Or(x.blocks < y.blocks, A.And(x.blocks == y.blocks, x.rest <= y.rest))


def smaller(A: Algebra, x: Count, y: Count) -> Term:
    """The smaller one of two counts."""
    first = at_most(A, x, y)
    return Count(A.If(first, x.blocks, y.blocks), A.If(first, x.rest, y.rest))


def plus(A: Algebra, count: Count, tokens: Term) -> Count:
    """The count and so many tokens that the block it ends in still has room for."""
    rest = count.rest + tokens
    full = rest == A.block_size
    return Count(count.blocks + A.If(full, 1, 0), A.If(full, 0, rest))


def blocks_needed(A: Algebra, count: Count) -> Term:
    """The number of blocks that hold so many tokens."""
    return count.blocks + A.If(count.rest > 0, 1, 0)


def first_block_read(A: Algebra, computed: Count) -> Term:
    """The block of the first position that the next token reads through the window, below 0 if the window is
    longer than the sequence."""
    blocks, rest = A.window
    return computed.blocks - blocks - A.If(computed.rest >= rest, 0, 1)
