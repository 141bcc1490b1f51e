"""Memory maps: they say the same in text, in SVG and in words, of sound states and of broken ones."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given

from spec.broken import (
    ALICE,
    ALONE,
    EMPTY,
    EXAMPLES,
    FORKED,
    FULL,
    STEP_2,
    SWAPPED,
    UNUSED,
    BrokenState,
    follow,
    stored,
)
from spec.picture import COLOURS, VARIABLES, Block, Map, caption_of, describe, frames, memory_map, svg, text
from spec.vocabulary import (
    Add,
    Allocate,
    Append,
    Begin,
    Copy,
    Event,
    Finish,
    FinishReason,
    Fork,
    Observe,
    Preempt,
    Start,
    State,
    Submit,
    Write,
    initial_state,
)
from tests.spec.strategies import states

SVG = "{http://www.w3.org/2000/svg}"
STATES = [example.state if isinstance(example, BrokenState) else example.before for example in EXAMPLES]


def words_of(picture: str) -> list[str]:
    """Every text in a picture, once more parsed as XML."""
    return [each.text or "" for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_a_fork_as_text() -> None:
    expected = """\
block   0 x2   1      2
slots  [5 .]  [. .]  [. .]
seqs    0 1    free   free
host    0      1
slots  [. .]  [. .]
seqs    free   free
seq 0   5   computed 1 of 1   table 0
seq 1   5   computed 1 of 1   table 0"""
    assert text(memory_map(FORKED)) == expected


def test_a_preemption_as_text() -> None:
    expected = """\
