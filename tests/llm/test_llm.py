"""``LLM`` on a tiny random model: shapes, limits, stops, and answers that do not depend on the neighbours."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest

from optimized import LLM, RequestOutput, SamplingParams
from optimized.checkpoint import Checkpoint, ModelConfig, random_checkpoint
from optimized.cli.reference_core import ReferenceCore
from optimized.device import Failure
from optimized.gpu_room import widest_plan
from optimized.llama import LlamaModel
from optimized.model_core import TorchCore
from optimized.plan import Plan
from optimized.torch_device import TorchDevice
from spec.conformance.judge import Follower
from spec.engine import InvalidRequest
from spec.vocabulary import Config, InvalidConfig, Recovery

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["hello", "a much longer prompt than that", "x", "hello hello"]
BYTES = list(b"hello")


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[output.token_ids for output in request.outputs] for request in outputs]


def core_of(llm: LLM) -> TorchCore:
    core = llm._core
    assert isinstance(core, TorchCore)
    return core


def free_blocks(llm: LLM) -> int:
    return core_of(llm).core.scheduler.pool.num_free


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_an_answer_has_the_shape_of_vllm(llm: LLM, tiny: Checkpoint) -> None:
    [answer] = llm.generate("hello", GREEDY)
    assert tiny.tokenizer is not None
    assert (answer.request_id, answer.prompt, answer.finished, answer.num_preemptions) == ("0", "hello", True, 0)
    assert answer.prompt_token_ids == tiny.tokenizer.encode("hello")
    [output] = answer.outputs
    assert (output.index, len(output.token_ids), output.finish_reason, output.stop_reason) == (0, 12, "length", None)
    assert output.finished()
    assert output.text == tiny.tokenizer.decode(output.token_ids)


def test_all_forms_of_a_prompt_mean_the_same(llm: LLM, tiny: Checkpoint) -> None:
    assert tiny.tokenizer is not None
    ids = tiny.tokenizer.encode("hello")
    forms: list[Any] = ["hello", ids, tuple(ids), {"prompt": "hello"}, {"prompt_token_ids": ids}]
    answers = llm.generate(forms, GREEDY)
    assert tokens(answers) == tokens(answers[:1]) * 5
    assert tokens(llm.generate(ids, GREEDY)) == tokens(answers[:1])
    assert [answer.prompt for answer in answers] == ["hello", None, None, "hello", None]
    assert llm.generate([], GREEDY) == []


def test_answers_come_in_the_order_of_the_prompts_each_with_its_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (9, 2, 5, 1)]
    answers = llm.generate(PROMPTS, params)
    assert [answer.prompt for answer in answers] == PROMPTS
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [9, 2, 5, 1]


def test_chat_applies_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    [answer] = llm.chat(messages, GREEDY)
    assert answer.prompt == "user: hello\n"
    assert [each.prompt for each in llm.chat([messages, messages], GREEDY)] == ["user: hello\n"] * 2


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids() -> None:
    config = ModelConfig(2, 16, 24, 4, 2, 8, vocab_size=32, max_model_len=64)
    llm = LLM(random_checkpoint(config, seed=0), block_size=4)
    [answer] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=5))
    assert (answer.prompt, len(answer.outputs[0].token_ids), answer.outputs[0].text) == (None, 5, "")
    with pytest.raises(InvalidRequest, match="random-0 has no tokenizer"):
        llm.generate("hello")
    with pytest.raises(InvalidRequest, match="stop strings and bad words have no meaning"):
        llm.generate([[1]], SamplingParams(stop="a"))


# --- one answer does not depend on the others ------------------------------------------------------------------------


def test_a_batch_says_what_each_prompt_says_alone(llm: LLM) -> None:
    assert tokens(llm.generate(PROMPTS, GREEDY)) == [tokens(llm.generate(prompt, GREEDY))[0] for prompt in PROMPTS]


@pytest.mark.parametrize("n", [1, 3])
def test_a_tiny_cache_preempts_and_changes_nothing(tiny: Checkpoint, llm: LLM, n: int) -> None:
    params = SamplingParams(n=n, temperature=0.7, seed=3, max_tokens=12, ignore_eos=True)
    tight = LLM(tiny, block_size=4, num_gpu_blocks_override=11 * n)
    answers = tight.generate(PROMPTS, params)
    assert tokens(answers) == tokens(llm.generate(PROMPTS, params))
    assert tight.stats().num_preemptions == sum(answer.num_preemptions for answer in answers) > 0
    assert llm.stats().num_preemptions == 0


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="model is 5, it must be a file, a folder, a checkpoint, or None"):
        LLM(5)  # type: ignore[arg-type]


def test_a_prefix_cache_changes_nothing(tiny: Checkpoint, llm: LLM) -> None:
    plain = LLM(tiny, block_size=4, enable_prefix_caching=False)
    for _ in range(2):
        assert tokens(llm.generate(PROMPTS, GREEDY)) == tokens(plain.generate(PROMPTS, GREEDY))
    assert llm.stats().hit_tokens > 0 == plain.stats().hit_tokens


def test_samples_share_the_blocks_of_their_prompt(llm: LLM) -> None:
    [answer] = llm.generate([[*range(10)]], SamplingParams(n=4, seed=1, max_tokens=6, ignore_eos=True))
    assert len({tuple(output.token_ids) for output in answer.outputs}) == 4
    stats = llm.stats()
    assert (stats.blocks_prompt_shared, stats.blocks_copied) == (3, 3)  # two full blocks, and a tail for all but one
    assert free_blocks(llm) == stats.num_blocks


def test_a_seed_fixes_the_samples(tiny: Checkpoint) -> None:
    drawn = SamplingParams(temperature=1.0, max_tokens=8)
    first, again, other = (LLM(tiny, seed=seed).generate(["x", "x"], drawn) for seed in (1, 1, 2))
    assert tokens(first) == tokens(again) != tokens(other)
    assert tokens(first)[0] != tokens(first)[1]
    fixed = LLM(tiny).generate(["x", "x"], SamplingParams(temperature=1.0, max_tokens=8, seed=5))
    assert tokens(fixed)[0] == tokens(fixed)[1]


def test_the_reference_engine_says_the_same_by_the_same_steps(tiny: Checkpoint) -> None:
    params = [GREEDY, SamplingParams(n=3, temperature=1.0, seed=2, top_p=0.9, max_tokens=9, ignore_eos=True)] * 2
    engines = [
        LLM(tiny, block_size=4, num_gpu_blocks_override=30, make_core=core) for core in (TorchCore, ReferenceCore)
    ]
    answers = [engine.generate(PROMPTS, params) for engine in engines]
    assert answers[0] == answers[1]
    assert asdict(engines[0].stats()) == asdict(engines[1].stats())
    assert engines[0].stats().num_preemptions > 0


def test_the_reference_engine_ends_a_sequence_at_a_stop_string(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4, num_gpu_blocks_override=30, make_core=ReferenceCore)
    [whole] = llm.generate("hello", GREEDY)[0].outputs
    stop = whole.text[4:6]
    [output] = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=12, stop=stop, ignore_eos=True))[
        0
    ].outputs
    assert output.text == whole.text[: whole.text.index(stop)]
    core = llm._core
    assert isinstance(core, ReferenceCore)
    assert not core._engine.has_work


def test_an_engine_can_be_judged_while_it_answers(tiny: Checkpoint) -> None:
    followers: list[Follower] = []

    def follow(config: Config) -> Follower:
        followers.append(Follower(config, "optimized"))
        return followers[0]

    llm = LLM(tiny, block_size=4, num_gpu_blocks_override=20, make_observer=follow)
    llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=9, stop=["a", "e"]))
    assert len(followers[0].trace) > 100
    assert not followers[0].state.requests


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_an_answer_and_is_no_text(llm: LLM, tiny: Checkpoint) -> None:
    assert tiny.tokenizer is not None
    [[said]] = tokens(llm.generate("hello", GREEDY))
    end = said[5]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[end], ignore_eos=True)
    [output] = llm.generate("hello", params)[0].outputs
    length = said.index(end) + 1
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (said[:length], "stop", end)
    assert output.text == tiny.tokenizer.decode(said[: length - 1])


def test_the_end_token_of_the_model_ends_an_answer_unless_it_is_ignored(tiny: Checkpoint) -> None:
    end = tiny.config.eos_token_ids[0]
    llm = LLM(tiny)
    core = core_of(llm)
    run = core.device.run
    core.device.run = lambda plan: [end for _ in run(plan)]  # type: ignore[method-assign]
    [output] = llm.generate("hello", SamplingParams(max_tokens=3))[0].outputs
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == ([end], "", "stop", None)
    [output] = llm.generate("hello", GREEDY)[0].outputs
    assert (len(output.token_ids), output.text, output.finish_reason) == (12, "", "length")


def test_a_stop_string_cuts_the_text_and_frees_the_blocks(llm: LLM) -> None:
    [whole] = llm.generate("hello", GREEDY)[0].outputs
    stop = whole.text[4:6]
    params = SamplingParams(n=2, temperature=0.0, max_tokens=12, stop=[stop, "never"], ignore_eos=True)
    [answer] = llm.generate("hello", params)
    for output in answer.outputs:
        assert output.text == whole.text[: whole.text.index(stop)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert free_blocks(llm) == llm.config.num_blocks
    assert not core_of(llm).device.sampling


def test_what_is_streamed_grows_to_the_final_text(llm: LLM) -> None:
    [whole] = llm.generate("hello", GREEDY)[0].outputs
    stop = whole.text[6:9]
    llm.add_request("mine", "hello", SamplingParams(temperature=0.0, max_tokens=12, stop=stop, ignore_eos=True))
    texts = []
    while llm.has_unfinished_requests():
        texts += [answer.outputs[0].text for answer in llm.step()]
    assert len(texts) > 1
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == whole.text[: whole.text.index(stop)]


def test_max_tokens_none_is_what_is_left(tiny: Checkpoint, llm: LLM) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    assert len(llm.generate([BYTES], endless)[0].outputs[0].token_ids) == tiny.config.max_model_len - len(BYTES)
    small = LLM(tiny, block_size=4, num_gpu_blocks_override=5)
    answers = small.generate([BYTES], endless)
    assert len(answers[0].outputs[0].token_ids) == 5 * 4 + 1 - len(BYTES)
    assert small.max_tokens_left(BYTES, n=2) == 2 * 4 + 1 - len(BYTES)


def test_an_abort_ends_one_request_and_no_other(llm: LLM) -> None:
    expected = tokens(llm.generate("hello", GREEDY))[0]
    llm.add_request("a", "hello", GREEDY)
    llm.add_request("b", PROMPTS[1], GREEDY)
    llm.step()
    llm.abort("b")
    llm.abort("unknown")
    last = [answer for _ in range(11) for answer in llm.step()][-1]
    assert (last.request_id, [output.token_ids for output in last.outputs]) == ("a", expected)
    assert not llm.has_unfinished_requests()
    assert llm.step() == []
    assert free_blocks(llm) == llm.config.num_blocks


def test_a_request_without_numbers_ends_alone(llm: LLM) -> None:
    expected = tokens(llm.generate(PROMPTS[:2], GREEDY))
    core, run = core_of(llm), core_of(llm).device.run

    def spoiled(plan: Plan) -> Sequence[Any]:
        sampled = list(run(plan))
        return [Failure("all is NaN"), *sampled[1:]] if plan.positions[-1] > 5 and len(sampled) == 2 else sampled

    core.device.run = spoiled  # type: ignore[method-assign]
    bad, good = llm.generate(PROMPTS[:2], GREEDY)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", "all is NaN")
    assert tokens([good]) == expected[1:]


def test_an_interrupted_answer_leaves_nothing_behind(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4)
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    core, run = core_of(llm), core_of(llm).device.run
    steps = iter(range(100))

    def interrupted(plan: Plan) -> Sequence[Any]:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return run(plan)

    core.device.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert not llm.has_unfinished_requests()
    assert free_blocks(llm) == llm.config.num_blocks
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


# --- the caller's mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("", GREEDY, "prompt is '', it must be at least one token long"),
        ([], GREEDY, "prompt is '', it must be at least one token long"),
        ([3, 262], GREEDY, "prompt is 262, it must be made of token ids from 0 to 261"),
        ([3, -1], GREEDY, "prompt is -1, "),
        ([3, True], GREEDY, "prompt is True, "),
        (3.5, GREEDY, "prompt is 'float', it must be a text or a list of token ids"),
        ({"text": "hello"}, GREEDY, r"prompt is \['text'\], it must be an object with prompt or prompt_token_ids"),
        ({"prompt": 7}, GREEDY, "prompt is 'int', it must be a text"),
        ([1] * 64, GREEDY, r"the number of prompt tokens is 64, it must be below max_model_len \(64\)"),
        (
            [1] * 60,
            GREEDY,
            r"max_tokens is 12, it must be at most max_model_len \(64\) together with the prompt \(60\)",
        ),
        ("x", SamplingParams(n=17), r"n is 17, it must be at most max_num_seqs \(16\)"),
    ],
)
def test_one_bad_prompt_adds_nothing(llm: LLM, prompt: Any, params: SamplingParams, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        llm.generate(["fine", prompt], [GREEDY, params])
    assert refused.value.__notes__ == ["This is about prompt 2 of 2."]
    with pytest.raises(InvalidRequest, match=said):
        llm.add_request("a", prompt, params)
    assert llm.stats().steps == 0
    assert not llm.has_unfinished_requests()
    assert llm.generate("x", GREEDY)[0].request_id == "0"


def test_a_request_that_never_fits_says_how_much_room_there_is(tiny: Checkpoint) -> None:
    llm = LLM(tiny, block_size=4, num_gpu_blocks_override=3)
    with pytest.raises(InvalidRequest, match="the request needs room for 16 tokens, the cache has 12 slots"):
        llm.generate([BYTES], GREEDY)


def test_of_equal_prompts_the_one_that_is_refused_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="n is 17") as refused:
        llm.generate(["x", "x", "x"], [GREEDY, SamplingParams(n=17), GREEDY])
    assert refused.value.__notes__ == ["This is about prompt 2 of 3."]


def test_a_salt_is_a_text(llm: LLM) -> None:
    wrong: list[Any] = [5, None, "half of \ud800"]
    for salt in wrong:
        with pytest.raises(InvalidRequest, match="cache_salt is .*, it must be a text of whole characters"):
            llm.add_request("a", "x", GREEDY, cache_salt=salt)
        with pytest.raises(InvalidRequest, match="cache_salt is .*, it must be a text of whole characters"):
            llm.generate("x", GREEDY, cache_salt=salt)
    assert not llm.has_unfinished_requests()


def test_only_prompts_of_the_same_salt_share_blocks(llm: LLM) -> None:
    said = [llm.generate([[*range(9)]], GREEDY, cache_salt=salt) for salt in ("", "mine", "yours", "mine")]
    assert tokens(said[0]) == tokens(said[1]) == tokens(said[2]) == tokens(said[3])
    assert llm.stats().hit_tokens == 8
    for _ in range(2):
        llm.chat([{"role": "user", "content": "hello"}], GREEDY, cache_salt="theirs")
    assert llm.stats().hit_tokens > 8


def test_ids_are_used_once_at_a_time(llm: LLM) -> None:
    llm.add_request("a", "x", GREEDY)
    with pytest.raises(InvalidRequest, match="request_id is 'a', it must be a text that no unfinished request has"):
        llm.add_request("a", "x", GREEDY)
    with pytest.raises(InvalidRequest, match="1 requests are unfinished"):
        llm.generate("x")
    llm.abort("a")
    llm.add_request("a", "x", GREEDY)


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params is '1 of them', it must be one for all, or one for each"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequest, match="prompts is 'int', it must be a text, a list of token ids, or"):
        llm.generate(3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="messages is 'dict', it must be a list of messages"):
        llm.chat({"role": "user", "content": "hello"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"block_size": 0}, "block_size is 0, it must be a whole number, at least 1"),
        ({"block_size": "16"}, "block_size is '16', "),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, "),
        ({"max_num_seqs": 65537}, "max_num_seqs is 65537, it must be at most 65,536: a step has a row for each"),
        ({"max_model_len": 65}, "max_model_len is 65, it must be at most what the model was made for, 64"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5, "),
        ({"kv_cache_memory_bytes": 10}, "kv_cache_memory_bytes is 10, it must be at least one block, 4,096 bytes"),
        ({"num_gpu_blocks_override": 10**15}, "num_gpu_blocks_override is 1000000000000000, it must be at most"),
        ({"kv_cache_memory_bytes": 10**17}, "kv_cache_memory_bytes is 100000000000000000, it must be at most"),
        ({"dtype": "int8"}, "dtype is 'int8', it must be one of auto, float32, bfloat16, float16"),
        ({"preemption_mode": "evict"}, "preemption_mode is 'evict', it must be one of auto, recompute, swap"),
        ({"swap_space": -1}, "swap_space is -1, it must be a number of GiB, at least 0"),
        ({"swap_space": True}, "swap_space is True, "),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching is 'no', it must be True or False"),
        ({"gpu_memory_utilization": "all"}, "gpu_memory_utilization is 'all', "),
        ({"admission_rule": "any"}, "admission_rule is 'any', it must be one of optimistic, prompt, no_evict"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills is 0, it must be a whole number, at least 1"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy is 'lifo', it must be one of fcfs, priority, static"),
        ({"watermark_blocks": -1}, "watermark_blocks is -1, it must be a whole number, at least 0"),
        ({"watermark_blocks": 9, "num_gpu_blocks_override": 9}, r"watermark_blocks is 9, .* below num_blocks \(9\)"),
        ({"swap_space": float("nan")}, "swap_space is nan, "),
        (
            {"swap_space": 2, "preemption_mode": "recompute"},
            "swap_space is 2, it must be left out where preemption_mode",
        ),
        ({"swap_space": 10**6}, "swap_space is 1000000, it must be at most this machine's memory, "),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype is 'fp4', it must be one of auto, fp8"),
        (
            {"kv_cache_dtype": "fp8", "make_core": ReferenceCore},
            "kv_cache_dtype is 'fp8', it must be auto: the reference",
        ),
        ({"quantization": "int4"}, "quantization is 'int4', it must be int8 or gguf, or left out"),
        (
            {"quantization": "int8", "make_core": ReferenceCore},
            "quantization is 'int8', it must be left out: the reference",
        ),
        (
            {"quantization": "int8", "block_size": 4, "device": "cpu"},
            "quantization is 'int8', it must be left out here, only the CPU's vector kernels have it: blocks of 4",
        ),
        ({"device": "tpu"}, "device is 'tpu', it must be one of auto, cpu, cuda"),
    ],
)
def test_an_engine_that_makes_no_sense_is_not_built(tiny: Checkpoint, args: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        LLM(tiny, **args)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_the_cache_has_no_more_blocks_than_can_be_of_use(tiny: Checkpoint) -> None:
    assert LLM(tiny, block_size=4, max_num_seqs=2, enable_prefix_caching=False).config.num_blocks == 2 * 64 // 4
    assert LLM(tiny, block_size=4, max_num_seqs=2).config.num_blocks == 2 * 2 * 64 // 4
    assert LLM(tiny, kv_cache_memory_bytes=1 << 20).config.num_blocks == 256


@pytest.mark.parametrize(
    ("args", "num_host_blocks"),
    [
        ({}, 0),
        ({"preemption_mode": "recompute"}, 0),
        ({"preemption_mode": "swap"}, 10),
        ({"preemption_mode": "auto", "swap_space": 4096.5 * 30 / 2**30}, 30),
        ({"preemption_mode": "swap", "swap_space": 0}, 0),
    ],
)
def test_swap_space_is_counted_in_blocks(tiny: Checkpoint, args: dict[str, Any], num_host_blocks: int) -> None:
    """A block of 16 tokens has 4,096 bytes."""
    config = LLM(tiny, num_gpu_blocks_override=10, **args).config
    assert config.num_host_blocks == num_host_blocks
    assert config.recovery is (Recovery.SWAP if "swap" in args.values() or num_host_blocks else Recovery.RECOMPUTE)


@pytest.mark.parametrize("max_num_seqs", [1, 3, 40])
def test_the_widest_step_is_one_that_a_device_can_run(tiny: Checkpoint, max_num_seqs: int) -> None:
    limits = Config(1000, 4, max_num_seqs=max_num_seqs, max_num_batched_tokens=30, max_model_len=64)
    plan = widest_plan(limits)
    assert plan.num_tokens == 30
    assert len(TorchDevice(LlamaModel(tiny.config, tiny.tensors), limits).run(plan)) == min(max_num_seqs, 30)
