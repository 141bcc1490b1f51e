"""``kvproof generate``: prompts in, text out as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optimized.cli.guard import FAILED, plain_errors
from optimized.cli.printing import GenerationConfigOption, JsonOption, ModelOption, OverrideOption, print_json
from optimized.cli.watch import SelfCheck, Watch

if TYPE_CHECKING:
    from optimized.llm import LLM
    from optimized.outputs import RequestOutput
    from optimized.prompts import Prompt

MAX_TOKENS = 128
OURS = {"temperature": 0.0}
"""What is asked of sampling where neither the command line nor the model says anything."""
SELF_CHECK_BLOCKS = 256
"""Blocks of an engine that is judged, unless told: each rule looks at every block, after every event."""


@plain_errors
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="What to answer.")],
    model: ModelOption = None,
    engine: Annotated[str, typer.Option(help="optimized, or reference: slow and obvious.")] = "optimized",
    max_tokens: Annotated[
        int | None,
        typer.Option(help="The most tokens of an answer.", show_default="the model's, else 128, or less if less fits"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token.", show_default="the model's, else 0")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    n: Annotated[int, typer.Option("--n", "-n", help="Answers to each prompt; they share its blocks.")] = 1,
    top_p: Annotated[
        float | None,
        typer.Option(help="Keep the likeliest tokens that have this probability.", show_default="the model's, else 1"),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Keep so many of the likeliest tokens, 0 for all.", show_default="the model's, else 0"),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens below this part of the likeliest one.", show_default="the model's, else 0"),
    ] = None,
    generation_config: GenerationConfigOption = "auto",
    override_generation_config: OverrideOption = None,
    beam_width: Annotated[
        int | None, typer.Option(help="Search so many beams, and show the likeliest whole answers, best first.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    as_json: JsonOption = False,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(help="Blocks of the KV cache, on any device.", show_default="what fits")
    ] = None,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(help="Size of the KV cache.", show_default="1 GiB on a CPU")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    prefix_caching: Annotated[
        bool,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Find blocks by what is in them."),
    ] = True,
    preemption_mode: Annotated[
        str, typer.Option(help="auto, recompute, or swap: what becomes of a request that has to wait again.")
    ] = "auto",
    swap_space: Annotated[
        float | None,
        typer.Option(help="GiB of host memory for swapped requests.", show_default="as large as the cache"),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="The most sequences that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="The most tokens in one step.")] = None,
    max_num_partial_prefills: Annotated[
        int, typer.Option(help="So many prompts may be computed in parts at a time, and share a step's tokens.")
    ] = 1,
    scheduling_policy: Annotated[
        str, typer.Option(help="fcfs, or static: nobody joins those who run once one of them has got a token.")
    ] = "fcfs",
    admission_rule: Annotated[
        str,
        typer.Option(
            help="Who is let in has room for its next step (optimistic), its tokens (prompt), or to its end (no_evict)."
        ),
    ] = "prompt",
    watermark_blocks: Annotated[int, typer.Option(help="Free blocks that whoever is let in must leave.")] = 0,
    threads: Annotated[
        int | None, typer.Option(help="Threads on a CPU.", show_default="one for each core that may be used")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto: the model's; fp8: 8 bits, and a scale for each token and head.")
    ] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(
            help="int8: the layers' weights in 8 bits; gguf: in the 4 bits of the file; on a CPU.", show_default="none"
        ),
    ] = None,
    self_check: Annotated[
        SelfCheck,
        typer.Option(help="Judge every event: sampled by counters, every-step by every rule in a cache of 256 blocks."),
    ] = SelfCheck.OFF,
    trace: Annotated[Path | None, typer.Option(help="Write the engine's events to this file.")] = None,
    kv_events: Annotated[
        Path | None, typer.Option(help="Write what the prefix cache stores and removes to this file, as vLLM tells it.")
    ] = None,
) -> None:
    """Answer prompts with a model, out of a paged KV cache."""
    from optimized.beam_search import MAX_BEAMS
    from optimized.capacity import pool_sentence
    from optimized.generation_defaults import defaults_sentence, read_override
    from optimized.model_core import EngineArgs
    from optimized.sampling import SamplingParams, demand_integer
    from spec.vocabulary import InvalidConfig

    if engine not in ("optimized", "reference"):
        raise InvalidConfig("engine", engine, "optimized or reference")
    for name, file in (("trace", trace), ("kv_events", kv_events)):
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise InvalidConfig(name, str(file), "a file in a folder that is there")
    if trace is not None and kv_events is not None and trace.resolve() == kv_events.resolve():
        raise InvalidConfig("kv_events", str(kv_events), "another file than that of the trace")
    if kv_events is not None and (engine == "reference" or not prefix_caching):
        raise InvalidConfig("kv_events", str(kv_events), "left out with the reference engine or without a prefix cache")
    if self_check is SelfCheck.EVERY_STEP and num_gpu_blocks_override is None and kv_cache_memory_bytes is None:
        num_gpu_blocks_override = SELF_CHECK_BLOCKS
    given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "max_tokens": max_tokens}
    asked: dict[str, Any] = {"n": n, **{name: value for name, value in given.items() if value is not None}}
    params = SamplingParams(**{**OURS, **asked})
    override = read_override(override_generation_config)
    if beam_width is not None:
        demand_integer("beam_width", beam_width, 1, MAX_BEAMS)
    if beam_width is not None and (n != 1 or not params.greedy):
        raise InvalidConfig("beam_width", beam_width, "without n and temperature: a search has its own answers")
    engine_args: dict[str, Any] = {  # the values of LLM's parameters
        "block_size": block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_partial_prefills": max_num_partial_prefills,
        "scheduling_policy": scheduling_policy,
        "admission_rule": admission_rule,
        "watermark_blocks": watermark_blocks,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "num_gpu_blocks_override": num_gpu_blocks_override,
        "enable_prefix_caching": prefix_caching,
        "preemption_mode": preemption_mode,
        "swap_space": swap_space,
        "kv_cache_dtype": kv_cache_dtype,
        "seed": seed,
        "threads": threads,
        "quantization": quantization,
    }
    EngineArgs(**engine_args)  # refuses what makes no sense before a model is fetched
    started = time.perf_counter()
    with Watch(engine, self_check, trace, kv_events) as watch:
        sampled_by = {"generation_config": generation_config, "override_generation_config": override}
        llm = _load(model, engine_args | sampled_by, watch)
        params = SamplingParams(**{**OURS, **llm.defaults, **asked})
        requests = [prompt if raw else llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
        typer.echo(pool_sentence(llm.checkpoint.name, llm.config), err=True)
        if llm.defaults and beam_width is None:
            typer.echo(defaults_sentence(llm.defaults), err=True)
        loaded = time.perf_counter()
        if beam_width is not None:
            done = _search(llm, prompts, requests, beam_width, max_tokens, as_json)
        else:
            for index, request in enumerate(requests):
                most = llm.max_tokens_left(request, n)
                if max_tokens is not None or "max_tokens" not in llm.defaults:
                    most = max_tokens if max_tokens is not None else min(MAX_TOKENS, most)
                llm.add_request(str(index), request, replace(params, max_tokens=most))
            done = _collect(llm, len(prompts), params.n) if as_json else _stream(llm, prompts, params.n, engine)
    seconds = time.perf_counter() - loaded
    if as_json:
        facts = {
            "seconds": round(seconds, 3),
            "load_seconds": round(loaded - started, 3),
            "self_check": self_check.value,
        }
        print_json({"engine": engine, **_as_json(llm, prompts, done), **facts})
    elif sys.stderr.isatty():
        typer.secho(_summary(llm, done, seconds), err=True, dim=True)
    failures = [output.stop_reason for request in done for output in request.outputs if output.finish_reason == "error"]
    for failure in failures:
        typer.echo(str(failure), err=True)
    if failures:
        raise typer.Exit(FAILED)


def _load(model: str | None, engine_args: dict[str, Any], watch: Watch) -> LLM:
    """The model behind its engine."""
    from optimized.cli.torch_start import import_torch, nothing_to_collect

    with nothing_to_collect():
        import_torch()
        return _made(model, engine_args, watch)


def _made(model: str | None, engine_args: dict[str, Any], watch: Watch) -> LLM:
    from optimized.cli.reference_core import ReferenceCore
    from optimized.llm import LLM

    watching: dict[str, Any] = {"make_observer": watch.make_observer} if watch.is_wanted else {}
    if watch.engine == "reference":
        watching["make_core"] = ReferenceCore
    elif watch.kv_events is not None:
        watching["make_core"] = watch.make_core
    return LLM(model, **engine_args, **watching)


def _search(
    llm: LLM, prompts: Sequence[str], requests: Sequence[Prompt], width: int, max_tokens: int | None, as_json: bool
) -> list[RequestOutput]:
    """The best answers of each search."""
    from optimized.beam_search import BeamSearchParams
    from optimized.cli.screen import Screen

    most = [max_tokens or min(MAX_TOKENS, llm.max_tokens_left(request, width)) for request in requests]
    done = llm.beam_search(list(requests), BeamSearchParams(beam_width=width, max_tokens=min(most)))
    if not as_json:
        screen = Screen(prompts, width)
        for index, request in enumerate(done):
            screen.show(index, request)
    return done


def _steps(llm: LLM) -> Iterator[RequestOutput]:
    """Every request each time that it has got tokens."""
    while llm.has_unfinished_requests():
        yield from llm.step()


def _stream(llm: LLM, prompts: Sequence[str], num_samples: int, engine: str) -> list[RequestOutput]:
    """Print the texts as they come."""
    from rich.console import Console

    from optimized.cli.screen import Screen

    screen = Screen(prompts, num_samples)
    done: dict[int, RequestOutput] = {}
    # A terminal may not have every character that a model knows.
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    status = Console(stderr=True).status(f"Computing the prompt with the {engine} engine")
    status.start()
    try:
        for request in _steps(llm):
            if any(output.text or output.finished() for output in request.outputs):
                status.stop()
            screen.show(int(request.request_id), request)
            done[int(request.request_id)] = request
    finally:
        status.stop()
        if not screen.is_empty and llm.has_unfinished_requests():
            typer.echo("")
    return [done[index] for index in range(len(prompts))]


def _collect(llm: LLM, num_prompts: int, num_samples: int) -> list[RequestOutput]:
    """Wait for all texts, with a bar on standard error if that is a terminal."""
    from tqdm import tqdm

    done: dict[int, RequestOutput] = {}
    with tqdm(total=None, desc="Generating", unit=" tokens", disable=None, leave=False) as bar:
        for request in _steps(llm):
            done[int(request.request_id)] = request
            bar.update(_num_tokens([*done.values()]) - bar.n)
    return [done[index] for index in range(num_prompts)]


def _num_tokens(requests: Sequence[RequestOutput]) -> int:
    return sum(len(output.token_ids) for request in requests for output in request.outputs)


def _as_json(llm: LLM, prompts: Sequence[str], done: Sequence[RequestOutput]) -> dict[str, object]:
    num_prompt_tokens, num_tokens = sum(len(request.prompt_token_ids) for request in done), _num_tokens(done)
    return {
        "model": llm.checkpoint.name,
        "prompts": list(prompts),
        "outputs": [
            {"prompt": index, **asdict(output)} for index, request in enumerate(done) for output in request.outputs
        ],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        },
        **asdict(llm.stats()),
        "block_size": llm.config.block_size,
    }


def _summary(llm: LLM, done: Sequence[RequestOutput], seconds: float) -> str:
    stats, num_tokens = llm.stats(), _num_tokens(done)
    facts = [f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s"]
    if stats.blocks_prompt_shared:
        facts.append(f"{stats.blocks_prompt_shared} blocks shared, {stats.blocks_copied} copied")
    if stats.hit_tokens:
        facts.append(f"{stats.hit_tokens} tokens from the prefix cache")
    if stats.num_preemptions:
        swapped = f" ({stats.blocks_swapped_out} blocks swapped out)" if stats.blocks_swapped_out else ""
        facts.append(f"{stats.num_preemptions} preemptions{swapped}")
    if any(output.finish_reason == "length" for request in done for output in request.outputs):
        facts.append("cut off by --max-tokens")
    return f"[{'; '.join(facts)}]"
