"""No schedule changes a token, and none leaves anything behind: exact, since the device computes prefixes."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from optimized.engine import SymbolicEngine, make_engine
from optimized.plan import Plan
from optimized.scheduler import Scheduler
from spec.engine import Admission, InvalidRequest
from spec.vocabulary import AdmissionRule, Config, Policy, Prefix, Recovery, Request, RequestId, SeqId, Token
from tests.optimized.driver import config_for

Said = dict[tuple[RequestId, int], tuple[Token, ...]]
"""What sample number so-and-so of a request says."""

STOP: Token = 2
ROOMY = Config(num_blocks=256, block_size=4, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=64)


def requests_of(seed: int) -> list[Request]:
    """Prompts that have beginnings in common; two samples of some."""
    rng = random.Random(seed)
    requests: list[Request] = []
    for number in range(7):
        prompt = (0, 1, 1, 0) * rng.randint(0, 3) + tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 6)))
        seq_ids = tuple(range(10 * number, 10 * number + rng.choice((1, 1, 2))))
        stop = (STOP,) if rng.random() < 0.5 else ()
        requests.append(Request(number, prompt, rng.randint(1, 9), seq_ids, stop, rng.randint(0, 2)))
    return requests


def serve(config: Config, requests: Sequence[Request], overlap: bool = False, at_once: bool = True) -> Said:
    """What everybody says; each token is a function of the request, of which of its samples it is, and of the prefix."""
    names = {seq_id: (r.request_id, i) for r in requests for i, seq_id in enumerate(r.seq_ids)}
    engine, said = make_engine(config), dict.fromkeys(names.values(), tuple[Token, ...]())

    def next_token(seq_id: SeqId, tokens: Prefix) -> Token:
        return hashlib.sha256(repr((names[seq_id], tokens)).encode()).digest()[0] % 3

    def run() -> None:
        while engine.core.has_work:
            if overlap:
                for _ in range(2):
                    if len(engine.core.scheduler.flights) < 2:
                        engine.begin_step()
                report = engine.end_step(next_token)
            else:
                report = engine.step(next_token)
            for event in report.emitted:
                said[names[event.seq]] += event.tokens

    for request in requests:
        engine.add(request)
        if not at_once:
            run()
    run()
    assert_nothing_is_left(engine)
    return said


def assert_nothing_is_left(engine: SymbolicEngine) -> None:
    """Neither in what an engine shows nor in what it does not."""
    scheduler, pool, config = engine.core.scheduler, engine.core.scheduler.pool, engine.core.config
    assert sorted(pool.free_list()) == list(range(config.num_blocks))
    assert pool.num_free == config.num_blocks
    assert not any(pool.ref_count)
    assert (pool.num_shared, pool.holds, pool.submitted) == (0, {}, {})
    assert sorted(scheduler.host_free) == list(range(config.num_host_blocks))
    assert (scheduler.requests, scheduler.seqs, scheduler.running, scheduler.flights) == ({}, {}, [], {})
    assert (scheduler._promised, scheduler._seats_taken) == (set(), 0)
    assert (len(scheduler.waiting), scheduler.waiting.head()) == (0, None)
    assert pool.num_spared == 0
    cache = scheduler.cache
    if cache is not None:
        assert len(cache._by_digest) == cache.num_cached == sum(record is not None for record in cache.of_block)
        assert engine.reset_cache()
        assert (cache.num_cached, cache._by_digest, list(cache._roots)) == (0, {}, [])


# --- no schedule changes a token --------------------------------------------------------------------------------------

SCHEDULES: Mapping[str, Config] = {
    "cache": replace(ROOMY, prefix_cache=True),
    "preemption": replace(ROOMY, num_blocks=14, admission_rule=AdmissionRule.OPTIMISTIC),
    "preemption and cache": replace(ROOMY, num_blocks=14, max_num_batched_tokens=16, prefix_cache=True),
    "swap": replace(
        ROOMY,
        num_blocks=14,
        admission_rule=AdmissionRule.OPTIMISTIC,
        num_host_blocks=40,
        recovery=Recovery.SWAP,
        prefix_cache=True,
    ),
    "chunks of one": replace(ROOMY, max_num_batched_tokens=1),
    "chunks of three": replace(ROOMY, max_num_batched_tokens=3, prefix_cache=True),
    "other blocks": replace(ROOMY, block_size=3),
    "priorities": replace(ROOMY, num_blocks=14, policy=Policy.PRIORITY),
    "promises": replace(ROOMY, num_blocks=14, admission_rule=AdmissionRule.NO_EVICT),
    "window": replace(ROOMY, window=5, max_num_batched_tokens=7),
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_changes_no_token(name: str, overlap: bool) -> None:
    for seed in range(6):
        requests = requests_of(seed)
        assert serve(SCHEDULES[name], requests, overlap) == serve(ROOMY, requests)


def test_the_schedules_are_what_they_are_called() -> None:
    """They would change nothing either if they never happened."""
    stats = {}
    for name in ("preemption", "preemption and cache", "swap", "chunks of three"):
        engine = make_engine(SCHEDULES[name])
        for request in requests_of(1):
            engine.add(request)
        while engine.core.has_work:
            engine.step(lambda seq_id, tokens: len(tokens) % 2)
        stats[name] = engine.core.stats()
    assert stats["preemption"]["num_preemptions"] > 0
    assert stats["preemption and cache"]["num_cache_hits"] > 0
    assert stats["swap"]["num_blocks_swapped_out"] > 0
    assert stats["chunks of three"]["num_cache_hits"] > 0


def test_a_batch_is_each_alone_and_names_mean_nothing() -> None:
    for seed in range(6):
        requests = requests_of(seed)
        expected = serve(ROOMY, requests)
        assert serve(ROOMY, requests, at_once=False) == expected
        assert serve(ROOMY, requests[::-1]) == expected
        renamed = [replace(r, seq_ids=tuple(1000 - seq_id for seq_id in r.seq_ids)) for r in requests]
        assert serve(SCHEDULES["swap"], renamed) == expected


# --- boundaries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 30, 31, 32, 33])
@pytest.mark.parametrize("config", [replace(ROOMY, max_model_len=32), replace(ROOMY, num_blocks=8, max_model_len=32)])
def test_prompts_of_every_length_are_served_or_refused(config: Config, length: int) -> None:
    """Blocks of 4 and a context of 32, which has room for a prompt of 31 tokens and one more."""
    for max_tokens in (1, 32 - length, 33 - length):
        engine = make_engine(config)
        request = Request(0, (1,) * length, max_tokens, (0,))
        if length == 0 or max_tokens < 1 or length + max_tokens > 32:
            with pytest.raises(InvalidRequest):
                engine.add(request)
            assert_nothing_is_left(engine)
        else:
            assert len(serve(config, [request])[0, 0]) == max_tokens


# --- nothing is left --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["preemption", "swap", "chunks of three"])
def test_an_abort_between_any_two_actions_takes_nothing_from_the_others(name: str) -> None:
    config, requests = SCHEDULES[name], requests_of(3)
    expected = serve(config, requests)
    for moment in range(40):
        engine, said, actions = make_engine(config), dict.fromkeys(expected, tuple[Token, ...]()), 0
        names = {seq_id: (r.request_id, i) for r in requests for i, seq_id in enumerate(r.seq_ids)}

        def next_token(seq_id: SeqId, tokens: Prefix, names: dict[SeqId, tuple[RequestId, int]] = names) -> Token:
            return hashlib.sha256(repr((names[seq_id], tokens)).encode()).digest()[0] % 3

        for request in requests:
            engine.add(request)
        while engine.core.has_work:
            for action in (engine.begin_step, lambda e=engine: e.end_step(next_token)):
                if actions == moment:
                    engine.abort(2)
                actions += 1
                for event in action().emitted:
                    said[names[event.seq]] += event.tokens
        assert_nothing_is_left(engine)
        assert {each: said[each] for each in said if each[0] != 2} == {
            each: tokens for each, tokens in expected.items() if each[0] != 2
        }
        for each, tokens in said.items():
            assert expected[each][: len(tokens)] == tokens


def random_trace(seed: int) -> SymbolicEngine:
    """Some requests in an engine that is too small for them, steps, forks, and many aborts and releases, at any moment;
    then all is given up, or runs to its end."""
    rng = random.Random(seed)
    config = replace(
        config_for(seed, SymbolicEngine.profile.capabilities),
        num_blocks=rng.randint(3, 6),
        watermark_blocks=0,
        block_size=rng.randint(1, 2),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice((2, 4, 16)),
        admission_rule=rng.choice((AdmissionRule.OPTIMISTIC, AdmissionRule.OPTIMISTIC, *AdmissionRule)),
    )
    engine = make_engine(config)
    scheduler, num_seqs = engine.core.scheduler, 0

    def next_token(seq_id: SeqId, tokens: Prefix) -> Token:
        return (seq_id + len(tokens) + tokens[-1]) % 2

    for number in range(rng.randint(6, 30)):
        try:
            match rng.randint(0, 7):
                case 0 | 1 | 2:
                    count = rng.choice((1, 1, 2, 3))
                    room = config.num_slots // count
                    prompt = tuple(rng.randint(0, 1) for _ in range(rng.randint(1, max(1, room // 2))))
                    seq_ids = tuple(range(num_seqs, num_seqs + count))
                    num_seqs += count
                    most = max(1, room - len(prompt) + 1)
                    engine.add(Request(number, prompt, rng.randint(1, most), seq_ids, (), rng.randint(0, 2)))
                case 3:
                    engine.begin_step()
                case 4 | 5:
                    engine.end_step(next_token)
                    engine.begin_step()
                case 6 if scheduler.requests and rng.random() < 0.5:
                    engine.abort(rng.choice(list(scheduler.requests)))
                case 7 if scheduler.seqs and rng.random() < 0.5:
                    engine.core.release(rng.choice(list(scheduler.seqs)))
                case 7 if scheduler.seqs:
                    num_seqs += engine.fork(rng.choice(list(scheduler.seqs)), num_seqs) is Admission.NOW
        except InvalidRequest:
            pass  # nothing changed, which is what is looked at below
    if rng.random() < 0.5:
        for request_id in list(scheduler.requests):
            engine.abort(request_id)
    while scheduler.requests or scheduler.flights:
        if len(scheduler.flights) < 2:
            engine.begin_step()
        engine.end_step(next_token)
    return engine


@pytest.mark.parametrize("first", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)]])
def test_traces_of_aborts_and_preemptions_leave_nothing(first: int) -> None:
    """10,000 of them, the first 400 each time."""
    for seed in {0: range(400), 1: range(400, 5_000), 2: range(5_000, 10_000)}[first]:
        assert_nothing_is_left(random_trace(seed))


def test_at_most_one_request_is_partly_prefilled_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So there is no ``max_num_partial_prefills`` to set: the order of service is that limit (docs/architecture.md)."""
    schedule, seen = Scheduler.schedule, []

    def watched(self: Scheduler) -> Plan:
        plan = schedule(self)
        scheduled = self.flights[plan.step_id].scheduled
        seen.append({s.request for s in scheduled if s.num_computed + s.num_scheduled < len(s.tokens)})
        return plan

    monkeypatch.setattr(Scheduler, "schedule", watched)
    for seed in range(60):
        random_trace(seed)
    assert {len(partial) for partial in seen} == {0, 1}
