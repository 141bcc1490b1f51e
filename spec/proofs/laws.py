"""Laws that the core rests on and that speak of no state: slots, the free list, merging, and reading through tables."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import z3

from spec.proofs.algebra import Fn, Term
from spec.proofs.obligations import Obligation


def laws() -> Iterator[Obligation]:
    """Every law but those of the scheduler."""
    yield from slot_laws()
    yield from merge_laws()
    yield from merge_laws_of_outputs()
    yield from paged_equals_contiguous()
    yield from free_list_laws()


def law(name: str, sentence: str, hypotheses: list[Term], goal: Term) -> Obligation:
    """A statement that follows from its hypotheses, whatever the state."""
    return Obligation(name, "", name, sentence, tuple(hypotheses), goal, may_search=True)


# Slots


def slot_laws() -> Iterator[Obligation]:
    """A slot is ``block_id * block_size + offset``, a position is cut into block and offset: for every block size."""
    block, other_block, offset, other_offset = z3.Ints("block other_block offset other_offset")
    size, num_blocks, num_tokens, position = z3.Ints("block_size num_blocks num_tokens position")
    sizes = [size >= 1, num_blocks == (num_tokens + size - 1) / size]
    slot, other_slot = block * size + offset, other_block * size + other_offset
    inside = [0 <= offset, offset < size, 0 <= other_offset, other_offset < size]
    yield law(
        "slots_are_distinct",
        "Two tokens have the same slot only if they have the same block and the same offset.",
        [size >= 1, *inside, slot == other_slot],
        z3.And(block == other_block, offset == other_offset),
    )
    yield law(
        "slots_are_in_the_pool",
        "The slot of a block of the pool lies in the pool.",
        [size >= 1, *inside, 0 <= block, block < num_blocks],
        z3.And(0 <= slot, slot < num_blocks * size),
    )
    yield law(
        "positions_are_in_the_table",
        "Every position of a sequence has an entry of its table and an offset in the block.",
        [*sizes, 0 <= position, position < num_tokens],
        z3.And(position / size >= 0, position / size < num_blocks, 0 <= position % size, position % size < size),
    )
    yield law(
        "less_than_a_block_is_wasted",
        "The blocks needed for a sequence have fewer than ``block_size`` slots to spare.",
        [*sizes, num_tokens >= 0],
        z3.And(num_blocks * size - num_tokens >= 0, num_blocks * size - num_tokens < size),
    )


# Merging partial results


class Partial(NamedTuple):
    """The softmax over some keys: the largest score so far, the mass and the weighted values relative to it."""

    maximum: Term
    mass: Term
    value: Term


def merge_laws() -> Iterator[Obligation]:
    """Merging as a kernel does it, with a running maximum. ``exp`` is known by exp(x + y) = exp(x) exp(y) alone."""
    exp = z3.Function("power", z3.RealSort(), z3.RealSort())
    x, y, z = (Partial(*z3.Reals(f"max_{n} mass_{n} value_{n}")) for n in "xyz")

    def merge(left: Partial, right: Partial) -> Partial:
        maximum = larger(left.maximum, right.maximum)
        old, new = exp(left.maximum - maximum), exp(right.maximum - maximum)
        return Partial(maximum, left.mass * old + right.mass * new, left.value * old + right.value * new)

    def powers(*steps: tuple[Term, Term]) -> list[Term]:
        return [z3.And(exp(a + b) == exp(a) * exp(b), exp(a) > 0, exp(b) > 0) for a, b in steps]

    both = merge(x, y)
    known = powers(*[(part.maximum - both.maximum, both.maximum) for part in (x, y)])
    for what, merged, parts in (("mass", both.mass, (x.mass, y.mass)), ("value", both.value, (x.value, y.value))):
        yield law(
            f"merge_adds_{what}",
            f"The {what} of merged parts, taken absolutely, is the sum of theirs.",
            known,
            merged * exp(both.maximum) == parts[0] * exp(x.maximum) + parts[1] * exp(y.maximum),
        )
    left, right = merge(both, z), merge(x, merge(y, z))
    tail = larger(y.maximum, z.maximum)
    known = powers(
        *[(part.maximum - both.maximum, both.maximum - left.maximum) for part in (x, y)],
        *[(part.maximum - tail, tail - right.maximum) for part in (y, z)],
    )
    mirrored = merge(y, x)
    for field in Partial._fields:
        yield law(
            f"merge_is_associative_in_{field}",
            f"How partial results are grouped does not change the {field}.",
            known,
            getattr(left, field) == getattr(right, field),
        )
        yield law(
            f"merge_is_commutative_in_{field}",
            f"The order of two partial results does not change the {field}.",
            [],
            getattr(both, field) == getattr(mirrored, field),
        )
    yield law(
        "output_is_free_of_the_maximum",
        "The output does not depend on the maximum that the mass and the value are relative to.",
        [exp(x.maximum) > 0, x.mass > 0],
        (x.value * exp(x.maximum)) / (x.mass * exp(x.maximum)) == x.value / x.mass,
    )


def larger(x: Term, y: Term) -> Term:
    """The larger one of two numbers."""
    return z3.If(x >= y, x, y)


class Output(NamedTuple):
    """What a kernel hands out: the output, and exp of its log-sum-exp. The empty set has output 0 and, since
    its log-sum-exp is -inf, mass 0."""

    out: Term
    mass: Term


def merge_laws_of_outputs() -> Iterator[Obligation]:
    """Merging finished outputs by their log-sum-exp, empty ones included."""
    x, y, z = (Output(*z3.Reals(f"out_{n} mass_{n}")) for n in "xyz")
    empty = Output(z3.RealVal(0), z3.RealVal(0))
    known = [z3.And(p.mass >= 0, z3.Implies(p.mass == 0, p.out == 0)) for p in (x, y, z)]

    def merge(left: Output, right: Output) -> Output:
        mass = left.mass + right.mass
        return Output(z3.If(mass == 0, 0, (left.out * left.mass + right.out * right.mass) / mass), mass)

    for side, merged in (("left", merge(empty, x)), ("right", merge(x, empty))):
        yield law(
            f"nothing_is_neutral_on_the_{side}",
            "Merging with the result of no keys at all, (0, -inf), changes nothing.",
            known,
            z3.And(merged.out == x.out, merged.mass == x.mass),
        )
    yield law(
        "outputs_merge_commutatively",
        "The order of two outputs does not matter.",
        known,
        z3.And(merge(x, y).out == merge(y, x).out, merge(x, y).mass == merge(y, x).mass),
    )
    left, right = merge(merge(x, y), z), merge(x, merge(y, z))
    yield law(
        "outputs_merge_masses_associatively",
        "How outputs are grouped does not change the mass.",
        known,
        left.mass == right.mass,
    )
    yield law(
        "outputs_merge_associatively",
        "How outputs are grouped does not change the output.",
        known,
        left.out == right.out,
    )


# Reading through a table


def paged_equals_contiguous() -> Iterator[Obligation]:
    """Attention that goes through a table equals attention over the sequence itself, by induction over its positions."""
    value, partial, block = z3.DeclareSort("Value"), z3.DeclareSort("Partial"), z3.DeclareSort("Block")
    integer = z3.IntSort()
    kv = z3.Function("kv", block, integer, value)
    table = z3.Function("table", integer, block)
    token = z3.Function("token", integer, value)
    index, offset = z3.Function("index", integer, integer), z3.Function("offset", integer, integer)
    paged, contiguous = z3.Function("paged", integer, partial), z3.Function("contiguous", integer, partial)
    merge = z3.Function("merge", partial, value, partial)
    nothing = z3.Const("nothing", partial)
    p, n, length = z3.Ints("p n num_computed_tokens")

    def read(position: Term) -> Term:
        return kv(table(index(position)), offset(position))

    content = z3.ForAll([p], z3.Implies(z3.And(0 <= p, p < length), read(p) == token(p)))
    unfolded = [
        paged(n + 1) == merge(paged(n), read(n)),
        contiguous(n + 1) == merge(contiguous(n), token(n)),
    ]
    yield law(
        "paged_equals_contiguous_at_the_start",
        "Over no tokens, attention through a table and attention over the sequence are the same.",
        [paged(0) == nothing, contiguous(0) == nothing],
        paged(0) == contiguous(0),
    )
    yield law(
        "paged_equals_contiguous_by_one_more",
        "If they are the same over n tokens, they are over n + 1, since the table holds the sequence (``content``).",
        [content, 0 <= n, n < length, *unfolded, paged(n) == contiguous(n)],
        paged(n + 1) == contiguous(n + 1),
    )


# The free list


class FreeList(NamedTuple):
    """A doubly linked list through the blocks themselves, between a head and a tail that are no blocks.

    ``time`` is a ghost: when a block was freed. It takes the place of reachability, so that no proof needs induction.
    """

    after: Fn
    before: Fn
    free: Fn
    time: Fn


class Link(NamedTuple):
    """The ends of the list, and the sort of what is linked."""

    sort: Term
    head: Term
    tail: Term


def free_list_clauses(link: Link, q: FreeList) -> dict[str, Term]:
    """What makes the list a queue of the free blocks, the one that has been free longest at the head."""
    x, y = z3.Consts("x y", link.sort)

    def from_head(n: Term) -> Term:
        return z3.Or(q.free(n), n == link.head)

    def to_tail(n: Term) -> Term:
        return z3.Or(q.free(n), n == link.tail)

    def linked(n: Term) -> Term:
        return z3.Or(q.free(n), n == link.head, n == link.tail)

    onward = z3.And(to_tail(q.after(x)), q.before(q.after(x)) == x, q.time(x) < q.time(q.after(x)))
    back = z3.And(from_head(q.before(x)), q.after(q.before(x)) == x)
    later = z3.And(from_head(x), to_tail(y), q.time(x) < q.time(y))
    same_time = z3.And(linked(x), linked(y), q.time(x) == q.time(y))
    return {
        "its_ends_are_no_blocks": z3.And(
            link.head != link.tail,
            z3.Not(q.free(link.head)),
            z3.Not(q.free(link.tail)),
            q.time(link.head) < q.time(link.tail),
        ),
        "it_goes_on": z3.ForAll([x], z3.Implies(from_head(x), onward)),
        "it_goes_back": z3.ForAll([x], z3.Implies(to_tail(x), back)),
        "it_skips_nothing": z3.ForAll([x, y], z3.Implies(later, q.time(q.after(x)) <= q.time(y))),
        "its_ends_enclose_it": z3.ForAll(
            [x], z3.Implies(q.free(x), z3.And(q.time(link.head) < q.time(x), q.time(x) < q.time(link.tail)))
        ),
        "its_times_differ": z3.ForAll([x, y], z3.Implies(same_time, x == y)),
    }


def unlink(q: FreeList, block: Term) -> FreeList:
    """A block leaves the list, from wherever it is: two links change."""
    return FreeList(
        after=lambda n: z3.If(n == q.before(block), q.after(block), q.after(n)),
        before=lambda n: z3.If(n == q.after(block), q.before(block), q.before(n)),
        free=lambda n: z3.And(n != block, q.free(n)),
        time=q.time,
    )


def push(link: Link, q: FreeList, block: Term) -> FreeList:
    """A block joins the list at the tail: four links change, and no time has passed that was not counted."""
    last = q.before(link.tail)
    return FreeList(
        after=lambda n: z3.If(n == block, link.tail, z3.If(n == last, block, q.after(n))),
        before=lambda n: z3.If(n == link.tail, block, z3.If(n == block, last, q.before(n))),
        free=lambda n: z3.Or(n == block, q.free(n)),
        time=lambda n: z3.If(n == block, q.time(link.tail), z3.If(n == link.tail, q.time(link.tail) + 1, q.time(n))),
    )


def free_list_laws(
    unlinked: Callable[[FreeList, Term], FreeList] = unlink,
    pushed: Callable[[Link, FreeList, Term], FreeList] = push,
) -> Iterator[Obligation]:
    """The linked free list is a queue in order of release, and unlinking from the middle keeps it one."""
    sort = z3.DeclareSort("Node")
    head, tail, block, other = z3.Consts("head tail block other", sort)
    link = Link(sort, head, tail)
    q = FreeList(
        z3.Function("after", sort, sort),
        z3.Function("before", sort, sort),
        z3.Function("free", sort, z3.BoolSort()),
        z3.Function("time", sort, z3.RealSort()),
    )
    known = list(free_list_clauses(link, q).values())
    new = [z3.Not(q.free(block)), block != head, block != tail]
    for name, goal in free_list_clauses(link, unlinked(q, block)).items():
        yield law(
            f"unlinking_from_the_free_list: {name}",
            "A block can leave the free list from anywhere, and the list stays a queue.",
            [*known, q.free(block)],
            goal,
        )
    for name, goal in free_list_clauses(link, pushed(link, q, block)).items():
        yield law(
            f"pushing_on_the_free_list: {name}",
            "A block that joins the free list at the tail leaves it a queue.",
            [*known, *new],
            goal,
        )
    emptied = z3.And(q.after(head) == tail, q.before(tail) == head, head != tail, q.time(head) < q.time(tail))
    for name, goal in free_list_clauses(link, q).items():
        yield law(
            f"the_empty_free_list: {name}",
            "A list whose ends are linked to each other is the queue without blocks.",
            [emptied, z3.ForAll([other], z3.Not(q.free(other)))],
            goal,
        )
    yield law(
        "the_head_was_freed_first",
        "The block at the head of the free list has been free longest.",
        [*known, q.free(q.after(head)), q.free(other)],
        q.time(q.after(head)) <= q.time(other),
    )
    yield law(
        "the_head_is_free_if_any_block_is",
        "The free list is empty exactly when no block is free.",
        known,
        (q.after(head) == tail) == z3.Not(z3.Exists([other], q.free(other))),
    )
