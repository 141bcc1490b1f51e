"""A real (random) model behind the scheduler: pressure, chunks and neighbours change no token."""

from dataclasses import replace

import pytest
import torch

import reference
from optimized.checkpoint import Checkpoint, ModelConfig, random_checkpoint
from optimized.engine import EngineCore
from optimized.llama import LlamaModel
from optimized.sampling import SamplingParams
from optimized.torch_device import SeqSampling, TorchDevice
from spec.vocabulary import Config, FinishReason, InvalidConfig, Recovery, Request, SeqId, Token

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=48,
    intermediate_size=80,
    num_query_heads=6,
    num_kv_heads=2,
    head_size=16,
    vocab_size=101,
    max_model_len=256,
)
ROOMY = Config(num_blocks=64, block_size=4, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=64)
PROMPTS = [(1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11, 12), (13,), (1, 2, 3, 4, 5)]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    checkpoint = random_checkpoint(MODEL, seed=0)
    return LlamaModel(checkpoint.config, checkpoint.tensors)


def generate(
    model: LlamaModel, config: Config, temperature: float = 0.0, num_samples: int = 1
) -> tuple[dict[SeqId, list[Token]], EngineCore]:
    """What each sequence says, and the engine that is left."""
    device = TorchDevice(model, config)
    for key_cache, value_cache in device.kv_caches:
        key_cache.fill_(float("nan"))  # a cell that was not written spoils what reads it
        value_cache.fill_(float("nan"))
    core = EngineCore(config, device)
    said: dict[SeqId, list[Token]] = {}
    for index, prompt in enumerate(PROMPTS):
        seq_ids = tuple(range(index * num_samples, (index + 1) * num_samples))
        core.add(Request(index, prompt, max_tokens=12, seq_ids=seq_ids))
        for ordinal, seq_id in enumerate(seq_ids):
            device.sampling[seq_id] = SeqSampling(SamplingParams(temperature=temperature), seed=index, ordinal=ordinal)
    while core.has_work:
        outcome = core.step()
        assert not outcome.failed
        for seq_id, token in zip(outcome.seq_ids, outcome.tokens, strict=True):
            said.setdefault(seq_id, []).append(token)
    return said, core


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        replace(ROOMY, max_num_batched_tokens=3),
        replace(ROOMY, max_num_seqs=1),
        replace(ROOMY, block_size=5),
        replace(ROOMY, num_blocks=8),
        replace(ROOMY, num_blocks=8, prefix_cache=True),
        replace(ROOMY, num_blocks=8, num_host_blocks=16, recovery=Recovery.SWAP),
    ],
    ids=["chunks", "alone", "odd blocks", "pressure", "pressure and cache", "pressure and swap"],
)
def test_the_greedy_tokens_do_not_depend_on_the_schedule(model: LlamaModel, config: Config) -> None:
    expected, _ = generate(model, ROOMY)
    said, core = generate(model, config)
    assert said == expected
    assert core.scheduler.counters.num_preemptions > 0 or config.num_blocks > 8
    assert core.scheduler.counters.num_blocks_swapped_out > 0 or config.recovery is Recovery.RECOMPUTE


@pytest.fixture(scope="module")
def short_sighted() -> Checkpoint:
    """A model whose tokens see six tokens, themselves included."""
    return random_checkpoint(replace(MODEL, sliding_window=6), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        replace(ROOMY, max_num_batched_tokens=3, window=6),
        replace(ROOMY, num_blocks=8, prefix_cache=True, window=6),
        replace(ROOMY, num_blocks=8, num_host_blocks=16, recovery=Recovery.SWAP, window=9),
    ],
    ids=["chunks", "pressure and cache", "pressure, swap and a wider window"],
)
def test_blocks_that_left_the_window_are_not_missed(
    model: LlamaModel, short_sighted: Checkpoint, config: Config
) -> None:
    """The same tokens as with every block kept, and as the reference engine says."""
    far_sighted, model = model, LlamaModel(short_sighted.config, short_sighted.tensors)
    requests = [Request(i, prompt, max_tokens=12, seq_ids=(i,)) for i, prompt in enumerate(PROMPTS)]
    exact: dict[SeqId, list[Token]] = {}
    limits = replace(ROOMY, window=6)
    for seq_id, token in reference.generate(short_sighted.arrays(), short_sighted.config, limits, requests):
        exact.setdefault(seq_id, []).append(token)
    assert generate(far_sighted, ROOMY)[0] != generate(model, ROOMY)[0] == exact
    said, core = generate(model, config)
    assert said == exact
    assert core.scheduler.counters.num_preemptions > 0 or config.num_blocks > 8


def test_an_engine_does_not_drop_what_its_model_sees(short_sighted: Checkpoint, model: LlamaModel) -> None:
    windowed = LlamaModel(short_sighted.config, short_sighted.tensors)
    with pytest.raises(InvalidConfig, match=r"^window is 5, it must be at least what the model sees, 6, or None$"):
        TorchDevice(windowed, replace(ROOMY, window=5))
    with pytest.raises(InvalidConfig, match=r"at least what the model sees, 64, or None$"):
        TorchDevice(model, replace(ROOMY, window=63))


def test_samples_share_the_prompt_and_are_the_same_under_pressure(model: LlamaModel) -> None:
    expected, roomy = generate(model, ROOMY, temperature=1.0, num_samples=3)
    said, tight = generate(model, replace(ROOMY, num_blocks=16), temperature=1.0, num_samples=3)
    assert said == expected
    assert len({tuple(tokens) for tokens in expected.values()}) > len(PROMPTS)
    assert roomy.scheduler.counters.num_blocks_copied > 0
    assert roomy.scheduler.pool.peak_shared == 7
    assert tight.scheduler.counters.num_preemptions > 0


def test_nothing_is_left_of_the_pool_when_all_have_ended(model: LlamaModel) -> None:
    _, core = generate(model, ROOMY, temperature=1.0, num_samples=3)
    assert core.scheduler.pool.num_free == ROOMY.num_blocks


def test_a_request_without_numbers_ends_alone(model: LlamaModel) -> None:
    device = TorchDevice(model, ROOMY)
    core = EngineCore(ROOMY, device)
    core.add(Request(0, (1, 2, 3), max_tokens=4, seq_ids=(0,)))
    core.add(Request(1, (4, 5, 6), max_tokens=4, seq_ids=(1, 2)))
    core.step()
    table = core.scheduler.seqs[0].table
    device.kv_caches[0][0][list(table)] = torch.nan
    outcome = core.step()
    assert [request_id for request_id, _ in outcome.failed] == [0]
    assert outcome.seq_ids == [1, 2]
    assert core.snapshot().running == (1,)
    finished = [end for _ in range(2) for end in core.step().finished]
    assert finished == [(1, FinishReason.LENGTH), (2, FinishReason.LENGTH)]
    assert core.scheduler.pool.num_free == ROOMY.num_blocks
