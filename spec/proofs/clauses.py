"""What is proved: clauses that hold in every state of the core, and clauses that hold of every transition."""

from collections.abc import Callable
from dataclasses import dataclass

from spec.proofs.algebra import Algebra, Term
from spec.proofs.core import DEVICE, HOST, Core, Side, extent, in_table, used
from spec.proofs.counts import at_most, blocks_needed, first_block_read, in_range


@dataclass(frozen=True)
class Clause:
    """A statement about a state (``holds(A, S)``) or about a transition (``holds(A, S, T)``), with its sentence."""

    name: str
    sentence: str
    holds: Callable[..., Term]


CLAUSES: dict[str, Clause] = {}
"""Clauses about a state: together they are inductive."""

STEP_CLAUSES: dict[str, Clause] = {}
"""Clauses about a transition from one state to the next."""


def sentence_of(function: Callable[..., object]) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((function.__doc__ or "").partition("\n\n")[0].split())


def clause(holds: Callable[[Algebra, Core], Term]) -> Callable[[Algebra, Core], Term]:
    """The function is a clause about every state."""
    CLAUSES[holds.__name__] = Clause(holds.__name__, sentence_of(holds), holds)
    return holds


def clause_of_both_pools(holds: Callable[[Algebra, Core, Side], Term]) -> Callable[[Algebra, Core, Side], Term]:
    """The function is a clause about the device pool and, under a name of its own, about the host pool."""
    name, sentence = holds.__name__, sentence_of(holds)
    CLAUSES[name] = Clause(name, sentence, lambda A, S: holds(A, S, DEVICE))
    CLAUSES[f"host_{name}"] = Clause(f"host_{name}", f"Host: {sentence}", lambda A, S: holds(A, S, HOST))
    return holds


def step_clause(holds: Callable[[Algebra, Core, Core], Term]) -> Callable[[Algebra, Core, Core], Term]:
    """The function is a clause about every transition."""
    STEP_CLAUSES[holds.__name__] = Clause(holds.__name__, sentence_of(holds), holds)
    return holds


def all_entries(A: Algebra, S: Core, side: Side, statement: Callable[[Term, Term], Term]) -> Term:
    """The statement holds for every entry i of every table s of the pool."""

    def of_seq(s: Term) -> Term:
        return A.upto(
            S.num_blocks(s),
            lambda i: A.Implies(A.And(side.resident(S)(s), S.first(s) <= i), statement(s, i)),
        )

    return A.all("Seq", of_seq)


# Sequences


@clause
def one_place(A: Algebra, S: Core) -> Term:
    """A sequence is never both running and swapped."""
    return A.all("Seq", lambda s: A.Not(A.And(S.running(s), S.swapped(s))))


@clause
def counters_in_range(A: Algebra, S: Core) -> Term:
    """The counters of a sequence are at least 0."""

    def of_seq(s: Term) -> Term:
        counts = A.And(in_range(A, S.num_computed_tokens(s)), in_range(A, S.num_tokens(s)))
        return A.Implies(used(A, S, s), A.And(counts, 0 <= S.first(s), S.first(s) <= S.num_blocks(s)))

    return A.all("Seq", of_seq)


@clause
def computed_are_known(A: Algebra, S: Core) -> Term:
    """``num_computed_tokens`` is at most ``num_tokens``."""
    return A.all("Seq", lambda s: A.Implies(used(A, S, s), at_most(A, S.num_computed_tokens(s), S.num_tokens(s))))


@clause
def computed_have_slots(A: Algebra, S: Core) -> Term:
    """Every computed token has a slot in a block of the table."""
    return A.all(
        "Seq", lambda s: A.Implies(used(A, S, s), blocks_needed(A, S.num_computed_tokens(s)) <= S.num_blocks(s))
    )


@clause
def no_spare_block(A: Algebra, S: Core) -> Term:
    """A table has no block without a token for it: less than one block is wasted per sequence."""
    return A.all("Seq", lambda s: A.Implies(used(A, S, s), S.num_blocks(s) <= blocks_needed(A, S.num_tokens(s))))


