"""The events of a step, worked out from what an engine reports and shows: they must be possible if those that happened are."""

from dataclasses import replace

import pytest

from spec.answers import StepReport
from spec.choices import Choices, EvictionOrder, Publication
from spec.replay import events_of_begin, events_of_step, not_moved, observe, replay, step
from spec.rules import RuleViolation, broken_rules
from spec.vocabulary import (
    Add,
    AdmissionRule,
    Admit,
    Allocate,
    Append,
    Begin,
    CacheKey,
    Complete,
    Config,
    Copy,
    Event,
    Flight,
    Hit,
    Observe,
    Preempt,
    Publish,
    Read,
    Request,
    Seq,
    State,
    Submit,
    SwapIn,
    SwapOut,
    Token,
    Write,
    initial_state,
)
from tests.reference.follow import followed, next_token

CONFIG = Config(13, 1, max_num_seqs=4, max_num_batched_tokens=16, prefix_cache=True)
OPTIMISTIC = replace(CONFIG, admission_rule=AdmissionRule.OPTIMISTIC)


def led_to(state: State, events: list[Event]) -> State:
    """Where the events lead; none of them breaks a rule."""
    for event in events:
        after = step(state, event)
        assert [rule.id for rule in broken_rules(state, event, after)] == [], event
        state = after
    return state


def report_of(events: list[Event]) -> StepReport:
    return StepReport(
        device=tuple(e for e in events if isinstance(e, Write | Read | Copy | SwapOut | SwapIn)),
        emitted=tuple(e for e in events if isinstance(e, Append)),
        preempted=tuple(e for e in events if isinstance(e, Preempt)),
    )


