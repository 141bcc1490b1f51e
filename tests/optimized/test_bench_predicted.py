"""What a simulated device foresees: the fit finds the costs that steps had, and the prediction is that of the same engine."""

import math
from itertools import product

import numpy as np
import pytest

from optimized.bench_offline import Task
from optimized.bench_predicted import GROUP_STEPS, GROUPS, Fit, Measured, bench_predicted, foresee, group, work_of
from optimized.checkpoint import ModelConfig, random_checkpoint
from optimized.engine import EngineCore
from optimized.simulated_device import ModelCost, Rates, SimulatedDevice
from spec.vocabulary import Config, InvalidConfig, Request

MODEL = ModelConfig(2, 16, 24, 4, 2, 8, vocab_size=32, max_model_len=64)
COSTS = (0.01, 0.004, 0.002, 0.001, 0.002, 0.00001, 0.00003)
"""Of a step; of a token up to the first knot, up to the second one, and after it; of a sample, a pair and a key."""


def steps(costs: tuple[float, ...]) -> list[Measured]:
    found = []
    for tokens, samples, length, is_prompt in product((1, 4, 20, 64), (1, 4), (16, 512), (False, True)):
        keys = length if is_prompt else tokens * length
        work = work_of(tokens, samples, tokens * length, keys)
        seconds = sum(cost * count for cost, count in zip(costs, work, strict=True))
        found.append(Measured(tokens, samples, tokens * length, keys, seconds))
    return found


def test_the_costs_of_a_linear_machine_are_found() -> None:
    fit = Fit.of(steps(COSTS))
    assert fit.costs == pytest.approx(COSTS)
    assert fit.median_error == pytest.approx(0.0, abs=1e-9)
    assert fit.num_steps == 32


def test_nothing_costs_less_than_nothing() -> None:
    fit = Fit.of(steps((*COSTS[:5], -0.0000004, COSTS[6])))
    assert fit.costs[5] == 0.0
    assert min(fit.costs[:5]) > 0.0


def test_what_is_foreseen_is_the_sum_of_the_steps_that_the_engine_makes() -> None:
    """Of two requests of 3 tokens: a step for both prompts, then two more."""
    step_s, token_s, _, _, sample_s, pair_s, key_s = COSTS
    tasks = [Task([1, 2], 3), Task([3, 4, 5], 3)]
    seconds, firsts = foresee(Config(num_blocks=8, block_size=4), tasks, Fit(COSTS, num_steps=1, median_error=0.0))
    first_s = step_s + 5 * token_s + 2 * sample_s + (3 + 6) * pair_s + (2 + 3) * key_s
    later_s = 2 * (step_s + 2 * token_s + 2 * sample_s) + (3 + 4 + 4 + 5) * (pair_s + key_s)
    assert firsts == pytest.approx([first_s, first_s])
    assert seconds == pytest.approx(first_s + later_s)


@pytest.mark.parametrize("shape", GROUPS)
def test_all_requests_of_a_group_run_at_once_in_the_end(shape: tuple[int, int]) -> None:
    """Without these steps nothing is known of many sequences with long contexts, and what they read is not foreseen."""
    config = Config(num_blocks=4096, block_size=16, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=512)
    device = SimulatedDevice(ModelCost("free", 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 1), Rates(1.0, 1.0, 1.0, 1.0), 16)
    core, random = EngineCore(config, device), np.random.default_rng(0)
    for number, task in enumerate(group(config, 32, random, *shape)):
        core.add(Request(number, tuple(task.prompt_token_ids), task.max_tokens, (number,)))
    sizes = []
    while core.has_work:
        plan = core.schedule()
        sizes.append((plan.num_tokens, len(plan.sample_rows)))
        core.commit(plan, device.run(plan))
    assert sizes.count((shape[0], shape[0])) >= GROUP_STEPS // 2


@pytest.mark.slow
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
