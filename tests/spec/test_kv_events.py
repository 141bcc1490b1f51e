"""vLLM's KV events, judged by the rules of the prefix cache: right streams pass, and each fault is named."""

import json

import pytest

import spec.replay  # noqa: F401  enters the rules
from spec.kv_events import StreamMonitor, StreamViolation, is_stream
from spec.trace import TraceError


def stored(hashes: list[object], tokens: list[int], parent: object = None, **more: object) -> dict[str, object]:
    facts = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": 2, "lora_id": None}
    return {"type": "BlockStored", **facts, "medium": "GPU", "lora_name": None, **more}


def removed(*hashes: object, **more: object) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


def follow(*values: object) -> int:
    return StreamMonitor().follow([json.dumps(value).encode() + b"\n" for value in values], "kv.jsonl")


def broken(*values: object) -> str:
    with pytest.raises(StreamViolation) as caught:
        follow(*values)
    return str(caught.value)


def test_a_right_stream_passes() -> None:
    story = (stored(["a", "b"], [1, 2, 3, 4]), stored(["c"], [5, 6], "b"), removed("c", "b"))
    assert follow(*story, stored(["d"], [5, 6], "a"), CLEARED, stored([7], [1, 2])) == 6


def test_batches_and_arrays_are_the_same_events() -> None:
    event = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU"]
    batch = [17.5, [event, ["BlockRemoved", [12], "GPU"]], 0]
    assert follow(batch, {"ts": 18.0, "events": [removed(11)], "data_parallel_rank": 0}) == 3


def test_a_hash_may_be_in_two_blocks_and_is_removed_twice() -> None:
    twice = (stored(["a"], [1, 2]), stored(["a"], [1, 2]), removed("a"), removed("a"))
    assert follow(*twice) == 4
    assert "nothing is stored under 'a'" in broken(*twice, removed("a"))


def test_ranks_media_and_groups_do_not_mix() -> None:
    assert broken(stored(["a"], [1, 2]), removed("a", medium="CPU")).startswith("CACHE-9 ")
    assert broken(stored(["a"], [1, 2], group_idx=0), removed("a", group_idx=1)).startswith("CACHE-9 ")
    first, second = (
        {"ts": 0, "data_parallel_rank": rank, "events": [event]} for rank, event in enumerate([CLEARED] * 2)
    )
    one = {**first, "events": [stored(["a"], [1, 2])]}
    assert follow(one, second, {**first, "events": [removed("a")]}) == 3


def test_a_block_that_was_never_stored_is_not_removed() -> None:
    report = broken(stored(["a"], [1, 2]), removed("b"))
    assert report.splitlines()[0].startswith("CACHE-9 does not hold: Only a cached block that nobody holds is evicted")
    assert "  event     BlockRemoved(block_hashes=['b'])" in report


def test_a_hash_does_not_change_its_tokens() -> None:
    report = broken(stored(["a"], [1, 2]), stored(["a"], [1, 3]))
    assert report.startswith("CACHE-1 ")
    assert "  before    {'a': parent None, tokens (1, 2)}\n  now       {'a': parent None, tokens (1, 3)}" in report


def test_a_hash_does_not_change_its_parent() -> None:
    assert broken(stored(["a", "b"], [1, 2, 3, 4]), stored(["b"], [3, 4])).startswith("CACHE-1 ")


def test_a_parent_is_stored_first() -> None:
    assert "nothing is stored under the parent 'x'" in broken(stored(["a"], [1, 2], "x"))
    assert follow(stored(["a"], [1, 2], "x", kv_cache_spec_sliding_window=64)) == 1, "a window lets parents go"


def test_nothing_is_left_after_a_clear() -> None:
    first = stored(["a"], [1, 2])
    assert broken(first, CLEARED, removed("a")).startswith("CACHE-9 ")
    assert broken(first, CLEARED, stored(["b"], [3, 4], "a")).startswith("CACHE-1 ")
    assert follow(first, CLEARED, stored(["a"], [9, 9])) == 3, "a hash may stand for something else then"


def test_only_whole_blocks_are_stored() -> None:
    assert broken(stored(["a"], [1, 2, 3])).startswith("CACHE-2 ")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (stored(["a"], [1, 2], 1.5), "the field 'parent_block_hash' is 1.5, it must be a hash or null"),
        (stored("a", [1, 2]), "the field 'block_hashes' is 'a', it must be a list of hashes"),  # type: ignore[arg-type]
        (stored(["a"], [1, True]), "the field 'token_ids' is [1, True], it must be a list of whole numbers"),
        (stored(["a"], [1], block_size=0), "the field 'block_size' is 0, it must be a whole number, at least 1"),
        ({"type": "BlockMoved"}, "the field 'type' is 'BlockMoved', it must be one of"),
        (7, "7 is no KV event"),
        ([1.0, [7]], "7 is no KV event"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(value: object, message: str) -> None:
    with pytest.raises(TraceError, match=r"^kv\.jsonl, line 1: ") as caught:
        follow(value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "problem"),
    [(b"[1", "the stream is cut off"), (b'["\xff"]\n', "byte 3 is no UTF-8"), (b"{\n", "this is no JSON")],
)
def test_a_line_that_is_none_is_named(line: bytes, problem: str) -> None:
    with pytest.raises(TraceError) as caught:
        StreamMonitor().follow([line], "kv.jsonl")
    assert caught.value.problem == problem


def test_a_stream_is_known_by_its_first_line() -> None:
    for value in (CLEARED, [0.0, []], {"ts": 0, "events": []}):
        assert is_stream(json.dumps(value).encode())
    for line in (b'{"format": "kvproof trace"}', b"hello", b"7", b"\xff"):
        assert not is_stream(line)
