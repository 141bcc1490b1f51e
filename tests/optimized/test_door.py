"""Who is turned away, and the sentence that says why."""

from dataclasses import replace

import pytest

from optimized.engine import EngineCore
from optimized.symbolic_device import SymbolicDevice
from spec.conformance.judge import Follower
from spec.engine import Admission, InvalidRequest
from spec.vocabulary import Config, Request

CONFIG = Config(num_blocks=4, block_size=2, max_num_seqs=3, max_num_batched_tokens=4, max_model_len=16)
REQUEST = Request(5, (0, 1), max_tokens=3, seq_ids=(8,))


def core_of(config: Config = CONFIG) -> EngineCore:
    """An engine in which request 0 waits, with sequence 0 and the promised sequence 1."""
    core = EngineCore(config, SymbolicDevice(config.block_size, lambda seq, prefix: 0), Follower(config, "optimized"))
    core.add(Request(0, (0, 1), max_tokens=3, seq_ids=(0, 1)))
    return core


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
def test_who_can_not_be_served_is_told_why(fields: dict[str, object], sentence: str) -> None:
    core = core_of()
    before = core.snapshot()
    with pytest.raises(InvalidRequest) as told:
        core.add(replace(REQUEST, **fields))
    assert str(told.value) == sentence
    assert core.snapshot() == before


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 7}, {"seq_ids": (8, 9)}, {"max_tokens": 1}])
def test_what_just_fits_comes_in(fields: dict[str, object]) -> None:
    core = core_of()
    core.add(replace(REQUEST, **fields))
    assert core.snapshot().waiting == (0, 5)


def test_the_longest_request_of_a_model_comes_in() -> None:
    core = core_of(replace(CONFIG, num_blocks=8))
    core.add(replace(REQUEST, prompt=(0,) * 13))
    assert core.snapshot().waiting == (0, 5)


def test_an_id_of_a_step_in_flight_is_not_given_to_somebody_else() -> None:
    core = core_of()
    plan = core.schedule()
    core.abort(0)
    with pytest.raises(InvalidRequest, match="seq_ids is 0, it must be an id that no live sequence has"):
        core.add(replace(REQUEST, seq_ids=(0,)))
    core.add(replace(REQUEST, seq_ids=(1,)))
    core.commit(plan, ())
    core.add(replace(REQUEST, request_id=6, seq_ids=(0,)))
    assert core.snapshot().waiting == (5, 6)


def test_an_id_is_free_when_its_own_step_is_over() -> None:
    core = core_of(replace(CONFIG, num_blocks=8, max_num_batched_tokens=2))
    core.add(replace(REQUEST, seq_ids=(8,)))
    first, second = core.schedule(), core.schedule()
    assert (first.seq_ids, second.seq_ids) == ((0,), (8,))
    core.abort(0)
    core.commit(first, ())
    core.add(replace(REQUEST, request_id=6, seq_ids=(0,)))
    core.commit(second, (0,))
    assert core.snapshot().waiting == (6,)


def test_what_one_request_promises_is_not_forgotten_with_another() -> None:
    core = core_of()
    core.step()
    core.release(1)
    core.add(replace(REQUEST, seq_ids=(8, 1)))
    core.abort(0)
    with pytest.raises(InvalidRequest, match="seq_ids is 1, it must be an id that no live sequence has"):
        core.add(replace(REQUEST, request_id=6, seq_ids=(1,)))


@pytest.mark.parametrize(
    ("parent", "child", "sentence"),
    [
        (7, 8, "there is no sequence 7"),
        (3, 8, "parent is 3, it must be a sequence of a running request, with output and not in a step"),
        (0, 1, "child is 1, it must be an id that no live sequence has"),
    ],
)
def test_who_can_not_be_forked_is_told_why(parent: int, child: int, sentence: str) -> None:
    core = core_of()
    core.step()
    core.add(Request(1, (0,), max_tokens=3, seq_ids=(3,)))
    with pytest.raises(InvalidRequest) as told:
        core.fork(parent, child)
    assert str(told.value) == sentence


def test_who_is_in_a_step_or_has_no_output_is_not_forked() -> None:
    core = core_of()
    sentence = "parent is 0, it must be a sequence of a running request, with output and not in a step"
    core.release(7)  # nobody: ignored
    with pytest.raises(InvalidRequest) as told:
        core.release(0)
    assert str(told.value) == "seq_id is 0, it must be a sequence with output"
    core.step()
    plan = core.schedule()
    with pytest.raises(InvalidRequest, match=sentence):
        core.fork(0, 9)
    core.commit(plan, (0, 0))
    assert core.fork(0, 9) is Admission.NEVER  # three sequences of four tokens do not fit into eight slots
    core.release(1)
    assert core.fork(0, 9) is Admission.NOW


def test_a_fork_waits_for_a_seat() -> None:
    core = core_of()
    core.step()
    core.release(1)
    core.add(Request(1, (0,), max_tokens=2, seq_ids=(3,)))
    core.add(Request(2, (0,), max_tokens=2, seq_ids=(4,)))
    core.commit(core.schedule(), (0, 0, 0))
    assert core.snapshot().running == (0, 1, 2)
    assert core.fork(0, 9) is Admission.LATER
    core.abort(1)
    assert core.fork(0, 9) is Admission.NOW
