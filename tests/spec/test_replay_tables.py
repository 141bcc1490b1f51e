"""The events of a step, worked out from tables: what leaves a window, what is published when, and what is not shown any more."""

from dataclasses import replace

import pytest

from spec.answers import StepReport
from spec.broken import follow
from spec.choices import Choices, Publication
from spec.replay import events_of_begin, events_of_step, observe, step
from spec.rules import broken_rules
from spec.vocabulary import (
    Add,
    Admit,
    Allocate,
    Append,
    Begin,
    CacheKey,
    Complete,
    Config,
    Event,
    Evict,
    Finish,
    FinishReason,
    Hit,
    Observe,
    Preempt,
    Publish,
    Read,
    Request,
    Seq,
    SeqId,
    Slide,
    State,
    Submit,
    Write,
    initial_state,
)
from tests.spec.happened import led_to, report_of

WINDOW = Config(9, 2, window=2)
"""Who computes a token sees the one before and the token itself."""

PAIR = Request(0, (1, 2), 3, (0,))
"""A request with two tokens."""


def served(seq: SeqId, block: int, max_tokens: int = 3) -> State:
    """The sequence runs alone: it has four tokens, one of them sampled, two blocks from this one on, and lacks the last
    token's K and V."""
    tokens, table, size = (0, 1, 2, 3), (block, block + 1), WINDOW.block_size
    idle = initial_state(WINDOW)
    return replace(
        idle,
        free=tuple(b for b in idle.free if b not in table),
        ref_count=tuple(int(b in table) for b in idle.free),
        block_tables={seq: table},
        seqs={seq: Seq(seq, tokens, 3, num_computed_tokens=3)},
        requests={seq: Request(seq, tokens[:3], max_tokens, (seq,))},
        running=(seq,),
        cells={block * size + p: tokens[: p + 1] for p in range(3)},
    )


def ids_broken(state: State, event: Event) -> set[str]:
    """The rules that the event breaks."""
    return {rule.id for rule in broken_rules(state, event, step(state, event))}


def test_what_has_ended_had_let_go_what_its_window_had_passed() -> None:
    """Of four tokens a window of two has passed the first two, and with them one block; of two it has passed nothing."""
    last: list[Event] = [Write(0, 3, (3,)), Read(0, (2, 3), 2), Append(0, (9,)), Slide(0, 1)]
    happened = [Begin(0), Allocate(0, 1, ()), Submit(0), *last, Finish(0, FinishReason.LENGTH), Complete(0)]
    before = served(0, block=0, max_tokens=2)
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened
    config = replace(WINDOW, block_size=1)
    before = led_to(initial_state(config), [Add(Request(0, (1,), 1, (0,)))])
    happened = [Begin(0), Admit(0), Allocate(0, 1, (0,)), Submit(0), Write(0, 0, (0,)), Read(0, (0,)), Append(0, (9,))]
    happened += [Finish(0, FinishReason.LENGTH), Complete(0)]
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened


def test_table_11_what_an_engine_keeps_behind_its_window_is_not_said_to_be_let_go() -> None:
    before = served(0, block=0)
    happened: list[Event] = [Begin(0), Allocate(0, 1, ()), Submit(0), Write(0, 3, (3,)), Read(0, (2, 3), 2)]
    happened += [Append(0, (9,)), Complete(0)]
    assert events_of_step(before, report_of(happened), follow(before, *happened)) == happened
    assert "TABLE-11" in ids_broken(led_to(before, happened[:-1]), Complete(0))


def test_windows_are_passed_in_the_order_of_the_step() -> None:
    """Sequence 1 came before sequence 0, and is served before it."""
    early, late = served(1, block=2), served(0, block=0)
    before = replace(
        early,
        free=(4, 5, 6, 7, 8),
        ref_count=(1, 1, 1, 1, 0, 0, 0, 0, 0),
        block_tables={**early.block_tables, **late.block_tables},
        seqs={**late.seqs, **early.seqs},
        requests={**early.requests, **late.requests},
        running=(1, 0),
        cells={**early.cells, **late.cells},
    )
    happened: list[Event] = [Begin(0), Allocate(1, 1, ()), Allocate(0, 1, ()), Submit(0)]
    happened += [Write(1, 3, (7,)), Read(1, (6, 7), 2), Write(0, 3, (3,)), Read(0, (2, 3), 2)]
    happened += [Append(1, (9,)), Append(0, (9,)), Slide(1, 1), Slide(0, 1), Complete(0)]
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened


def test_a_table_whose_front_is_gone_goes_on_and_is_published_behind_it() -> None:
    """Six tokens, of which the window has passed the first two: the third block comes to the table, and the second leaves
    it at the end, when the third is full and can be found."""
    four = served(0, block=0)
    slid = replace(
        four,
        config=replace(WINDOW, prefix_cache=True),
        free=(0, *four.free),
        ref_count=(0, *four.ref_count[1:]),
        block_tables={0: (1,)},
        seqs={0: Seq(0, (0, 1, 2, 3, 4, 5), 6, num_computed_tokens=4, num_dropped_blocks=1)},
        requests={0: Request(0, (0, 1, 2, 3, 4, 5), 2, (0,))},
        cells={2: (0, 1, 2), 3: (0, 1, 2, 3)},
    )
    begun: list[Event] = [Begin(0), Allocate(0, 2, (5,)), Submit(0)]
    ended: list[Event] = [Write(0, 4, (10, 11)), Read(0, (3, 10, 11), 3), Append(0, (9,)), Publish(0, 2), Slide(0, 1)]
    happened = [*begun, *ended, Complete(0)]
    assert events_of_begin(slid, StepReport(), led_to(slid, begun)) == begun
    assert events_of_step(slid, report_of(happened), led_to(slid, happened)) == happened


def test_a_hit_is_worked_out_when_a_step_begins() -> None:
    warm = replace(initial_state(Config(4, 1, prefix_cache=True)), cached={0: CacheKey((1,))}, cells={0: (1,)})
    before = led_to(warm, [Add(PAIR)])
    begun: list[Event] = [Begin(0), Admit(0), Hit(0, (0,)), Allocate(0, 1, (1,)), Submit(0)]
    assert events_of_begin(before, StepReport(), led_to(before, begun)) == begun


def test_an_engine_that_loses_half_of_a_sequence_when_a_step_begins_is_told_by_a_rule() -> None:
    before = led_to(initial_state(Config(4, 1)), [Add(PAIR)])
    after = led_to(before, [Begin(0), Admit(0), Allocate(0, 2, (0, 1)), Submit(0)])
    for shown, blocks in ((replace(after, seqs={}), (0, 1)), (replace(after, block_tables={}), ())):
        worked_out = events_of_begin(before, StepReport(), shown)
        assert worked_out == [Begin(0), Admit(0), Allocate(0, 2, blocks), Submit(0)]
        state = follow(before, *worked_out)
        assert broken_rules(state, Observe(), observe(state, shown))


def test_table_2_who_has_ended_and_wrote_into_one_block_twice_is_said_to_have_had_two() -> None:
    """Its table is not shown any more; of the blocks that were free and are, the last one that nobody touched is the other."""
    before = led_to(initial_state(Config(4, 2)), [Add(Request(0, (1, 2, 3), 1, (0,)))])
    write, finish = Write(0, 0, (7, 7, 7)), Finish(0, FinishReason.LENGTH)
    report = report_of([write, Append(0, (9,)), finish])
    begun: list[Event] = [Begin(0), Admit(0), Allocate(0, 3, (3, 2)), Submit(0)]
    worked_out = events_of_step(before, report, initial_state(before.config))
    assert worked_out == [*begun, write, Append(0, (9,)), finish, Complete(0)]
    assert "TABLE-2" in ids_broken(led_to(before, begun), write)


def test_cache_6_what_a_step_does_not_fill_was_not_published_at_the_schedule() -> None:
    """The third token is the first of its block; the fourth one is only drawn. To publish that is too early."""
    config, ahead = Config(4, 2, prefix_cache=True), Choices(publication=Publication.AT_SCHEDULE)
    before = led_to(initial_state(config, ahead), [Add(Request(0, (1, 2, 3), 2, (0,)))])
    happened: list[Event] = [Begin(0), Admit(0), Allocate(0, 3, (0, 1)), Publish(0, 0), Submit(0)]
    happened += [Write(0, 0, (0, 1, 2)), Read(0, (0, 1, 2)), Append(0, (4,)), Publish(0, 1), Complete(0)]
    assert events_of_step(before, report_of(happened), follow(before, *happened)) == happened
    assert "CACHE-6" in ids_broken(led_to(before, happened[:-2]), Publish(0, 1))


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_a_victim_published_before_it_was_preempted_has_the_name_of_a_free_block(is_kept: bool) -> None:
    """The victim's second block is equal to block 4, and has its name now. So the victim had taken block 4 for its third
    token, unless that is still found: then the engine publishes equal blocks."""
    config, key = Config(5, 1, prefix_cache=True, window=2), CacheKey((1, 2))
    ahead = Choices(publication=Publication.AT_SCHEDULE, publishes_equal_blocks=is_kept)
    before = replace(
        initial_state(config, ahead),
        free=(0, 1, 2, 4),
        ref_count=(0, 0, 0, 1, 0),
        block_tables={0: (3,)},
        seqs={0: Seq(0, (1, 2, 3), 2, num_computed_tokens=2, num_dropped_blocks=1)},
        requests={0: Request(0, (1, 2), 3, (0,))},
        running=(0,),
        cached={4: key},
        cells={3: (1, 2), 4: (1, 2)},
    )
    happened: list[Event] = [
        Begin(0),
        *([] if is_kept else [Evict(4)]),
        Publish(0, 1),
        Preempt(0),
        Submit(0),
        Complete(0),
    ]
    shown = follow(before, *happened)
    assert shown.cached == ({4: key, 3: key} if is_kept else {3: key})
    assert events_of_step(before, StepReport(preempted=(Preempt(0),)), shown) == happened


