"""``kvproof plan``: how many users fit on a card, from the real engine on a simulated one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from optimized.cli.guard import plain_errors
from optimized.cli.printing import JsonOption, print_json, with_bar, with_status


@plain_errors
def plan(
    context: typer.Context,
    preset: Annotated[
        str | None, typer.Option(help="workshop, paper or baselines: known set-ups with known numbers.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="A model by name, or a config.json; a wrong name lists them all.")
    ] = "llama-3-8b",
    gpu: Annotated[str, typer.Option(help="The card; a wrong name lists them all.")] = "h100",
    tensor_parallel_size: Annotated[int, typer.Option(help="Cards that share the model.")] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="The part of the memory that may be used.")] = 0.9,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    max_model_len: Annotated[
        int | None, typer.Option(help="The longest sequence.", show_default="the model's, at most 8192")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="The most sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="The most tokens in one step.")] = 8192,
    replicas: Annotated[int, typer.Option(help="Engines, each on cards of its own.")] = 1,
    router: Annotated[
        str, typer.Option(help="How requests come to replicas: least-loaded or round-robin.")
    ] = "least-loaded",
    coarse: Annotated[
        bool,
        typer.Option("--coarse", help="A fitted queue in place of the engine, for whole days; its error is shown."),
    ] = False,
    allocation: Annotated[str, typer.Option(help="paged, contiguous, pow2 or oracle.")] = "paged",
    batching: Annotated[
        str, typer.Option(help="continuous, or static: a batch ends before the next begins.")
    ] = "continuous",
    rate: Annotated[float, typer.Option(help="Requests a second, at random times.")] = 10.0,
    duration: Annotated[float, typer.Option(help="Seconds of arrivals.")] = 60.0,
    prompt_len: Annotated[str, typer.Option(help="Tokens: N, exponential:MEAN or uniform:MEAN.")] = "exponential:1024",
    output_len: Annotated[str, typer.Option(help="Tokens: N, exponential:MEAN or uniform:MEAN.")] = "exponential:256",
    workload: Annotated[
        Path | None, typer.Option(help="Lines of JSON with prompt_len, max_tokens and arrival_s, in place of a rate.")
    ] = None,
    shared_len: Annotated[int, typer.Option(help="Tokens that prompts have in common.")] = 0,
    prefix_share: Annotated[float, typer.Option(help="The part of the requests that have them.")] = 1.0,
    n: Annotated[int, typer.Option("--n", help="Answers to each prompt.")] = 1,
    preemption_mode: Annotated[
        str, typer.Option(help="auto, recompute or swap: where preempted requests go while there is room.")
    ] = "auto",
    swap_space: Annotated[
        float | None, typer.Option(help="GiB of host memory for them.", show_default="with swap, as much as the cache")
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="ttft=SECONDS,tpot=SECONDS for 99 of 100 requests, normalized=SECONDS on average."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Draws of the traffic.")] = 3,
    compute_efficiency: Annotated[float, typer.Option(help="The part of the card's operations that is reached.")] = 0.6,
    bandwidth_efficiency: Annotated[float, typer.Option(help="The part of its bandwidth that is reached.")] = 0.8,
    overhead_ms: Annotated[float, typer.Option(help="What each pass takes besides.")] = 0.2,
    sweep: Annotated[
        str | None, typer.Option(help="Ask for several values of an option: rate=1:40, block_size=8:64:8, gpu=l4,h100.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the answer into FILE.svg or FILE.html.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how many requests fit on a card, how long they wait, and where its cache goes."""
    if plot is not None:
        _check_plot(plot)
    if preset is not None:
        _refuse_beside_a_preset(context)
        _preset(preset, seeds, plot, as_json)
        return
    from optimized.question import Question, Sweep

    question = Question(
        model=model,
        gpu=gpu,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        replicas=replicas,
        router=router,
        coarse=coarse,
        allocation=allocation,
        batching=batching,
        rate=rate,
        duration=duration,
        prompt_len=prompt_len,
        output_len=output_len,
        workload=workload,
        shared_len=shared_len,
        prefix_share=prefix_share,
        n=n,
        preemption_mode=preemption_mode,
        swap_space=swap_space,
        slo=slo,
        seeds=seeds,
        compute_efficiency=compute_efficiency,
        bandwidth_efficiency=bandwidth_efficiency,
        overhead_ms=overhead_ms,
    )
    if sweep is None:
        answer = with_status("Simulating", question.answer)
        if plot is not None:
            _draw(plot, question.charts(answer), question.title(answer))
        print_json(answer) if as_json else _show(answer)
        return
    several = Sweep.read(sweep)
    answers = with_bar(f"Sweeping {several.name}", several.ask(question), len(several.values))
    if plot is not None:
        _draw(plot, several.charts(answers), f"{question.model} on {question.gpu}, by {several.name.replace('_', ' ')}")
    print_json(answers) if as_json else _table(several.name, answers)


