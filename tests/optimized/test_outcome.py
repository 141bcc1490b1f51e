"""What a device may say instead of a token: that there is none, or that a sequence goes on in several ways."""

from collections.abc import Sequence

import pytest

from optimized.device import Branches, Failure, Sampled
from optimized.engine import EngineCore
from optimized.plan import Plan
from optimized.step import Outcome
from optimized.symbolic_device import SymbolicDevice
from spec.conformance.judge import Follower
from spec.vocabulary import Config, FinishReason, Request, SeqId

CONFIG = Config(num_blocks=16, block_size=2, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=16)
BROKEN = Failure("all is NaN")


class Told(SymbolicDevice):
    """Says what it was told to say of a sequence, once, and else token 0."""

    def __init__(self) -> None:
        super().__init__(CONFIG.block_size, lambda seq, prefix: 0)
        self.says: dict[SeqId, Sampled] = {}

    def run(self, plan: Plan) -> Sequence[Sampled]:
        tokens = super().run(plan)
        return [self.says.pop(i, token) for i, token in zip(plan.sample_seq_ids, tokens, strict=True)]


def engine(*requests: Request) -> tuple[EngineCore, Told]:
    device = Told()
    core = EngineCore(CONFIG, device, Follower(CONFIG, "optimized"))
    for request in requests:
        core.add(request)
    return core, device


def step(core: EngineCore, device: Told, says: dict[SeqId, Sampled]) -> Outcome:
    device.says = dict(says)
    outcome = core.step()
    assert not device.says
    return outcome


def nothing_is_left(core: EngineCore) -> None:
    """All seats and blocks are there again: who needs all of them is served."""
    while core.has_work:
        core.step()
    core.add(Request(99, (0, 1, 1), max_tokens=5, seq_ids=(96, 97, 98, 99)))
    core.add(Request(98, (0, 1), max_tokens=5, seq_ids=(95,)))
    assert core.step().forked == [(96, 97), (96, 98), (96, 99)]
    assert core.snapshot().waiting == (98,)
    core.abort(99)
    core.abort(98)
    assert core.scheduler.pool.num_free == CONFIG.num_blocks


def test_who_has_no_token_ends_alone() -> None:
    core, device = engine(
        Request(0, (0, 1), max_tokens=5, seq_ids=(0,)),
        Request(1, (0, 1, 1), max_tokens=5, seq_ids=(1,)),
        Request(2, (0,), max_tokens=1, seq_ids=(2,)),
    )
    outcome = step(core, device, {1: BROKEN, 2: 7})
    assert outcome.failed == [(1, BROKEN)]
    assert (list(outcome.seq_ids), list(outcome.tokens)) == ([0, 2], [0, 7])
    assert outcome.finished == [(2, FinishReason.LENGTH)]
    assert core.snapshot().running == (0,)
    assert core.stats()["num_tokens_sampled"] == 2
    nothing_is_left(core)


@pytest.mark.parametrize("says", [(0, BROKEN), (0, 0)])
def test_a_device_that_leaves_somebody_out_is_found(says: tuple[Sampled, ...]) -> None:
    core = EngineCore(CONFIG, Told())
    for i in range(3):
        core.add(Request(i, (0, 1), max_tokens=5, seq_ids=(i,)))
    with pytest.raises(ValueError, match="shorter"):
        core.commit(core.schedule(), says)


def test_one_sample_without_a_token_ends_all_of_its_request() -> None:
    core, device = engine(
        Request(0, (0, 1), max_tokens=5, seq_ids=(0, 1, 2)),
        Request(1, (0, 1, 1), max_tokens=5, seq_ids=(3,)),
    )
    outcome = step(core, device, {1: BROKEN, 2: Failure("another")})
    assert outcome.failed == [(0, BROKEN)]
    assert outcome.forked == []
    assert (list(outcome.seq_ids), list(outcome.tokens)) == ([3], [0])
    assert core.snapshot().running == (1,)
    nothing_is_left(core)


def test_a_forked_sequence_without_a_token_ends_its_request_too() -> None:
    core, device = engine(Request(0, (0, 1), max_tokens=5, seq_ids=(0,)), Request(1, (0,), max_tokens=5, seq_ids=(1,)))
    core.step()
    core.fork(0, 9)
    outcome = step(core, device, {9: BROKEN})
    assert outcome.failed == [(0, BROKEN)]
    assert (list(outcome.seq_ids), list(outcome.tokens)) == ([1], [0])
    nothing_is_left(core)


def test_a_sequence_goes_on_in_several_ways_and_another_one_in_none() -> None:
    core, device = engine(
        Request(0, (0, 1), max_tokens=5, seq_ids=(0, 1, 2)), Request(1, (0,), max_tokens=5, seq_ids=(3,))
    )
    core.step()
    three_ways = Branches(((0, 5), (8, 6), (9, 7)))
    outcome = step(core, device, {0: three_ways, 1: Branches(()), 2: Branches(()), 3: 4})
    assert outcome.forked == [(0, 8), (0, 9)]
    assert (list(outcome.seq_ids), list(outcome.tokens)) == ([3, 0, 8, 9], [4, 5, 6, 7])
    assert outcome.failed == []
    assert {i: seq.tokens for i, seq in core.snapshot().seqs.items()} == {
        0: (0, 1, 0, 5),
        8: (0, 1, 0, 6),
        9: (0, 1, 0, 7),
        3: (0, 0, 4),
    }
    nothing_is_left(core)


def test_a_request_whose_sequences_go_on_in_no_way_is_over() -> None:
    core, device = engine(
        Request(0, (0, 1), max_tokens=5, seq_ids=(0, 1)), Request(1, (0,), max_tokens=5, seq_ids=(3,))
    )
    core.step()
    outcome = step(core, device, {0: Branches(()), 1: Branches(()), 3: Branches(((3, 4),))})
    assert (list(outcome.seq_ids), list(outcome.tokens)) == ([3], [4])
    assert core.snapshot().running == (1,)
    nothing_is_left(core)


def test_branches_of_a_request_that_failed_are_not_followed() -> None:
    core, device = engine(
        Request(0, (0, 1), max_tokens=5, seq_ids=(0, 1)), Request(1, (0,), max_tokens=5, seq_ids=(3,))
    )
    core.step()
    outcome = step(core, device, {0: Branches(((0, 5), (8, 6))), 1: BROKEN})
    assert outcome.failed == [(0, BROKEN)]
    assert (list(outcome.seq_ids), list(outcome.tokens), outcome.forked) == ([3], [0], [])
    nothing_is_left(core)
