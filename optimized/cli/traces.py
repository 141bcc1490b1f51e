"""``kvproof trace``: read what an engine did."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimized.cli.guard import FAILED, plain_errors
from optimized.cli.printing import JsonOption, print_json, with_status

if TYPE_CHECKING:
    from spec.vocabulary import Event

TraceFile = Annotated[Path, typer.Argument(help="A log that --trace wrote.")]

CLEAR = "\x1b[2J\x1b[H"
"""Empties a terminal."""

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

    A file of published KV events (vLLM's, or those of --kv-events) is known by its first line, and judged by the rules of
    the prefix cache.
    """
    import spec.replay  # noqa: F401  enters the rules
    from spec.kv_events import is_stream
    from spec.log_check import check_log, replay_log
    from spec.rules import RULES, RuleViolation
    from spec.trace import Reader, TraceError
    from spec.uncounted import counted_rules

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
    verdict: dict[str, object] = {"engine": None, "num_rules": len(RULES), "num_rules_judged": len(JUDGED)}
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
        typer.echo(f"{monitor.num_events:,} KV events: those rules hold that such a stream can break ({names})")


@app.command()
@plain_errors
def render(
    file: TraceFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write: .html to step through, or .svg.")],
) -> None:
    """Draw the memory over time, and who computes, runs and waits in each step, in one file that needs no other."""
    from spec.playback import MOST_MAPS, MOST_MAPS_IN_SVG, html, svg
    from spec.timeline import timeline
    from spec.trace import load
    from spec.vocabulary import InvalidConfig

    if output.suffix not in (".html", ".svg"):
        raise InvalidConfig("output", str(output), "a file whose name ends in .html or .svg")
    draws, most = (html, MOST_MAPS) if output.suffix == ".html" else (svg, MOST_MAPS_IN_SVG)
    trace = load(file)
    time = with_status("Drawing", lambda _: timeline(trace.config, trace.events, most, trace.choices))
    write_whole(output, draws(time, f"{trace.engine}: {file.name}"))
    typer.echo(f"{output}: {len(time.steps):,} steps of {len(time.requests):,} requests, {len(time.maps):,} maps")


@app.command()
@plain_errors
def shrink(
    file: TraceFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The log to write.")],
) -> None:
    """Leave out of a log whatever it does not need to break the same rule."""
    from spec.shrink import first_broken, shrunk
    from spec.trace import Trace, dumps, load

    trace = load(file)
    rule = first_broken(trace.config, trace.events, trace.choices)
    if rule is None:
        typer.echo(f"{file}: every rule holds, so there is nothing to shrink", err=True)
        raise typer.Exit(FAILED)
    found = with_status("Shrinking", lambda say: shrunk(trace.config, trace.events, say, trace.choices))
    write_whole(output, dumps(Trace(found.config, found.events, trace.engine, found.choices)))
    typer.echo(f"{output}: {len(found.events):,} of {len(trace.events):,} events break {found.rule_id}")


def write_whole(path: Path, text: str) -> None:
    """The file has this text, or is as it was."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@app.command()
@plain_errors
def replay(
    file: TraceFile,
    first: Annotated[int, typer.Option("--from", min=1, help="The first event to show.")] = 1,
    last: Annotated[int | None, typer.Option("--to", min=1, help="The last one.", show_default="all")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the events of a log one by one; nothing is judged.

    In a terminal n goes on, p goes back, q ends, and the memory is shown after each event. Elsewhere all events are
    printed, or those from --from to --to and the memory that they lead to.
    """
    from spec.picture import memory_map, text
    from spec.replay import step
    from spec.trace import Reader
    from spec.vocabulary import initial_state

    ranged = first > 1 or last is not None
    if not (ranged or as_json) and sys.stdin.isatty() and sys.stdout.isatty():
        return _step_through(file)
    with file.open("rb") as source:
        reader = Reader(source, str(file))
        state = initial_state(reader.config, reader.choices)
        events: list[Event] = []
        for event in reader:
            state = step(state, event)
            events.append(event)
            if not as_json and len(events) >= first:
                typer.echo(f"{len(events):6} {event!r}")
            if len(events) == last:
                break
    if ranged and not as_json:
        typer.echo(f"\n{text(memory_map(state))}")
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


def _step_through(file: Path) -> None:
    """Event by event, as the keys say."""
    from spec.picture import caption_of, memory_map, text
    from spec.replay import step
    from spec.trace import load
    from spec.vocabulary import initial_state

    trace = load(file)
    states, place = [initial_state(trace.config, trace.choices)], 0
    while True:
        caption = caption_of(trace.events[place - 1]) if place else "an empty engine"
        typer.echo(f"{CLEAR}event {place} of {len(trace.events)}: {caption}\n\n{text(memory_map(states[place]))}\n")
        typer.echo("n: next   p: previous   q: quit")
        try:
            key = typer.getchar()
        except EOFError:
            return
        if key in ("q", "\x04"):
            return
        if key in ("n", " ", "\r", "\n", "\x1b[C") and place < len(trace.events):
            place += 1
            if place == len(states):
                states.append(step(states[-1], trace.events[place - 1]))
        elif key in ("p", "\x1b[D"):
            place = max(0, place - 1)
