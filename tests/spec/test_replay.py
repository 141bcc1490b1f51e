"""The events of a step, worked out from what an engine reports and shows: they must be possible if those that happened are."""

from dataclasses import replace

import pytest

from spec.answers import StepReport
from spec.broken import follow
from spec.choices import Choices, EvictionOrder, Publication
from spec.preemption import blocks_for_step
from spec.prefix_cache import longest_hit
from spec.replay import events_of_begin, events_of_end, events_of_step, not_moved, observe, replay, step
from spec.rules import RuleViolation, broken_rules
from spec.vocabulary import (
    Abort,
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
    Evict,
    Finish,
    FinishReason,
    Flight,
    Fork,
    Hit,
    Observe,
    Preempt,
    Publish,
    Read,
    Recovery,
    Request,
    Seq,
    Slide,
    State,
    Submit,
    SwapIn,
    SwapOut,
    Token,
    Write,
    initial_state,
)
from tests.reference.follow import followed, next_token
from tests.spec.happened import led_to, report_of

CONFIG = Config(13, 1, max_num_seqs=4, max_num_batched_tokens=16, prefix_cache=True)
OPTIMISTIC = replace(CONFIG, admission_rule=AdmissionRule.OPTIMISTIC)


def samples(num_free: int = 1) -> State:
    """Sequence 0 of request 0 and three samples of request 1 have one token in the cache, the samples share its block;
    so many blocks are free, and two tokens fit into a block."""
    config = Config(
        2 + num_free, 2, max_num_seqs=4, max_num_batched_tokens=4, num_host_blocks=2, recovery=Recovery.SWAP
    )
    engine, follower = followed(config)
    engine.add(Request(0, (1,), max_tokens=2, seq_ids=(0,)))
    engine.add(Request(1, (0,), max_tokens=2, seq_ids=(1, 2, 3)))
    engine.step(next_token)
    return follower.state


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


SERVED: list[Event] = [Write(0, 4, (6,)), Read(0, (0, 1, 2, 3, 6)), Append(0, (1,))]
"""What the device does for sequence 0 of a crowd."""


def in_vain(*room: Event) -> list[Event]:
    """A step of a crowd that serves sequence 0 alone: request 1 is admitted, gets this room, and is preempted."""
    served: list[Event] = [*SERVED, Publish(0, 4), Complete(0)]
    return [Begin(0), Allocate(0, 1, (6,)), Admit(1), *room, Preempt(1), Submit(0), *served]


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
    begun = led_to(
        initial_state(CONFIG, Choices(publishes_equal_blocks=True)),
        [Add(Request(0, (1, 2), 2, (0,))), Begin(0), Admit(0), Allocate(0, 2, (0, 1)), Submit(0), Write(0, 0, (0, 1))],
    )
    expected = replace(begun, host_cells={4: (1,)})
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
        host_cells={},
        drawn={},
        choices=Choices(),
    )
    seen = observe(expected, shown)
    for step_id, known in ((0, expected.flights[0]), (1, Flight())):
        flight = replace(known, scheduled={0: 1}, blocks=frozenset({7}), holds=(8,), submitted=False)
        assert seen.flights[step_id] == flight
    assert (seen.cells, seen.host_cells) == (expected.cells, expected.host_cells)
    assert (seen.drawn, seen.choices) == (expected.drawn, expected.choices)
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


def half_a_group() -> State:
    """A crowd in which request 1 runs again: the budget of the step before sufficed for sequence 1 and not for 2, which
    would hit the free blocks 4 and 5 and those of sequence 0 behind them."""
    crowded = crowd(first=7)
    own = replace(crowded.seqs[1], num_computed_tokens=4)
    return replace(
        crowded,
        free=(5, 6, 11, 12, 4),
        ref_count=(1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0),
        block_tables={0: (0, 1, 2, 3), 1: (7, 8, 9, 10), 2: ()},
        seqs={**crowded.seqs, 1: own},
        waiting=(),
        running=(0, 1),
        cells={**crowded.cells, **{block: own.tokens[: i + 1] for i, block in enumerate((7, 8, 9, 10))}},
    )


