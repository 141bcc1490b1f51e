"""``kvproof chat``: a conversation in the terminal, out of one cache that remembers it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from optimized.cli.guard import plain_errors
from optimized.cli.printing import GenerationConfigOption, OverrideOption

OURS = {"temperature": 0.7, "max_tokens": 256}
"""What is asked of sampling where neither the command line nor the model says anything."""


@plain_errors
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A GGUF file, a Hugging Face directory, or ORG/NAME[@REVISION][:FILE.gguf] of the hub.",
            show_default="SmolLM2-135M-Instruct",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="The most tokens of an answer.", show_default="the model's, else 256")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token.", show_default="the model's, else 0.7")
    ] = None,
    generation_config: GenerationConfigOption = "auto",
    override_generation_config: OverrideOption = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    blocks: Annotated[bool, typer.Option("--blocks", help="After each answer say what the cache did.")] = False,
) -> None:
    """Talk to a model. A line is a message; an empty one, or the end of the input, is the end."""
    from optimized.cli.torch_start import import_torch, nothing_to_collect
    from optimized.generation_defaults import read_override
    from optimized.llm import LLM
    from optimized.sampling import SamplingParams

    given = {"temperature": temperature, "max_tokens": max_tokens}
    asked: dict[str, Any] = {"seed": seed, **{name: value for name, value in given.items() if value is not None}}
    SamplingParams(**asked)  # refuses what makes no sense before a model is fetched
    override = read_override(override_generation_config)
    with nothing_to_collect():
        import_torch()
        llm = LLM(model, seed=seed, generation_config=generation_config, override_generation_config=override)
    of_model = {**llm.defaults, **({"max_tokens": None} if "max_tokens" in llm.defaults else {})}
    params = SamplingParams(**{**OURS, **of_model, **asked})
    messages = [{"role": "system", "content": system}] if system else []
    turn, hits = 0, 0
    while text := _line():
        messages.append({"role": "user", "content": text})
        llm.add_request(str(turn), llm.chat_prompt(messages), params)
        answer = ""
        while llm.has_unfinished_requests():
            for output in llm.step():
                [only] = output.outputs
                typer.echo(only.text[len(answer) :], nl=False)
                sys.stdout.flush()
                answer = only.text
                if only.finish_reason == "error":
                    typer.echo(str(only.stop_reason), err=True)
        typer.echo("")
        messages.append({"role": "assistant", "content": answer})
        stats = llm.stats()
        if blocks:
            used = stats.num_blocks - stats.num_free_blocks
            typer.echo(
                f"[{stats.hit_tokens - hits} tokens found in the cache, {stats.num_cached_blocks} blocks can be found, "
                f"{used} of {stats.num_blocks} in use]",
                err=True,
            )
        turn, hits = turn + 1, stats.hit_tokens


def _line() -> str:
    """The next message; a prompt is shown where somebody sits."""
    if sys.stdin.isatty():
        typer.echo("> ", nl=False)
        sys.stdout.flush()
    return sys.stdin.readline().strip()
