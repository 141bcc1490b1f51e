"""``kvproof bench``: what things cost on this machine, as facts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from optimized.cli.guard import plain_errors
from optimized.cli.printing import JsonOption, ModelOption, print_json, with_status

app = typer.Typer(name="bench", help="Measure.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure."""


@app.command()
@plain_errors
def scheduler(
    prefix: Annotated[bool, typer.Option("--prefix", help="With a prefix cache; prompts share 512 tokens.")] = False,
    num_blocks: Annotated[int, typer.Option(help="Blocks of the pool.")] = 8192,
    waiting: Annotated[
        int, typer.Option(help="Requests that wait behind the workload; the clock stops before one of them is served.")
    ] = 0,
    requests: Annotated[int, typer.Option(help="Requests that are served.")] = 1000,
    max_num_seqs: Annotated[int, typer.Option(help="The most sequences that run at once.")] = 256,
    as_json: JsonOption = False,
) -> None:
    """The scheduler and the block pool alone, without a model: microseconds per token and per step."""
    from optimized.bench_scheduler import bench_lookup, bench_memory, bench_scheduler
    from spec.vocabulary import InvalidConfig

    limits = {"num_blocks": (num_blocks, 512), "waiting": (waiting, 0), "requests": (requests, 1)}
    for name, (count, least) in {**limits, "max_num_seqs": (max_num_seqs, 1)}.items():
        if not least <= count <= 100_000_000:
            raise InvalidConfig(name, count, f"from {least} to 100000000")
    facts = with_status(
        "Serving", lambda say: bench_scheduler(num_blocks, prefix, waiting, requests, max_num_seqs, say)
    )
    if prefix:
        facts |= bench_lookup()
        facts |= bench_memory(num_blocks)
    _show(facts, as_json)


