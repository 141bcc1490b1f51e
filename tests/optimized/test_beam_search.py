"""Beam search against its definition and against all answers there are, without an engine."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimized.beam_search import BeamSearch, BeamSearchParams, Hypothesis
from optimized.device import Branches, Failure
from optimized.sampling import log_softmax
from spec.engine import InvalidField

VOCAB, END = 3, 2


def logits_after(tokens: tuple[int, ...], seed: int) -> np.ndarray:
    """A row that depends on every token so far."""
    return np.random.default_rng([seed, *tokens]).normal(0.0, 2.0, VOCAB).astype(np.float32)


def searched(params: BeamSearchParams, seed: int) -> tuple[BeamSearch, int]:
    """A whole search, driven as the engine drives it, and the number of its steps."""
    width, ids = params.beam_width, itertools.count(100)
    search = BeamSearch(params, (END,), tuple(range(width)), lambda: next(ids))
    lines: dict[int, tuple[int, ...]] = dict.fromkeys(range(width), ())
    for step in range(params.max_tokens):
        chosen = search.choose({seq_id: logits_after(tokens, seed) for seq_id, tokens in lines.items()})
        assert chosen.keys() == lines.keys()
        grown = {}
        for seq_id, what in chosen.items():
            branches = what.tokens if isinstance(what, Branches) else ((seq_id, what),)
            assert not branches or branches[0][0] == seq_id, "the first branch keeps the name"
            grown |= {name: (*lines[seq_id], token) for name, token in branches}
        assert {name: beam.token_ids for name, beam in search.beams.items()} == grown
        assert len(grown) <= width
        lines = grown
        if not lines:
            return search, step + 1
    return search, params.max_tokens


def all_answers(seed: int, max_tokens: int) -> Iterator[Hypothesis]:
    """Every answer: it ends with the end token, or has the most tokens."""
    open_lines = [Hypothesis((), 0.0)]
    while open_lines:
        line = open_lines.pop()
        logs = log_softmax(logits_after(line.token_ids, seed))
        for token in range(VOCAB):
            made = Hypothesis((*line.token_ids, token), line.log_probability + float(logs[token]), token == END)
            if made.is_ended or len(made.token_ids) == max_tokens:
                yield made
            else:
                open_lines.append(made)


def scores(answers: list[Hypothesis], penalty: float) -> list[float]:
    return [round(answer.score(penalty), 9) for answer in answers]


@given(seed=st.integers(0, 1000), penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]), max_tokens=st.integers(1, 3))
def test_with_room_for_all_answers_the_best_of_all_are_found(seed: int, penalty: float, max_tokens: int) -> None:
    params = BeamSearchParams(beam_width=27, max_tokens=max_tokens, length_penalty=penalty)
    search, _ = searched(params, seed)
    expected = sorted(all_answers(seed, max_tokens), key=lambda answer: answer.score(penalty), reverse=True)[:27]
    assert scores(search.results(), penalty) == scores(expected, penalty)


@given(seed=st.integers(0, 1000), width=st.integers(1, 4), max_tokens=st.integers(1, 6))
def test_without_an_end_the_beams_are_the_likeliest_continuations_of_the_beams(
    seed: int, width: int, max_tokens: int
) -> None:
    search, num_steps = searched(BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=True), seed)
    beams = [Hypothesis((), 0.0)]
    for _ in range(max_tokens):
        grown = [
            Hypothesis((*beam.token_ids, token), beam.log_probability + float(logs[token]))
            for beam in beams
            for logs in [log_softmax(logits_after(beam.token_ids, seed))]
            for token in range(VOCAB)
        ]
        beams = sorted(grown, key=lambda beam: -beam.log_probability)[:width]
    assert num_steps == max_tokens
    assert search.results() == beams


@given(seed=st.integers(0, 300), width=st.integers(1, 3), penalty=st.sampled_from([-0.5, 0.0, 1.0, 1.5]))
def test_to_stop_when_nothing_can_become_better_changes_no_result(seed: int, width: int, penalty: float) -> None:
    class Patient(BeamSearch):
        def _is_over(self, best: Hypothesis) -> bool:
            return False

    params = BeamSearchParams(beam_width=width, max_tokens=6, length_penalty=penalty)
    search, _ = searched(params, seed)
    ids = itertools.count(100)
    patient = Patient(params, (END,), tuple(range(width)), lambda: next(ids))
    lines = dict.fromkeys(range(width), ())
    for _ in range(6):
        patient.choose({seq_id: logits_after(tokens, seed) for seq_id, tokens in lines.items()})
        lines = {seq_id: beam.token_ids for seq_id, beam in patient.beams.items()}
    assert scores(search.results(), penalty) == scores(patient.results(), penalty)


def test_early_stopping_ends_with_enough_answers() -> None:
    counts = [
        searched(BeamSearchParams(beam_width=2, max_tokens=8, early_stopping=early), 5)[1] for early in (True, False)
    ]
    assert counts[0] <= counts[1]


def test_a_row_without_numbers_ends_the_search_and_says_so() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=3), (END,), (0, 1), lambda: 9)
    chosen = search.choose({0: np.full(VOCAB, np.nan, np.float32), 1: np.zeros(VOCAB, np.float32)})
    assert all(isinstance(each, Failure) for each in chosen.values())
    assert search.failure is not None
    assert "3 logits are NaN" in search.failure


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 65),
        ("max_tokens", 0),
        ("length_penalty", math.nan),
        ("early_stopping", "never"),
    ],
)
def test_what_makes_no_sense_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidField, match=f"^{field} is "):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | {field: value}))