@pytest.mark.parametrize("is_over", [False, True])
def test_what_a_step_publishes_it_may_hit_though_the_window_passes_that_before_it_is_shown(is_over: bool) -> None:
    """Nobody reads it in the step: where it lies only the cache can tell, and only as it is shown afterwards."""
    config, ahead = Config(4, 2, window=1, prefix_cache=True), Choices(publication=Publication.AT_SCHEDULE)
    arrivals = [Add(PAIR), Add(Request(1, (1, 2, 3), 1 if is_over else 2, (1,)))]
    before = led_to(initial_state(config, ahead), [*arrivals])
    happened: list[Event] = [Begin(0), Admit(0), Allocate(0, 2, (0,)), Publish(0, 0)]
    happened += [Admit(1), Hit(1, (0,)), Allocate(1, 1, (1,)), Submit(0)]
    happened += [Write(0, 0, (0, 1)), Read(0, (0, 1)), Write(1, 2, (2,)), Read(1, (2,), 2)]
    happened += [Append(0, (8,)), Append(1, (9,)), Slide(0, 1), Slide(1, 1)]
    happened += [*([Finish(1, FinishReason.LENGTH)] if is_over else []), Complete(0)]
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened


def test_siblings_that_are_admitted_get_room_in_their_order_whoever_is_written_first() -> None:
    """The first one takes the block that the second one would have hit."""
    config = Config(6, 1, prefix_cache=True)
    before = replace(
        initial_state(config),
        seqs={0: Seq(0, (1, 2, 4), 1), 1: Seq(0, (1, 3, 5), 1)},
        requests={0: Request(0, (1,), 4, (0, 1))},
        waiting=(0,),
        cached={0: CacheKey((1,)), 1: CacheKey((1, 3))},
        cells={0: (1,), 1: (1, 3)},
    )
    happened: list[Event] = [Begin(0), Admit(0), Hit(0, (0,)), Allocate(0, 2, (1, 2))]
    happened += [Hit(1, (0,)), Allocate(1, 2, (3, 4)), Submit(0)]
    happened += [Write(1, 1, (3, 4)), Read(1, (0, 3, 4)), Write(0, 1, (1, 2)), Read(0, (0, 1, 2))]
    happened += [
        Append(0, (7,)),
        Append(1, (8,)),
        *(Publish(seq, index) for seq in (0, 1) for index in (1, 2)),
        Complete(0),
    ]
    assert events_of_step(before, report_of(happened), led_to(before, happened)) == happened


def test_a_hit_that_the_window_passed_is_where_the_cache_named_it_before_and_not_where_it_names_it_since() -> None:
    """The step publishes an equal block, which whoever shows the cache in the order of its blocks names first."""
    config, key = Config(4, 2, window=1, prefix_cache=True), CacheKey((1, 2))
    before = led_to(
        replace(
            initial_state(config, Choices(publishes_equal_blocks=True)),
            cached={3: key},
            cells={6: (1,), 7: (1, 2)},
        ),
        [Add(PAIR), Add(Request(1, (1, 2, 3), 2, (1,)))],
    )
    happened: list[Event] = [Begin(0), Admit(0), Allocate(0, 2, (0,)), Admit(1), Hit(1, (3,)), Allocate(1, 1, (1,))]
    happened += [Submit(0), Write(0, 0, (0, 1)), Read(0, (0, 1)), Write(1, 2, (2,)), Read(1, (2,), 2)]
    happened += [Append(0, (8,)), Append(1, (9,)), Publish(0, 0), Slide(0, 1), Slide(1, 1), Complete(0)]
    shown = led_to(before, happened)
    assert shown.cached == {3: key, 0: key}
    in_order = replace(shown, cached={0: key, 3: key})
    assert events_of_step(before, report_of(happened), in_order) == happened