@clause
def window_is_kept(A: Algebra, S: Core) -> Term:
    """Only blocks that no later token reads have left the front of a table."""

    def of_seq(s: Term) -> Term:
        return A.Or(S.first(s) == 0, S.first(s) <= first_block_read(A, S.num_computed_tokens(s)))

    return A.all("Seq", lambda s: A.Implies(used(A, S, s), of_seq(s)))


# Holders


@clause_of_both_pools
def no_block_twice(A: Algebra, S: Core, side: Side) -> Term:
    """No block stands twice in one table."""
    P = side.blocks(S)
    return all_entries(A, S, side, lambda s, i: P.pos(s, P.table(s, i)) == i)


@clause_of_both_pools
def entries_are_counted(A: Algebra, S: Core, side: Side) -> Term:
    """Every table entry has a number below the count of entries of its block, and no two have the same."""
    P = side.blocks(S)

    def of_entry(s: Term, i: Term) -> Term:
        b, r = P.table(s, i), P.rank(s, i)
        return A.And(0 <= r, r < P.entries(b), P.own(b, r) == s, P.idx(b, r) == i)

    return all_entries(A, S, side, of_entry)


@clause_of_both_pools
def counts_are_entries(A: Algebra, S: Core, side: Side) -> Term:
    """Every number below the count of entries of a block is that of a table entry."""
    P = side.blocks(S)

    def of_number(b: Term, j: Term) -> Term:
        s, i = P.own(b, j), P.idx(b, j)
        return A.And(side.resident(S)(s), in_table(A, S, s, i), P.table(s, i) == b, P.rank(s, i) == j)

    return A.all(side.sort, lambda b: A.upto(P.entries(b), lambda j: of_number(b, j)))


@clause
def holds_are_counted(A: Algebra, S: Core) -> Term:
    """Every hold of a step in flight has a number below the count of holds, and no two have the same."""

    def of_hold(k: Term, b: Term) -> Term:
        r = S.hold_rank(k, b)
        return A.Implies(S.holds(k, b), A.And(S.in_flight(k), 0 <= r, r < S.held(b), S.hold_own(b, r) == k))

    return A.all("Step", lambda k: A.all("Block", lambda b: of_hold(k, b)))


@clause
def counts_are_holds(A: Algebra, S: Core) -> Term:
    """Every number below the count of holds of a block is that of a step in flight."""

    def of_number(b: Term, j: Term) -> Term:
        k = S.hold_own(b, j)
        return A.And(S.holds(k, b), S.hold_rank(k, b) == j)

    return A.all("Block", lambda b: A.upto(S.held(b), lambda j: of_number(b, j)))


@clause_of_both_pools
def count_is_holders(A: Algebra, S: Core, side: Side) -> Term:
    """A block's reference count is the number of its holders."""
    P = side.blocks(S)

    def of_block(b: Term) -> Term:
        if side is HOST:
            return A.And(P.entries(b) >= 0, P.ref_count(b) == P.entries(b))
        return A.And(P.entries(b) >= 0, S.held(b) >= 0, P.ref_count(b) == P.entries(b) + S.held(b))

    return A.all(side.sort, of_block)


@clause_of_both_pools
def free_means_unreferenced(A: Algebra, S: Core, side: Side) -> Term:
    """A block is free exactly when its reference count is zero."""
    P = side.blocks(S)
    return A.all(side.sort, lambda b: P.free(b) == (P.ref_count(b) == 0))


# Contents


@clause_of_both_pools
def content(A: Algebra, S: Core, side: Side) -> Term:
    """What a sequence finds through its table is what belongs to its own tokens."""
    P = side.blocks(S)

    def of_entry(s: Term, i: Term) -> Term:
        return A.upto(extent(A, S, s, i), lambda o: P.kv(P.table(s, i), o) == S.token(s, i, o))

    return all_entries(A, S, side, of_entry)


@clause_of_both_pools
def reads_stay_filled(A: Algebra, S: Core, side: Side) -> Term:
    """A sequence never reads a slot of a block beyond what was put there."""
    P = side.blocks(S)
    return all_entries(A, S, side, lambda s, i: extent(A, S, s, i) <= P.filled(P.table(s, i)))


@clause_of_both_pools
def blocks_are_not_overfilled(A: Algebra, S: Core, side: Side) -> Term:
    """A block is filled with at most ``block_size`` tokens."""
    P = side.blocks(S)
    return A.all(side.sort, lambda b: P.filled(b) <= A.block_size)


