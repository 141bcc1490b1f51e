"""The reference's sampling, and that the optimized one, written from the same definition, draws the same tokens."""

import numpy as np
import pytest

from optimized.sampling import Draw, SamplingParams
from optimized.sampling import sample as optimized_sample
from reference.sampling import Sampling, candidates, sample, uniform

CASES = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.3, seed=2**63),
    Sampling(temperature=1.5, top_k=4, seed=1),
    Sampling(temperature=1.0, top_p=0.6, seed=5),
    Sampling(temperature=1.0, min_p=0.2, seed=6),
    Sampling(temperature=2.0, top_k=9, top_p=0.8, min_p=0.02, seed=7),
]


def logits(seed: int) -> np.ndarray:
    """Float32 numbers, coarse enough that some are equal."""
    draw = np.random.Generator(np.random.PCG64(seed)).standard_normal(40)
    return np.round(2 * draw, 1).astype(np.float32)


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_both_engines_draw_the_same_token(sampling: Sampling) -> None:
    params = SamplingParams(
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p
    )
    for position in range(50):
        row = logits(position)
        expected = optimized_sample(row, Draw(params, seed=sampling.seed, sequence=2, position=position))
        drawn = sample(row.astype(np.float64), sampling, sequence=2, position=position)
        assert drawn == expected, f"position {position}"


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    assert sample(np.array([1.0, 3.0, 3.0]), Sampling(), sequence=0, position=0) == 1


def test_candidates_stand_in_the_order_of_likelihood() -> None:
    assert candidates([0.0, 2.0, 1.0, 2.0], Sampling(top_k=3)) == [1, 3, 2]
    assert candidates([0.0, 9.0, 9.0], Sampling(top_p=0.4)) == [1]
    assert candidates([0.0, 9.0, 8.9], Sampling(min_p=0.5)) == [1, 2]


def test_a_token_is_drawn_as_often_as_it_is_likely() -> None:
    row = np.log(np.array([0.7, 0.2, 0.1]))
    counts = np.zeros(3)
    for position in range(4000):
        counts[sample(row, Sampling(temperature=1.0, seed=11), sequence=0, position=position)] += 1
    # Four standard deviations of a binomial count.
    for count, p in zip(counts, (0.7, 0.2, 0.1), strict=True):
        assert abs(count - 4000 * p) <= 4 * np.sqrt(4000 * p * (1 - p))


def test_every_argument_changes_the_draw() -> None:
    base = {"seed": 1, "sequence": 2, "position": 3, "token": 4}
    others = [uniform(**(base | {name: value + 1})) for name, value in base.items()]
    assert len({uniform(**base), *others}) == 5


@pytest.mark.parametrize("bad", [np.array([1.0, np.nan]), np.array([np.inf, 0.0]), np.array([-np.inf, -np.inf])])
def test_logits_without_a_number_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(ArithmeticError):
        sample(bad, Sampling(), sequence=0, position=0)
