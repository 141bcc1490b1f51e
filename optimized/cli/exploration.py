"""``kvproof spec explore``: visit every state of a small scope, or look for one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from optimized.cli.guard import FAILED, plain_errors
from optimized.cli.printing import JsonOption, print_json, with_status

if TYPE_CHECKING:
    from spec.rules import RuleViolation
    from spec.scope import Move, Scope
    from spec.vocabulary import Config

Facts = dict[str, object]
T = TypeVar("T")


@dataclass(frozen=True)
class Looked:
    """What one search has to say."""

    name: str
    num_states: int
    num_edges: int
    num_refusals: int
    depth: int
    seconds: float
    broken: list[str]
    more: Facts

    def line(self) -> str:
        return (
            f"{self.name:9} {self.num_states:,} states up to renaming, {self.num_edges:,} transitions, "
            f"{self.num_refusals:,} refusals, at most {self.depth} calls deep, in {self.seconds:.1f} s"
        )

    def as_json(self) -> Facts:
        return {
            "lens": self.name,
            "num_states": self.num_states,
            "num_edges": self.num_edges,
            "num_refusals": self.num_refusals,
            "depth": self.depth,
            "seconds": round(self.seconds, 3),
            "broken": self.broken,
            **self.more,
        }


@plain_errors
def explore(
    lens: Annotated[
        list[str] | None, typer.Option(help="A feature; again for another one. All of them by default.")
    ] = None,
    scope: Annotated[
        str | None, typer.Option(help="small (seconds a lens) or large (minutes).", show_default="small")
    ] = None,
    reach: Annotated[
        str | None, typer.Option(help="Look for a state, as in 'ref_count>=3 and not swapped', and stop there.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME", help="With --reach: only what the profile of this factory's engine declares."
        ),
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of the pool: a scope of your own.")] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per block, in a scope of your own.", show_default="2")
    ] = None,
    max_seqs: Annotated[int | None, typer.Option(help="The most live sequences.", show_default="3")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="The most tokens of a sequence.", show_default="4")] = None,
    num_token_values: Annotated[int | None, typer.Option(help="Different tokens.", show_default="2")] = None,
    max_flights: Annotated[int | None, typer.Option(help="The most steps in flight.", show_default="0")] = None,
    num_host_blocks: Annotated[
        int | None, typer.Option(help="Host blocks; with some, sequences are swapped.", show_default="0")
    ] = None,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache", help="Publish, hit and evict blocks.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="Take tokens back.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Visit every reachable state of small scopes, one a feature, and check every rule in each."""
    import spec  # noqa: F401  enters the rules
    from spec.vocabulary import InvalidConfig

    own: dict[str, int | None] = {
        "block_size": block_size,
        "max_seqs": max_seqs,
        "max_tokens": max_tokens,
        "num_token_values": num_token_values,
        "max_flights": max_flights,
        "num_host_blocks": num_host_blocks,
        "prefix_cache": prefix_cache or None,
        "rollback": rollback or None,
    }
    if num_blocks is not None:
        _left_out({"lens": lens, "scope": scope}, "with --num-blocks, which is a scope of your own")
        scopes, loads = {"own": _own(num_blocks, {name: n for name, n in own.items() if n is not None})}, list[str]()
    else:
        _left_out(own, "without --num-blocks: it is about a scope of your own")
        scopes, loads = _chosen(lens or [], scope or "small", reach is not None)
    if reach is not None:
        _look(reach, scopes if engine is None else _declared(scopes, engine), as_json)
        return
    if engine is not None:
        raise InvalidConfig("engine", engine, "left out without --reach: the suite judges engines, a search the rules")
    looked = [_explored(name, each, as_json) for name, each in scopes.items()]
    looked += [_scheduled(name, as_json) for name in loads]
    broken = [rule_id for each in looked for rule_id in each.broken]
    if as_json:
        print_json(looked[0].as_json() if num_blocks is not None else _together(looked, broken))
    elif not broken:
        from spec.rules import RULES

        typer.echo(f"every one of {len(RULES)} rules holds")
    if broken:
        raise typer.Exit(FAILED)


