"""The kernels draw the tokens that ``optimized.sampling`` defines."""

import math

import numpy as np
import pytest
import torch

from kernels import NO_TOKEN, BadArgument, cpu_draw_tokens, draw_tokens, triton_draw_tokens
from kernels.sampling_twin import signed
from optimized.sampling import Draw, SamplingParams, absorb, sample

BOTH = pytest.mark.parametrize("draw", [cpu_draw_tokens, triton_draw_tokens], ids=["twin", "triton"])


def key_of(seed: int, sequence: int, position: int) -> int:
    return signed(absorb(absorb(absorb(0, seed), sequence), position))


def float64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@BOTH
@pytest.mark.parametrize("vocab_size", [1, 5, 2048, 5000])
def test_a_row_gets_the_token_of_the_definition(draw, vocab_size):
    kinds = [(0.0, 0.0), (1.0, 0.0), (0.3, 0.0), (5.0, 0.0), (1.0, 0.2), (2.0, 1.0)]
    logits = torch.randn(len(kinds), vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    keys = [key_of(7, 0, position) for position in range(len(kinds))]
    found = draw(
        logits,
        float64(*(temperature for temperature, _ in kinds)),
        float64(*(math.log(min_p) if min_p else -math.inf for _, min_p in kinds)),
        torch.tensor(keys),
    )
    for row, (temperature, min_p) in enumerate(kinds):
        params = SamplingParams(temperature=temperature, min_p=min_p)
        assert found[row] == sample(logits[row].numpy(), Draw(params, seed=7, sequence=0, position=row))


def test_many_draws_follow_the_softmax():
    """With probabilities 1/2, 1/4, 1/4: each count lies within five standard deviations."""
    logits = torch.tensor([[math.log(2.0), 0.0, 0.0]]).repeat(400, 1)
    keys = torch.tensor([key_of(1, 0, position) for position in range(400)])
    found = cpu_draw_tokens(logits, torch.ones(400, dtype=torch.float64), float64(-math.inf).repeat(400), keys)
    for token, share in enumerate((0.5, 0.25, 0.25)):
        deviation = math.sqrt(400 * share * (1 - share))
        assert abs(int((found == token).sum()) - 400 * share) < 5 * deviation


@BOTH
def test_of_equal_logits_the_lowest_id_is_taken(draw):
    logits = torch.zeros(1, 5000)
    logits[0, [4999, 3000, 123]] = 1.0
    assert draw(logits, float64(0.0), float64(-math.inf), torch.tensor([0])).tolist() == [123]


@BOTH
def test_rows_without_a_token_say_so_and_others_are_as_alone(draw):
    bad = [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]]
    logits = torch.tensor([*bad, [0.5, -math.inf], [0.0, 1.0]])
    temperatures, keys = float64(1.0, 1.0, 0.0, 1.0, 1.0), torch.arange(5)
    with np.errstate(invalid="ignore"):  # inf - inf, in the interpreter
        found = draw(logits, temperatures, float64(-math.inf).repeat(5), keys)
    assert found[:4].tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 0]
    alone = draw(logits[4:], temperatures[4:], float64(-math.inf), keys[4:])
    assert alone.tolist() == found[4:].tolist()


@BOTH
def test_no_row_is_no_token(draw):
    nothing = torch.zeros(0, dtype=torch.float64)
    assert draw(torch.zeros(0, 5), nothing, nothing, torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_cpu_tensors_take_the_twin():
    arguments = torch.randn(2, 9), float64(0.0, 1.0), float64(-math.inf, -math.inf), torch.arange(2)
    assert torch.equal(draw_tokens(*arguments), cpu_draw_tokens(*arguments))


@BOTH
@pytest.mark.parametrize(
    ("argument", "change", "found", "needed"),
    [
        ("logits", {"logits": torch.zeros(3)}, 1, 2),
        ("logits", {"logits": torch.zeros(2, 3).half()}, "float16", "float32"),
        ("logits", {"logits": torch.zeros(2, 0)}, 0, 1),
        ("logits", {"logits": torch.zeros(3, 2).T}, 2, 1),
        ("temperatures", {"temperatures": float64(1.0)}, 1, 2),
        ("temperatures", {"temperatures": float64(1.0, -1.0)}, -1.0, "finite numbers from 0"),
        ("temperatures", {"temperatures": float64(1.0, math.nan)}, "nan", "finite numbers from 0"),
        ("temperatures", {"temperatures": torch.ones(2)}, "float32", "float64"),
        ("log_min_ps", {"log_min_ps": float64(0.5, -1.0)}, 0.5, "at most 0"),
        ("keys", {"keys": torch.zeros(2, dtype=torch.int32)}, "int32", "int64"),
    ],
)
def test_a_bad_draw_is_refused(draw, argument, change, found, needed):
    arguments = {
        "logits": torch.zeros(2, 3),
        "temperatures": float64(1.0, 0.0),
        "log_min_ps": float64(-math.inf, -1.0),
        "keys": torch.arange(2),
    } | change
    with pytest.raises(BadArgument) as raised:
        draw(**arguments)
    assert raised.value.argument == argument
    assert str(found) in str(raised.value)
    assert str(needed) in str(raised.value)
