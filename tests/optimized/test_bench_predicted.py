"""What a simulated device foresees: the fit finds the costs that steps had, and the prediction is that of the same engine."""

import math
from itertools import product

import pytest

from optimized.bench_offline import Task
from optimized.bench_predicted import Fit, Measured, bench_predicted, foresee
from optimized.checkpoint import ModelConfig, random_checkpoint
from spec.vocabulary import Config, InvalidConfig

MODEL = ModelConfig(2, 16, 24, 4, 2, 8, vocab_size=32, max_model_len=64)
COSTS = (0.01, 0.001, 0.002, 0.00001)


def steps(costs: tuple[float, float, float, float]) -> list[Measured]:
    step_s, token_s, sample_s, pair_s = costs
    return [
        Measured(
            tokens, samples, tokens * length, step_s + token_s * tokens + sample_s * samples + pair_s * tokens * length
        )
        for tokens, samples, length in product((1, 8, 64), (1, 4), (16, 512))
    ]


def test_the_costs_of_a_linear_machine_are_found() -> None:
    fit = Fit.of(steps(COSTS))
    assert (fit.step_s, fit.token_s, fit.sample_s, fit.pair_s) == pytest.approx(COSTS)
    assert fit.median_error == pytest.approx(0.0, abs=1e-9)
    assert fit.num_steps == 12


def test_nothing_costs_less_than_nothing() -> None:
    fit = Fit.of(steps((0.01, 0.001, 0.0005, -0.0000004)))
    assert fit.pair_s == 0.0
    assert min(fit.step_s, fit.token_s, fit.sample_s) > 0.0


def test_what_is_foreseen_is_the_sum_of_the_steps_that_the_engine_makes() -> None:
    """Of two requests of 3 tokens: a step for both prompts, then two more."""
    step_s, token_s, sample_s, pair_s = COSTS
    tasks = [Task([1, 2], 3), Task([3, 4, 5], 3)]
    seconds, firsts = foresee(Config(num_blocks=8, block_size=4), tasks, Fit(*COSTS, num_steps=1, median_error=0.0))
    first_s = step_s + 5 * token_s + 2 * sample_s + (3 + 6) * pair_s
    later_s = 2 * (step_s + 2 * token_s + 2 * sample_s) + (3 + 4 + 4 + 5) * pair_s
    assert firsts == pytest.approx([first_s, first_s])
    assert seconds == pytest.approx(first_s + later_s)


def test_both_are_there_for_each_way_of_coming() -> None:
    tasks = [Task([1, 2, 3], 4), Task([4], 2), Task([5, 6], 3)]
    facts = bench_predicted(random_checkpoint(MODEL, 0), "auto", tasks, load=0.7, rounds=1)
    assert facts["tokens_out"] == 9
    assert len(facts["runs"]) == 2
    for run in facts["runs"].values():
        assert run.keys() == {"tokens_out_per_s", "ttft_p50_s", "ttft_p90_s"}
        assert all(each["measured"] > 0.0 and math.isfinite(each["error"]) for each in run.values())


def test_several_answers_to_a_prompt_are_not_predicted() -> None:
    with pytest.raises(InvalidConfig, match="n is 2, it must be 1"):
        bench_predicted(random_checkpoint(MODEL, 0), "auto", [Task([1], 1, n=2)], load=0.7, rounds=1)
