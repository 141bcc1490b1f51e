"""The reference engine with a tiny model: whatever the schedule, the tokens are those of dense attention."""

from dataclasses import replace

import numpy as np
import pytest

from reference import Llama, ReferenceModelEngine, Sampling, dense_logits, generate
from reference.sampling import sample
from spec.conformance.judge import Follower
from spec.engine import Admission, InvalidField
from spec.vocabulary import AdmissionRule, Config, Event, Hit, Policy, Preempt, Recovery, SwapIn, Token
from tests.reference.follow import request
from tests.tiny import TinyConfig, tiny_model

ROOMY = Config(num_blocks=64, block_size=4, max_num_batched_tokens=64, max_model_len=64)
PROMPTS: list[tuple[Token, ...]] = [(1, 5, 9, 30, 2), (7,), (3, 3, 3, 3, 3, 3, 3, 3, 3), (31, 0, 4)]
DRAWN = Sampling(temperature=1.0, top_p=0.95, seed=4)

SCHEDULES = {
    "all at once": ROOMY,
    "one token a step": replace(ROOMY, max_num_batched_tokens=1),
    "chunks of three": replace(ROOMY, max_num_batched_tokens=3),
    "blocks of one": replace(ROOMY, block_size=1, num_blocks=256),
    "blocks of seven": replace(ROOMY, block_size=7),
    "one sequence at a time": replace(ROOMY, max_num_seqs=1),
    "preemption": replace(ROOMY, num_blocks=6),
    "swapping": replace(ROOMY, num_blocks=6, recovery=Recovery.SWAP, num_host_blocks=6),
    "prefix cache": replace(ROOMY, prefix_cache=True, max_num_seqs=1),
    "everything": replace(
        ROOMY,
        num_blocks=6,
        recovery=Recovery.SWAP,
        num_host_blocks=6,
        prefix_cache=True,
        admission_rule=AdmissionRule.OPTIMISTIC,
        policy=Policy.PRIORITY,
        max_num_batched_tokens=5,
    ),
}