def test_preempt_5_who_was_served_before_may_cost_the_half_of_a_group_its_hits() -> None:
    """The free blocks suffice as long as sequence 2 hits all four; but sequence 0 takes block 5, and then it hits one. The
    report does not say that block 5 was gone when request 1 was preempted."""
    before = half_a_group()
    served = [Write(0, 4, (5,)), Read(0, (0, 1, 2, 3, 5)), Append(0, (1,)), Publish(0, 4)]
    begun = [Begin(0), Allocate(0, 1, (5,)), Allocate(1, 1, (6,)), Preempt(1), Submit(0), *served, Complete(0)]
    assert longest_hit(before, 2) == 4 and longest_hit(led_to(before, begun[:2]), 2) == 1
    assert blocks_for_step(step(before, Begin(0))) == len(before.free)
    after = led_to(before, begun)
    worked_out = events_of_step(before, report_of(begun), after)
    assert worked_out == [Begin(0), Preempt(1), Allocate(0, 1, (5,)), Submit(0), *served, Complete(0)]
    state = led_to(before, worked_out)
    assert [rule.id for rule in broken_rules(state, Observe(), observe(state, after))] == []


def test_sched_27_who_was_preempted_behind_its_admission_had_a_share_in_between() -> None:
    """Five tokens are missing, and a share is four."""
    crowded = crowd(first=7)
    before = replace(crowded, config=replace(crowded.config, max_num_partial_prefills=4))
    begun = in_vain(Allocate(1, 4, (5, 7, 8, 9)))
    assert events_of_step(before, report_of(begun), led_to(before, begun)) == begun


def test_sched_27_who_was_preempted_behind_its_admission_had_what_was_left_of_the_budget() -> None:
    crowded = crowd(first=7)
    before = replace(crowded, config=replace(crowded.config, max_num_batched_tokens=2))
    begun = in_vain(Allocate(1, 1, (5,)))
    assert events_of_step(before, report_of(begun), follow(before, *begun)) == begun


def test_who_was_preempted_behind_its_admission_took_no_block_that_the_cache_still_names() -> None:
    """Block 5 is free before the others, but it is still found under its name, by sequence 2 too."""
    before = crowd(first=7)
    begun = in_vain(Allocate(1, 5, (7, 8, 9, 10, 11)), Hit(2, (4, 5, 2, 3)), Allocate(2, 1, (12,)))
    assert events_of_step(before, report_of(begun), follow(before, *begun)) == begun


def test_who_was_admitted_without_budget_or_from_host_memory_had_no_room_in_between() -> None:
    """Neither may happen; it is worked out so that the rules of admission and of swaps say so."""
    crowded = crowd(first=7)
    spent = replace(crowded, config=replace(crowded.config, max_num_batched_tokens=1))
    swapped = replace(crowded, config=replace(crowded.config, num_host_blocks=1), host_tables={1: (0,)})
    for before in (spent, swapped):
        assert events_of_step(before, report_of(in_vain()), follow(before, *in_vain())) == in_vain()


def test_preempt_5_who_is_admitted_and_preempted_where_blocks_are_published_at_the_schedule() -> None:
    """What the victim was to fill was found under its name until it was preempted, and is forgotten with it."""
    crowded = crowd(first=7)
    before = replace(crowded, choices=replace(crowded.choices, publication=Publication.AT_SCHEDULE))
    begun: list[Event] = [Begin(0), Allocate(0, 1, (6,)), Publish(0, 4), Admit(1), Allocate(1, 5, (5, 7, 8, 9, 10))]
    happened: list[Event] = [*begun, Preempt(1), Submit(0), *SERVED, Complete(0)]
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened


def test_who_is_preempted_and_runs_on_was_admitted_again() -> None:
    """Whether it may be is for the rules of admission to say: it gave its blocks back, and others wait before it."""
    before = crowd()
    readmitted: list[Event] = [Begin(0), Preempt(0), Admit(0), Submit(0)]
    report = StepReport(preempted=(Preempt(0),))
    assert events_of_step(before, report, before) == [*readmitted, Complete(0)]
    finish = Finish(0, FinishReason.STOP)
    gone = replace(before, running=(), seqs={i: seq for i, seq in before.seqs.items() if i != 0})
    worked_out = events_of_step(before, replace(report, finished=(finish,)), gone)
    assert worked_out[:4] == readmitted
    assert finish in worked_out


def test_sched_9_a_step_in_which_an_engine_does_nothing_is_a_step() -> None:
    before = step(initial_state(CONFIG), Add(Request(0, (1, 2), 3, (0,))))
    begin, submit, complete = events_of_step(before, StepReport(), before)
    assert [begin, submit, complete] == [Begin(0), Submit(0), Complete(0)]
    assert events_of_begin(before, StepReport(), before) == [begin, submit, complete]
    begun = led_to(before, [begin])
    assert "SCHED-9" in {rule.id for rule in broken_rules(begun, submit, step(begun, submit))}


def test_api_2_a_token_for_nobody_is_one_for_a_sequence_that_does_not_exist() -> None:
    idle, append = initial_state(CONFIG), Append(7, (1,))
    assert events_of_end(idle, StepReport(emitted=(append,)), idle) == [Fork(7, 7), append]
    assert "API-2" in {rule.id for rule in broken_rules(idle, Fork(7, 7), idle)}


def test_swap_6_a_table_that_is_lost_in_host_memory_did_not_come_back() -> None:
    config = replace(CONFIG, num_host_blocks=1)
    before = led_to(initial_state(config), [Add(Request(0, (1, 2), 3, (0,)))])
    swapped = replace(before, host_free=(), host_tables={0: (0,)})
    shown = replace(before, host_tables={})
    worked_out = events_of_begin(swapped, StepReport(), shown)
    assert worked_out == [Begin(0), Submit(0), Complete(0)]
    assert "SWAP-6" in {rule.id for rule in broken_rules(swapped, Observe(), observe(swapped, shown))}


def test_cache_8_who_was_preempted_had_taken_a_name_that_another_has_now() -> None:
    """Block 3 is free and has lost its name, and block 0 has it: so it was lost before."""
    key = CacheKey((1,))
    cached = replace(initial_state(CONFIG), cached={3: key}, cells={3: (1,)})
    begun = led_to(cached, [Add(Request(0, (1,), 2, (0,))), Begin(0), Admit(0), Allocate(0, 1, (0,)), Submit(0)])
    happened: list[Event] = [Write(0, 0, (0,)), Read(0, (0,)), Append(0, (5,)), Evict(3), Publish(0, 0), Complete(0)]
    assert events_of_end(begun, report_of(happened), led_to(begun, happened)) == happened


def test_a_hit_that_the_window_passed_in_its_own_step_was_where_the_cache_names_it() -> None:
    """The token 4 sees the token 3 and itself: nobody reads the first two blocks, and all three leave the table."""
    held = {block: (1, 2, 3)[: block + 1] for block in range(3)}
    idle = initial_state(replace(CONFIG, window=2))
    warm = replace(idle, cached={block: CacheKey(held[block]) for block in held}, cells=held)
    before = led_to(warm, [Add(Request(0, (1, 2, 3, 4), 2, (0,)))])
    happened: list[Event] = [Begin(0), Admit(0), Hit(0, (0, 1, 2)), Allocate(0, 1, (3,)), Submit(0)]
    happened += [Write(0, 3, (3,)), Read(0, (2, 3), 2), Append(0, (5,)), Publish(0, 3), Slide(0, 3), Complete(0)]
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened


