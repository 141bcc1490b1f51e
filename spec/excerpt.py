"""An excerpt: what the report of a violation shows of a large pool."""

from spec.vocabulary import Event, State, replace

MOST_BLOCKS_SHOWN = 64
"""A pool of more blocks is reported as far as it is concerned."""


def concerned(before: State, event: Event, after: State) -> tuple[State, State]:
    """The two states as a report shows them: of a large pool only the blocks that the event names or moves, the
    sequences that it is about, and who else holds those blocks."""
    if before.config.num_blocks <= MOST_BLOCKS_SHOWN:
        return before, after
    size, facts = before.config.block_size, vars(event)
    named = {facts[name] for name in ("source", "target", "block") if name in facts}
    named |= set(facts.get("blocks", ())) | {at // size for at in facts.get("slots", ())}
    named |= {b for b in range(before.config.num_blocks) if before.ref_count[b] != after.ref_count[b]}
    named |= set(before.free) ^ set(after.free)
    seqs = {facts[name] for name in ("seq", "parent", "child") if name in facts}
    return _only(before, named, seqs), _only(after, named, seqs)


def _only(s: State, blocks: set[int], seqs: set[int]) -> State:
    """The state without other blocks, and without sequences that hold none of these."""
    tables = {i: t for i, t in s.block_tables.items() if i in seqs or not blocks.isdisjoint(t)}
    return replace(
        s,
        free=tuple(b for b in s.free if b in blocks),
        ref_count=tuple(count if block in blocks else 0 for block, count in enumerate(s.ref_count)),
        block_tables=tables,
        seqs={i: q for i, q in s.seqs.items() if i in tables or i in seqs},
    )
