"""The reference's block pool: every operation is followed in the executable model, and every refusal leaves no trace."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from reference import SequencePool, make_pool
from reference.pool import BlockPool
from spec.conformance.judge import Follower
from spec.engine import Admission, InvalidField, InvalidRequest, Pool, UnknownId
from spec.vocabulary import (
    Allocate,
    Append,
    CacheKey,
    Complete,
    Config,
    Copy,
    Event,
    Fork,
    Hit,
    Prefix,
    Publish,
    Reset,
    Rollback,
    SeqId,
    Slide,
    Start,
    State,
    SwapIn,
    SwapOut,
    Write,
)

SMALL = Config(num_blocks=4, block_size=2, num_host_blocks=2, prefix_cache=True, max_model_len=64)
Answer = tuple[Event, ...] | Admission


@dataclass
class FollowedPool:
    """A pool, and the model that follows every event of every answer."""

    config: Config
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.pool = make_pool(self.config)
        self.follower = Follower(self.config, "reference")

    def call(self, operation: Callable[..., Answer], *arguments: Any) -> Answer:
        before = self.pool.snapshot()
        answer = operation(*arguments)
        if isinstance(answer, Admission):
            assert answer is not Admission.NOW
            assert self.pool.snapshot() == before, f"{operation.__name__} was refused and changed something"
        else:
            for event in answer:
                self.follower.event(event)
            self.follower.settled(self.pool.snapshot)
        name = operation.__name__
        self.counts[f"{name} {answer.value}" if isinstance(answer, Admission) else name] += 1
        return answer

    def allocate(self, seq: SeqId, tokens: Prefix) -> Answer:
        return self.call(self.pool.allocate, seq, tokens)

    def append(self, seq: SeqId, tokens: Prefix) -> Answer:
        return self.call(self.pool.append, seq, tokens)

    @property
    def state(self) -> State:
        return self.pool.snapshot()


def test_make_pool_gives_a_pool() -> None:
    assert isinstance(make_pool(SMALL), Pool)


def test_a_sequence_is_written_where_its_table_says() -> None:
    pool = FollowedPool(SMALL)
    assert pool.allocate(0, (5, 6, 7)) == (Start(0, (5, 6, 7)), Allocate(0, 3, (0, 1)), Write(0, 0, (0, 1, 2)))
    assert pool.append(0, (8, 9)) == (Append(0, (8, 9)), Allocate(0, 2, (2,)), Write(0, 3, (3, 4)))


def test_the_first_writer_copies_a_shared_tail_and_the_last_one_does_not() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (5,))
    assert pool.call(pool.pool.fork, 0, 1) == (Fork(0, 1),)
    assert pool.append(1, (6,)) == (Append(1, (6,)), Copy(1, 0, 0, 1), Allocate(1, 1, ()), Write(1, 1, (3,)))
    assert pool.append(0, (7,)) == (Append(0, (7,)), Allocate(0, 1, ()), Write(0, 1, (1,)))


def test_no_room_now_is_later_and_no_room_at_all_is_never() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1,) * 5)
    assert pool.allocate(1, (1,) * 3) is Admission.LATER
    assert pool.allocate(1, (1,) * 9) is Admission.NEVER
    pool.allocate(1, (1,))
    assert pool.append(1, (1, 1)) is Admission.LATER
    assert pool.append(1, (1,) * 8) is Admission.NEVER
    assert pool.call(pool.pool.swap_out, 0) is Admission.NEVER


def test_a_copy_needs_a_free_block() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1,) * 7)
    pool.call(pool.pool.fork, 0, 1)
    assert pool.append(1, (2,)) is Admission.LATER


def test_cache_5_the_longest_prefix_is_hit_and_the_last_token_is_computed() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1, 2, 3, 4))
    assert pool.call(pool.pool.publish, 0) == (Publish(0, 0), Publish(0, 1))
    assert pool.call(pool.pool.publish, 0) == ()
    assert pool.allocate(1, (1, 2, 3, 4))[1:] == (Hit(1, (0,)), Allocate(1, 2, (2,)), Write(1, 2, (4, 5)))  # type: ignore[index]


def test_a_released_block_is_still_found_until_it_is_taken() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1, 2, 3))
    pool.call(pool.pool.publish, 0)
    pool.call(pool.pool.release, 0)
    assert pool.state.free == (2, 3, 1, 0), "the end of the table came back first"
    assert pool.state.cached == {0: CacheKey((1, 2))}
    pool.allocate(1, (9,) * 6)
    assert pool.allocate(2, (1, 2)) == (Start(2, (1, 2)), Allocate(2, 2, (0,)), Write(2, 0, (0, 1)))
    assert pool.state.cached == {}


def test_cache_10_the_cache_is_emptied_only_while_nobody_uses_it() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1, 2))
    pool.call(pool.pool.publish, 0)
    assert pool.call(pool.pool.reset) is Admission.LATER
    pool.call(pool.pool.release, 0)
    assert pool.call(pool.pool.reset) == (Reset(),)
    assert pool.state.cached == {}


def test_swap_5_a_table_goes_out_and_comes_back_whole() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1, 2, 3))
    assert pool.call(pool.pool.swap_out, 0) == (SwapOut(0, (0, 1)),)
    assert sorted(pool.state.free) == [0, 1, 2, 3]
    pool.allocate(1, (4, 4))
    assert pool.call(pool.pool.swap_out, 1) is Admission.LATER
    assert pool.call(pool.pool.swap_in, 0) == (SwapIn(0, (3, 1)),)
    assert pool.append(0, (4,))[-1] == Write(0, 3, (3,))  # type: ignore[index]


def test_a_swapped_sequence_can_be_released() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1, 2, 3))
    pool.call(pool.pool.swap_out, 0)
    pool.call(pool.pool.release, 0)
    assert sorted(pool.state.host_free) == [0, 1]


def test_cow_7_a_rollback_gives_back_the_blocks_at_the_end() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1, 2, 3, 4, 5))
    assert pool.call(pool.pool.rollback, 0, 2) == (Rollback(0, 2),)
    assert pool.state.block_tables == {0: (0,)}
    assert pool.append(0, (9,)) == (Append(0, (9,)), Allocate(0, 1, (3,)), Write(0, 2, (6,)))


def test_cow_2_a_cached_block_that_was_rolled_back_into_is_copied() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1, 2))
    pool.call(pool.pool.publish, 0)
    pool.call(pool.pool.rollback, 0, 1)
    assert pool.append(0, (9,)) == (Append(0, (9,)), Copy(0, 0, 0, 1), Allocate(0, 1, ()), Write(0, 1, (3,)))
    assert pool.state.cached == {0: CacheKey((1, 2))}


def test_alloc_5_a_step_in_flight_keeps_what_it_reads() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1, 2, 3))
    pool.call(pool.pool.submit, 0, (0,))
    pool.call(pool.pool.release, 0)
    assert pool.state.free == (2, 3)
    assert pool.state.flights[0].holds == (1, 0)
    assert pool.call(pool.pool.complete, 0) == (Complete(0),)
    assert pool.state.free == (2, 3, 1, 0)


def test_alloc_5_two_steps_in_flight_both_keep_what_they_read() -> None:
    pool = FollowedPool(SMALL)
    pool.allocate(0, (1, 2, 3))
    pool.call(pool.pool.submit, 0, (0,))
    pool.call(pool.pool.submit, 1, (0,))
    pool.call(pool.pool.release, 0)
    pool.call(pool.pool.complete, 1)
    assert pool.state.free == (2, 3)
    pool.call(pool.pool.complete, 0)
    assert sorted(pool.state.free) == [0, 1, 2, 3]


def test_cache_17_what_was_let_go_is_free_before_the_sources_of_copies() -> None:
    pool = BlockPool(SMALL)
    source, other = pool.take(), pool.take()
    pool.tables = {0: (other,)}
    pool.submit(0, {0: 1}, holds=[source])
    pool.drop(0)
    assert (pool.free, pool.flights[0].holds) == ([2, 3], (source, other))
    pool.complete(0)
    assert pool.free == [2, 3, other, source]


def test_a_name_is_lost_when_no_block_has_it_under_its_salt() -> None:
    pool = BlockPool(SMALL)
    pool.cached = {0: CacheKey((5, 6), "salt")}
    assert [pool.is_lost((5, 6), salt) for salt in ("salt", "")] == [False, True]
    assert pool.is_lost((5, 7), "salt")


def test_table_10_blocks_that_the_window_has_passed_leave_the_table() -> None:
    pool = FollowedPool(Config(num_blocks=4, block_size=2, window=3))
    assert pool.allocate(0, (1, 2, 3, 4))[-1] == Slide(0, 1)  # type: ignore[index]
    assert pool.append(0, (5,)) == (Append(0, (5,)), Allocate(0, 1, (2,)), Write(0, 4, (4,)))
    with pytest.raises(InvalidField):
        pool.pool.rollback(0, 2)
    pool.call(pool.pool.rollback, 0, 4)


def test_a_window_of_one_token_can_leave_an_empty_table() -> None:
    pool = FollowedPool(Config(num_blocks=2, block_size=1, window=1))
    pool.allocate(0, (1, 2))
    assert pool.state.block_tables == {0: ()}
    for token in range(5):
        pool.append(0, (token,))
    assert sorted(pool.state.free) == [0, 1]


def test_a_clone_goes_its_own_way() -> None:
    pool = make_pool(SMALL)
    pool.allocate(0, (1, 2))
    twin, before = pool.clone(), pool.snapshot()
    twin.append(0, (3,))
    assert pool.snapshot() == before != twin.snapshot()


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.append(9, (1,)),
        lambda pool: pool.append(0, ()),
        lambda pool: pool.allocate(0, (1,)),
        lambda pool: pool.allocate(9, ()),
        lambda pool: pool.fork(9, 10),
        lambda pool: pool.fork(0, 0),
        lambda pool: pool.release(9),
        lambda pool: pool.swap_out(9),
        lambda pool: pool.swap_in(0),
        lambda pool: pool.publish(9),
        lambda pool: pool.rollback(0, 0),
        lambda pool: pool.rollback(0, 2),
        lambda pool: pool.submit(0, (9,)),
        lambda pool: pool.complete(7),
    ],
)
def test_a_call_that_makes_no_sense_changes_nothing(call: Callable[[SequencePool], object]) -> None:
    pool = make_pool(SMALL)
    pool.allocate(0, (1, 2))
    before = pool.snapshot()
    with pytest.raises(InvalidRequest):
        call(pool)
    assert pool.snapshot() == before


def test_the_error_names_the_sequence() -> None:
    with pytest.raises(UnknownId, match="there is no sequence 9"):
        make_pool(SMALL).release(9)


@dataclass
class RandomCaller:
    """Anything at any time, on one pool."""

    pool: FollowedPool
    rng: random.Random
    next_seq: int = 0
    next_step: int = 0

    def go(self, num_calls: int = 60) -> Counter[str]:
        for _ in range(num_calls):
            self.one_call()
        for step_id in list(self.pool.state.flights):
            self.pool.call(self.pool.pool.complete, step_id)
        for seq_id in list(self.pool.state.seqs):
            self.pool.call(self.pool.pool.release, seq_id)
        state = self.pool.state
        assert sorted(state.free) == list(range(self.pool.config.num_blocks))
        assert sorted(state.host_free) == list(range(self.pool.config.num_host_blocks))
        return self.pool.counts

    def one_call(self) -> None:
        rng, pool, state = self.rng, self.pool.pool, self.pool.state
        running, swapped = list(state.block_tables), list(state.host_tables)
        tokens = tuple(rng.randint(0, 1) for _ in range(rng.choice((1, 1, 2, 3, 5))))
        calls: list[tuple[Callable[..., Answer], tuple[Any, ...]]] = [(pool.allocate, (self.next_seq, tokens))]
        if running:
            seq = rng.choice(running)
            calls += 3 * [(pool.append, (seq, tokens))]
            calls += [(pool.fork, (seq, self.next_seq)), (pool.release, (seq,)), (pool.publish, (seq,))]
            if state.config.num_host_blocks:
                calls.append((pool.swap_out, (seq,)))
            if state.seqs[seq].num_tokens > 1 and state.config.window is None:
                calls.append((pool.rollback, (seq, rng.randrange(1, state.seqs[seq].num_tokens))))
            if len(state.flights) < 2:
                calls.append((pool.submit, (self.next_step, (seq,))))
        if swapped:
            calls += [(pool.swap_in, (rng.choice(swapped),)), (pool.release, (rng.choice(swapped),))]
        if state.flights:
            calls.append((pool.complete, (rng.choice(list(state.flights)),)))
        calls.append((pool.reset, ()))
        operation, arguments = rng.choice(calls)
        self.next_seq += 1
        self.next_step += 1
        self.pool.call(operation, *arguments)


@cache
def counts_of_random_calls(window: int | None) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(60):
        rng = random.Random(f"pool {window} {seed}")
        config = Config(
            num_blocks=rng.randint(2, 8),
            block_size=rng.randint(1, 4),
            num_host_blocks=rng.randint(0, 4),
            prefix_cache=True,
            window=window,
        )
        seen.update(RandomCaller(FollowedPool(config), rng).go())
    return seen


@pytest.mark.parametrize("window", [None, 1, 3])
def test_random_calls_break_no_rule_and_leave_nothing_behind(window: int | None) -> None:
    assert counts_of_random_calls(window)["append"] > 100


def test_random_calls_do_everything_and_are_refused_everything() -> None:
    seen = counts_of_random_calls(None).keys()
    done = {"allocate", "append", "fork", "release", "swap_out", "swap_in", "publish", "reset", "rollback", "complete"}
    refused = {f"{name} later" for name in ("allocate", "append", "swap_out", "swap_in", "reset")}
    assert not (done | refused) - seen, "these never happened"