def test_nothing_happens_in_an_idle_engine() -> None:
    idle = initial_state(CONFIG)
    assert events_of_begin(idle, StepReport(), idle) == []
    assert events_of_step(idle, StepReport(), idle) == []


def test_a_sequence_may_write_its_tokens_in_two_pieces() -> None:
    before = step(initial_state(CONFIG), Add(Request(0, (1, 2), 3, (0,))))
    device: list[Event] = [Write(0, 0, (0,)), Write(0, 1, (1,)), Read(0, (0, 1))]
    happened: list[Event] = [Begin(0), Admit(0), Allocate(0, 2, (0, 1)), Submit(0), *device, Append(0, (5,))]
    happened += [Publish(0, 0), Publish(0, 1), Complete(0)]
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened


@pytest.mark.parametrize("lost", ["seqs", "block_tables"])
def test_an_engine_that_loses_half_of_a_sequence_is_told_by_a_rule(lost: str) -> None:
    """It shows a table without a sequence, or a sequence without a table; its step is worked out all the same."""
    before = step(initial_state(Config(4, 1)), Add(Request(0, (1, 2), 3, (0,))))
    device: list[Event] = [Write(0, 0, (0, 1)), Read(0, (0, 1))]
    happened: list[Event] = [
        Begin(0),
        Admit(0),
        Allocate(0, 2, (0, 1)),
        Submit(0),
        *device,
        Append(0, (5,)),
        Complete(0),
    ]
    shown = replace(led_to(before, happened), **{lost: {}})
    worked_out = events_of_step(before, report_of(happened), shown)
    assert worked_out == happened
    state = led_to(before, worked_out)
    assert broken_rules(state, Observe(), observe(state, shown))


def test_a_victim_copied_its_tail_before_it_was_preempted() -> None:
    """The step in which the first sample begins to copy has no block for the second, so all of them go; the source of the
    copy is held until the step is over."""
    before, copy = samples(), Copy(1, 0, 1, 2)
    happened: list[Event] = [Begin(1), copy, Preempt(1), Allocate(0, 1, ()), Submit(1)]
    shown = led_to(before, [Begin(1), Allocate(0, 1, ()), copy, Allocate(1, 1, ()), Preempt(1), Submit(1)])
    assert events_of_begin(before, StepReport(preempted=(Preempt(1),)), shown) == happened
    assert broken_rules(led_to(before, happened), Observe(), shown) == []


def test_cow_3_a_victim_copied_its_tail_before_its_other_samples_were_swapped_out() -> None:
    """Only the first sample was in the step already, so it is computed again. Its copy came first: when the others have
    left for host memory, nobody shares the tail any more."""
    before = samples()
    copy = Copy(1, 0, 1, 2)
    gone: list[Event] = [SwapOut(2, (0,)), SwapOut(3, (1,)), Preempt(1)]
    shown = led_to(before, [Begin(1), Allocate(0, 1, ()), copy, Allocate(1, 1, ()), *gone, Submit(1)])
    worked_out = events_of_begin(before, StepReport(preempted=(Preempt(1),)), shown)
    assert worked_out == [Begin(1), copy, *gone, Allocate(0, 1, ()), Submit(1)]
    assert broken_rules(led_to(before, worked_out), Observe(), shown) == []


def test_a_copy_for_a_victim_may_be_made_and_makes_no_difference() -> None:
    """The step is over: nobody holds its source or its target, and nobody reads what it copied."""
    before, copy = samples(), Copy(1, 0, 1, 2)
    served: list[Event] = [
        Write(0, 1, (1,)),
        Read(0, (0, 1)),
        Append(0, (5,)),
        Finish(0, FinishReason.LENGTH),
        Complete(0),
    ]
    shown = led_to(before, [Begin(0), copy, Allocate(0, 1, ()), Allocate(1, 1, ()), Preempt(1), Submit(0), *served])
    report = report_of([copy, Preempt(1), *served])
    assert events_of_step(before, report, shown) == [Begin(0), Preempt(1), Allocate(0, 1, ()), Submit(0), *served]