def _check_plot(path: Path) -> None:
    from spec.vocabulary import InvalidConfig

    if path.suffix not in (".svg", ".html"):
        raise InvalidConfig("plot", str(path), "a file that ends in .svg or .html")
    if not path.parent.is_dir():
        raise InvalidConfig("plot", str(path), "a file in a folder that exists")


def _refuse_beside_a_preset(context: typer.Context) -> None:
    """A preset would leave what else is asked unheard."""
    from spec.vocabulary import InvalidConfig

    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in ("preset", "seeds", "plot", "as_json"):
            raise InvalidConfig(name, value, "left out with --preset")


def _draw(path: Path, charts: Any, title: str) -> None:
    from optimized.chart import html, svg

    path.write_text((html if path.suffix == ".html" else svg)(charts, title), encoding="utf-8")
    typer.echo(f"wrote {path}", err=True)


def _preset(name: str, seeds: int, plot: Path | None, as_json: bool) -> None:
    from optimized import paper, workshop
    from spec.vocabulary import InvalidConfig

    if not 1 <= seeds <= 1000:
        raise InvalidConfig("seeds", seeds, "from 1 to 1000")
    works: dict[str, tuple[Any, Any, str]] = {
        "workshop": (
            lambda say: workshop.workshop(max(seeds, workshop.NUM_SEEDS), progress=say),
            workshop.charts,
            "Running out of cache: Llama 3 8B on one H100",
        ),
        "paper": (paper.paper, paper.charts, "Kwon et al. 2023 beside this engine: OPT-13B on one A100 of 40 GB"),
        "baselines": (paper.baselines, paper.baseline_charts, "Two ideas apart and together: OPT-13B on one A100"),
    }
    if name not in works:
        raise InvalidConfig("preset", name, f"one of {', '.join(works)}")
    work, charts, title = works[name]
    answer = with_status("Simulating", work)
    if plot is not None:
        _draw(plot, charts(answer), title)
    print_json(answer) if as_json else _show(answer)


def _table(name: str, answers: list[dict[str, Any]]) -> None:
    """A line for each answer: medians over the draws."""
    typer.echo(
        f"{name.replace('_', ' '):>18} {'fit':>6} {'ttft p50':>9} {'p99':>9} {'tpot p50':>9} {'done/s':>8} {'in use':>7}"
    )
    for each in answers:
        first, other = each["ttft_s"], each["tpot_s"]["p50"]["median"]
        typer.echo(
            f"{each[name]!s:>18} {each['requests_that_fit']:>6} {first['p50']['median']:>9.4g} {first['p99']['median']:>9.4g} "
            f"{other:>9.4g} {each['requests_per_s']['median']:>8.4g} {each['share_of_reserved_with_tokens']['median']:>7.1%}"
        )


def _show(facts: dict[str, object], indent: int = 0) -> None:
    """Facts as lines; three numbers of a spread on one of them."""
    for name, value in facts.items():
        label = " " * indent + name.replace("_", " ")
        if isinstance(value, dict) and value.keys() == {"median", "low", "high"}:
            typer.echo(
                f"{label:<38} {_number(value['median'])}   ({_number(value['low'])} to {_number(value['high'])})"
            )
        elif isinstance(value, dict) and value.keys() == {"exact", "coarse", "error"}:
            both = f"{_number(value['coarse'])}   (exact {_number(value['exact'])}, error {value['error']:+.1%})"
            typer.echo(f"{label:<38} {both}")
        elif isinstance(value, dict) and "distance" in value:
            beside = f"{label:<38} {_number(value['ours'])}   (published {_number(value['published'])}"
            typer.echo(f"{beside}, distance {value['distance']:+.1%})")
        elif isinstance(value, dict):
            typer.echo(label)
            _show(value, indent + 2)
        else:
            typer.echo(f"{label:<38} {_shown(value)}")


def _shown(value: object) -> str:
    return _number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else f"{value}"


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
