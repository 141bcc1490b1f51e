"""The lives of blocks and requests: what moves where, and that the pictures say it in words as well."""

import os
from itertools import combinations
from xml.etree import ElementTree

import pytest

import optimized
import reference
from spec.engine import EngineFactory
from spec.life import (
    BLOCK_PLACES,
    REQUEST_LOADS,
    REQUEST_PLACES,
    Edges,
    life_of_a_block,
    life_of_a_request,
    svg,
)
from spec.scope import LENSES

GIVEN_BACK = ("Release", "Rollback", "SwapOut")
TAKEN = ("Allocate", "Copy", "SwapIn")
BLOCK: Edges = {
    ("cached, free", "cached, held"): ("Hit",),
    ("cached, free", "free"): ("Reset",),
    ("cached, free", "held"): TAKEN,
    ("cached, held", "cached, free"): ("Copy", *GIVEN_BACK),
    ("cached, held", "cached, in flight"): ("Copy", *GIVEN_BACK),
    ("cached, held", "cached, shared"): ("Fork", "Hit"),
    ("cached, in flight", "cached, free"): ("Complete",),
    ("cached, in flight", "cached, held"): ("Hit",),
    ("cached, shared", "cached, held"): ("Copy", *GIVEN_BACK),
    ("free", "held"): TAKEN,
    ("held", "cached, held"): ("Publish",),
    ("held", "free"): ("Release", "Rollback", "Slide", "SwapOut"),
    ("held", "in flight"): GIVEN_BACK,
    ("held", "shared"): ("Fork",),
    ("in flight", "free"): ("Complete",),
    ("shared", "cached, shared"): ("Publish",),
    ("shared", "held"): ("Copy", "Release", "Rollback", "Slide", "SwapOut"),
}
REQUEST: Edges = {
    ("not there", "waiting"): ("Add",),
    ("running", "aborted"): ("Abort",),
    ("running", "finished"): ("Finish",),
    ("running", "running, swapped"): ("SwapOut",),
    ("running", "waiting, preempted"): ("Preempt",),
    ("running, swapped", "running"): ("SwapIn",),
    ("running, swapped", "waiting, swapped"): ("Preempt",),
    ("waiting", "aborted"): ("Abort",),
    ("waiting", "running"): ("Admit",),
    ("waiting, preempted", "aborted"): ("Abort",),
    ("waiting, preempted", "running"): ("Admit",),
    ("waiting, swapped", "aborted"): ("Abort",),
    ("waiting, swapped", "running, swapped"): ("Admit",),
}


@pytest.mark.slow
def test_a_block_moves_as_ever() -> None:
    assert life_of_a_block() == BLOCK


@pytest.mark.skipif(os.environ.get("KVPROOF_TIER") != "soak", reason="takes a minute; runs in the tier soak")
@pytest.mark.slow
def test_in_the_lenses_a_block_moves_in_no_other_way() -> None:
    assert life_of_a_block(lens.small for lens in LENSES.values()) == BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("make", [reference.make_engine, optimized.make_engine], ids=["reference", "optimized"])
def test_a_request_moves_as_ever(make: EngineFactory) -> None:
    assert life_of_a_request(REQUEST_LOADS, make) == REQUEST


@pytest.mark.parametrize(
    ("edges", "places"), [(BLOCK, BLOCK_PLACES), (REQUEST, REQUEST_PLACES)], ids=["block", "request"]
)
def test_the_picture_has_every_place_and_every_event_and_says_them(
    edges: Edges, places: dict[str, tuple[int, int]]
) -> None:
    assert {place for pair in edges for place in pair} == set(places)
    root = ElementTree.fromstring(svg(edges, places, "A life"))
    tag = "{http://www.w3.org/2000/svg}"
    shown = [text.text for text in root.iter(f"{tag}text")]
    assert sorted(map(str, shown)) == sorted([*places, *(name for names in edges.values() for name in names)])
    assert len([path for path in root.iter(f"{tag}path") if path.get("class") == "kv-box"]) == len(edges)
    said = root.findtext(f"{tag}desc")
    assert said is not None
    assert all(f"From {old} to {new}: {', '.join(names)}." in said for (old, new), names in edges.items())


@pytest.mark.parametrize(
    ("edges", "places"), [(BLOCK, BLOCK_PLACES), (REQUEST, REQUEST_PLACES)], ids=["block", "request"]
)
def test_no_words_lie_over_others_or_over_a_place(edges: Edges, places: dict[str, tuple[int, int]]) -> None:
    root = ElementTree.fromstring(svg(edges, places, "A life"))
    rooms = [
        tuple(float(each.get(side, "")) for side in ("x", "y", "width", "height"))
        for each in root.iter("{http://www.w3.org/2000/svg}rect")
        if each.get("x") is not None
    ]
    assert len(rooms) == len(places) + len(edges)
    for (x, y, wide, high), (u, v, wider, higher) in combinations(rooms, 2):
        assert x + wide <= u + 0.2 or u + wider <= x + 0.2 or y + high <= v + 0.2 or v + higher <= y + 0.2