@clause
def cached_are_full(A: Algebra, S: Core) -> Term:
    """Only full blocks are in the prefix cache."""
    return A.all("Block", lambda b: A.Implies(S.cached(b), S.device.filled(b) == A.block_size))


@clause
def cached_content(A: Algebra, S: Core) -> Term:
    """What a cached block holds is what its key stands for."""
    return A.all(
        "Block",
        lambda b: A.upto(
            A.block_size, lambda o: A.Implies(S.cached(b), S.device.kv(b, o) == A.cached_value(S.key(b), o))
        ),
    )


# Steps in flight


@clause
def reach_is_filled(A: Algebra, S: Core) -> Term:
    """A step in flight reads and writes only slots that were given to a token."""

    def of_hold(k: Term, b: Term) -> Term:
        return A.Implies(S.holds(k, b), A.And(0 <= S.reach(k, b), S.reach(k, b) <= S.device.filled(b)))

    return A.all("Step", lambda k: A.all("Block", lambda b: of_hold(k, b)))


@clause
def steps_see_what_they_were_given(A: Algebra, S: Core) -> Term:
    """A step in flight finds in its blocks what was there when it was planned."""

    def of_hold(k: Term, b: Term) -> Term:
        return A.upto(S.reach(k, b), lambda o: A.Implies(S.holds(k, b), S.device.kv(b, o) == S.seen(k, b, o)))

    return A.all("Step", lambda k: A.all("Block", lambda b: of_hold(k, b)))


@clause
def unwritten_are_due(A: Algebra, S: Core) -> Term:
    """A filled slot that is not written yet is due from a step in flight that holds its block."""

    def of_slot(b: Term, o: Term) -> Term:
        k = S.writer(b, o)
        return A.Or(S.written(b, o), A.And(S.holds(k, b), o < S.reach(k, b)))

    return A.all("Block", lambda b: A.upto(S.device.filled(b), lambda o: of_slot(b, o)))


# Transitions


@step_clause
def shared_blocks_are_never_written(A: Algebra, S: Core, T: Core) -> Term:
    """A block in more than one table, or one that stays cached, is not written."""

    def of_block(b: Term) -> Term:
        kept = A.Or(S.device.entries(b) > 1, A.And(S.cached(b), T.cached(b)))
        return A.upto(A.block_size, lambda o: A.Implies(kept, T.device.kv(b, o) == S.device.kv(b, o)))

    return A.all("Block", of_block)


@step_clause
def readers_keep_reading(A: Algebra, S: Core, T: Core) -> Term:
    """What a running sequence has computed stays what it reads, whoever acts."""

    def of_entry(s: Term, i: Term) -> Term:
        both = A.And(S.running(s), T.running(s), S.first(s) <= i, T.first(s) <= i, i < T.num_blocks(s))
        return A.upto(
            extent(A, S, s, i),
            lambda o: A.Implies(
                A.And(both, o < extent(A, T, s, i)),
                T.device.kv(T.device.table(s, i), o) == S.device.kv(S.device.table(s, i), o),
            ),
        )

    return A.all("Seq", lambda s: A.upto(S.num_blocks(s), lambda i: of_entry(s, i)))


@step_clause
def held_blocks_keep_their_owner(A: Algebra, S: Core, T: Core) -> Term:
    """While a step in flight may read a block, the block is not free, not emptied and not written below that."""

    def of_hold(k: Term, b: Term) -> Term:
        kept = A.And(S.holds(k, b), T.holds(k, b))
        same = A.upto(S.reach(k, b), lambda o: A.Implies(kept, T.device.kv(b, o) == S.device.kv(b, o)))
        whole = A.Implies(kept, A.And(A.Not(T.device.free(b)), S.device.filled(b) <= T.device.filled(b)))
        return A.And(same, whole)

    return A.all("Step", lambda k: A.all("Block", lambda b: of_hold(k, b)))


@step_clause
def holds_end_with_their_step(A: Algebra, S: Core, T: Core) -> Term:
    """A step gives a block back only by being complete."""
    return A.all(
        "Step", lambda k: A.all("Block", lambda b: A.Implies(A.And(S.holds(k, b), T.in_flight(k)), T.holds(k, b)))
    )
