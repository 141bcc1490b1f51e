"""Text, usage and draws: what the specification defines is what the engine shows."""

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from optimized.outputs import OpenOutput, OpenRequest, OutputText
from optimized.sampling import Draw, SamplingParams, logprob, sample, sample_rows, uniforms
from optimized.tokenizer import Detokenizer, Tokenizer, byte_level_bpe
from spec.conformance import text
from tests.models.tiny_files import vocabulary


class Spelled(Detokenizer):
    """Token i is the i-th piece."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def add(self, token_id: int) -> str:
        return self.pieces[token_id]

    def finish(self) -> str:
        return ""


def tiny() -> Tokenizer:
    tokens, types, merges = vocabulary()
    return byte_level_bpe(tokens, types, merges, pre_type="smollm", bos_token_id=260, eos_token_ids=(261,))


def error(log_probabilities: Sequence[float]) -> float:
    """How far float64 may be off: one rounding a term of the sum, and one of the largest number for each of the four
    operations around it, a logit or a result. Of a probability it is the same, relative to it."""
    size = max(1.0, *map(abs, log_probabilities))
    return (len(log_probabilities) + 4 * size) * float(np.finfo(np.float64).eps)


def stream(pieces: list[str], stop: list[str]) -> tuple[OutputText, list[str]]:
    """The finished text, and what was shown at first and after each piece."""
    output = OutputText(Spelled(pieces), stop)
    shown = [output.settled]
    for token_id in range(len(pieces)):
        output.add(token_id)
        shown.append(output.settled)
    output.finish()
    return output, shown


PIECES = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
TOKEN_IDS = st.lists(st.integers(0, 261), max_size=30)
LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20)
SEEDS = st.integers(0, 2**64 - 1)


@given(PIECES, STOPS)
def test_x3_text_is_cut_before_the_first_stop_string(pieces: list[str], stop: list[str]) -> None:
    output, _ = stream(pieces, stop)
    expected, used = text.answer(pieces, stop)
    assert output.text == expected
    assert (output.stopped_by is None) == (text.first_stop("".join(pieces), stop) is None)
    assert used == len(pieces) or output.stopped_by is not None


@given(PIECES, STOPS)
def test_x3_nothing_that_may_belong_to_a_stop_string_is_shown(pieces: list[str], stop: list[str]) -> None:
    _, shown = stream(pieces, stop)
    assert text.shows_only_what_stays(shown, pieces, stop)
    assert text.only_grows(shown)


def test_x3_text_that_was_taken_back_is_noticed() -> None:
    assert not text.shows_only_what_stays(["", "t", ""], ["t", "wo"], ["two"])
    assert not text.only_grows(["t", ""])


@given(TOKEN_IDS)
def test_x4_the_pieces_are_the_text_that_is_decoded_at_once(token_ids: list[int]) -> None:
    tokenizer = tiny()
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add(token_id) for token_id in token_ids]
    assert text.pieces_are_the_whole([*pieces, detokenizer.finish()], tokenizer.decode(token_ids))


@given(TOKEN_IDS, STOPS)
def test_x5_the_text_is_that_of_the_ids(token_ids: list[int], stop: list[str]) -> None:
    tokenizer = tiny()
    output = OpenOutput(0, OutputText(tokenizer.detokenizer(), stop))
    for token_id in token_ids:
        if output.finish_reason is None:
            output.take(token_id, None)
    output.text.finish()
    shown = output.shown()
    assert text.is_text_of_ids(shown.text, tokenizer.decode(shown.token_ids), stop)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(TOKEN_IDS, min_size=1, max_size=3))
def test_x6_usage_counts_the_prompt_once_and_every_answer(prompt: list[int], answers: list[list[int]]) -> None:
    outputs = {i: OpenOutput(i, OutputText(None)) for i in range(len(answers))}
    request = OpenRequest("0", 0, None, prompt, outputs)
    for i, token_ids in enumerate(answers):
        for token_id in token_ids:
            outputs[i].take(token_id, None)
    shown = request.shown()
    used = text.usage_of(shown.prompt_token_ids, [output.token_ids for output in shown.outputs])
    assert used == text.Usage(len(prompt), sum(map(len, answers)))
    assert used.num_tokens == len(prompt) + sum(map(len, answers))


@given(st.lists(LOGITS, min_size=1, max_size=4), SEEDS)
def test_x7_a_draw_depends_on_its_own_request_only(rows: list[list[float]], seed: int) -> None:
    width = min(map(len, rows))
    logits = np.array([row[:width] for row in rows], np.float32)
    draws = [Draw(SamplingParams(temperature=0.5 + i), seed, i, 7) for i in range(len(rows))]
    together = {i: [token] for i, token in enumerate(sample_rows(logits, draws)) if isinstance(token, int)}
    alone = {i: [sample(logits[i], d)] for i, d in enumerate(draws)}
    assert len(together) == len(rows)
    assert text.depends_on_itself_only(alone, together)


@given(SEEDS, st.integers(0, 1000))
def test_c6_siblings_draw_from_streams_of_their_own(seed: int, position: int) -> None:
    token_ids = np.arange(4)
    streams = [
        uniforms(seed=seed, sequence=sequence, position=position, token_ids=token_ids).tolist() for sequence in range(8)
    ]
    assert text.are_distinct(streams)
    again = uniforms(seed=seed, sequence=3, position=position, token_ids=token_ids).tolist()
    assert again == streams[3]


@given(LOGITS)
def test_x9_a_log_probability_is_that_of_its_row(row: list[float]) -> None:
    exact = text.log_probabilities([float(x) for x in np.array(row, np.float32)])
    assert all(abs(logprob(np.array(row, np.float32), i) - exact[i]) <= error([*exact, *row]) for i in range(len(row)))


def test_x9_0_means_the_chosen_token_only() -> None:
    assert list(text.reported_log_probabilities((0.0, 2.0, 1.0), chosen=0, num_top=0)) == [0]
    assert list(text.reported_log_probabilities((0.0, 2.0, 2.0), chosen=2, num_top=1)) == [2, 1]


@given(LOGITS)
def test_x11_probabilities_are_finite_and_sum_to_one(row: list[float]) -> None:
    probabilities = [math.exp(logprob(np.array(row, np.float32), i)) for i in range(len(row))]
    assert text.is_distribution(
        probabilities, 2 * error([logprob(np.array(row, np.float32), i) for i in range(len(row))])
    )
    assert not text.is_distribution([math.nan, 1.0], error=1.0)
