"""What a state of the proved core consists of: total functions, the redundant ghosts among them included."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from spec.proofs.algebra import Algebra, Fn, Signature, Sort, Term
from spec.proofs.counts import Count


@dataclass(frozen=True)
class Blocks:
    """The blocks of one pool and the tables over them. ``table`` speaks of the entries from ``first`` on.

    Ghosts, which no engine needs: ``pos`` inverts a table; ``rank`` numbers the entries that name a block, and
    ``own`` and ``idx`` invert it. A one-to-one map is how a count is stated without a sum.
    """

    table: Fn
    ref_count: Fn
    free: Fn
    kv: Fn
    filled: Fn
    entries: Fn
    pos: Fn
    rank: Fn
    own: Fn
    idx: Fn


@dataclass(frozen=True)
class Core:
    """Sequences, both pools, the prefix cache and the steps in flight.

    ``kv`` is what a slot holds, or will hold once the step in flight that is its ``writer`` has ``written`` it;
    ``reach`` says how many slots of a block a step in flight reads or writes, ``seen`` what it counts on there.
    ``held`` is the number of steps in flight that hold a block; ``hold_rank`` and ``hold_own`` are its ghosts.
    """

    running: Fn
    swapped: Fn
    first: Fn
    num_blocks: Fn
    computed_blocks: Fn
    computed_rest: Fn
    token_blocks: Fn
    token_rest: Fn
    token: Fn
    device: Blocks
    host: Blocks
    cached: Fn
    key: Fn
    in_flight: Fn
    holds: Fn
    reach: Fn
    seen: Fn
    written: Fn
    writer: Fn
    held: Fn
    hold_rank: Fn
    hold_own: Fn

    def num_computed_tokens(self, s: Term) -> Count:
        """The tokens of s whose K and V are in the cache."""
        return Count(self.computed_blocks(s), self.computed_rest(s))

    def num_tokens(self, s: Term) -> Count:
        """The tokens of s that are known."""
        return Count(self.token_blocks(s), self.token_rest(s))


@dataclass(frozen=True)
class Side:
    """One of the two pools, with the sequences whose tables lie in it."""

    name: str
    sort: Sort
    blocks: Callable[[Core], Blocks]
    resident: Callable[[Core], Fn]


DEVICE = Side("device", "Block", lambda S: S.device, lambda S: S.running)
HOST = Side("host", "HostBlock", lambda S: S.host, lambda S: S.swapped)


def _blocks_signatures(block: Sort) -> dict[str, Signature]:
    return {
        "table": ("Seq", "Int", block),
        "ref_count": (block, "Int"),
        "free": (block, "Bool"),
        "kv": (block, "Int", "Value"),
        "filled": (block, "Int"),
        "entries": (block, "Int"),
        "pos": ("Seq", block, "Int"),
        "rank": ("Seq", "Int", "Int"),
        "own": (block, "Int", "Seq"),
        "idx": (block, "Int", "Int"),
    }


SIGNATURES: dict[str, Signature] = {
    "running": ("Seq", "Bool"),
    "swapped": ("Seq", "Bool"),
    "first": ("Seq", "Int"),
    "num_blocks": ("Seq", "Int"),
    "computed_blocks": ("Seq", "Int"),
    "computed_rest": ("Seq", "Int"),
    "token_blocks": ("Seq", "Int"),
    "token_rest": ("Seq", "Int"),
    "token": ("Seq", "Int", "Int", "Value"),
    **{f"device.{name}": signature for name, signature in _blocks_signatures("Block").items()},
    **{f"host.{name}": signature for name, signature in _blocks_signatures("HostBlock").items()},
    "cached": ("Block", "Bool"),
    "key": ("Block", "Key"),
    "in_flight": ("Step", "Bool"),
    "holds": ("Step", "Block", "Bool"),
    "reach": ("Step", "Block", "Int"),
    "seen": ("Step", "Block", "Int", "Value"),
    "written": ("Block", "Int", "Bool"),
    "writer": ("Block", "Int", "Step"),
    "held": ("Block", "Int"),
    "hold_rank": ("Step", "Block", "Int"),
    "hold_own": ("Block", "Int", "Step"),
}
"""Every function of a state with its sorts, those of a pool under the pool's name."""


def build(make: Callable[[str, Signature], Fn]) -> Core:
    """A state out of one function per name and signature."""
    # Fields are filled in by name, which no checker follows.
    made: dict[str, Term] = {name: make(name, signature) for name, signature in SIGNATURES.items()}
    for pool in ("device", "host"):
        made[pool] = Blocks(**{field.name: made.pop(f"{pool}.{field.name}") for field in fields(Blocks)})
    return Core(**made)


def functions(S: Core) -> dict[str, Fn]:
    """The functions of a state by name: what ``build`` puts together."""
    named: dict[str, Fn] = {}
    for name in SIGNATURES:
        pool, _, field = name.rpartition(".")
        named[name] = getattr(getattr(S, pool) if pool else S, field)
    return named


def used(A: Algebra, S: Core, s: Term) -> Term:
    """The sequence has a table, on the device or on the host."""
    return A.Or(S.running(s), S.swapped(s))


def extent(A: Algebra, S: Core, s: Term, i: Term) -> Term:
    """The number of computed tokens of s in its block i."""
    computed = S.num_computed_tokens(s)
    return A.If(i < computed.blocks, A.block_size, A.If(i == computed.blocks, computed.rest, 0))


def in_table(A: Algebra, S: Core, s: Term, i: Term) -> Term:
    """Entry i of the table of s exists."""
    return A.And(S.first(s) <= i, i < S.num_blocks(s))
