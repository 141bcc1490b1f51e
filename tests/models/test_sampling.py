"""The sampler: its definition, written once more in plain Python, and what follows from it."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimized.adjustment import adjusted
from optimized.sampling import (
    BadLogits,
    Draw,
    SamplingParams,
    derived_seed,
    logprob,
    logprobs,
    sample,
    sample_rows,
    survivors,
    uniforms,
)
from spec.conformance.text import reported_log_probabilities
from spec.engine import InvalidField, InvalidRequest

MODULUS = 1 << 64
FINITE = st.floats(-30, 30, width=32)
ROWS = st.lists(FINITE | st.just(-math.inf), min_size=1, max_size=40).filter(lambda row: max(row) > -math.inf)
FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.1, 0.7, 1.0, 1.5, 100.0]),
        "top_k": st.sampled_from([0, -1, 1, 2, 5, 1000]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    }
)
COUNTERS = st.tuples(st.integers(0, MODULUS - 1), st.integers(0, 63), st.integers(0, 1 << 20))


def array(row: list[float]) -> np.ndarray:
    return np.array(row, np.float32)


# --- the definition, once more ----------------------------------------------------------------------------------------


def plain_absorb(state: int, value: int) -> int:
    z = (state + (value + 1) * 0x9E3779B97F4A7C15) % MODULUS
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ z >> 27) * 0x94D049BB133111EB % MODULUS
    return z ^ z >> 31


def plain_uniform(seed: int, sequence: int, position: int, token_id: int) -> float:
    state = 0
    for value in (seed, sequence, position, token_id):
        state = plain_absorb(state, value)
    return ((state >> 12) + 0.5) / 2**52


def plain_survivors(x: list[float], params: SamplingParams) -> list[int]:
    token_ids = list(range(len(x)))
    if params.min_p > 0:
        token_ids = [t for t in token_ids if x[t] >= max(x) + math.log(params.min_p)]
    token_ids.sort(key=lambda t: (-x[t], t))
    if params.top_k > 0:
        token_ids = token_ids[: params.top_k]
    if params.top_p < 1:
        sums = np.cumsum(np.exp(np.array([x[t] for t in token_ids]) - max(x))).tolist()
        token_ids = [t for i, t in enumerate(token_ids) if i == 0 or sums[i - 1] < params.top_p * sums[-1]]
    return sorted(token_ids)


@given(row=ROWS, filters=FILTERS, counter=COUNTERS)
def test_the_sampler_does_what_its_definition_says(
    row: list[float], filters: dict[str, Any], counter: tuple[int, int, int]
) -> None:
    params = SamplingParams(**filters)
    x = [float(np.float32(logit)) / params.temperature for logit in row]
    token_ids = plain_survivors(x, params)
    assert survivors(np.array(x), params).tolist() == token_ids
    scores = {t: x[t] - math.log(-math.log(plain_uniform(*counter, t))) for t in token_ids}
    chosen = sample(array(row), Draw(params, seed=counter[0], sequence=counter[1], position=counter[2]))
    assert scores[chosen] >= max(scores.values()) - 1e-12  # the two logarithms differ in the last place


@given(counter=COUNTERS, first=st.integers(0, 100_000))
def test_uniform_numbers_are_the_documented_ones(counter: tuple[int, int, int], first: int) -> None:
    token_ids = np.arange(first, first + 5)
    found = uniforms(seed=counter[0], sequence=counter[1], position=counter[2], token_ids=token_ids)
    assert found.tolist() == [plain_uniform(*counter, t) for t in range(first, first + 5)]


def test_neither_0_nor_1_can_come_out() -> None:
    for bits in (0, MODULUS - 1):
        assert 0.0 < ((bits >> 12) + 0.5) / 2**52 < 1.0


# --- what follows -----------------------------------------------------------------------------------------------------
@given(row=st.lists(st.integers(-3, 3), min_size=1, max_size=20))
def test_temperature_0_takes_the_lowest_id_of_the_largest(row: list[int]) -> None:
    assert sample(array(row), Draw(SamplingParams(temperature=0), seed=1, sequence=2, position=3)) == row.index(
        max(row)
    )


@given(rows=st.lists(st.lists(FINITE, min_size=7, max_size=7), min_size=1, max_size=6), data=st.data())
def test_neighbours_do_not_matter(rows: list[list[float]], data: st.DataObject) -> None:
    params = [SamplingParams(**data.draw(FILTERS)) for _ in rows]
    draws = [Draw(each, seed=place % 2, sequence=place, position=5) for place, each in enumerate(params)]
    together = sample_rows(array(rows), draws)
    alone = [sample_rows(array([row]), [draw])[0] for row, draw in zip(rows, draws, strict=True)]
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = sample_rows(array([rows[i] for i in order]), [draws[i] for i in order])
    assert together == alone
    assert shuffled == [together[i] for i in order]


@pytest.mark.slow
def test_tokens_come_as_often_as_they_are_likely() -> None:
    logits = array([0.0, 1.0, 2.0, -math.inf, 0.5])
    params, total = SamplingParams(temperature=0.8), 20_000
    weights = np.exp(logits.astype(np.float64) / 0.8)
    counts = Counter(sample(logits, Draw(params, seed=3, sequence=0, position=position)) for position in range(total))
    for token_id, probability in enumerate(weights / weights.sum()):
        spread = math.sqrt(total * probability * (1 - probability))
        assert abs(counts[token_id] - total * probability) <= 4 * spread, token_id


@pytest.mark.parametrize("changed", ["seed", "sequence", "position"])
def test_each_number_changes_the_draws(changed: str) -> None:
    logits = np.zeros(1000, np.float32)
    counters = [{"seed": 1, "sequence": 1, "position": 1} | {changed: value} for value in range(200)]
    tokens = {sample(logits, Draw(SamplingParams(), **counter)) for counter in counters}
    assert len(tokens) > 150


def test_seeds_sequences_and_positions_do_not_stand_in_for_each_other() -> None:
    numbers = [
        float(uniforms(seed=seed, sequence=sequence, position=position, token_ids=np.arange(1))[0])
        for seed in range(12)
        for sequence in range(12)
        for position in range(12)
    ]
    assert len(set(numbers)) == 12**3


def test_derived_seeds_differ() -> None:
    assert len({derived_seed(engine, ordinal) for engine in range(30) for ordinal in range(30)}) == 900


@pytest.mark.parametrize(
    "row", [[0.0, math.nan], [math.nan, math.nan], [0.0, math.inf], [-math.inf, -math.inf]], ids=str
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_concern_their_own_row_only(row: list[float], temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    draws = [Draw(params, seed=0, sequence=0, position=position) for position in range(3)]
    first, bad, last = sample_rows(array([[1.0, 50.0], row, [50.0, 1.0]]), draws)
    assert (first, last) == (1, 0)
    assert isinstance(bad, BadLogits)
    assert bad.num_nan == sum(math.isnan(logit) for logit in row)


# --- what changes logits first ----------------------------------------------------------------------------------------

VOCAB = 6
ADJUSTMENTS = st.fixed_dictionaries(
    {},
    optional={
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=1),
        "min_tokens": st.integers(0, 4),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100)),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "frequency_penalty": st.floats(-2, 2),
        "presence_penalty": st.floats(-2, 2),
    },
)
HISTORIES = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


def plain_adjusted(row: list[float], draw: Draw) -> list[float]:
    params, output = draw.params, list(draw.tokens[draw.num_prompt_tokens :])
    x = list(row)
    for token in range(len(x)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -math.inf
        if any(
            word[-1] == token and output[len(output) - len(word) + 1 :] == list(word[:-1]) for word in draw.bad_words
        ):
            x[token] = -math.inf
        if len(output) < params.min_tokens and token in draw.end_token_ids:
            x[token] = -math.inf
        x[token] += dict(params.biases).get(token, 0.0)
        if token in draw.tokens:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        if token in output:
            x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


@given(
    row=st.lists(FINITE, min_size=VOCAB, max_size=VOCAB),
    fields=ADJUSTMENTS,
    tokens=HISTORIES,
    num_prompt_tokens=st.integers(1, 8),
    bad_words=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple), max_size=2),
)
def test_adjustments_do_what_their_definition_says(
    row: list[float],
    fields: dict[str, Any],
    tokens: list[int],
    num_prompt_tokens: int,
    bad_words: list[tuple[int, ...]],
) -> None:
    params = SamplingParams(temperature=0, bad_words=["x"] * len(bad_words), **fields)
    start = min(num_prompt_tokens, len(tokens))
    draw = Draw(params, 1, 0, len(tokens), tokens, start, (0, 3), bad_words)
    expected = plain_adjusted([float(x) for x in array(row)], draw)
    np.testing.assert_allclose(adjusted(array(row), draw), expected, rtol=1e-12, atol=1e-12)
    [chosen] = sample_rows(array([row]), [draw])
    if max(expected) == -math.inf:
        assert isinstance(chosen, BadLogits)
        assert "leave no token" in str(chosen)
    else:
        assert isinstance(chosen, int)
        assert expected[chosen] >= max(expected) - 1e-9


def test_x12_penalties_of_a_row_do_not_touch_its_neighbours() -> None:
    rows = array([[1.0, 1.5, 0.0]] * 3)
    penalized = Draw(SamplingParams(temperature=0, presence_penalty=2.0), 0, 0, 2, (1, 1), 1)
    plain = Draw(SamplingParams(temperature=0), 0, 0, 2, (1, 1), 1)
    assert sample_rows(rows, [plain, penalized, plain]) == [1, 0, 1]
    assert rows.tolist() == [[1.0, 1.5, 0.0]] * 3


def test_forced_tokens_come_whatever_the_logits_say_and_then_the_model_goes_on() -> None:
    params = SamplingParams(temperature=0, forced_token_ids=[2, 0])
    draws = [Draw(params, 0, 0, position, range(position), 3) for position in (3, 4, 5)]
    assert sample_rows(array([[0.0, 9.0, 1.0]] * 3), draws) == [2, 0, 1]


@given(row=st.lists(st.integers(-9, 9).map(float), min_size=1, max_size=30), num_top=st.integers(0, 20), data=st.data())
def test_x9_log_probabilities_are_the_chosen_one_and_the_likeliest(
    row: list[float], num_top: int, data: st.DataObject
) -> None:
    chosen = data.draw(st.integers(0, len(row) - 1))
    found = logprobs(array(row), chosen, num_top)
    expected = reported_log_probabilities([float(x) for x in array(row)], chosen, num_top)
    assert list(found) == list(expected)
    for token, each in found.items():
        assert math.isclose(each.logprob, expected[token], rel_tol=1e-9, abs_tol=1e-9)
    assert found[chosen].rank == sum(x >= array(row)[chosen] for x in array(row))


@given(row=st.lists(FINITE, min_size=1, max_size=30))
def test_probabilities_sum_to_one(row: list[float]) -> None:
    total = math.fsum(math.exp(logprob(array(row), token_id)) for token_id in range(len(row)))
    assert math.isclose(total, 1.0, rel_tol=1e-12)


# --- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, math.nan) for field in ("temperature", "top_p", "min_p")],
        *[(field, math.inf) for field in ("temperature", "top_p", "min_p")],
        *[(field, True) for field in ("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")],
        *[(field, "1") for field in ("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")],
        *[(field, 1.5) for field in ("n", "top_k", "max_tokens", "seed")],
        ("n", 0),
        ("n", 65),
        ("temperature", -0.1),
        ("temperature", 1e-6),
        ("temperature", 5e-324),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 1 << 64),
        ("max_tokens", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", ["a"] * 65),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", 1),
        ("min_tokens", 17),
        ("min_tokens", -1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {token: 1.0 for token in range(1025)}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", True),
        ("forced_token_ids", ["a"]),
        ("forced_token_ids", None),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_limit(field: str, value: object) -> None:
    with pytest.raises(InvalidField) as caught:
        SamplingParams(**{field: value})
    assert isinstance(caught.value, InvalidRequest)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} is ")


def test_unknown_parameters_are_not_accepted() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_lists_become_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert hash(params) == hash(SamplingParams(stop=["end"], stop_token_ids=(1, 2)))
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()
    assert SamplingParams(logit_bias={3: 1}) == SamplingParams(logit_bias=((3, 1.0),))
    assert hash(SamplingParams(logit_bias={3: 1})) == hash(SamplingParams(logit_bias={3: 1.0}))