def dense_tokens(prompt: tuple[Token, ...], count: int, sampling: Sampling, sequence: int = 0) -> tuple[Token, ...]:
    """The tokens without a cache, one forward pass over everything for each."""
    config, weights = tiny_model(0)
    model, tokens = Llama(weights, config), prompt
    for _ in range(count):
        row = dense_logits(model, tokens)[-1]
        tokens += (sample(row, sampling, sequence=sequence, position=len(tokens)),)
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_paged_equals_dense_on_every_schedule(schedule: str, sampling: Sampling) -> None:
    config, weights = tiny_model(0)
    requests = [request(i, prompt, 8) for i, prompt in enumerate(PROMPTS)]
    got: dict[int, tuple[Token, ...]] = {i: () for i in range(len(PROMPTS))}
    for seq_id, token in generate(weights, config, SCHEDULES[schedule], requests, dict.fromkeys(got, sampling)):
        got[seq_id] += (token,)
    assert got == {i: dense_tokens(prompt, 8, sampling) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize(("schedule", "kind"), [("preemption", Preempt), ("swapping", SwapIn), ("everything", SwapIn)])
def test_what_a_schedule_is_named_after_happens(schedule: str, kind: type[Event]) -> None:
    config, weights = tiny_model(0)
    follower = Follower(SCHEDULES[schedule], "model")
    engine = ReferenceModelEngine(weights, config, SCHEDULES[schedule], follower)
    for i, prompt in enumerate(PROMPTS):
        engine.add(request(i, prompt, 8))
    while engine.has_work:
        engine.step()
    assert any(isinstance(event, kind) for event in follower.trace)


def test_a_prompt_from_the_prefix_cache_gives_the_same_tokens() -> None:
    config, weights = tiny_model(0)
    follower = Follower(SCHEDULES["prefix cache"], "model")
    engine = ReferenceModelEngine(weights, config, SCHEDULES["prefix cache"], follower)
    got: dict[int, tuple[Token, ...]] = {0: (), 1: ()}
    for i in got:
        engine.add(request(i, PROMPTS[2], 5))
    while engine.has_work:
        for event in engine.step().emitted:
            got[event.seq] += event.tokens
    assert [event for event in follower.trace if isinstance(event, Hit)] == [Hit(1, (0, 1))]
    assert got[0] == got[1] == dense_tokens(PROMPTS[2], 5, Sampling())


@pytest.mark.parametrize("budget", [64, 3])
@pytest.mark.parametrize("window", [1, 4, 6])
def test_a_window_gives_what_dense_attention_with_that_window_gives(window: int, budget: int) -> None:
    config, weights = tiny_model(1)
    model, tokens = Llama(weights, config), PROMPTS[2]
    for _ in range(6):
        tokens += (int(dense_logits(model, tokens, window)[-1].argmax()),)
    pool = replace(ROOMY, block_size=2, window=window, max_num_batched_tokens=budget)
    got = [token for _, token in generate(weights, config, pool, [request(0, PROMPTS[2], 6)])]
    assert tuple(got) == tokens[len(PROMPTS[2]) :]


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_samples_share_a_prompt_and_draw_their_own_tokens(num_blocks: int) -> None:
    config, weights = tiny_model(0)
    asked = request(0, PROMPTS[0], 6, seq_ids=(0, 1, 2))
    got: dict[int, tuple[Token, ...]] = {0: (), 1: (), 2: ()}
    pool = replace(ROOMY, num_blocks=num_blocks)
    for seq_id, token in generate(weights, config, pool, [asked], {0: DRAWN}):
        got[seq_id] += (token,)
    assert got == {i: dense_tokens(PROMPTS[0], 6, DRAWN, sequence=i) for i in range(3)}
    assert len(set(got.values())) == 3


def test_a_forked_sequence_goes_on_from_its_parents_tokens() -> None:
    config, weights = tiny_model(0)
    engine = ReferenceModelEngine(weights, config, ROOMY, Follower(ROOMY, "model"))
    engine.add(request(0, PROMPTS[0], 6), DRAWN)
    engine.step()
    engine.step()
    assert engine.fork(0, 1, sequence=1) is Admission.NOW
    shared = engine.snapshot().seqs[1].tokens
    report = engine.step()
    assert len(report.copies) == 1
    last = {event.seq: event.tokens[0] for event in report.emitted}
    row = dense_logits(Llama(weights, config), shared)[-1]
    assert last == {i: sample(row, DRAWN, sequence=i, position=len(shared)) for i in (0, 1)}


def test_the_logits_of_the_paged_model_are_the_dense_ones() -> None:
    config, weights = tiny_model(3)
    engine = ReferenceModelEngine(weights, config, replace(ROOMY, max_num_batched_tokens=2))
    engine.add(request(0, PROMPTS[2], 4))
    while engine.has_work:
        before = engine.snapshot().seqs[0].tokens
        if engine.step().emitted:
            dense = dense_logits(Llama(weights, config), before)[-1]
            # Twice the rounding of sums of hidden_size terms, in two layers; measured 1e-14 at most.
            assert np.abs(engine.device.last_logits[0] - dense).max() <= 1e-12


def test_an_output_matrix_of_its_own_is_used() -> None:
    config, weights = tiny_model(0, TinyConfig(tie_word_embeddings=False))
    tied = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
    assert not np.allclose(dense_logits(Llama(weights, config), [1])[0], dense_logits(Llama(tied, config), [1])[0])


def test_rotary_divisors_stretch_the_angles() -> None:
    plain, weights = tiny_model(0)
    stretched = replace(plain, rope_divisors=(2.0,) * 4)
    far, near = [1, 2, 3], [1, 2, 3]
    assert not np.allclose(dense_logits(Llama(weights, plain), far), dense_logits(Llama(weights, stretched), near))


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    config, weights = tiny_model(0)
    engine = ReferenceModelEngine(weights, config, ROOMY)
    with pytest.raises(InvalidField):
        engine.add(request(0, (1, 32), 2))
    assert not engine.has_work