Preempt request 1
block   0 x1   1
slots  [5]    [.]
seqs    0      free
host    0      1
slots  [.]    [.]
seqs    free   free
running 0
waiting 1 (preempted 1x)
seq 0   5 + 7   computed 1 of 2   table 0
seq 1   6 + 7   computed 0 of 2   table none"""
    assert text(memory_map(follow(FULL, Preempt(1)), caption_of(Preempt(1)))) == expected


def test_what_is_scheduled_is_drawn_as_room() -> None:
    (block, *_) = memory_map(follow(EMPTY, Start(0, (5,)), Allocate(0, 1, (0,)))).blocks
    assert (block.slots, block.label) == (("_",), "0")


def test_what_is_cached_is_not_just_free() -> None:
    (block, other, *_) = memory_map(UNUSED).blocks
    assert (block.slots, block.label, other.label) == (("5",), "cached", "free")


def test_what_a_step_holds_is_said() -> None:
    state = follow(FORKED, Begin(3), Copy(1, 0, 0, 2), Submit(3))
    (block, *_) = memory_map(state).blocks
    assert (block.label, block.ref_count, block.shared) == ("0 step3", 2, False)


def test_a_swapped_sequence_is_in_host_memory() -> None:
    (host, *_) = memory_map(SWAPPED).host_blocks
    assert (host.slots, host.label, host.request) == (("5",), "0", 0)


def test_an_engine_that_shows_no_contents_is_drawn_from_its_tables() -> None:
    assert memory_map(replace(FORKED, cells={})) == memory_map(FORKED)


def test_what_lies_in_a_slot_is_drawn_and_not_what_ought_to() -> None:
    (block, *_) = memory_map(replace(ALONE, cells={0: (6,)})).blocks
    assert block.slots == ("6",)


def test_a_long_sequence_is_shown_by_both_ends() -> None:
    pool = initial_state(replace(EMPTY.config, num_blocks=2, block_size=32))
    line = memory_map(follow(pool, *stored(0, tuple(range(40)), (0, 1), block_size=32))).lines[0]
    assert line.text == "0 1 2 3 4 5 6 7 8 9 10 11 ... 37 38 39   computed 40 of 40   table 0 1"


def test_many_blocks_wrap() -> None:
    pool = initial_state(replace(EMPTY.config, num_blocks=40, num_host_blocks=0))
    rows = text(memory_map(pool), width=60).splitlines()
    assert max(map(len, rows)) <= 60
    assert sum(row.count("free") for row in rows) == 40


def test_a_strip_has_a_map_for_each_event_and_marks_what_changed() -> None:
    events: list[Event] = [Start(0, (5,)), Allocate(0, 1, (1,)), Write(0, 0, (1,)), Fork(0, 1)]
    strip = frames(EMPTY.config, events)
    assert [picture.caption for picture in strip] == [
        "an empty engine",
        "Start seq 0, tokens 5",
        "Allocate seq 0, num_tokens 1, blocks 1",
        "Write seq 0, start 0, slots 1",
        "Fork parent 0, child 1",
    ]
    changed = [[block.block_id for block in picture.blocks if block.changed] for picture in strip]
    assert changed == [[], [], [1], [1], [1]]


@pytest.mark.parametrize(
    ("event", "caption"),
    [
        (Add(ALICE), "Add request 0, prompt 5, max_tokens 2"),
        (Finish(3, FinishReason.STOP), "Finish seq 3, reason stop"),
        (Append(3, (4, 5)), "Append seq 3, tokens 4 5"),
        (Observe(), "Observe"),
    ],
    ids=str,
)
def test_an_event_in_a_few_words(event: Event, caption: str) -> None:
    assert caption_of(event) == caption


def test_a_picture_has_a_title_and_a_description() -> None:
    root = ElementTree.fromstring(svg(memory_map(FORKED), "A fork"))
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and title.text == "A fork"
    assert description is not None and description.text == describe(memory_map(FORKED))
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"


def test_a_description_says_what_is_shared() -> None:
    expected = (
        "Block 0: held by sequence 0 and sequence 1, shared, reference count 2, holds 5. Free blocks: 1 2. "
        "Free host blocks: 0 1. seq 0: 5 computed 1 of 1 table 0. seq 1: 5 computed 1 of 1 table 0."
    )
    assert describe(memory_map(FORKED)) == expected


def test_a_picture_shows_ids_counts_contents_holders_and_queues() -> None:
    words = words_of(svg(memory_map(STEP_2), "t"))
    assert {"0", "1", "5", "seq 0", "free", "running", "waiting", "none"} <= set(words)
    assert "5 + 7   computed 1 of 2   table 0" in words


def test_requests_have_colours_and_shared_blocks_a_pattern() -> None:
    picture = svg(memory_map(FULL), "t")
    assert 'class="kv-cell kv-request0"' in picture and 'class="kv-cell kv-request1"' in picture
    assert 'fill="url(#' not in picture
    assert 'fill="url(#' in svg(memory_map(FORKED), "t")


def test_a_picture_is_the_same_every_time_and_its_names_are_its_own() -> None:
    assert svg(memory_map(FORKED), "t") == svg(memory_map(FORKED), "t")
    ids = [ElementTree.fromstring(svg(memory_map(FORKED), title))[0].get("id") for title in ("a", "b")]
    assert len(set(ids)) == 2


def test_text_in_a_picture_is_escaped() -> None:
    nasty = 'a < b & "c" > d </svg>'
    picture = svg(Map(nasty, (Block(0, ("<",), seq_ids=(0,)),)), nasty)
    assert {nasty, "<"} <= set(words_of(picture))
    assert ElementTree.fromstring(picture)[0].text == nasty


@pytest.mark.parametrize("state", STATES, ids=[example.rule_id for example in EXAMPLES])
def test_every_small_state_can_be_drawn(state: State) -> None:
    picture = memory_map(state)
    assert words_of(svg(picture, "t"))
    assert text(picture)


@pytest.mark.slow
@given(states())
def test_nonsense_can_be_drawn(state: State) -> None:
    picture = memory_map(state, "nonsense")
    assert words_of(svg([picture, picture], "t"))
    assert text(picture).startswith("nonsense\n")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_everything_can_be_read_in_light_and_in_dark(theme: int) -> None:
    """The bound of WCAG 2.1 for text, 4.5, and for lines, 3."""
    ink, quiet, line, back = (VARIABLES[name][theme] for name in ("ink", "quiet", "line", "back"))
    assert all(contrast(ink, pair[theme]) >= 4.5 for pair in COLOURS)
    assert contrast(ink, back) >= 4.5 and contrast(quiet, back) >= 4.5
    assert contrast(line, back) >= 3 and contrast(VARIABLES["mark"][theme], back) >= 3


def test_a_reader_of_dark_pages_gets_dark_pictures() -> None:
    picture = svg(memory_map(ALONE), "t")
    assert "@media (prefers-color-scheme:dark)" in picture
    for name, (light, dark) in VARIABLES.items():
        assert f"--kv-{name}:{light};" in picture and f"--kv-{name}:{dark};" in picture
