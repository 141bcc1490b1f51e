"""``kvproof trace``: read what an engine did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimized.cli.guard import FAILED, plain_errors
from optimized.cli.printing import JsonOption, print_json
from optimized.cli.specification import all_rules

if TYPE_CHECKING:
    from spec.rules import Rule
    from spec.vocabulary import Event

TraceFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A log that --trace wrote.")]

app = typer.Typer(help="Read what an engine did.", no_args_is_help=True)


@app.command()
@plain_errors
def check(file: TraceFile, as_json: JsonOption = False) -> None:
    """Judge every event of a log by every rule."""
    from spec.replay import step
    from spec.rules import RuleViolation, check_rules
    from spec.trace import Reader
    from spec.vocabulary import initial_state

    num_events = 0
    with file.open("rb") as source:
        reader = Reader(source, str(file))
        state = initial_state(reader.config)
        for event in reader:
            num_events += 1
            after = step(state, event)
            try:
                check_rules(state, event, after, engine=reader.engine)
            except RuleViolation as violation:
                violation.add_note(f"This is event {num_events} of {file}, on line {num_events + 1}.")
                if as_json:
                    print_json(_verdict(reader.engine, num_events, violation))
                    raise typer.Exit(FAILED) from None
                raise
            state = after
    if as_json:
        print_json(_verdict(reader.engine, num_events, None))
    else:
        typer.echo(f"{num_events:,} events of {reader.engine}: every one of {len(all_rules())} rules holds")


def _verdict(engine: str, num_events: int, violation: Exception | None) -> dict[str, object]:
    rule: Rule | None = getattr(violation, "rule", None)
    return {
        "engine": engine,
        "num_events": num_events,
        "broken": None if rule is None else rule.id,
        "report": None if violation is None else str(violation),
    }


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