def _left_out(options: Mapping[str, object], why: str) -> None:
    """None of these options was given: nobody would look at it."""
    from spec.vocabulary import InvalidConfig

    for name, value in options.items():
        if value is not None:
            raise InvalidConfig(name, value, f"left out {why}")


def _own(num_blocks: int, limits: Mapping[str, int]) -> Scope:
    """A scope of the caller's own."""
    from spec.scope import CACHE, FLIGHTS, PLAIN, ROLLBACK, SWAP, Scope
    from spec.vocabulary import Config

    of = {"block_size": 2, "max_seqs": 3, "max_tokens": 4, "num_token_values": 2, **limits}
    features = {"prefix_cache": CACHE, "num_host_blocks": SWAP, "max_flights": FLIGHTS, "rollback": ROLLBACK}
    operations = PLAIN.union(*(names for name, names in features.items() if of.get(name)))
    host, cached = of.get("num_host_blocks", 0), bool(of.get("prefix_cache"))
    config = Config(num_blocks, of["block_size"], num_host_blocks=host, prefix_cache=cached)
    most = of["max_seqs"], of["max_tokens"], of["num_token_values"], of.get("max_flights", 0)
    return Scope(config, *most, operations)


def _together(looked: Sequence[Looked], broken: list[str]) -> Facts:
    return {
        "num_states": sum(each.num_states for each in looked),
        "num_edges": sum(each.num_edges for each in looked),
        "num_refusals": sum(each.num_refusals for each in looked),
        "seconds": round(sum(each.seconds for each in looked), 3),
        "broken": broken,
        "lenses": [each.as_json() for each in looked],
    }


def _chosen(names: Sequence[str], size: str, pools_only: bool) -> tuple[dict[str, Scope], list[str]]:
    """The scopes of the lenses, and the loads of the scheduler, that have these names."""
    from spec.schedules import LOADS
    from spec.scope import LENSES
    from spec.vocabulary import InvalidConfig

    if size not in ("small", "large"):
        raise InvalidConfig("scope", size, "small or large")
    known = [*LENSES, *([] if pools_only else LOADS)]
    for name in names:
        if name not in known:
            raise InvalidConfig("lens", name, f"one of {', '.join(known)}")
    chosen = list(dict.fromkeys(names)) or known
    scopes = {name: LENSES[name].small if size == "small" else LENSES[name].large for name in chosen if name in LENSES}
    return scopes, [name for name in chosen if name in LOADS]


def _declared(scopes: Mapping[str, Scope], engine: str) -> dict[str, Scope]:
    """The scopes without what the engine's profile does not declare; what is then the same is searched once."""
    from spec.conformance.target import BadTarget, load
    from spec.scope import narrowed
    from spec.vocabulary import InvalidConfig

    try:
        profile = load(engine, Path.cwd()).profile
    except BadTarget as error:
        raise InvalidConfig("engine", engine, f"a factory of engines or pools: {error}") from None
    if profile is None:
        raise InvalidConfig("engine", engine, "a factory of engines or pools, not a kernel")
    unique: dict[Scope, str] = {}
    for name, scope in scopes.items():
        unique.setdefault(narrowed(scope, profile), name)
    return {name: scope for scope, name in unique.items()}


def _explored(name: str, scope: Scope, as_json: bool) -> Looked:
    """Search one scope, and say what was found."""
    from spec.explore import explore as search

    found, seconds = _timed(f"Searching {name}", lambda say: search(scope, on_progress=lambda n: say(f"{n:,} states")))
    more: Facts = {"num_events": found.num_events, **_report(found.violation), "scope": _scope(scope)}
    more["path"] = [str(move) for move in found.path]
    looked = Looked(
        name,
        found.num_states,
        found.num_edges,
        found.num_refusals,
        found.depth,
        seconds,
        [rule.id for rule in found.broken],
        more,
    )
    if not as_json:
        typer.echo(looked.line())
        if found.violation is not None:
            typer.echo(f"{found.violation}\n")
            _show_way(scope.config, found.path)
    return looked


