"""The monitor: it reports what a replay reports, at the same event, and does not lose its way."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

import optimized
import reference
from spec.broken import ALICE, PROMISING, served
from spec.choices import Choices, EvictionOrder
from spec.engine import EngineFactory
from spec.excerpt import concerned
from spec.log_check import check_log, replay_log
from spec.monitor import Monitor
from spec.replay import step
from spec.rules import RULES, RuleViolation, broken_rules
from spec.trace import Reader, Trace, TraceError, Writer, dumps, load
from spec.uncounted import UNCOUNTED, counted_rules
from spec.vocabulary import (
    Add,
    Admit,
    Allocate,
    Append,
    Begin,
    Complete,
    Config,
    Event,
    Evict,
    Fork,
    Preempt,
    Publish,
    Read,
    Request,
    Start,
    State,
    Submit,
    Write,
    initial_state,
)
from tests.optimized.driver import Caller, config_for
from tests.transcripts.story import Teller, read_story

STORIES = sorted(Path(__file__).parents[1].joinpath("transcripts").glob("*_*.txt"))
ENGINES: dict[str, Callable[..., object]] = {"reference": reference.make_engine, "optimized": optimized.make_engine}


IN_ORDER = Choices(eviction_order=EvictionOrder.LRU)
"""What both engines declare."""


class Tape:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def settled(self, snapshot: Callable[[], State]) -> None:
        """Nothing."""


def reader_of(config: Config, events: Sequence[Event]) -> Reader:
    return Reader(BytesIO(dumps(Trace(config, tuple(events), choices=IN_ORDER)).encode()), "log")


def by_counters(config: Config, events: Sequence[Event]) -> tuple[int, str] | None:
    """The event and the rule at which a monitor ends."""
    reader = reader_of(config, events)
    try:
        check_log(reader)
    except RuleViolation as violation:
        return reader.num_judged, violation.rule.id
    return None


def by_replay(config: Config, events: Sequence[Event]) -> tuple[int, str] | None:
    """The same from the whole model, among the rules that a monitor judges."""
    state = initial_state(config, IN_ORDER)
    for number, event in enumerate(events, start=1):
        after = step(state, event)
        broken = [rule.id for rule in broken_rules(state, event, after) if rule.id not in UNCOUNTED]
        if broken:
            return number, broken[0]
        state = after
    return None


def run_of(engine: str, seed: int) -> tuple[Config, list[Event]]:
    """What an engine tells while a random caller drives it."""
    make = ENGINES[engine]
    config = config_for(seed, optimized.make_engine(Config(2)).profile.capabilities)
    tape = Tape()
    Caller(config, [make(config, tape)], seed).run(num_calls=40)  # type: ignore[list-item]  # both are engines
    return config, tape.events


def sabotaged(events: Sequence[Event], rng: random.Random) -> list[Event]:
    """One event left out, told twice, exchanged with another, or with another number in it."""
    result, at = list(events), rng.randrange(len(events))
    match rng.randrange(4):
        case 0:
            del result[at]
        case 1:
            result.insert(at, result[at])
        case 2:
            other = rng.randrange(len(events))
            result[at], result[other] = result[other], result[at]
        case _:
            facts = {name: fact for name, fact in vars(result[at]).items() if isinstance(fact, int | tuple) and fact}
            for name in rng.sample(sorted(facts), min(1, len(facts))):
                fact, change = facts[name], rng.choice((-1, 1))
                if isinstance(fact, int):
                    result[at] = replace(result[at], **{name: fact + change})
                elif isinstance(fact[0], int):
                    result[at] = replace(result[at], **{name: (fact[0] + change, *fact[1:])})
    return result


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_monitor_follows_every_story_to_its_end(path: Path) -> None:
    story = read_story(path)
    teller = Teller(story.config, reference.make_engine)
    for line in story.lines:
        if line.startswith("> "):
            teller.tell(line[2:])
    follows(story.config, teller.judged.follower.trace)


def follows(config: Config, events: Sequence[Event]) -> None:
    """No rule is broken, and the monitor ends where the model ends."""
    assert by_counters(config, events) is None
    state = initial_state(config)
    monitor = Monitor(config)
    for event in events:
        state = step(state, event)
        monitor.event(event)
    assert monitor.state() == replace(state, cells={}, host_cells={})


def agree(engine: str, seed: int, num_faults: int) -> None:
    config, events = run_of(engine, seed)
    follows(config, events)
    rng = random.Random(seed)
    for _ in range(num_faults):
        wrong = sabotaged(events, rng)
        assert by_counters(config, wrong) == by_replay(config, wrong)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [3, 11])
def test_a_monitor_reports_what_a_replay_reports(engine: str, seed: int) -> None:
    agree(engine, seed, num_faults=2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_monitor_reports_what_a_replay_reports_of_many_runs(engine: str) -> None:
    for seed in range(20, 40):
        agree(engine, seed, num_faults=5)


def test_forgotten_prefixes_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec.mirror.MOST_NODES", 0)
    seed = next(
        s for s in range(60) if config_for(s, optimized.make_engine(Config(2)).profile.capabilities).prefix_cache
    )
    agree("optimized", seed, num_faults=0)


def test_what_a_monitor_leaves_out_is_said() -> None:
    assert {rule.id for rule in counted_rules()} | UNCOUNTED.keys() == RULES.keys()


# The cheap way to tell


def test_an_engine_that_tells_batches_tells_the_same(tmp_path: Path) -> None:
    for seed in range(8):
        config, events = run_of("optimized", seed)
        with Writer(tmp_path / "log", config) as writer:
            Caller(config, [optimized.make_engine(config, writer)], seed).run(num_calls=40)
        assert list(load(tmp_path / "log").events) == events
        with (tmp_path / "log").open("rb") as source:
            assert check_log(Reader(source, "log")) == len(events)


LINES = (
    '{"events": "Allocate", "seqs": [0]}',
    '{"events": "Compute", "seqs": [0], "starts": [0], "slots": [4, 5], "seq_lens": [2], "query_start": [0, 2]'
    + ', "num_dropped_blocks": null, "tables": [[0, 0, [1]]]}',
    '{"events": "Append", "seqs": [0], "tokens": [7]}',
)


def batch_error(line: str) -> TraceError:
    log = dumps(Trace(Config(num_blocks=2, block_size=4), (Start(0, (5, 6)), Allocate(0, 2, (1,))))).splitlines()
    text = "\n".join([*log[:-1], line, '{"num_events": 9}', ""])
    errors = []
    for judge in (check_log, replay_log):
        with pytest.raises(TraceError) as caught:
            judge(Reader(BytesIO(text.encode()), "a.jsonl"))
        errors.append(str(caught.value))
    assert errors[0] == errors[1], "both ways to judge say the same"
    return caught.value


@pytest.mark.parametrize(
    ("line", "old", "new", "field", "problem"),
    [
        (0, '"Allocate"', '"Begin"', "events", "is 'Begin', which is no batch"),
        (0, "[0]", "[true]", "seqs", "must be a list of whole numbers"),
        (0, "}", ', "novelty": 1}', "novelty", "is unknown"),
        (1, '"seqs": [0]', '"seqs": [0, 0]', "seqs", "names a sequence twice"),
        (1, '"starts": [0]', '"starts": []', "starts", "has 0 entries, it must have 1"),
        (1, "[0, 2]", "[0, 0]", "query_start", "must begin with 0 and grow"),
        (1, "[0, 2]", "null", "slots", "has 2 entries, it must have 1"),
        (1, "[2]", "[9]", "seq_lens", "has 9 for sequence 0, whose table has 1 blocks"),
        (1, "[0, 0, [1]]", "[0, 1, [1]]", "tables[0]", "keeps 1 entries of a table of sequence 0 that is not there"),
        (
            1,
            "[0, 0, [1]]",
            "[0, 0]",
            "tables[0]",
            "must be a sequence, a number of entries, and the entries after them",
        ),
        (1, "null", "[0, 0]", "num_dropped_blocks", "has 2 entries, it must have 1"),
        (1, "null", "[1]", "seq_lens", "has 2 for sequence 0, whose table has 1 blocks"),
        (1, "[[0, 0, [1]]]", "7", "tables", "must be a list"),
        (2, "[7]", "[7, 8]", "tokens", "has 2 entries, it must have 1"),
    ],
    ids=str,
)
def test_a_wrong_column_is_named(line: int, old: str, new: str, field: str, problem: str) -> None:
    error = batch_error(LINES[line].replace(old, new, 1))
    assert (error.line, error.field, error.problem) == (4, field, problem)


# What a fast way must not overlook


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "Begin", "step_id": 0, "step_id": 0}',
        '{"event": "Begin", "step_id": true}',
        '{"event": "Begin", "step_id": 0} ,',
        '{"event": "Begin"}',
        '{"event": "Begin", "step": 0}',
        '{"event": "Begin", "step_id": [0]}',
        '{"event": "Write", "seq": 0, "start": 0, "slots": [4, 5.0]}',
        '{"event": "Write", "seq": 0, "start": 0, "slots": 4}',
        '{"event": ["Begin"], "step_id": 0}',
        '{"event": "Be1gin", "step_id": 0}',
        '{"event": "Begin", "step_id2": 0}',
        '{"event": "Begin", "step_id": 00}',
        '{"event": "Begin", "step_id": }',
        '{"event": "Begin", "step_id": 0} 7',
        '7 {"event": "Begin", "step_id": 0}',
        "[" * 100_000,
        "",
        "7",
    ],
    ids=lambda line: line[:60],
)
def test_a_line_that_a_replay_refuses_is_refused(line: str) -> None:
    assert batch_error(line).line == 4


def test_a_read_that_begins_as_the_last_one_is_judged_to_its_end() -> None:
    """Only what is new in it is decoded: neither a wrong beginning nor a wrong end gets by."""
    config = Config(num_blocks=12, block_size=1)
    events: list[Event] = [Start(0, (5, 6)), Allocate(0, 2, (10, 11)), Write(0, 0, (10, 11)), Read(0, (10, 11))]
    events += [Append(0, (7,)), Allocate(0, 1, (2,)), Write(0, 2, (2,))]
    for slots, rule in {(10, 11, 2): None, (10, 11, 1): "ATTN-2", (10, 1, 2): "ATTN-2", (10, 11): "ATTN-3"}.items():
        expected = None if rule is None else (len(events) + 1, rule)
        assert by_counters(config, [*events, Read(0, slots)]) == expected
    text = dumps(Trace(config, (*events, Read(0, (10, 11, 2))))).replace("[10, 11, 2]", "[10, 11, 2.0]")
    with pytest.raises(TraceError, match="slots"):
        check_log(Reader(BytesIO(text.encode()), "log"))


@pytest.mark.parametrize("name", ["num_blocks", "num_host_blocks", "block_size"])
def test_a_pool_that_nobody_can_have_is_refused(name: str) -> None:
    with pytest.raises(
        TraceError, match=f"line 1: the field 'config.{name}' is 1000000000000, a log is followed up to"
    ):
        reader_of(replace(Config(num_blocks=2), **{name: 10**12}), ())


def test_a_large_pool_is_reported_as_far_as_it_is_concerned() -> None:
    config = Config(num_blocks=1000, block_size=1)
    state = initial_state(config)
    for event in (Start(0, (5,)), Allocate(0, 1, (700,)), Start(1, (6,)), Allocate(1, 1, (3,)), Fork(0, 2)):
        state = step(state, event)
    wrong = Write(0, 0, (700,))
    violation = RuleViolation(RULES["COW-2"], *[concerned(state, wrong, state)[0]], wrong, state)
    assert "free {}   ref_count {700: 2}   block_tables {0: (700,), 2: (700,)}" in str(violation).splitlines()[3]


FACTORIES: dict[str, EngineFactory] = {"reference": reference.make_engine, "optimized": optimized.make_engine}


@pytest.mark.parametrize("engine", FACTORIES)
def test_what_an_engine_shows_is_compared_with_its_events(engine: str) -> None:
    config, events = run_of(engine, 5)
    monitor = Monitor(config)
    for event in events[: len(events) // 2]:
        monitor.event(event)
    shown = monitor.state()
    monitor.shown(shown)
    wrong = replace(shown, ref_count=tuple(count + 1 for count in shown.ref_count))
    with pytest.raises(RuleViolation, match="ALLOC-2"):
        monitor.shown(wrong)


def test_cache_9_is_seen_without_the_contents_of_slots() -> None:
    config = Config(num_blocks=2, block_size=2, prefix_cache=True)
    events = (Start(0, (5, 6, 7)), Allocate(0, 3, (0, 1)), Write(0, 0, (0, 1, 2)), Publish(0, 0), Evict(0))
    assert by_counters(config, events) == by_replay(config, events) == (5, "CACHE-9")


def test_sched_9_counts_a_step_in_flight_that_computes_nothing_for_nothing() -> None:
    config, request = Config(num_blocks=4, block_size=2), Request(0, (5,), 2, (0,))
    begun = (Add(request), Begin(0), Admit(0), Allocate(0, 1, (0,)), Submit(0), Begin(1), Submit(1))
    ended = (Write(0, 0, (0,)), Read(0, (0,)), Append(0, (6,)), Complete(0))
    events = (*begun, *ended, Begin(2), Submit(2))
    assert by_counters(config, events) == by_replay(config, events) == (len(events), "SCHED-9")


def test_preempt_5_is_judged_where_nobody_is_ever_preempted() -> None:
    monitor = Monitor(PROMISING.config)
    for event in (Add(ALICE), Begin(1), *served(ALICE, 0)):
        monitor.event(event)
    with pytest.raises(RuleViolation, match="^PREEMPT-5 "):
        monitor.event(Preempt(0))
