"""Arbitrary events and arbitrary states, most of them nonsense."""

from dataclasses import is_dataclass
from types import UnionType
from typing import get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from spec.vocabulary import (
    AdmissionRule,
    CacheKey,
    Config,
    Event,
    FinishReason,
    Flight,
    Policy,
    Recovery,
    Request,
    Seq,
    State,
)

numbers = st.integers(-1, 4)
tuples = st.lists(numbers, max_size=4).map(tuple)
salts = st.sampled_from(["", "a", 'é"\n'])

configs = st.builds(
    Config,
    num_blocks=st.integers(1, 4),
    block_size=st.integers(1, 3),
    max_num_seqs=st.integers(1, 3),
    max_num_batched_tokens=st.integers(1, 4),
    max_model_len=st.integers(1, 9),
    watermark_blocks=st.just(0),
    num_host_blocks=st.integers(0, 2),
    prefix_cache=st.booleans(),
    window=st.none() | st.integers(1, 3),
    policy=st.sampled_from(Policy),
    admission_rule=st.sampled_from(AdmissionRule),
    recovery=st.sampled_from(Recovery),
    max_num_partial_prefills=st.integers(1, 2),
)
requests = st.builds(
    Request,
    request_id=numbers,
    prompt=tuples,
    max_tokens=numbers,
    seq_ids=tuples,
    stop_token_ids=tuples,
    priority=numbers,
    cache_salt=salts,
)


def of_type(hint: object) -> st.SearchStrategy:
    """Any value of a field's type."""
    if isinstance(hint, UnionType):
        return st.one_of(*(of_type(each) for each in get_args(hint)))
    if get_origin(hint) is tuple:
        return tuples
    if isinstance(hint, type) and is_dataclass(hint):
        return st.builds(hint, **{name: of_type(each) for name, each in get_type_hints(hint).items()})
    return {int: numbers, str: salts, FinishReason: st.sampled_from(FinishReason)}[hint]


EVENTS: dict[type, st.SearchStrategy[Event]] = {kind: of_type(kind) for kind in get_args(Event)}
"""One strategy for each kind of event."""

events = st.one_of(*EVENTS.values())

flights = st.builds(
    Flight,
    scheduled=st.dictionaries(numbers, numbers, max_size=2),
    blocks=st.frozensets(numbers, max_size=3),
    holds=tuples,
    written=st.frozensets(numbers, max_size=3),
    readers=st.frozensets(numbers, max_size=2),
    submitted=st.booleans(),
    preempting=st.booleans(),
)
seqs = st.builds(
    Seq,
    request_id=numbers,
    tokens=tuples,
    num_prompt_tokens=numbers,
    num_computed_tokens=numbers,
    num_scheduled_tokens=numbers,
    num_dropped_blocks=numbers,
)


def by_id(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.dictionaries(numbers, values, max_size=3)


@st.composite
def states(draw: st.DrawFn) -> State:
    config = draw(configs)
    counts = st.lists(st.integers(-1, 3), min_size=config.num_blocks, max_size=config.num_blocks)
    return State(
        config=config,
        free=draw(tuples),
        ref_count=tuple(draw(counts)),
        block_tables=draw(by_id(tuples)),
        seqs=draw(by_id(seqs)),
        requests=draw(by_id(requests)),
        waiting=draw(tuples),
        running=draw(tuples),
        num_preemptions=draw(by_id(numbers)),
        flights=draw(by_id(flights)),
        cached=draw(by_id(st.builds(CacheKey, tuples, salts))),
        host_free=draw(tuples),
        host_tables=draw(by_id(tuples)),
        cells=draw(by_id(tuples)),
        host_cells=draw(by_id(tuples)),
    )
