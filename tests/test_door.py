"""Who is turned away, and the sentence that says why: the same one of both engines."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from optimized.engine import SymbolicEngine
from reference.engine import ReferenceEngine
from spec.conformance.judge import Follower
from spec.engine import Admission, InvalidRequest
from spec.vocabulary import Config, Prefix, Request, SeqId, Token

CONFIG = Config(num_blocks=4, block_size=2, max_num_seqs=3, max_num_batched_tokens=4, max_model_len=16)
REQUEST = Request(5, (0, 1), max_tokens=3, seq_ids=(8,))

AnyEngine: TypeAlias = ReferenceEngine | SymbolicEngine
Make: TypeAlias = Callable[[Config], AnyEngine]


@pytest.fixture(params=["reference", "optimized"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an engine in which request 0 waits, with sequence 0 and the promised sequence 1."""

    def made(config: Config = CONFIG) -> AnyEngine:
        kind = ReferenceEngine if request.param == "reference" else SymbolicEngine
        engine: AnyEngine = kind(config, Follower(config, request.param))
        engine.add(Request(0, (0, 1), max_tokens=3, seq_ids=(0, 1)))
        return engine

    return made


def zero(seq_id: SeqId, prefix: Prefix) -> Token:
    return 0


def release(engine: AnyEngine, seq_id: SeqId) -> None:
    """The protocol has no such call: both engines have it, one of them in its core."""
    (engine.core if isinstance(engine, SymbolicEngine) else engine).release(seq_id)


def sentence_of(engine: AnyEngine, call: Callable[[], object]) -> str:
    """Why the engine turns the call away. It changes nothing."""
    before = engine.snapshot()
    with pytest.raises(InvalidRequest) as told:
        call()
    assert engine.snapshot() == before
    return str(told.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"request_id": 0}, "request_id is 0, it must be an id that no live request has"),
        ({"prompt": ()}, "prompt is (), it must be at least one token"),
        ({"max_tokens": 0}, "max_tokens is 0, it must be at least 1"),
        ({"seq_ids": ()}, "seq_ids is (), it must be at least one id, each once"),
        ({"seq_ids": (8, 8)}, "seq_ids is (8, 8), it must be at least one id, each once"),
        ({"seq_ids": (8, 0)}, "seq_ids is 0, it must be an id that no live sequence has"),
        ({"seq_ids": (8, 1)}, "seq_ids is 1, it must be an id that no live sequence has"),
        ({"seq_ids": (6, 7, 8, 9)}, "seq_ids is (6, 7, 8, 9), it must be at most max_num_seqs (3)"),
        (
            {"prompt": (0,) * 14},
            "max_tokens is 3, it must be at most max_model_len (16) together with the prompt (14)",
        ),
        ({"max_tokens": 8}, "the request needs room for 9 tokens, the cache has 8 slots"),
        ({"seq_ids": (8, 9, 10)}, "the request needs room for 3 sequences of 4 tokens, the cache has 8 slots"),
    ],
)
def test_who_can_not_be_served_is_told_why(make: Make, fields: dict[str, object], sentence: str) -> None:
    engine = make(CONFIG)
    assert sentence_of(engine, lambda: engine.add(replace(REQUEST, **fields))) == sentence


def test_of_several_reasons_both_engines_tell_the_same(make: Make) -> None:
    """What is wrong is put right piece by piece; each time the next reason is told."""
    engine = make(CONFIG)
    request, told = Request(0, (), max_tokens=0, seq_ids=(0, 0, 6, 7)), list[str]()
    for fields in (
        {"request_id": 5},
        {"prompt": (0,) * 9},
        {"max_tokens": 8},
        {"seq_ids": (0, 5, 6, 7)},
        {"seq_ids": (4, 5, 6, 7)},
        {"seq_ids": (4, 5, 6)},
        {"max_tokens": 7},
    ):
        told.append(sentence_of(engine, lambda: engine.add(request)).split(",")[0])  # noqa: B023  called at once
        request = replace(request, **fields)
    assert told == [
        "request_id is 0",
        "prompt is ()",
        "max_tokens is 0",
        "seq_ids is (0",
        "seq_ids is 0",
        "seq_ids is (4",
        "max_tokens is 8",
    ]
    sentence = "the request needs room for 3 sequences of 15 tokens, the cache has 8 slots"
    assert sentence_of(engine, lambda: engine.add(request)) == sentence


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 7}, {"seq_ids": (8, 9)}, {"max_tokens": 1}])
def test_what_just_fits_comes_in(make: Make, fields: dict[str, object]) -> None:
    engine = make(CONFIG)
    engine.add(replace(REQUEST, **fields))
    assert engine.snapshot().waiting == (0, 5)


def test_as_many_sequences_as_there_are_seats_come_in(make: Make) -> None:
    engine = make(replace(CONFIG, num_blocks=6))
    engine.add(replace(REQUEST, seq_ids=(8, 9, 10)))
    assert engine.snapshot().waiting == (0, 5)


def test_the_longest_request_of_a_model_comes_in(make: Make) -> None:
    engine = make(replace(CONFIG, num_blocks=8))
    engine.add(replace(REQUEST, prompt=(0,) * 13))
    assert engine.snapshot().waiting == (0, 5)


