"""What a request says of the part of its prompt that the prefix cache had."""

import pytest

from optimized import LLM, SamplingParams
from optimized.checkpoint import Checkpoint
from optimized.cli.reference_core import ReferenceCore
from optimized.model_core import TorchCore


@pytest.mark.parametrize("core", [TorchCore, ReferenceCore])
def test_a_request_says_how_much_of_its_prompt_the_cache_had(
    tiny: Checkpoint, core: type[TorchCore | ReferenceCore]
) -> None:
    llm = LLM(tiny, block_size=4, num_gpu_blocks_override=30, make_core=core)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    found = [llm.generate({"prompt_token_ids": [*range(5, 5 + count)]}, params)[0] for count in (8, 9, 8, 12)]
    # A hit leaves the last token of a prompt to be computed.
    assert [each.num_hit_tokens for each in found] == [0, 8, 4, 8]
    assert all(each.metrics is not None and each.metrics.begun is not None for each in found)
    plain = LLM(tiny, block_size=4, num_gpu_blocks_override=30, enable_prefix_caching=False, make_core=core)
    [_, second] = [plain.generate({"prompt_token_ids": [*range(5, 14)]}, params)[0] for _ in range(2)]
    assert second.num_hit_tokens == 0


def test_what_was_in_the_cache_is_that_of_the_first_time(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4, num_gpu_blocks_override=8, max_num_seqs=2, admission_rule="optimistic")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [first, 6, 7, 8, 9, 10]} for first in (5, 6)]
    outputs = llm.generate(prompts, params)
    preempted = [each for each in outputs if each.num_preemptions]
    assert preempted
    assert llm.stats().hit_tokens > 0 == preempted[0].num_hit_tokens  # it found its own blocks when it came back