def test_alloc_2_a_copy_whose_source_the_step_does_not_hold_is_one_all_the_same() -> None:
    before, copy = samples(), Copy(1, 0, 1, 2)
    happened: list[Event] = [Begin(0), Allocate(0, 1, ()), copy, Allocate(1, 1, ()), Submit(0)]
    after = led_to(before, [Begin(0), Allocate(0, 1, ()), copy, Allocate(1, 1, ())])
    shown = replace(after, flights={0: replace(after.flights[0], holds=(), submitted=True)})
    assert events_of_begin(before, StepReport(), shown) == happened
    assert "ALLOC-2" in {rule.id for rule in broken_rules(after, Observe(), shown)}


def test_a_move_that_no_step_decided_when_it_began_is_an_event_of_its_end() -> None:
    begun = follow(samples(), *[Begin(0), Allocate(0, 1, ()), Submit(0)])
    moves: list[Event] = [Copy(0, 0, 0, 2), SwapOut(1, (0,))]
    for move in moves:
        assert events_of_end(begun, report_of([move]), begun) == [move, Complete(0)]


def test_samples_that_go_on_copy_their_tail_before_anybody_writes() -> None:
    """The last of the three writes in place."""
    before = samples(num_free=2)
    begun: list[Event] = [Begin(0), Allocate(0, 1, ()), Copy(1, 0, 1, 2), Allocate(1, 1, ()), Copy(2, 0, 1, 3)]
    begun += [Allocate(2, 1, ()), Allocate(3, 1, ()), Submit(0)]
    slots = {0: (0, 1), 1: (4, 5), 2: (6, 7), 3: (2, 3)}
    device = [event for i, two in slots.items() for event in (Write(i, 1, two[1:]), Read(i, two))]
    ended: list[Event] = [Append(i, (5,)) for i in slots]
    ended += [Finish(i, FinishReason.LENGTH) for i in slots]
    happened = [*begun, *device, *ended, Complete(0)]
    shown = led_to(before, happened)
    assert events_of_begin(before, StepReport(), led_to(before, begun)) == begun
    assert events_of_step(before, report_of([*begun, *device, *ended]), shown) == happened


def test_cow_4_a_copy_behind_a_write_happened_there() -> None:
    before, copy = samples(num_free=2), Copy(1, 0, 1, 2)
    device: list[Event] = [Write(0, 1, (1,)), copy, Write(1, 1, (5,))]
    worked_out = events_of_step(before, report_of(device), before)
    assert worked_out == [Begin(0), Allocate(0, 1, ()), Allocate(1, 1, ()), Submit(0), *device, Complete(0)]


def swapped() -> tuple[State, list[Event]]:
    """Three requests of one sequence have two tokens in blocks of two, none is free for the first one's next; and how a
    step begins in which the others go to host memory."""
    config = Config(3, 2, max_num_batched_tokens=8, num_host_blocks=2, recovery=Recovery.SWAP)
    start = led_to(initial_state(config), [Add(Request(i, (i, 9), 2, (i,))) for i in range(3)])
    begun = [event for i in range(3) for event in (Admit(i), Allocate(i, 2, (i,)))]
    device = [event for i in range(3) for event in (Write(i, 0, (2 * i, 2 * i + 1)), Read(i, (2 * i, 2 * i + 1)))]
    ended: list[Event] = [Append(i, (5,)) for i in range(3)]
    before = led_to(start, [Begin(0), *begun, Submit(0), *device, *ended, Complete(0)])
    gone = [SwapOut(2, (0,)), Preempt(2), SwapOut(1, (1,)), Preempt(1)]
    return before, [Begin(0), *gone, Allocate(0, 1, (2,)), Submit(0)]


