"""The pool without a scheduler: random operations under every rule, and beside the reference's pool."""

import random

import pytest

from optimized.sequence_pool import SequencePool, make_pool
from reference.sequence_pool import make_pool as make_reference_pool
from spec.conformance.judge import Follower
from spec.engine import Admission, InvalidRequest, Pool
from spec.explore import Move
from spec.vocabulary import Config, Event, State
from tests.optimized.driver import up_to_names


def config_for(seed: int) -> Config:
    rng = random.Random(seed)
    return Config(
        num_blocks=rng.randint(2, 8),
        block_size=rng.randint(1, 4),
        num_host_blocks=rng.randint(0, 6),
        prefix_cache=rng.random() < 0.7,
        window=rng.choice([None, None, rng.randint(1, 6)]),
    )


def random_move(rng: random.Random, state: State) -> Move:
    """A call that makes sense, or one that does not."""
    running = [*state.block_tables, 99]
    seq = rng.choice(running)
    fresh = rng.choice([max(state.seqs, default=-1) + 1] * 4 + list(state.seqs))
    tokens = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 6)))
    step_id = rng.choice([max(state.flights, default=-1) + 1, 7])
    oldest = min(state.flights, default=3)
    kept = rng.randint(1, max(1, len(state.seqs[seq].tokens))) if seq in state.seqs else 1
    return rng.choice(
        [
            Move("allocate", fresh, tokens),
            Move("allocate", fresh, tokens),
            Move("append", seq, tokens[:2]),
            Move("append", seq, tokens[:2]),
            Move("append", seq, tokens[:2]),
            Move("fork", seq, child=fresh),
            Move("release", rng.choice([*state.seqs, 99])),
            Move("swap_out", seq),
            Move("swap_in", rng.choice([*state.host_tables, seq])),
            Move("publish" if state.config.prefix_cache else "release", seq),
            Move("publish" if state.config.prefix_cache else "fork", seq, child=fresh),
            Move("reset"),
            Move("rollback", seq, number=kept),
            Move("submit", seq, number=step_id) if len(state.flights) < 2 else Move("complete", number=oldest),
            Move("complete", number=oldest),
        ]
    )


def answer(pool: Pool, move: Move) -> tuple[Event, ...] | Admission | type[InvalidRequest]:
    try:
        return move.call(pool)
    except InvalidRequest:
        return InvalidRequest


@pytest.mark.parametrize("seed", range(60))
def test_every_operation_keeps_every_rule(seed: int) -> None:
    config, rng = config_for(seed), random.Random(seed)
    pool, follower = make_pool(config), Follower(config, "optimized")
    for _ in range(80):
        before = pool.snapshot()
        done = answer(pool, random_move(rng, follower.state))
        if isinstance(done, tuple):
            for event in done:
                follower.event(event)
        else:
            assert pool.snapshot() == before
        follower.settled(pool.snapshot)


@pytest.mark.parametrize("seed", range(60))
def test_both_pools_do_the_same(seed: int) -> None:
    config, rng = config_for(seed), random.Random(seed)
    pools: list[Pool] = [make_pool(config), make_reference_pool(config)]
    for _ in range(80):
        move = random_move(rng, pools[0].snapshot())
        answers = [answer(pool, move) for pool in pools]
        assert [each if not isinstance(each, tuple) else len(each) for each in answers[:1]] == [
            each if not isinstance(each, tuple) else len(each) for each in answers[1:]
        ], move
        ours, theirs = (up_to_names(pool.snapshot()) for pool in pools)
        assert ours == theirs, move


def test_a_clone_lives_on_its_own() -> None:
    pool = SequencePool(Config(num_blocks=4, block_size=2, prefix_cache=True))
    pool.allocate(0, (1, 2, 3))
    pool.publish(0)
    other = pool.clone()
    before = pool.snapshot()
    other.release(0)
    other.allocate(1, (1, 2, 3, 4))
    assert pool.snapshot() == before
    assert other.snapshot().block_tables[1][0] == before.block_tables[0][0]
