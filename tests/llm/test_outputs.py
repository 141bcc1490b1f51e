"""Text that grows and stops: what was shown is never taken back, and no stop string is ever shown."""

from hypothesis import given
from hypothesis import strategies as st

from optimized.outputs import OutputText
from optimized.tokenizer import Detokenizer


class Spelled(Detokenizer):
    """Token i is the i-th piece; the last piece comes only when the text is finished."""

    def __init__(self, pieces: list[str], held: str = "") -> None:
        self.pieces = pieces
        self.held = held

    def add(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return self.held


letters = st.text("ab", max_size=4)


@given(st.lists(letters, max_size=12), letters, st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_shown_stays_and_has_no_stop_string(pieces: list[str], held: str, stop: list[str]) -> None:
    text = OutputText(Spelled(pieces, held), stop)
    shown = [text.settled]
    for token_id in range(len(pieces)):
        text.add(token_id)
        shown.append(text.settled)
    text.finish()
    assert text.settled == text.text
    assert all(text.text.startswith(each) for each in shown)
    assert [*map(len, shown)] == sorted(map(len, shown))
    assert ("".join(pieces) + held).startswith(text.text)
    assert not any(each in text.text for each in stop)
    assert (text.stopped_by is not None) == any(each in "".join(pieces) + held for each in stop)


@given(st.lists(letters, max_size=12), letters)
def test_without_stop_strings_everything_is_shown_at_once(pieces: list[str], held: str) -> None:
    text = OutputText(Spelled(pieces, held))
    for token_id in range(len(pieces)):
        text.add(token_id)
        assert text.settled == "".join(pieces[: token_id + 1])
    text.finish()
    assert text.settled == text.text == "".join(pieces) + held


def test_the_first_occurrence_in_the_whole_text_counts() -> None:
    text = OutputText(Spelled(["one tw", "o three two"]), ["three", "two"])
    text.add(0)
    assert (text.text, text.settled) == ("one tw", "one ")
    text.add(1)
    assert (text.text, text.stopped_by) == ("one ", "two")


def test_a_stopped_text_does_not_grow() -> None:
    text = OutputText(Spelled(["a stop here", "more"], "held"), ["stop"])
    text.add(0)
    text.add(1)
    text.finish()
    assert text.text == "a "


def test_a_stop_string_may_be_completed_by_what_was_held_back() -> None:
    text = OutputText(Spelled(["en"], "d"), ["end"])
    text.add(0)
    assert text.settled == ""
    text.finish()
    assert (text.text, text.stopped_by) == ("", "end")


def test_without_a_tokenizer_there_is_no_text() -> None:
    text = OutputText(None)
    text.add(3)
    text.finish()
    assert text.text == ""
