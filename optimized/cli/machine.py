"""``kvproof doctor`` and ``kvproof kernels``: what there is on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from optimized.cli.guard import FAILED, plain_errors
from optimized.cli.printing import JsonOption, print_json


@plain_errors
def doctor(
    flags: Annotated[
        list[str] | None, typer.Argument(help="Flags of kvproof serve, after --, to see what they come to.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Look at this model on this machine instead: a file, a folder, ORG/NAME, or default."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a model ORG/NAME.")] = None,
    fault_points: Annotated[
        bool, typer.Option("--fault-points", help="List the places at which a test may let something fail.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is installed, which device and kernels would be used, why, and where each setting of serve comes from;
    or, with --model, what a model is made of, file by file, and whether it can be served."""
    if fault_points:
        _list_fault_points(as_json)
        return
    if model is not None:
        inspect(model, revision, as_json)
        return
    from optimized.cli import app
    from optimized.cli.settings import settings_of
    from optimized.doctor import examine

    settings, found = settings_of(app, "serve", flags or []), examine()
    if as_json:
        print_json({**found.as_json(), "settings": [asdict(each) for each in settings]})
    else:
        typer.echo(found.text())
        typer.echo("settings of kvproof serve:")
        for each in settings:
            typer.echo(f"  {each.name:<28}{each.value:<24} {each.origin}")
    if found.problems:
        raise typer.Exit(FAILED)


def inspect(model: str, revision: str | None, as_json: bool) -> None:
    """Print what a model is made of."""
    from optimized.inspection import inspect_model

    found = inspect_model(model, revision)
    if as_json:
        print_json(found.as_json())
    else:
        typer.echo(found.text())
    if found.refused is not None:
        raise typer.Exit(FAILED)


def _list_fault_points(as_json: bool) -> None:
    from optimized.fault_points import VARIABLE, FaultPoint

    if as_json:
        facts = [{"name": each.title, "what": each.what, "harm": each.harm.value} for each in FaultPoint]
        print_json({"fault_points": facts})
        return
    for each in FaultPoint:
        typer.echo(f"{each.title:<17} {each.what:<61} ends {each.harm.value}")
    typer.echo(f"In a folder of the sources, {VARIABLE}=NAME:N lets one fail the Nth time that it is reached.")


@plain_errors
def kernels(
    compile_them: Annotated[
        bool, typer.Option("--compile", help="Compile for every target, without a GPU, and read the machine code.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every head size, type and option: minutes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the Triton kernels by target; with --compile, judge what the compiler makes of them."""
    from kernels.compiled import as_text, compile_report
    from kernels.configuration import covering_set, small_set

    wanted = covering_set() if everything else small_set()
    if not compile_them:
        facts = [asdict(each) for each in wanted]
        text = [
            f"{each.target}  {each.kernel:12} head size {each.head_size}, block size {each.block_size}, {each.dtype}"
            for each in wanted
        ]
        if as_json:
            print_json({"configurations": facts})
        else:
            typer.echo("\n".join([*text, "--compile compiles and judges these."]))
        return
    reports = []
    for each in wanted:
        reports += compile_report([each])
        if not as_json:
            typer.echo(as_text(reports[-1]))
    if as_json:
        print_json({"reports": [asdict(report) for report in reports]})
    if any(report.problems for report in reports):
        raise typer.Exit(FAILED)
