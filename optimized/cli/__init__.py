"""The command ``kvproof``: the one place where all packages meet, each loaded when a command needs it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from optimized.cli import bench, specification, traces
from optimized.cli.chat import chat
from optimized.cli.generate import generate
from optimized.cli.guard import BAD_INPUT, BROKEN_PIPE, INTERRUPTED, OK, forget_stdout
from optimized.cli.machine import doctor, kernels
from optimized.cli.plan import plan
from optimized.cli.serve import serve

app = typer.Typer(
    name="kvproof",
    help="PagedAttention serving that can be checked.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(plan)
app.command()(serve)
app.command()(doctor)
app.command()(kernels)
app.add_typer(bench.app, name="bench")
app.add_typer(specification.app, name="spec")
app.add_typer(traces.app, name="trace")


def main() -> None:
    """The entry point of the installed command. A stream that was closed before the start is written to nowhere."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        forget_stdout()
        sys.exit(BROKEN_PIPE)


def _show_version(wanted: bool) -> None:
    if wanted:
        from optimized.doctor import version_of

        typer.echo(f"kvproof {version_of('kvproof') or '(not installed)'}")
        raise typer.Exit(OK)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """PagedAttention serving that can be checked."""
    from optimized.fault_points import VARIABLE, arm
    from spec.vocabulary import InvalidConfig

    try:
        if arm(os.environ):
            typer.echo(f"warning: {VARIABLE} makes something fail: {os.environ[VARIABLE]}", err=True)
    except InvalidConfig as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(BAD_INPUT) from None
