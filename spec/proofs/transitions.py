"""What may happen: every transition of the core, as a guard and the state that it leads to.

Longer operations are sequences of these: an append is ``append``, then ``allocate`` if the last block is full or
``copy`` if it is shared, then ``write``; preemption is ``release`` or ``swap_out``; resumption is ``start`` and ``hit``.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from spec.proofs.algebra import Algebra, Fn, Signature, Sort, Term
from spec.proofs.clauses import sentence_of
from spec.proofs.core import DEVICE, HOST, Core, Side, extent, in_table, used
from spec.proofs.counts import Count, at_most, blocks_needed, first_block_read, in_range, plus, smaller
from spec.proofs.holders import distinct, drop, hold, let_go, picked, take

Step: TypeAlias = tuple[Term, Core]
"""When the transition may happen, and where it leads."""


@dataclass(frozen=True)
class Transition:
    """One thing that may happen, with the sorts of the choices that it leaves open."""

    name: str
    sentence: str
    choices: tuple[Sort | Signature, ...]
    step: Callable[..., Step]

    @property
    def choice_names(self) -> tuple[str, ...]:
        """The names of the choices: the parameters after the algebra and the state."""
        return tuple(inspect.signature(self.step).parameters)[2:]


TRANSITIONS: dict[str, Transition] = {}

PICK: Signature = ("Int", "Block")
PLACE: Signature = ("Block", "Int")
HOST_PICK: Signature = ("Int", "HostBlock")
HOST_PLACE: Signature = ("HostBlock", "Int")


def transition(*choices: Sort | Signature) -> Callable[[Callable[..., Step]], Callable[..., Step]]:
    """The function is a transition; ``choices`` are the sorts of its parameters after the state."""

    def register(step: Callable[..., Step]) -> Callable[..., Step]:
        TRANSITIONS[step.__name__] = Transition(step.__name__, sentence_of(step), choices, step)
        return step

    return register


# Sequences and tokens


@transition("Seq", "Int", "Int", ("Int", "Int", "Value"))
def start(A: Algebra, S: Core, s: Term, blocks: Term, rest: Term, value: Fn) -> Step:
    """A sequence begins to run, or comes back by recomputation: its tokens are known, its table is empty."""
    num_tokens = Count(blocks, rest)
    guard = A.And(A.Not(used(A, S, s)), in_range(A, num_tokens))
    return guard, replace(
        _count(A, S, s, Count(0, 0), num_tokens),
        running=lambda t: A.Or(t == s, S.running(t)),
        first=lambda t: A.If(t == s, 0, S.first(t)),
        num_blocks=lambda t: A.If(t == s, 0, S.num_blocks(t)),
        token=lambda t, i, o: A.If(t == s, value(i, o), S.token(t, i, o)),
    )


@transition("Seq", "Value")
def append(A: Algebra, S: Core, s: Term, value: Term) -> Step:
    """A token, sampled or given, comes to the end of a sequence."""
    end = S.num_tokens(s)
    return S.running(s), replace(
        _count(A, S, s, S.num_computed_tokens(s), plus(A, end, 1)),
        token=lambda t, i, o: A.If(A.And(t == s, i == end.blocks, o == end.rest), value, S.token(t, i, o)),
    )


@transition("Seq", "Int", "Int", "Int", "Int", "Int")
def rollback(
    A: Algebra, S: Core, s: Term, blocks: Term, rest: Term, computed_blocks: Term, computed_rest: Term, kept: Term
) -> Step:
    """A sequence gives up its last tokens, what was computed of them, and the blocks that nothing else is in."""
    num_tokens, computed = Count(blocks, rest), Count(computed_blocks, computed_rest)
    guard = A.And(
        S.running(s),
        in_range(A, num_tokens),
        in_range(A, computed),
        at_most(A, num_tokens, S.num_tokens(s)),
        at_most(A, computed, smaller(A, S.num_computed_tokens(s), num_tokens)),
        A.Or(S.first(s) == 0, S.first(s) <= first_block_read(A, computed)),
        S.first(s) <= kept,
        kept <= S.num_blocks(s),
        blocks_needed(A, computed) <= kept,
        kept <= blocks_needed(A, num_tokens),
    )
    return guard, replace(
        _count(A, S, s, computed, num_tokens),
        device=drop(A, S.device, s, kept, S.num_blocks(s)),
        num_blocks=lambda t: A.If(t == s, kept, S.num_blocks(t)),
    )


@transition("Seq", "Seq")
def fork(A: Algebra, S: Core, parent: Term, child: Term) -> Step:
    """A new sequence shares every block of its parent, and knows the same tokens."""
    P = S.device
    shared = take(
        A, P, child, S.first(parent), S.num_blocks(parent), lambda i: P.table(parent, i), lambda b: P.pos(parent, b)
    )

    def inherit(of: Fn) -> Fn:
        return lambda t, *rest: A.If(t == child, of(parent, *rest), of(t, *rest))

    return A.And(S.running(parent), A.Not(used(A, S, child))), replace(
        S,
        device=shared,
        running=lambda t: A.Or(t == child, S.running(t)),
        first=inherit(S.first),
        num_blocks=inherit(S.num_blocks),
        computed_blocks=inherit(S.computed_blocks),
        computed_rest=inherit(S.computed_rest),
        token_blocks=inherit(S.token_blocks),
        token_rest=inherit(S.token_rest),
        token=inherit(S.token),
    )


@transition("Seq")
def release(A: Algebra, S: Core, s: Term) -> Step:
    """A running sequence gives all its blocks back: it finished, was aborted, or is to be recomputed."""
    return S.running(s), replace(
        S,
        device=drop(A, S.device, s, S.first(s), S.num_blocks(s)),
        running=lambda t: A.And(t != s, S.running(t)),
    )


@transition("Seq", "Int")
def slide(A: Algebra, S: Core, s: Term, n: Term) -> Step:
    """The first n blocks leave a table, since the window of every later token has passed them."""
    first = S.first(s) + n
    guard = A.And(S.running(s), n >= 1, first <= first_block_read(A, S.num_computed_tokens(s)))
    return guard, replace(
        S,
        device=drop(A, S.device, s, S.first(s), first),
        first=lambda t: A.If(t == s, first, S.first(t)),
    )


# Blocks and what is in them


@transition("Seq", "Int", PICK, PLACE)
def allocate(A: Algebra, S: Core, s: Term, n: Term, pick: Fn, place: Fn) -> Step:
    """A table grows by n free blocks for tokens that are known."""
    start, stop = S.num_blocks(s), S.num_blocks(s) + n
    guard = A.And(
        S.running(s),
        n >= 0,
        stop <= blocks_needed(A, S.num_tokens(s)),
        distinct(A, start, stop, pick, place, lambda i: S.device.free(pick(i))),
    )
    P = take(A, S.device, s, start, stop, pick, place)
    fresh = picked(A, start, stop, pick, place)
    return guard, replace(
        S,
        device=replace(P, filled=lambda b: A.If(fresh(b), 0, P.filled(b))),
        num_blocks=lambda t: A.If(t == s, stop, S.num_blocks(t)),
        cached=lambda b: A.And(A.Not(fresh(b)), S.cached(b)),
    )


@transition("Seq", "Int", "Int", PICK, PLACE, ("Int", "Key"))
def hit(A: Algebra, S: Core, s: Term, skip: Term, n: Term, pick: Fn, place: Fn, key: Fn) -> Step:
    """A sequence with an empty table takes cached blocks for its first n; of these, ``skip`` lie before the window."""
    guard = A.And(
        S.running(s),
        S.num_blocks(s) == 0,
        S.first(s) == 0,
        at_most(A, S.num_computed_tokens(s), Count(0, 0)),
        0 <= skip,
        skip <= n,
        at_most(A, Count(n, 0), S.num_tokens(s)),
        A.Or(skip == 0, skip <= first_block_read(A, Count(n, 0))),
        distinct(A, skip, n, pick, place, lambda i: A.And(S.cached(pick(i)), S.key(pick(i)) == key(i))),
        A.upto(n, lambda i: A.upto(A.block_size, lambda o: S.token(s, i, o) == A.cached_value(key(i), o))),
    )
    return guard, replace(
        _count(A, S, s, Count(n, 0), S.num_tokens(s)),
        device=take(A, S.device, s, skip, n, pick, place),
        first=lambda t: A.If(t == s, skip, S.first(t)),
        num_blocks=lambda t: A.If(t == s, n, S.num_blocks(t)),
    )


@transition("Seq", "Int", "Block", ("Int", "Value"))
def copy(A: Algebra, S: Core, s: Term, i: Term, target: Term, stale: Fn) -> Step:
    """Copy-on-write: an entry whose block must not be written names a free block with the same contents.

    ``stale`` is what lies in slots that are not written yet: that is what a hasty copy would get.
    """
    source, size = S.device.table(s, i), extent(A, S, s, i)
    guard = A.And(
        S.running(s),
        in_table(A, S, s, i),
        A.Or(S.device.entries(source) > 1, S.cached(source)),
        S.device.free(target),
        A.upto(size, lambda o: S.written(source, o)),
    )
    P = take(A, drop(A, S.device, s, i, i + 1), s, i, i + 1, lambda _: target, lambda _: i)
    return guard, replace(
        S,
        device=replace(
            P,
            kv=lambda b, o: A.If(
                A.And(b == target, o < size), A.If(S.written(source, o), P.kv(source, o), stale(o)), P.kv(b, o)
            ),
            filled=lambda b: A.If(b == target, size, P.filled(b)),
        ),
        cached=lambda b: A.And(b != target, S.cached(b)),
        written=lambda b, o: A.Or(b == target, S.written(b, o)),
    )


@transition("Seq", "Int")
def write(A: Algebra, S: Core, s: Term, n: Term) -> Step:
    """The next n tokens of a sequence, all in one block, are computed: their K and V are written to their slots."""
    guard, at, T = _compute(A, S, s, n)
    return guard, replace(T, written=lambda x, o: A.Or(at(x, o), S.written(x, o)))


@transition("Seq", "Int", "Step")
def schedule(A: Algebra, S: Core, s: Term, n: Term, k: Term) -> Step:
    """The next n tokens, all in one block, are left to step k: it holds the block and writes them when it runs."""
    guard, at, T = _compute(A, S, s, n)
    b = S.device.table(s, S.computed_blocks(s))
    end = S.computed_rest(s) + n
    return A.And(guard, S.in_flight(k), S.holds(k, b)), replace(
        T,
        written=lambda x, o: A.And(A.Not(at(x, o)), S.written(x, o)),
        writer=lambda x, o: A.If(at(x, o), k, S.writer(x, o)),
        reach=lambda m, x: A.If(A.And(m == k, x == b), end, S.reach(m, x)),
        seen=lambda m, x, o: A.If(A.And(m == k, x == b), T.device.kv(x, o), S.seen(m, x, o)),
    )


# The prefix cache


@transition("Seq", "Int", "Key")
def publish(A: Algebra, S: Core, s: Term, i: Term, key: Term) -> Step:
    """A full block of a sequence can be found in the prefix cache, under the key of exactly its tokens."""
    b = S.device.table(s, i)
    guard = A.And(
        S.running(s),
        in_table(A, S, s, i),
        extent(A, S, s, i) == A.block_size,
        A.Not(S.cached(b)),
        A.upto(A.block_size, lambda o: A.cached_value(key, o) == S.token(s, i, o)),
    )
    return guard, replace(
        S,
        cached=lambda x: A.Or(x == b, S.cached(x)),
        key=lambda x: A.If(x == b, key, S.key(x)),
    )


@transition("Block")
def evict(A: Algebra, S: Core, b: Term) -> Step:
    """A free block can no longer be found in the prefix cache."""
    return A.And(S.cached(b), S.device.free(b)), replace(S, cached=lambda x: A.And(x != b, S.cached(x)))


@transition()
def reset(A: Algebra, S: Core) -> Step:
    """The prefix cache is emptied, blocks in use included."""
    return A.And(), replace(S, cached=lambda b: A.Or())


# The host


@transition("Seq", "Int", HOST_PICK, HOST_PLACE, ("Block", "Int", "Value"))
def swap_out(A: Algebra, S: Core, s: Term, n: Term, pick: Fn, place: Fn, stale: Fn) -> Step:
    """A running sequence moves to host blocks, free ones or those where a sibling already put the same contents.

    ``stale`` is what lies in slots that are not written yet.
    """

    def found(b: Term, o: Term) -> Term:
        return A.If(S.written(b, o), S.device.kv(b, o), stale(b, o))

    guard = A.And(
        S.running(s),
        n <= S.num_blocks(s),
        _written_so_far(A, S, s),
        _may_move(A, S, DEVICE, HOST, s, n, pick, place),
    )
    return guard, replace(
        _move(A, S, DEVICE, HOST, s, n, pick, place, found),
        running=lambda t: A.And(t != s, S.running(t)),
        swapped=lambda t: A.Or(t == s, S.swapped(t)),
    )


@transition("Seq", "Int", PICK, PLACE)
def swap_in(A: Algebra, S: Core, s: Term, n: Term, pick: Fn, place: Fn) -> Step:
    """A swapped sequence moves back to device blocks, free ones or those that already hold the same contents."""
    fresh = picked(A, S.first(s), n, pick, place)
    guard = A.And(S.swapped(s), n <= S.num_blocks(s), _may_move(A, S, HOST, DEVICE, s, n, pick, place))
    T = _move(A, S, HOST, DEVICE, s, n, pick, place, S.host.kv)

    def new(b: Term) -> Term:
        return A.And(fresh(b), S.device.free(b))

    return guard, replace(
        T,
        running=lambda t: A.Or(t == s, S.running(t)),
        swapped=lambda t: A.And(t != s, S.swapped(t)),
        cached=lambda b: A.And(A.Not(new(b)), S.cached(b)),
        written=lambda b, o: A.Or(new(b), S.written(b, o)),
    )


@transition("Seq")
def release_swapped(A: Algebra, S: Core, s: Term) -> Step:
    """A swapped sequence gives its host blocks back."""
    return S.swapped(s), replace(
        S,
        host=drop(A, S.host, s, S.first(s), S.num_blocks(s)),
        swapped=lambda t: A.And(t != s, S.swapped(t)),
    )


# Steps in flight


@transition("Step")
def begin(A: Algebra, S: Core, k: Term) -> Step:
    """A step is in flight; it holds nothing yet."""
    return A.Not(S.in_flight(k)), replace(S, in_flight=lambda m: A.Or(m == k, S.in_flight(m)))


@transition("Step", ("Block", "Bool"), ("Block", "Int"))
def submit(A: Algebra, S: Core, k: Term, some: Fn, reach: Fn) -> Step:
    """A step in flight holds every block that it may read or write, and counts on what is there."""
    referenced = A.all(
        "Block",
        lambda b: A.Implies(
            some(b),
            A.And(A.Not(S.device.free(b)), A.Not(S.holds(k, b)), 0 <= reach(b), reach(b) <= S.device.filled(b)),
        ),
    )
    return A.And(S.in_flight(k), referenced), hold(A, S, k, some, reach)


@transition("Step", "Block", "Int")
def land(A: Algebra, S: Core, k: Term, b: Term, o: Term) -> Step:
    """A write of a step in flight reaches its slot, whoever has the block by then."""
    guard = A.And(S.holds(k, b), 0 <= o, o < S.reach(k, b), S.writer(b, o) == k)

    def at(x: Term, p: Term) -> Term:
        return A.And(x == b, p == o)

    return guard, replace(
        S,
        device=replace(S.device, kv=lambda x, p: A.If(at(x, p), S.seen(k, b, o), S.device.kv(x, p))),
        written=lambda x, p: A.Or(at(x, p), S.written(x, p)),
    )


@transition("Step")
def complete(A: Algebra, S: Core, k: Term) -> Step:
    """A step that has written all its tokens is over, and gives back what it held."""
    done = A.all(
        "Block",
        lambda b: A.upto(
            S.reach(k, b),
            lambda o: A.Implies(A.And(S.holds(k, b), S.writer(b, o) == k), S.written(b, o)),
        ),
    )
    T = let_go(A, S, k)
    return A.And(S.in_flight(k), done), replace(T, in_flight=lambda m: A.And(m != k, S.in_flight(m)))


# What several transitions share


def _count(A: Algebra, S: Core, s: Term, computed: Count, num_tokens: Count) -> Core:
    """The counters of s are set, those of everybody else are as they were."""
    return replace(
        S,
        computed_blocks=lambda t: A.If(t == s, computed.blocks, S.computed_blocks(t)),
        computed_rest=lambda t: A.If(t == s, computed.rest, S.computed_rest(t)),
        token_blocks=lambda t: A.If(t == s, num_tokens.blocks, S.token_blocks(t)),
        token_rest=lambda t: A.If(t == s, num_tokens.rest, S.token_rest(t)),
    )


def _compute(A: Algebra, S: Core, s: Term, n: Term) -> tuple[Term, Fn, Core]:
    """The next n tokens of s get their slots: when that is allowed, whether a slot is one of them, and where it
    leads."""
    P, computed = S.device, S.num_computed_tokens(s)
    i, begin, end = computed.blocks, computed.rest, computed.rest + n
    b, after = P.table(s, i), plus(A, computed, n)
    unread = A.all("Step", lambda k: A.Implies(S.holds(k, b), S.reach(k, b) <= begin))
    guard = A.And(
        S.running(s),
        n >= 1,
        end <= A.block_size,
        at_most(A, after, S.num_tokens(s)),
        in_table(A, S, s, i),
        P.entries(b) == 1,
        A.Not(S.cached(b)),
        unread,
    )

    def at(x: Term, o: Term) -> Term:
        return A.And(x == b, begin <= o, o < end)

    return (
        guard,
        at,
        replace(
            _count(A, S, s, after, S.num_tokens(s)),
            device=replace(
                P,
                kv=lambda x, o: A.If(at(x, o), S.token(s, i, o), P.kv(x, o)),
                filled=lambda x: A.If(A.And(x == b, P.filled(x) < end), end, P.filled(x)),
            ),
        ),
    )


def _written_so_far(A: Algebra, S: Core, s: Term) -> Term:
    """No computed token of s is still due from a step in flight."""
    return A.upto(
        S.num_blocks(s),
        lambda i: A.upto(extent(A, S, s, i), lambda o: A.Implies(S.first(s) <= i, S.written(S.device.table(s, i), o))),
    )


def _may_move(A: Algebra, S: Core, source: Side, target: Side, s: Term, n: Term, pick: Fn, place: Fn) -> Term:
    """The picked blocks are free, or in use with the contents that s would bring."""
    P, Q = source.blocks(S), target.blocks(S)

    def large_enough(i: Term) -> Term:
        return A.Or(Q.free(pick(i)), extent(A, S, s, i) <= Q.filled(pick(i)))

    def same(i: Term, o: Term) -> Term:
        return A.Or(Q.free(pick(i)), Q.kv(pick(i), o) == P.kv(P.table(s, i), o))

    return A.And(
        S.first(s) <= n,
        blocks_needed(A, S.num_computed_tokens(s)) <= n,
        distinct(A, S.first(s), n, pick, place, large_enough),
        A.upto(n, lambda i: A.upto(extent(A, S, s, i), lambda o: A.Implies(S.first(s) <= i, same(i, o)))),
    )


def _move(A: Algebra, S: Core, source: Side, target: Side, s: Term, n: Term, pick: Fn, place: Fn, found: Fn) -> Core:
    """The table of s lies in the other pool; free blocks there got what was found here."""
    P, Q = source.blocks(S), target.blocks(S)
    got = picked(A, S.first(s), n, pick, place)
    taken = take(A, Q, s, S.first(s), n, pick, place)

    def fresh(b: Term) -> Term:
        return A.And(got(b), Q.free(b))

    taken = replace(
        taken,
        kv=lambda b, o: A.If(fresh(b), found(P.table(s, place(b)), o), Q.kv(b, o)),
        filled=lambda b: A.If(fresh(b), extent(A, S, s, place(b)), Q.filled(b)),
    )
    left = drop(A, P, s, S.first(s), S.num_blocks(s))
    moved = {source.name: left, target.name: taken}
    return replace(
        S,
        device=moved["device"],
        host=moved["host"],
        num_blocks=lambda t: A.If(t == s, n, S.num_blocks(t)),
    )
