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


def unfiltered(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``log_min_ps``, ``top_ks`` and ``top_ps`` that leave out nothing."""
    return float64(-math.inf).repeat(count), torch.zeros(count, dtype=torch.int64), float64(1.0).repeat(count)


def assert_defined(draw, logits: torch.Tensor, kinds: list[SamplingParams]) -> None:
    """Each row gets the token that ``optimized.sampling`` defines for it."""
    found = draw(
        logits,
        float64(*(each.temperature for each in kinds)),
        float64(*(math.log(each.min_p) if each.min_p else -math.inf for each in kinds)),
        torch.tensor([each.top_k for each in kinds]),
        float64(*(each.top_p for each in kinds)),
        torch.tensor([key_of(7, 0, position) for position in range(len(kinds))]),
    )
    for row, params in enumerate(kinds):
        defined = sample(logits[row].numpy(), Draw(params, seed=7, sequence=0, position=row))
        assert found[row] == defined, params


@BOTH
@pytest.mark.parametrize("vocab_size", [1, 5, 2048, 5000])
def test_a_row_gets_the_token_of_the_definition(draw, vocab_size):
    kinds = [(0.0, 0.0), (1.0, 0.0), (0.3, 0.0), (5.0, 0.0), (1.0, 0.2), (2.0, 1.0)]
    logits = torch.randn(len(kinds), vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    assert_defined(draw, logits, [SamplingParams(temperature=heat, min_p=min_p) for heat, min_p in kinds])


FILTERS = [
    SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    for temperature, min_p, top_k, top_p in [
        (1.0, 0.0, 1, 1.0),
        (3.0, 0.0, 2, 1.0),
        (3.0, 0.0, 7, 1.0),
        (3.0, 0.0, 10_000, 1.0),
        (3.0, 0.0, 0, 0.9),
        (3.0, 0.0, 0, 0.5),
        (3.0, 0.0, 0, 1e-12),
        (3.0, 0.0, 0, 0.999999),
        (3.0, 0.0, 9, 0.7),
        (3.0, 0.1, 9, 0.7),
        (3.0, 0.3, 0, 0.6),
        (0.0, 0.0, 3, 0.3),
    ]
]


SLOW_TRITON = pytest.mark.parametrize(
    "draw",
    [pytest.param(cpu_draw_tokens, id="twin"), pytest.param(triton_draw_tokens, id="triton", marks=pytest.mark.slow)],
)  # a search is hundreds of turns, and the interpreter takes a millisecond for each


def test_top_k_and_top_p_leave_what_the_definition_leaves_of_five_tokens():
    logits = torch.randn(len(FILTERS), 5, generator=torch.Generator().manual_seed(1)) * 3
    assert_defined(triton_draw_tokens, logits[6:9], FILTERS[6:9])


@SLOW_TRITON
@pytest.mark.parametrize("vocab_size", [1, 5, 700])
def test_top_k_and_top_p_leave_what_the_definition_leaves(draw, vocab_size):
    logits = torch.randn(len(FILTERS), vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    assert_defined(draw, logits, FILTERS)


@SLOW_TRITON
@pytest.mark.parametrize("num_levels", [1, 2, 4])
def test_of_equal_logits_at_the_border_the_lowest_ids_stay(draw, num_levels):
    """Few different logits, both zeros among them, so that every border lies between equals."""
    random = torch.Generator().manual_seed(num_levels)
    levels = torch.tensor([0.0, -0.0, 1.5, -2.0])[:num_levels]
    both = SamplingParams(temperature=3.0, top_k=9, top_p=0.2)
    logits = levels[torch.randint(num_levels, (len(FILTERS) + 3, 530), generator=random)]
    assert_defined(draw, logits, [*FILTERS, both, both, both])


@SLOW_TRITON
def test_equals_are_counted_over_all_turns(draw):
    """More tokens than one turn looks at, all alike but one: the first that stays comes after the last of a turn."""
    logits = torch.zeros(4, 2100)
    logits[:, :2047] = -1.0
    kinds = [SamplingParams(temperature=3.0, top_k=top_k) for top_k in (1, 2, 2, 3)]
    assert_defined(draw, logits, kinds)


@SLOW_TRITON
def test_a_border_is_between_tokens_whatever_the_others_do(draw):
    """With weights 1/2, 1/4, 1/4 exactly one, two or three tokens stay; what is -inf never does."""
    logits = 9.0 * torch.tensor([[-math.inf, 0.0, math.log(2.0), 0.0]]).repeat(12, 1)
    heat, (log_min_ps, top_ks, _) = float64(9.0).repeat(12), unfiltered(12)
    for top_p, left in [(0.49, {2}), (0.5, {2}), (0.51, {1, 2}), (0.74, {1, 2}), (0.76, {1, 2, 3})]:
        found = draw(logits, heat, log_min_ps, top_ks, float64(top_p).repeat(12), torch.arange(12))
        assert set(found.tolist()) == left


@SLOW_TRITON
def test_a_filter_concerns_its_own_row(draw):
    logits = torch.randn(len(FILTERS), 40, generator=torch.Generator().manual_seed(2)) * 3
    columns = (
        float64(*(each.temperature for each in FILTERS)),
        float64(-math.inf).repeat(len(FILTERS)),
        torch.tensor([each.top_k for each in FILTERS]),
        float64(*(each.top_p for each in FILTERS)),
        torch.arange(len(FILTERS)),
    )
    together = draw(logits, *columns)
    for row in range(len(FILTERS)):
        assert draw(logits[row : row + 1], *(each[row : row + 1] for each in columns)) == together[row]


def test_many_draws_follow_the_softmax():
    """With probabilities 1/2, 1/4, 1/4: each count lies within five standard deviations."""
    logits = torch.tensor([[math.log(2.0), 0.0, 0.0]]).repeat(400, 1)
    keys = torch.tensor([key_of(1, 0, position) for position in range(400)])
    found = cpu_draw_tokens(logits, torch.ones(400, dtype=torch.float64), *unfiltered(400), keys)
    for token, share in enumerate((0.5, 0.25, 0.25)):
        deviation = math.sqrt(400 * share * (1 - share))
        assert abs(int((found == token).sum()) - 400 * share) < 5 * deviation


@BOTH
def test_of_equal_logits_the_lowest_id_is_taken(draw):
    logits = torch.zeros(1, 5000)
    logits[0, [4999, 3000, 123]] = 1.0
    assert draw(logits, float64(0.0), *unfiltered(1), torch.tensor([0])).tolist() == [123]


@BOTH
def test_rows_without_a_token_say_so_and_others_are_as_alone(draw):
    bad = [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]]
    logits = torch.tensor([*bad, [0.5, -math.inf], [0.0, 1.0]])
    temperatures, keys = float64(1.0, 1.0, 0.0, 1.0, 1.0), torch.arange(5)
    with np.errstate(invalid="ignore"):  # inf - inf, in the interpreter
        found = draw(logits, temperatures, *unfiltered(5), keys)
    assert found[:4].tolist() == [NO_TOKEN, NO_TOKEN, NO_TOKEN, 0]
    alone = draw(logits[4:], temperatures[4:], *unfiltered(1), keys[4:])
    assert alone.tolist() == found[4:].tolist()


@BOTH
def test_no_row_is_no_token(draw):
    nothing = torch.zeros(0, dtype=torch.float64)
    assert draw(torch.zeros(0, 5), nothing, *unfiltered(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_cpu_tensors_take_the_twin():
    arguments = torch.randn(2, 9), float64(0.0, 1.0), *unfiltered(2), torch.arange(2)
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
        ("top_ks", {"top_ks": torch.tensor([0, -1])}, -1, "at least 0"),
        ("top_ks", {"top_ks": torch.zeros(2, dtype=torch.int32)}, "int32", "int64"),
        ("top_ps", {"top_ps": float64(1.0, 0.0)}, 0.0, "more than 0"),
        ("top_ps", {"top_ps": float64(1.0, math.nan)}, "nan", "at most 1"),
        ("top_ps", {"top_ps": float64(1.0, 1.5)}, 1.5, "at most 1"),
        ("keys", {"keys": torch.zeros(2, dtype=torch.int32)}, "int32", "int64"),
    ],
)
def test_a_bad_draw_is_refused(draw, argument, change, found, needed):
    arguments = {
        "logits": torch.zeros(2, 3),
        "temperatures": float64(1.0, 0.0),
        "log_min_ps": float64(-math.inf, -1.0),
        "top_ks": torch.tensor([0, 2]),
        "top_ps": float64(1.0, 0.5),
        "keys": torch.arange(2),
    } | change
    with pytest.raises(BadArgument) as raised:
        draw(**arguments)
    assert raised.value.argument == argument
    assert str(found) in str(raised.value)
    assert str(needed) in str(raised.value)
