"""What paged attention computes, in plain Python: softmax(scale * q K^T) V over the slots that a block table names."""

import math
from collections.abc import Sequence
from typing import TypeAlias

from spec.rules import step_rule
from spec.vocabulary import Append, Complete, Read, Sample, Slot, State, replace, step_of

Vector: TypeAlias = tuple[float, ...]
Partial: TypeAlias = tuple[Vector, float]
"""The attention over some of the keys, and the logarithm of the sum of their weights (LSE)."""


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def attention(query: Vector, keys: Sequence[Vector], values: Sequence[Vector], scale: float) -> Partial:
    """One query over contiguous keys and values. Nothing to read gives 0 and LSE -inf.

    >>> attention((1.0,), keys=[(0.0,), (0.0,)], values=[(2.0,), (4.0,)], scale=1.0)
    ((3.0,), 0.6931471805599453)
    >>> attention((1.0,), keys=[], values=[], scale=1.0)
    ((0.0,), -inf)
    """
    if not keys:
        return (0.0,) * len(query), -math.inf
    scores = [scale * dot(query, key) for key in keys]
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    total = math.fsum(weights)
    out = (math.fsum(w * value[d] for w, value in zip(weights, values, strict=True)) / total for d in range(len(query)))
    return tuple(out), most + math.log(total)


def paged_attention(
    query: Vector, key_cache: Sequence[Vector], value_cache: Sequence[Vector], slots: Sequence[Slot], scale: float
) -> Partial:
    """One query over the slots of its sequence: what it reads, wherever it lies, is all that counts.

    >>> cache = [(9.0,), (0.0,), (9.0,), (0.0,)]
    >>> paged_attention((1.0,), cache, [(9.0,), (2.0,), (9.0,), (4.0,)], slots=(3, 1), scale=1.0)
    ((3.0,), 0.6931471805599453)
    """
    return attention(query, [key_cache[at] for at in slots], [value_cache[at] for at in slots], scale)


def merge(a: Partial, b: Partial) -> Partial:
    """The attention over both sets of keys, from the attention over each. The empty set changes nothing.

    >>> merge(((3.0,), 0.5), ((0.0,), -math.inf))
    ((3.0,), 0.5)
    """
    most = max(a[1], b[1])
    if most == -math.inf:
        return a
    x, y = math.exp(a[1] - most), math.exp(b[1] - most)
    return tuple((x * p + y * q) / (x + y) for p, q in zip(a[0], b[0], strict=True)), most + math.log(x + y)


def first_visible(position: int, window: int | None) -> int:
    """The first position that the token at ``position`` sees: with a window it sees that many, itself included.

    >>> first_visible(position=9, window=4)
    6
    """
    return 0 if window is None else max(0, position - window + 1)


def read(s: State, event: Read) -> State:
    """The step that computes the sequence knows that it has read."""
    oldest = step_of(s, event.seq)
    if oldest is None:
        return s
    flight = replace(s.flights[oldest], readers=s.flights[oldest].readers | {event.seq})
    return replace(s, flights={**s.flights, oldest: flight})


@step_rule("ATTN-1", corpus="K1 T5 T8 P1")
def reads_find_their_own_prefix(before: State, event: Read, after: State) -> bool:
    """Whatever attention reads for position p holds exactly the sequence's prefix that ends in p."""
    tokens = before.seqs[event.seq].tokens
    return all(before.cells.get(at) == tokens[: event.start + i + 1] for i, at in enumerate(event.slots))


@step_rule("ATTN-2", corpus="K1 K10 T2 T6")
def reads_stay_in_the_table(before: State, event: Read, after: State) -> bool:
    """Attention reads only blocks that stand in the sequence's own table."""
    return set(before.block_tables[event.seq]) >= {at // before.config.block_size for at in event.slots}


@step_rule("ATTN-3", corpus="K6")
def reads_leave_nothing_out(before: State, event: Read, after: State) -> bool:
    """Attention reads every position from the first that a token of this step sees to the last that is computed."""
    computed, step_id = before.seqs[event.seq].num_computed_tokens, step_of(before, event.seq)
    scheduled = before.flights[step_id].scheduled[event.seq] if step_id is not None else 1
    first = first_visible(computed - scheduled, before.config.window)
    return event.start == first and event.start + len(event.slots) == computed


@step_rule("ATTN-4", corpus="K1 P14 S11")
def every_scheduled_sequence_computes(before: State, event: Complete, after: State) -> bool:
    """A sequence that a step schedules has written all its tokens of the step and read its keys when the step ends."""
    flight = before.flights[event.step_id]
    alive = {i: before.seqs[i].num_scheduled_tokens for i in flight.scheduled if i in before.seqs}
    later = {i: sum(f.scheduled.get(i, 0) for f in after.flights.values()) for i in alive}
    return alive == later and alive.keys() <= flight.readers


@step_rule("SAMPLE-1", corpus="R1 R2 P11 T8")
def tokens_are_sampled_from_what_the_sequence_has(before: State, event: Sample, after: State) -> bool:
    """The next token of a sequence is drawn from exactly the tokens that the sequence has.

    So neither the batch nor a chunk, a preemption, a swap or a cached prefix can change what is drawn.
    """
    return event.prefix == before.seqs[event.seq].tokens


@step_rule("SAMPLE-2", corpus="R9 X5")
def the_drawn_token_is_appended(before: State, event: Append, after: State) -> bool:
    """A sequence is given the token that was drawn for it.

    Only where somebody knows what is drawn, and for sequences that a scheduler serves.
    """
    if before.drawn is None or before.seqs[event.seq].request_id not in before.requests:
        return True
    return event.tokens == (before.drawn.get(event.seq),)


def sample(s: State, event: Sample) -> State:
    """The token is known, and not yet the sequence's."""
    return replace(s, drawn={**(s.drawn or {}), event.seq: event.token})
