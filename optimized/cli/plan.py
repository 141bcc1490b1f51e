"""``kvproof plan``: how many users fit on a card, from the real engine on a simulated one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from optimized.cli.guard import plain_errors
from optimized.cli.printing import JsonOption, print_json, with_status


@plain_errors
def plan(
    preset: Annotated[str | None, typer.Option(help="workshop: Llama 3 8B on one H100, contiguous or paged.")] = None,
    model: Annotated[str, typer.Option(help="A model by name, or a config.json.")] = "llama-3-8b",
    gpu: Annotated[str, typer.Option(help="The card.")] = "h100",
    tensor_parallel_size: Annotated[int, typer.Option(help="Cards that share the model.")] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="The part of the memory that may be used.")] = 0.9,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    max_model_len: Annotated[
        int | None, typer.Option(help="The longest sequence.", show_default="the model's, at most 8192")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="The most sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="The most tokens in one step.")] = 8192,
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
    swap_space: Annotated[float, typer.Option(help="GiB of host memory for preempted requests.")] = 0.0,
    slo: Annotated[str | None, typer.Option(help="ttft=SECONDS,tpot=SECONDS for 99 of 100 requests.")] = None,
    seeds: Annotated[int, typer.Option(help="Draws of the traffic.")] = 3,
    compute_efficiency: Annotated[float, typer.Option(help="The part of the card's operations that is reached.")] = 0.6,
    bandwidth_efficiency: Annotated[float, typer.Option(help="The part of its bandwidth that is reached.")] = 0.8,
    overhead_ms: Annotated[float, typer.Option(help="What each pass takes besides.")] = 0.2,
    as_json: JsonOption = False,
) -> None:
    """Say how many requests fit on a card, how long they wait, and where its cache goes."""
    from spec.vocabulary import InvalidConfig

    if not 1 <= seeds <= 1000:
        raise InvalidConfig("seeds", seeds, "from 1 to 1000")
    if preset is not None:
        _preset(preset, seeds, as_json)
        return
    from optimized.cards import card_named
    from optimized.known_models import cost_of
    from optimized.planner import Deployment, Objective, largest_rate, summary
    from optimized.workload import Lengths, PoissonTraffic, read_arrivals

    cost = cost_of(model)
    longest = max_model_len if max_model_len is not None else min(cost.max_model_len, 8192)
    deployment = Deployment(
        cost,
        card_named(gpu),
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        block_size=block_size,
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        allocation=_choice("allocation", allocation),
        in_batches=_is_static(batching),
        enable_prefix_caching=shared_len > 0,
        swap_space_bytes=int(swap_space * (1 << 30)),
        num_samples=n,
        compute_efficiency=compute_efficiency,
        bandwidth_efficiency=bandwidth_efficiency,
        overhead_s=overhead_ms / 1000.0,
        activation_bytes=int(cost.activation_bytes_per_token * max_num_batched_tokens),
    )
    objective = None if slo is None else Objective.read(slo)
    prompt, output = Lengths.read(prompt_len, "prompt_len"), Lengths.read(output_len, "output_len")
    traffic = PoissonTraffic(rate, duration, prompt, output, longest, shared_len, prefix_share if shared_len else 0.0)
    draws = (
        [read_arrivals(workload, longest)]
        if workload is not None
        else [traffic.arrivals(seed) for seed in range(seeds)]
    )
    draws = [arrivals for arrivals in draws if arrivals]
    if not draws:
        raise InvalidConfig("rate", rate, f"high enough that a request comes within {duration:g} s")

    def work(say: Any) -> dict[str, object]:
        runs = []
        for number, arrivals in enumerate(draws, start=1):
            say(f"draw {number} of {len(draws)}")
            runs.append(deployment.run(arrivals))
        say("the saturation rate")
        facts: dict[str, object] = {"saturation_rate": deployment.saturation_rate(traffic)}
        if objective is not None:
            facts["largest_rate_within_slo"] = largest_rate(deployment, traffic, objective, progress=say)
        return {
            "model": cost.name,
            "gpu": f"{tensor_parallel_size} x {deployment.card.name}",
            "cache_bytes": deployment.cache_bytes,
            "kv_bytes_per_token": cost.kv_bytes_per_token,
            "num_blocks": deployment.num_blocks,
            "block_size": deployment.engine_block_size,
            "requests_that_fit": deployment.requests_that_fit(prompt.mean, output.mean),
            "requests": sum(len(run.served) for run in runs),
            **summary(runs),
            **facts,
        }

    answer = with_status("Simulating", work)
    print_json(answer) if as_json else _show(answer)


def _choice(field: str, value: str) -> Any:
    from optimized.contiguous import Allocation
    from spec.vocabulary import InvalidConfig

    try:
        return Allocation(value)
    except ValueError:
        raise InvalidConfig(field, value, f"one of {', '.join(kind.value for kind in Allocation)}") from None


def _is_static(batching: str) -> bool:
    from spec.vocabulary import InvalidConfig

    if batching not in ("continuous", "static"):
        raise InvalidConfig("batching", batching, "continuous or static")
    return batching == "static"


def _preset(name: str, seeds: int, as_json: bool) -> None:
    from optimized.workshop import NUM_SEEDS, workshop
    from spec.vocabulary import InvalidConfig

    if name != "workshop":
        raise InvalidConfig("preset", name, "workshop")
    answer = with_status("Simulating", lambda say: workshop(max(seeds, NUM_SEEDS), progress=say))
    print_json(answer) if as_json else _show(answer)


def _show(facts: dict[str, object], indent: int = 0) -> None:
    """Facts as lines; three numbers of a spread on one of them."""
    for name, value in facts.items():
        label = " " * indent + name.replace("_", " ")
        if isinstance(value, dict) and value.keys() == {"median", "low", "high"}:
            typer.echo(
                f"{label:<38} {_number(value['median'])}   ({_number(value['low'])} to {_number(value['high'])})"
            )
        elif isinstance(value, dict):
            typer.echo(label)
            _show(value, indent + 2)
        else:
            typer.echo(f"{label:<38} {_number(value) if isinstance(value, float) else value}")


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:,.0f}"