def _scheduled(name: str, as_json: bool) -> Looked:
    """Search what the scheduler of the reference engine does under one load, also for a request that never ends."""
    import reference
    from spec.schedules import LOADS, find_lasso, schedules, tell

    load = LOADS[name]
    found, seconds = _timed(f"Searching {name}", lambda _: schedules(load, reference.make_engine))
    lasso = find_lasso(found) if found.violation is None else None
    story = None if lasso is None else tell(load, reference.make_engine, lasso)
    broken = [] if found.violation is None else [found.violation.rule.id]
    broken += ["a request never ends"] if story is not None and load.everyone_ends else []
    path = ["step" if turn is None else f"add a request of kind {turn}" for turn in found.path]
    more: Facts = {**_report(found.violation), "path": path, "lasso": story}
    looked = Looked(name, found.num_states, found.num_edges, 0, found.depth, seconds, broken, more)
    if not as_json:
        typer.echo(looked.line())
        if found.violation is not None:
            typer.echo(f"{found.violation}\n  after " + ", ".join(path))
        if story is not None and load.everyone_ends:
            typer.echo(f"a request never ends:\n{story}")
    return looked


def _look(reach: str, scopes: Mapping[str, Scope], as_json: bool) -> None:
    """The first state of these scopes that is as claimed, and the shortest way there."""
    from spec.explore import Exploration
    from spec.explore import explore as search
    from spec.situation import situation

    wanted, found, num_states, name = situation(reach), Exploration(), 0, ""
    for name, scope in scopes.items():
        found, _ = _timed(f"Searching {name}", lambda _: search(scope, reach=wanted))  # noqa: B023  called at once
        num_states += found.num_states
        if found.state is not None:
            break
    is_reached = found.state is not None and found.violation is None
    if as_json:
        facts: Facts = {"reach": reach, "reached": is_reached, "num_states": num_states}
        facts |= {"lens": name, "path": [str(move) for move in found.path]} if found.state is not None else {}
        print_json({**facts, "broken": [rule.id for rule in found.broken], **_report(found.violation)})
    elif found.state is None:
        typer.echo(f"{reach}: no, in none of {num_states:,} states of {', '.join(scopes)}")
    else:
        answer = f"{reach}: yes, after {len(found.path)} calls, in the lens {name}"
        typer.echo(f"{answer if is_reached else found.violation}\n")
        _show_way(scopes[name].config, found.path)
    if found.violation is not None:
        raise typer.Exit(FAILED)


def _timed(doing: str, work: Callable[[Callable[[str], None]], T]) -> tuple[T, float]:
    started = time.perf_counter()
    return with_status(doing, work), time.perf_counter() - started


def _show_way(config: Config, path: Sequence[Move]) -> None:
    """The calls of a path, and the memory map after each."""
    from spec.explore import story
    from spec.picture import text

    typer.echo("\n\n".join(text(picture) for picture in story(config, path)))


def _report(violation: RuleViolation | None) -> Facts:
    return {"report": None if violation is None else str(violation)}


def _scope(scope: Scope) -> Facts:
    return {
        "num_blocks": scope.config.num_blocks,
        "block_size": scope.config.block_size,
        "num_host_blocks": scope.config.num_host_blocks,
        "window": scope.config.window,
        "max_seqs": scope.max_seqs,
        "max_tokens": scope.max_tokens,
        "num_token_values": scope.num_token_values,
        "max_flights": scope.max_flights,
        "max_append": scope.max_append,
        "operations": sorted(scope.operations),
    }
