"""``kvproof bench``: what things cost on this machine, as facts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optimized.cli.guard import plain_errors
from optimized.cli.printing import JsonOption, print_json, with_status

app = typer.Typer(name="bench", help="Measure.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure."""


@app.command()
@plain_errors
def scheduler(
    prefix: Annotated[bool, typer.Option("--prefix", help="With a prefix cache; prompts share 512 tokens.")] = False,
    num_blocks: Annotated[int, typer.Option(help="Blocks of the pool.")] = 8192,
    waiting: Annotated[int, typer.Option(help="Requests that wait behind the workload and are not served.")] = 0,
    requests: Annotated[int, typer.Option(help="Requests that are served.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """The scheduler and the block pool alone, without a model: microseconds per token and per step."""
    from optimized.bench_scheduler import bench_lookup, bench_memory, bench_scheduler
    from spec.vocabulary import InvalidConfig

    for name, count, least in (("num_blocks", num_blocks, 512), ("waiting", waiting, 0), ("requests", requests, 1)):
        if not least <= count <= 100_000_000:
            raise InvalidConfig(name, count, f"from {least} to 100000000")
    facts = with_status("Serving", lambda say: bench_scheduler(num_blocks, prefix, waiting, requests, say))
    if prefix:
        facts |= bench_lookup()
        facts |= bench_memory(num_blocks)
    _show(facts, as_json)


@app.command()
@plain_errors
def offline(
    workload: Annotated[Path, typer.Argument(help="A line of JSON for each request.")],
    model: Annotated[
        str | None, typer.Option(help="A GGUF file or a Hugging Face directory.", show_default="SmolLM2-135M-Instruct")
    ] = None,
    dtype: Annotated[str, typer.Option(help="The type of the numbers.")] = "auto",
    max_num_seqs: Annotated[int | None, typer.Option(help="The most sequences that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="The most tokens in one step.")] = None,
    prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Find blocks by what is in them.")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """A whole engine on a workload: greedy, end tokens ignored, every request from its arrival on."""
    from optimized.bench_offline import bench_offline, read_tasks
    from optimized.llm import LLM

    tasks = read_tasks(workload)
    llm = LLM(
        model,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
    )
    facts = with_status("Serving", lambda say: bench_offline(llm, tasks, say))
    _show(facts, as_json)


def _show(facts: dict[str, object], as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        typer.echo(f"{name.replace('_', ' '):<24} {value}")