def test_an_id_of_a_step_in_flight_is_not_given_to_somebody_else(make: Make) -> None:
    engine = make(CONFIG)
    engine.begin_step()
    engine.abort(0)
    sentence = "seq_ids is 0, it must be an id that no live sequence has"
    assert sentence_of(engine, lambda: engine.add(replace(REQUEST, seq_ids=(0,)))) == sentence
    engine.add(replace(REQUEST, seq_ids=(1,)))
    engine.end_step(zero)
    engine.add(replace(REQUEST, request_id=6, seq_ids=(0,)))
    assert engine.snapshot().waiting == (5, 6)


def test_an_id_is_free_when_its_own_step_is_over(make: Make) -> None:
    engine = make(replace(CONFIG, num_blocks=8, max_num_batched_tokens=2))
    engine.add(replace(REQUEST, seq_ids=(8,)))
    engine.begin_step()
    engine.begin_step()
    assert [[*flight.scheduled] for flight in engine.snapshot().flights.values()] == [[0], [8]]
    engine.abort(0)
    engine.end_step(zero)
    engine.add(replace(REQUEST, request_id=6, seq_ids=(0,)))
    engine.end_step(zero)
    assert engine.snapshot().waiting == (6,)


def test_what_one_request_promises_is_not_forgotten_with_another(make: Make) -> None:
    engine = make(CONFIG)
    engine.step(zero)
    release(engine, 1)
    engine.add(replace(REQUEST, seq_ids=(8, 1)))
    engine.abort(0)
    sentence = "seq_ids is 1, it must be an id that no live sequence has"
    assert sentence_of(engine, lambda: engine.add(replace(REQUEST, request_id=6, seq_ids=(1,)))) == sentence


NO_PARENT = "it must be a sequence of a running request, with output and not in a step"


@pytest.mark.parametrize(
    ("parent", "child", "sentence"),
    [
        (7, 8, "there is no sequence 7"),
        (7, 1, "there is no sequence 7"),
        (3, 8, f"parent is 3, {NO_PARENT}"),
        (3, 1, f"parent is 3, {NO_PARENT}"),
        (0, 1, "child is 1, it must be an id that no live sequence has"),
    ],
)
def test_who_can_not_be_forked_is_told_why(make: Make, parent: int, child: int, sentence: str) -> None:
    engine = make(CONFIG)
    engine.step(zero)
    engine.add(Request(1, (0,), max_tokens=3, seq_ids=(3,)))
    assert sentence_of(engine, lambda: engine.fork(parent, child)) == sentence


def test_who_is_in_a_step_or_has_no_output_is_not_forked(make: Make) -> None:
    engine = make(CONFIG)
    release(engine, 7)  # nobody: ignored
    assert sentence_of(engine, lambda: release(engine, 0)) == "seq_id is 0, it must be a sequence with output"
    engine.step(zero)
    engine.begin_step()
    assert sentence_of(engine, lambda: engine.fork(0, 9)) == f"parent is 0, {NO_PARENT}"
    engine.end_step(zero)
    assert engine.fork(0, 9) is Admission.NEVER  # three sequences of four tokens do not fit into eight slots
    release(engine, 1)
    assert engine.fork(0, 9) is Admission.NOW


def test_who_runs_without_output_is_not_forked(make: Make) -> None:
    engine = make(replace(CONFIG, max_num_batched_tokens=1))
    engine.step(zero)
    assert engine.snapshot().running == (0,)
    assert sentence_of(engine, lambda: engine.fork(0, 9)) == f"parent is 0, {NO_PARENT}"


def test_a_victim_is_not_forked_though_it_has_output(make: Make) -> None:
    """There is room for four blocks, and each of two requests grows to three."""
    engine = make(CONFIG)
    engine.abort(0)
    engine.add(Request(1, (0, 1), max_tokens=5, seq_ids=(3,)))
    engine.add(Request(2, (0, 1), max_tokens=5, seq_ids=(4,)))
    for _ in range(4):
        engine.step(zero)
    assert engine.snapshot().waiting == (2,)
    assert engine.snapshot().seqs[4].num_output_tokens == 3
    assert sentence_of(engine, lambda: engine.fork(4, 9)) == f"parent is 4, {NO_PARENT}"


def test_a_fork_waits_for_a_seat(make: Make) -> None:
    engine = make(CONFIG)
    engine.step(zero)
    release(engine, 1)
    engine.add(Request(1, (0,), max_tokens=2, seq_ids=(3,)))
    engine.add(Request(2, (0,), max_tokens=2, seq_ids=(4,)))
    engine.step(zero)
    assert engine.snapshot().running == (0, 1, 2)
    assert engine.fork(0, 9) is Admission.LATER
    engine.abort(1)
    assert engine.fork(0, 9) is Admission.NOW


def test_steps_begin_and_end_in_turn(make: Make) -> None:
    engine = make(replace(CONFIG, max_num_batched_tokens=1))
    engine.begin_step()
    sentence = "the number of steps in flight is 1, it must be 0 when a step is made whole"
    assert sentence_of(engine, lambda: engine.step(zero)) == sentence
    engine.begin_step()
    sentence = "the number of steps in flight is 2, it must be below 2 when a step begins"
    assert sentence_of(engine, engine.begin_step) == sentence