@app.command()
@plain_errors
def offline(
    workload: Annotated[Path, typer.Argument(help="A line of JSON for each request.")],
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(help="The type of the numbers.")] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto: the model's; fp8: 8 bits, and a scale for each token and head.")
    ] = "auto",
    max_num_seqs: Annotated[int | None, typer.Option(help="The most sequences that run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="The most tokens in one step.")] = None,
    prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Find blocks by what is in them.")
    ] = True,
    serial: Annotated[bool, typer.Option("--serial", help="One request after the other, for latency.")] = False,
    threads: Annotated[
        int | None, typer.Option(help="Threads on a CPU.", show_default="one for each core that may be used")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="int8: the layers' weights in 8 bits; gguf: in the 4 bits of the file; on a CPU.", show_default="none"
        ),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Where the time goes, as shares of all of it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """A whole engine on a workload: greedy, end tokens ignored, every request from its arrival on."""
    from optimized.bench_offline import bench_offline, read_tasks
    from optimized.llm import LLM
    from optimized.model_core import TorchCore
    from optimized.step_profile import ProfiledCore

    tasks = read_tasks(workload)
    cores: list[TorchCore] = []

    def make_core(*arguments: Any) -> TorchCore:
        cores.append((ProfiledCore if profile else TorchCore)(*arguments))
        return cores[0]

    llm = LLM(
        model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
        threads=threads,
        quantization=quantization,
        make_core=make_core,
    )
    facts = with_status("Serving", lambda say: bench_offline(llm, tasks, say, serial))
    core, seconds = cores[0], facts["seconds"]
    shares = core.shares(seconds) if isinstance(core, ProfiledCore) and isinstance(seconds, float) else {}
    if as_json:
        print_json({**facts, "profile": shares} if profile else facts)
        return
    _show(facts, as_json)
    for name, share in shares.items():
        typer.echo(f"  {name:<22} {share:7.2%}")


@app.command()
@plain_errors
def compare(
    workloads: Annotated[
        list[Path], typer.Argument(metavar="WORKLOAD", help="Files with a line of JSON for each request.")
    ],
    model: Annotated[str, typer.Option(help="A Hugging Face directory that every side can load.")],
    peer: Annotated[list[str], typer.Option(metavar="NAME=DIR", help="Another engine: DIR has a program named run.")],
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How often each side serves the workload.")] = 5,
    prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="On every side.")
    ] = False,
    serial: Annotated[bool, typer.Option("--serial", help="One request after the other, for latency.")] = False,
    quantization: Annotated[
        str | None,
        typer.Option(
            help="int8: our layers' weights in 8 bits; gguf: in the file's 4; the floor stays that of 16.",
            show_default="none",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Our engine and others on the same workload, in turn: ratios with their spread, and the share of the floor."""
    from optimized.bench_compare import Side, our_command, peer_command
    from optimized.bench_compare import compare as compare_sides
    from optimized.bench_offline import read_tasks
    from optimized.checkpoint import load_checkpoint
    from optimized.floor import Floor
    from spec.vocabulary import InvalidConfig

    for workload in workloads:
        read_tasks(workload)
    commands = {}
    for each in peer:
        name, equals, folder = each.partition("=")
        if not name or not equals or name in commands or name == "kvproof":
            raise InvalidConfig("peer", each, "NAME=DIR, each name once, and not kvproof")
        commands[name] = peer_command(Path(folder), model, prefix_caching)
    config = load_checkpoint(Path(model)).config
    sides: list[Side] = []
    try:
        sides.append(Side("kvproof", our_command(model, prefix_caching, quantization)))
        sides += [Side(name, command) for name, command in commands.items()]
        import torch

        floor = Floor(config, getattr(torch, sides[0].greeting["dtype"]))
        found = []
        for workload in workloads:

            def compared(say: Callable[[str], None], workload: Path = workload) -> dict[str, Any]:
                return compare_sides(sides[0], sides[1:], workload, rounds, serial, floor.seconds, say)

            found.append(with_status(f"{workload.stem}:", compared))
            if not as_json:
                _show_comparison(found[-1])
        if as_json:
            facts = {"model": model, "prefix_caching": prefix_caching, "quantization": quantization}
            print_json(facts | {"comparisons": found})
    finally:
        for side in sides:
            side.close()


@app.command()
@plain_errors
def predicted(
    workload: Annotated[Path, typer.Argument(help="A line of JSON for each request.")],
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(help="The type of the numbers.")] = "auto",
    load: Annotated[
        float, typer.Option(help="The second time requests come at this part of the predicted rate.")
    ] = 0.7,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How often it is served; the median counts.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """The planner held against this CPU: what a simulated device foresees, and what the engine does."""
    from optimized.bench_offline import read_tasks
    from optimized.bench_predicted import bench_predicted
    from optimized.checkpoint import load_checkpoint
    from spec.vocabulary import InvalidConfig

    if not 0.0 < load <= 10.0:
        raise InvalidConfig("load", load, "more than 0 and at most 10")
    tasks = read_tasks(workload)
    checkpoint = load_checkpoint(None if model is None else Path(model))
    facts = with_status("Measuring", lambda say: bench_predicted(checkpoint, dtype, tasks, load, rounds, say))
    if as_json:
        print_json(facts | {"workload": workload.stem})
        return
    fit = facts["fit"]
    costs = ", ".join(
        f"a {name.removeprefix('ms_per_').replace('_', ' ')} {value:.3f} ms"
        for name, value in fit.items()
        if "ms_" in name
    )
    typer.echo(f"{costs}; median error {fit['median_error']:.1%} of {fit['steps']} steps")
    typer.echo(f"{'':<40} {'measured':>10} {'predicted':>10} {'error':>8}")
    for name, run in facts["runs"].items():
        for what, each in run.items():
            label = f"{name}: {what.replace('_', ' ')}"
            typer.echo(f"{label:<40} {each['measured']:>10.4g} {each['predicted']:>10.4g} {each['error']:>+8.1%}")
    busy = facts["neighbours"]
    typer.echo(f"used by others meanwhile: {'not known' if busy is None else f'{busy} CPUs'}")


@app.command()
@plain_errors
def server(
    model: Annotated[
        str | None,
        typer.Option(help="Whose tokenizer it has; its weights are not used.", show_default="SmolLM2-135M-Instruct"),
    ] = None,
    connections: Annotated[int, typer.Option(help="Callers at once.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 1024,
    idle: Annotated[int, typer.Option(help="Connections that say nothing.")] = 500,
    as_json: JsonOption = False,
) -> None:
    """The front end alone, over HTTP, with a device that answers at once: streamed tokens a second, and what a token costs."""
    from optimized.bench_server import bench_server
    from spec.vocabulary import InvalidConfig

    for name, count, most in (("connections", connections, 1000), ("tokens", tokens, 100_000), ("idle", idle, 4000)):
        if not 1 <= count <= most:
            raise InvalidConfig(name, count, f"from 1 to {most}")
    _show(with_status("Serving", lambda say: bench_server(model, connections, tokens, idle, say)), as_json)


def _show(facts: dict[str, object], as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        typer.echo(f"{name.replace('_', ' '):<24} {value}")


def _show_comparison(facts: dict[str, Any]) -> None:
    """A line for each side and each ratio: the median, and in brackets the extremes."""

    def line(name: str, unit: str, of: dict[str, float]) -> None:
        typer.echo(f"{name:<36} {of['median']:>10.4g} {unit} ({of['least']:g} to {of['largest']:g})")

    busy = facts["neighbours"]
    others = "not known" if busy is None else f"{busy} CPUs"
    typer.echo(f"{facts['workload']}, {facts['rounds']} rounds, most used by others: {others}")
    for name, side in facts["sides"].items():
        line(f"  {name}, tokens in and out", "/ s", side["tokens_per_s"])
    for name, ratio in facts["ratio"].items():
        line(f"  kvproof over {name}", "x", ratio)
    line("  the floor's time over kvproof's", "", facts["floor_share"])
