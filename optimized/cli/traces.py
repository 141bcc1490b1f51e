"""``kvproof trace``: read what an engine did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimized.cli.guard import FAILED, plain_errors
from optimized.cli.printing import JsonOption, print_json

if TYPE_CHECKING:
    from spec.vocabulary import Event

TraceFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A log that --trace wrote.")]

app = typer.Typer(help="Read what an engine did.", no_args_is_help=True)


@app.command()
@plain_errors
def check(
    file: TraceFile,
    full: Annotated[
        bool, typer.Option("--full", help="Judge by every rule: slow, for it replays the whole model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Judge every event of a log by the rules that need only counters, or by all of them.

    A file of vLLM's published KV events is known by its first line, and judged by the rules of the prefix cache.
    """
    import spec.replay  # noqa: F401  enters the rules
    from spec.kv_events import is_stream
    from spec.log_check import check_log, replay_log
    from spec.monitor import counted_rules
    from spec.rules import RULES, RuleViolation
    from spec.trace import Reader, TraceError

    num_judged = len(RULES) if full else len(counted_rules())
    with file.open("rb") as source:
        if is_stream(source.readline()):
            return _check_stream(file, as_json)
        source.seek(0)
        reader = Reader(source, str(file))
        verdict: dict[str, object] = {"engine": reader.engine, "num_rules": len(RULES), "num_rules_judged": num_judged}
        try:
            num_events = (replay_log if full else check_log)(reader)
        except RuleViolation as violation:
            if as_json:
                found = {"num_events": reader.num_judged, "line": reader.line, "broken": violation.rule.id}
                print_json({**verdict, **found, "report": str(violation)})
                raise typer.Exit(FAILED) from None
            violation.add_note(f"This is event {reader.num_judged} of {file}, on line {reader.line}.")
            raise
        except TraceError as error:
            if reader.num_judged:
                error.add_note(
                    f"The {reader.num_judged:,} events before it break none of the {num_judged} rules judged."
                )
            raise
    if as_json:
        print_json({**verdict, "num_events": num_events, "broken": None, "report": None})
    elif full:
        typer.echo(f"{num_events:,} events of {reader.engine}: every one of {num_judged} rules holds")
    else:
        left = f"--full judges the other {len(RULES) - num_judged} too"
        typer.echo(f"{num_events:,} events of {reader.engine}: {num_judged} of {len(RULES)} rules hold; {left}")


def _check_stream(file: Path, as_json: bool) -> None:
    from spec.kv_events import JUDGED, StreamMonitor, StreamViolation
    from spec.rules import RULES

    monitor = StreamMonitor()
    verdict: dict[str, object] = {"engine": "vllm", "num_rules": len(RULES), "num_rules_judged": len(JUDGED)}
    try:
        with file.open("rb") as source:
            monitor.follow(source, str(file))
    except StreamViolation as violation:
        if as_json:
            found = {"num_events": monitor.num_events, "line": monitor.line, "broken": violation.rule.id}
            print_json({**verdict, **found, "report": str(violation)})
            raise typer.Exit(FAILED) from None
        violation.add_note(f"This is event {monitor.num_events} of {file}, on line {monitor.line}.")
        raise
    if as_json:
        print_json({**verdict, "num_events": monitor.num_events, "broken": None, "report": None})
    else:
        names = f"{', '.join(JUDGED)}, of {len(RULES)} rules"
        typer.echo(f"{monitor.num_events:,} KV events of vLLM: those that a stream can break hold ({names})")


@app.command()
@plain_errors
def replay(file: TraceFile, as_json: JsonOption = False) -> None:
    """Print the events of a log, and the state that they lead to; nothing is judged."""
    from spec.replay import step
    from spec.trace import Reader
    from spec.vocabulary import initial_state

    with file.open("rb") as source:
        reader = Reader(source, str(file))
        state = initial_state(reader.config)
        events: list[Event] = []
        for event in reader:
            state = step(state, event)
            events.append(event)
            if not as_json:
                typer.echo(f"{len(events):6} {event!r}")
    if as_json:
        print_json(
            {
                "engine": reader.engine,
                "events": [repr(event) for event in events],
                "free": list(state.free),
                "block_tables": {seq_id: list(table) for seq_id, table in state.block_tables.items()},
                "running": list(state.running),
                "waiting": list(state.waiting),
            }
        )
        return
    typer.echo(
        f"{reader.engine}: {len(events):,} events lead to {len(state.free)} of {state.config.num_blocks} blocks free, "
        f"{len(state.running)} requests that run and {len(state.waiting)} that wait"
    )