def test_two_victims_go_to_host_memory_each_when_it_is_preempted() -> None:
    before, begun = swapped()
    report = StepReport(preempted=(Preempt(2), Preempt(1)))
    assert events_of_begin(before, report, led_to(before, begun)) == begun
    ended: list[Event] = [Write(0, 2, (4,)), Read(0, (0, 1, 4)), Append(0, (5,)), Finish(0, FinishReason.LENGTH)]
    happened = [*begun, *ended, Complete(0)]
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened


def test_two_come_back_from_host_memory_each_when_it_is_admitted() -> None:
    """With the first one's last token all blocks are free, and there is a fourth one: each of the two has a block in host
    memory, and needs one more."""
    three, begun = swapped()
    ended: list[Event] = [Write(0, 2, (4,)), Read(0, (0, 1, 4)), Append(0, (5,)), Finish(0, FinishReason.LENGTH)]
    gone = led_to(three, [*begun, *ended, Complete(0)])
    before = replace(gone, config=replace(gone.config, num_blocks=4), free=(*gone.free, 3), ref_count=(0, 0, 0, 0))
    begun = [Begin(0)]
    for i, (block, new) in {1: (0, 1), 2: (2, 3)}.items():
        begun += [Admit(i), SwapIn(i, (block,)), Allocate(i, 1, (new,))]
    begun.append(Submit(0))
    device = [Write(1, 2, (2,)), Read(1, (0, 1, 2)), Write(2, 2, (6,)), Read(2, (4, 5, 6))]
    last: list[Event] = [Append(1, (5,)), Append(2, (5,))]
    last += [Finish(1, FinishReason.LENGTH), Finish(2, FinishReason.LENGTH)]
    happened = [*begun, *device, *last, Complete(0)]
    assert events_of_begin(before, StepReport(), led_to(before, begun)) == begun
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened


def test_who_was_given_up_in_flight_is_not_served_and_the_step_is_over() -> None:
    """The next one, which was begun before this one was over, is not."""
    begun: list[Event] = [Begin(0), Admit(0), Allocate(0, 2, (0, 1)), Submit(0), Abort(0), Begin(1), Submit(1)]
    before = led_to(initial_state(CONFIG), [Add(Request(0, (1, 2), 2, (0,))), *begun])
    assert events_of_end(before, StepReport(), led_to(before, [Complete(0)])) == [Complete(0)]


def test_what_a_device_did_not_swap_is_taken_from_nobody_else() -> None:
    """A request was given up after its step had begun, and its host block is another one's by now."""
    config = replace(CONFIG, num_host_blocks=2)
    swapped = replace(initial_state(config), host_free=(0,), host_tables={1: (1,)}, host_cells={1: (4,)})
    assert not_moved(swapped, StepReport(), [SwapOut(0, (1,))]) == swapped
    assert not_moved(swapped, StepReport(), [SwapOut(1, (1,))]).host_cells == {}
    assert not_moved(swapped, StepReport(device=(SwapOut(1, (1,)),)), [SwapOut(1, (1,))]) == swapped


def test_what_a_device_did_not_move_is_in_none_of_the_blocks_that_it_was_for() -> None:
    """Nor does anybody else lose a token: blocks have two slots, and tables other blocks."""
    config = Config(6, 2, num_host_blocks=3)
    cells = {at: (at,) for at in range(12)}
    full = replace(
        initial_state(config),
        block_tables={0: (0, 1), 1: (2, 3)},
        host_tables={2: (0,), 3: (1,)},
        cells=cells,
        host_cells={at: (at,) for at in range(6)},
    )
    undone = not_moved(full, StepReport(), [SwapOut(2, (0,)), SwapOut(3, (1,)), SwapIn(0, (0, 1)), Copy(1, 1, 0, 3)])
    assert set(undone.cells) == {4, 5, 8, 9, 10, 11}
    assert set(undone.host_cells) == {4, 5}
    assert not_moved(full, StepReport(), [SwapIn(4, (4,)), SwapOut(4, (2,))]) == full