def crowd(first: Token = 1) -> State:
    """Sequence 0 runs in blocks 0 to 3, of which the cache names the last two; the first two names are those of blocks 4
    and 5, which are free. Sequences 1 and 2 of request 1 wait: 1 begins with the block 4, unless its first token is
    another one, and 2 with all four."""
    key = (1, 2, 3, 4)
    running = Seq(0, (*key, 9), num_prompt_tokens=5, num_computed_tokens=4)
    forks = {1: Seq(1, (first, 5, 6, 7, 8), num_prompt_tokens=1), 2: Seq(1, (*key, 6), num_prompt_tokens=1)}
    held = {0: (1,), 1: (1, 2), 2: (1, 2, 3), 3: key, 4: (1,), 5: (1, 2)}
    return replace(
        initial_state(OPTIMISTIC, Choices(eviction_order=EvictionOrder.LRU)),
        free=(6, 5, 7, 8, 9, 10, 11, 12, 4),
        ref_count=(1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        block_tables={0: (0, 1, 2, 3)},
        seqs={0: running, **forks},
        requests={0: Request(0, (*key, 9), 3, (0,)), 1: Request(1, (first,), 6, (1, 2))},
        waiting=(1,),
        running=(0,),
        num_preemptions={1: 1},
        cached={block: CacheKey(held[block]) for block in (2, 3, 4, 5)},
        cells=held,
    )


def in_vain(*room: Event) -> list[Event]:
    """A step of a crowd that serves sequence 0 alone: request 1 is admitted, gets this room, and is preempted."""
    served = [Write(0, 4, (6,)), Read(0, (0, 1, 2, 3, 6)), Append(0, (1,)), Publish(0, 4)]
    return [Begin(0), Allocate(0, 1, (6,)), Admit(1), *room, Preempt(1), Submit(0), *served, Complete(0)]


def test_events_are_judged_under_the_choices_of_their_engine_and_each_is_kept() -> None:
    """One block of one token is published while it is computed, which is too early unless it may be at the schedule."""
    request = Request(0, (1, 2), 1, (0,))
    told: list[Event] = [Add(request), Begin(0), Admit(0), Allocate(0, 2, (0, 1)), Publish(0, 0)]
    ahead = Choices(publication=Publication.AT_SCHEDULE)
    assert list(replay(CONFIG, told, ahead).cached) == [0]
    with pytest.raises(RuleViolation, match="CACHE-6") as caught:
        replay(CONFIG, told)
    assert caught.value.trace == tuple(told)


def test_what_an_engine_shows_of_its_steps_counts_and_what_they_have_done_is_known() -> None:
    """In mappings of the follower's own, which the engine's later steps do not change."""
    expected = led_to(
        initial_state(CONFIG),
        [Add(Request(0, (1, 2), 2, (0,))), Begin(0), Admit(0), Allocate(0, 2, (0, 1)), Submit(0), Write(0, 0, (0, 1))],
    )
    other = Flight(scheduled={0: 1}, blocks=frozenset({7}), holds=(8,), submitted=False)
    tables, hosts, counts = {0: (5,)}, {0: (2,)}, {0: 3}
    seqs, requests, cached = dict(expected.seqs), dict(expected.requests), {3: CacheKey((1,))}
    shown = replace(
        expected,
        flights={0: other, 1: other},
        block_tables=tables,
        host_tables=hosts,
        seqs=seqs,
        requests=requests,
        num_preemptions=counts,
        cached=cached,
        cells={},
        drawn={},
    )
    seen = observe(expected, shown)
    for step_id, known in ((0, expected.flights[0]), (1, Flight())):
        flight = replace(known, scheduled={0: 1}, blocks=frozenset({7}), holds=(8,), submitted=False)
        assert seen.flights[step_id] == flight
    assert (seen.cells, seen.drawn) == (expected.cells, expected.drawn)
    for mapping in (tables, hosts, counts, seqs, requests, cached):
        mapping.clear()
    assert (seen.block_tables, seen.host_tables, seen.num_preemptions) == ({0: (5,)}, {0: (2,)}, {0: 3})
    assert (list(seen.seqs), list(seen.requests), list(seen.cached)) == ([0], [0], [3])


def test_preempt_5_who_is_admitted_and_preempted_in_one_step_had_room_in_between() -> None:
    """Sequence 1 takes block 5, which sequence 2 would have hit; so 2 does not hit the blocks behind it either, though
    others hold them, and lacks one more block than was free when its request was admitted."""
    before = crowd()
    begun = in_vain(Hit(1, (4,)), Allocate(1, 4, (5, 7, 8, 9)))
    after = led_to(before, begun)
    worked_out = events_of_step(before, report_of(begun), after)
    assert worked_out[0] == Begin(0)
    state = led_to(before, worked_out)
    shown = observe(state, after)
    assert [rule.id for rule in broken_rules(state, Observe(), shown)] == []


def test_preempt_5_who_hit_nothing_in_between_is_not_said_to_have_hit() -> None:
    before = crowd(first=7)
    begun = in_vain(Allocate(1, 5, (5, 7, 8, 9, 10)))
    assert events_of_step(before, report_of(begun), led_to(before, begun)) == begun


def test_sched_27_who_was_preempted_behind_its_admission_had_a_share_in_between() -> None:
    """Five tokens are missing, and a share is four."""
    crowded = crowd(first=7)
    before = replace(crowded, config=replace(crowded.config, max_num_partial_prefills=4))
    begun = in_vain(Allocate(1, 4, (5, 7, 8, 9)))
    assert events_of_step(before, report_of(begun), led_to(before, begun)) == begun


def test_nothing_happens_in_an_idle_engine() -> None:
    idle = initial_state(CONFIG)
    assert events_of_begin(idle, StepReport(), idle) == []
    assert events_of_step(idle, StepReport(), idle) == []


def test_a_sequence_may_write_its_tokens_in_two_pieces() -> None:
    before = step(initial_state(CONFIG), Add(Request(0, (1, 2), 3, (0,))))
    device = [Write(0, 0, (0,)), Write(0, 1, (1,)), Read(0, (0, 1))]
    happened = [Begin(0), Admit(0), Allocate(0, 2, (0, 1)), Submit(0), *device, Append(0, (5,))]
    happened += [Publish(0, 0), Publish(0, 1), Complete(0)]
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened


@pytest.mark.parametrize("lost", ["seqs", "block_tables"])
def test_an_engine_that_loses_half_of_a_sequence_is_told_by_a_rule(lost: str) -> None:
    """It shows a table without a sequence, or a sequence without a table; its step is worked out all the same."""
    before = step(initial_state(Config(4, 1)), Add(Request(0, (1, 2), 3, (0,))))
    device = [Write(0, 0, (0, 1)), Read(0, (0, 1))]
    happened = [Begin(0), Admit(0), Allocate(0, 2, (0, 1)), Submit(0), *device, Append(0, (5,)), Complete(0)]
    shown = replace(led_to(before, happened), **{lost: {}})
    worked_out = events_of_step(before, report_of(happened), shown)
    assert worked_out == happened
    state = led_to(before, worked_out)
    assert broken_rules(state, Observe(), observe(state, shown))


def test_a_victim_copied_its_tail_before_it_was_preempted() -> None:
    """Three samples share a tail. The step in which the second begins to copy has no block for the third, so all of them
    go; the source of the copy is held until the step is over."""
    engine, follower = followed(Config(num_blocks=3, block_size=2, max_num_seqs=4, max_num_batched_tokens=4))
    engine.add(Request(0, (1,), max_tokens=2, seq_ids=(0,)))
    engine.add(Request(1, (0,), max_tokens=2, seq_ids=(1, 2, 3)))
    engine.step(next_token)
    before, copy = follower.state, Copy(1, 0, 1, 2)
    report = engine.begin_step()
    worked_out = events_of_begin(before, report, engine.snapshot())
    assert copy in follower.trace
    assert worked_out == [Begin(1), copy, Preempt(1), Allocate(0, 1, ()), Submit(1)]
    state = led_to(before, worked_out)
    assert broken_rules(state, Observe(), observe(state, engine.snapshot())) == []


def test_what_a_device_did_not_swap_is_taken_from_nobody_else() -> None:
    """A request was given up after its step had begun, and its host block is another one's by now."""
    config = replace(CONFIG, num_host_blocks=2)
    swapped = replace(initial_state(config), host_free=(0,), host_tables={1: (1,)}, host_cells={1: (4,)})
    assert not_moved(swapped, StepReport(), [SwapOut(0, (1,))]) == swapped
    assert not_moved(swapped, StepReport(), [SwapOut(1, (1,))]).host_cells == {}
    assert not_moved(swapped, StepReport(device=(SwapOut(1, (1,)),)), [SwapOut(1, (1,))]) == swapped
