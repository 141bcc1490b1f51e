"""The scheduler chart, the file that holds it, and traces made minimal."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import optimized
from spec.choices import Choices, Publication
from spec.engine import Observer
from spec.playback import MOST_MAPS_IN_SVG, html, svg
from spec.shrink import Broken, first_broken, shrunk
from spec.timeline import Doing, Timeline, timeline
from spec.trace import Writer
from spec.vocabulary import (
    Add,
    Admit,
    Allocate,
    Append,
    Begin,
    Complete,
    Config,
    Event,
    Finish,
    FinishReason,
    Publish,
    Read,
    Request,
    Submit,
    Write,
)


class Tape(list[Event]):
    """An observer that keeps what it hears."""

    def event(self, event: Event) -> None:
        self.append(event)

    def settled(self, snapshot: object) -> None:
        """Nothing."""


EXAMPLE = Path(__file__).parents[2] / "docs/example.jsonl"
CONFIG = Config(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, prefix_cache=True)


def run(observer: Observer) -> None:
    """Four requests that begin alike, on so few blocks that some are preempted; the third has two samples."""
    engine = optimized.make_engine(CONFIG, observer)
    for i in range(4):
        engine.add(Request(i, (1, 2, 3, 4, 5 + i), 12, (10 * i, 10 * i + 1) if i == 2 else (10 * i,)))
    while engine.core.has_work:
        engine.step(lambda seq, tokens: seq + len(tokens))


@pytest.fixture(scope="module")
def events() -> list[Event]:
    tape = Tape()
    run(tape)
    return list(tape)


def test_the_log_that_the_book_draws_is_what_an_engine_writes(tmp_path: Path) -> None:
    with Writer(tmp_path / "log", CONFIG, "optimized") as writer:
        run(writer)
    assert (tmp_path / "log").read_text() == EXAMPLE.read_text()


@pytest.fixture(scope="module")
def time(events: list[Event]) -> Timeline:
    return timeline(CONFIG, events)


def test_a_step_says_who_computes_and_who_waits(time: Timeline) -> None:
    first = time.steps[0]
    assert (first.num_tokens, first.admitted) == (15, (0, 1, 2))
    assert first.doing == {0: Doing.COMPUTES, 1: Doing.COMPUTES, 2: Doing.COMPUTES, 3: Doing.WAITS}
    cut = next(each for each in time.steps if each.preempted)
    assert cut.doing[cut.preempted[0]] is Doing.PREEMPTED
    assert f"preempted {cut.preempted[0]}" in cut.caption
    assert time.steps[-1].num_free == CONFIG.num_blocks


def test_a_step_counts_what_was_computed(time: Timeline, events: list[Event]) -> None:
    assert sum(each.num_tokens for each in time.steps) == sum(len(e.slots) for e in events if isinstance(e, Write))


def test_few_maps_are_spread_evenly(events: list[Event], time: Timeline) -> None:
    few = timeline(CONFIG, events, most_maps=3)
    assert few.steps == time.steps
    assert 0 < len(few.maps) <= 3
    assert few.map_steps[-1] == len(time.steps) - 1


def test_a_file_is_well_formed_and_asks_for_nothing(events: list[Event], time: Timeline) -> None:
    drawing = svg(timeline(CONFIG, events, MOST_MAPS_IN_SVG), "a <story>")
    ElementTree.fromstring(drawing)
    text = html(time, "a <story>")
    assert "a &lt;story&gt;" in text
    for whole in (text, drawing):
        links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')>\s]*)""", whole)
        assert all(link in ("data:,",) or link.startswith("#") for link in links), links


def test_a_map_is_made_of_pieces_that_maps_share(time: Timeline) -> None:
    found = re.search(r'id="scene">(.*?)</script>', html(time, "story"))
    assert found is not None
    scene = json.loads(found[1])
    assert len(scene["frames"]) == len(scene["x"]) == len(scene["words"]) == len(time.steps)
    assert max(map(max, scene["frames"])) == len(scene["pieces"]) - 1
    assert len(scene["pieces"]) < sum(map(len, scene["frames"])) / 2
    assert scene["words"][0] == time.steps[0].caption


def test_nothing_is_drawn_of_nothing() -> None:
    empty = timeline(CONFIG, ())
    assert (empty.steps, empty.maps) == ((), ())
    ElementTree.fromstring(svg(empty, "nothing"))
    assert "0 requests in 0 steps" in html(empty, "nothing")


# Shrinking


def test_a_shrunk_trace_breaks_the_same_rule_and_needs_every_event(events: list[Event]) -> None:
    at = [i for i, event in enumerate(events) if isinstance(event, Write)][6]
    write = events[at]
    assert isinstance(write, Write)
    wrong = [*events[:at], replace(write, slots=(write.slots[0] ^ 1, *write.slots[1:])), *events[at + 1 :]]
    broken = first_broken(CONFIG, wrong)
    assert broken is not None and broken.rule_ids[0] == "TABLE-2"
    found = shrunk(CONFIG, wrong)
    assert found.rule_id == "TABLE-2"
    assert first_broken(found.config, found.events) == Broken(len(found.events) - 1, broken.rule_ids)
    assert len(found.events) < at / 3
    for i in range(len(found.events) - 1):
        without = found.events[:i] + found.events[i + 1 :]
        assert first_broken(found.config, without) != Broken(len(without) - 1, broken.rule_ids)


def test_a_rule_of_the_scheduler_keeps_its_requests(events: list[Event]) -> None:
    at = next(i for i, event in enumerate(events) if isinstance(event, Publish))
    wrong = [*events[:at], *events[at + 1 :]]
    found = shrunk(CONFIG, wrong)
    assert found.rule_id == "CACHE-14"
    assert len(found.events) < len(wrong) / 2


def test_what_breaks_no_rule_is_not_shrunk(events: list[Event]) -> None:
    with pytest.raises(ValueError, match="every rule holds"):
        shrunk(CONFIG, events)


AHEAD_OF_THE_DEVICE = Choices(publication=Publication.AT_SCHEDULE, num_reserved_blocks=1)
PUBLISHED_EARLY: tuple[Event, ...] = (
    *(Add(Request(0, (5, 6), 1, (0,))), Begin(0), Admit(0), Allocate(0, 2, (1,)), Publish(0, 0), Submit(0)),
    *(Write(0, 0, (2, 3)), Read(0, (2, 3)), Append(0, (7,)), Finish(0, FinishReason.LENGTH), Complete(0)),
)
"""What an engine does that publishes at the schedule and keeps block 0 for itself."""


def test_a_trace_is_judged_shrunk_and_drawn_under_the_choices_of_its_engine() -> None:
    config = Config(num_blocks=3, block_size=2, prefix_cache=True)
    assert first_broken(config, PUBLISHED_EARLY) == Broken(4, ("CACHE-6", "CACHE-1"))
    assert first_broken(config, PUBLISHED_EARLY, AHEAD_OF_THE_DEVICE) is None
    late = (*PUBLISHED_EARLY[:4], *PUBLISHED_EARLY[5:])
    found = shrunk(config, late, choices=AHEAD_OF_THE_DEVICE)
    assert (found.rule_id, found.choices, found.config.num_blocks) == ("CACHE-15", AHEAD_OF_THE_DEVICE, 2)
    assert first_broken(found.config, found.events, found.choices) == Broken(len(found.events) - 1, ("CACHE-15",))
    assert [step.num_free for step in timeline(config, PUBLISHED_EARLY, 1, AHEAD_OF_THE_DEVICE).steps] == [2]
