"""Beam search by the engine: transformers' own answers, whatever the batch, on blocks that the beams share."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from optimized import LLM, BeamSearchParams
from optimized.checkpoint import Checkpoint, load_checkpoint
from optimized.cli.reference_core import ReferenceCore
from optimized.model_core import TorchCore
from optimized.plan import Plan
from spec.conformance.judge import Follower
from spec.engine import InvalidRequest
from tests.models.tiny_files import FAMILIES, write_directory

RECORDED = json.loads((Path(__file__).parent.parent / "models" / "tiny_logits.json").read_text())
BEAMS = BeamSearchParams(beam_width=4, max_tokens=7, ignore_eos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    write_directory(tmp_path, FAMILIES[family][0], **FAMILIES[family][1])
    llm = LLM(load_checkpoint(tmp_path), block_size=4, max_num_seqs=8)
    [answer] = llm.beam_search([RECORDED["token_ids"]], BEAMS)
    expected = RECORDED["models"][family]["beams"]
    assert [output.token_ids for output in answer.outputs] == [beam["token_ids"] for beam in expected]
    for output, beam in zip(answer.outputs, expected, strict=True):
        assert output.cumulative_logprob is not None
        assert output.cumulative_logprob / 7 == pytest.approx(beam["score"], abs=1e-5)
        assert output.finish_reason == "length"


def test_every_event_of_a_search_is_judged(tiny: Checkpoint) -> None:
    followers: list[Follower] = []

    def watch(config: object) -> Follower:
        followers.append(Follower(config, "optimized"))  # type: ignore[arg-type]
        return followers[-1]

    llm = LLM(tiny, block_size=4, max_num_seqs=8, num_gpu_blocks_override=40, make_observer=watch)
    texts = ["hello", "a longer prompt", "x"]
    together = llm.beam_search(texts, BEAMS)
    state = followers[0].state
    assert not state.requests
    assert set(state.ref_count) == {0}
    assert llm.stats().blocks_copied > 0
    alone = [LLM(tiny, block_size=4, max_num_seqs=8).beam_search(text, BEAMS)[0] for text in texts]
    assert [[o.token_ids for o in each.outputs] for each in together] == [
        [o.token_ids for o in each.outputs] for each in alone
    ]


def test_an_answer_that_ends_is_shown_without_its_end(tiny: Checkpoint) -> None:
    free = LLM(tiny, block_size=4).beam_search("hello", BeamSearchParams(beam_width=3, max_tokens=5))[0]
    assert len(free.outputs) == 3
    scores = [output.cumulative_logprob / len(output.token_ids) for output in free.outputs]  # type: ignore[operator]
    assert scores == sorted(scores, reverse=True)
    assert free.outputs[0].text == tiny.tokenizer.decode(free.outputs[0].token_ids)  # type: ignore[union-attr]


def test_more_prompts_than_fit_wait_for_their_turn(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4, max_num_seqs=4, num_gpu_blocks_override=20, max_num_batched_tokens=6)
    answers = llm.beam_search(["hello"] * 5, BEAMS)
    assert len({tuple(o.token_ids for o in each.outputs).__repr__() for each in answers}) == 1
    assert llm.stats().num_preemptions == 0


def test_what_can_not_be_searched_is_refused(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4, max_num_seqs=2)
    with pytest.raises(InvalidRequest, match="beam_width is 4, it must be at most max_num_seqs"):
        llm.beam_search("hello", BEAMS)
    narrow = LLM(tiny, block_size=4, max_num_batched_tokens=3)
    with pytest.raises(InvalidRequest, match=r"beam_width is 4, it must be at most max_num_batched_tokens \(3\)"):
        narrow.beam_search("hello", BEAMS)
    with pytest.raises(InvalidRequest, match="the reference engine has no beam search"):
        LLM(tiny, block_size=4, make_core=ReferenceCore).beam_search("hello", BEAMS)
    assert not llm.has_unfinished_requests()


def test_a_search_that_somebody_interrupts_leaves_nothing_behind(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4, max_num_seqs=8)
    expected = llm.beam_search("hello", BEAMS)[0].outputs
    core = llm._core
    assert isinstance(core, TorchCore)
    run, steps = core.device.run, iter(range(100))

    def interrupted(plan: Plan) -> Sequence[Any]:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return run(plan)

    core.device.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search("hello", BEAMS)
    assert (core.device.beams, core.device.sampling, core.core.has_work) == ({}, {}, False)
    assert llm.beam_search("hello", BEAMS)[0].outputs == expected
