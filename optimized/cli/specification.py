"""``kvproof spec``: look at the rules, search for one that breaks, prove that none does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from optimized.cli.guard import FAILED, plain_errors
from optimized.cli.printing import JsonOption, print_json, with_status

if TYPE_CHECKING:
    from spec.explore import Exploration, Scope
    from spec.rules import Rule

app = typer.Typer(help="Look at the specification, search it, prove it.", no_args_is_help=True)


@app.command()
@plain_errors
def rules(as_json: JsonOption = False) -> None:
    """List every rule."""
    found = all_rules()
    if as_json:
        facts = [
            {
                "id": rule.id,
                "name": rule.name,
                "sentence": rule.sentence,
                "reason": rule.reason,
                "kind": rule.kind.value,
                "events": [event.__name__ for event in rule.events],
                "corpus": list(rule.corpus),
            }
            for rule in found
        ]
        print_json({"rules": facts})
        return
    for rule in found:
        after = " | ".join(event.__name__ for event in rule.events)
        typer.echo(f"{rule.id:11}{rule.sentence}{f'  [{after}]' if after else ''}")


def all_rules() -> list[Rule]:
    """Every rule, in the order of the chapters."""
    import spec.replay  # noqa: F401  it loads the chapters, which enter their rules
    from spec.rules import RULES

    return list(RULES.values())


@app.command()
@plain_errors
def explore(
    num_blocks: Annotated[int, typer.Option(help="Blocks of the pool.")] = 4,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 2,
    max_seqs: Annotated[int, typer.Option(help="The most live sequences.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of a sequence.")] = 4,
    num_token_values: Annotated[int, typer.Option(help="Different tokens.")] = 2,
    max_flights: Annotated[int, typer.Option(help="The most steps in flight.")] = 0,
    num_host_blocks: Annotated[int, typer.Option(help="Host blocks; with some, sequences are swapped.")] = 0,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache", help="Publish, hit and evict blocks.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="Take tokens back.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Visit every reachable state of a small scope, and check every rule in each."""
    from spec.explore import Scope
    from spec.explore import explore as search
    from spec.vocabulary import Config

    all_rules()
    config = Config(num_blocks, block_size, num_host_blocks=num_host_blocks, prefix_cache=prefix_cache)
    operations = {"allocate", "append", "fork", "release"}
    operations |= {"publish", "reset"} if prefix_cache else set()
    operations |= {"swap_out", "swap_in"} if num_host_blocks else set()
    operations |= {"submit", "complete"} if max_flights else set()
    operations |= {"rollback"} if rollback else set()
    scope = Scope(config, max_seqs, max_tokens, num_token_values, max_flights, frozenset(operations))
    started = time.perf_counter()
    found = with_status("Searching", lambda _: search(scope))
    seconds = time.perf_counter() - started
    if as_json:
        print_json(_exploration(scope, found, seconds))
    else:
        typer.echo(
            f"{found.num_states:,} states up to renaming, {found.num_edges:,} transitions, {found.num_refusals:,} "
            f"refusals, at most {found.depth} calls deep, in {seconds:.1f} s"
        )
        for rule in found.broken:
            typer.echo(f"{rule.id} does not hold: {rule.sentence}")
        if found.broken:
            typer.echo("  " + "\n  ".join(repr(move) for move in found.path))
        else:
            typer.echo(f"every one of {len(all_rules())} rules holds")
    if found.broken:
        raise typer.Exit(FAILED)


def _exploration(scope: Scope, found: Exploration, seconds: float) -> dict[str, object]:
    return {
        "scope": {
            "num_blocks": scope.config.num_blocks,
            "block_size": scope.config.block_size,
            "num_host_blocks": scope.config.num_host_blocks,
            "max_seqs": scope.max_seqs,
            "max_tokens": scope.max_tokens,
            "num_token_values": scope.num_token_values,
            "max_flights": scope.max_flights,
            "operations": sorted(scope.operations),
        },
        "num_states": found.num_states,
        "num_edges": found.num_edges,
        "num_refusals": found.num_refusals,
        "depth": found.depth,
        "broken": [rule.id for rule in found.broken],
        "path": [repr(move) for move in found.path],
        "seconds": round(seconds, 3),
    }


@app.command()
@plain_errors
def prove(
    solver: Annotated[str, typer.Option(help="z3, cvc5 or both.")] = "z3",
    mutations: Annotated[bool, typer.Option("--mutations", help="Break the model too, and see proofs fail.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove the rules of the core for every size."""
    from spec.proofs.matrix import matrix
    from spec.proofs.prove import prove as prove_all
    from spec.proofs.solvers import Solver
    from spec.vocabulary import InvalidConfig

    solvers = {"z3": (Solver.Z3,), "cvc5": (Solver.CVC5,), "both": (Solver.Z3, Solver.CVC5)}
    if solver not in solvers:
        raise InvalidConfig("solver", solver, f"one of {', '.join(solvers)}")
    report = with_status("Proving", lambda say: prove_all(solvers[solver], mutations=mutations, on_progress=say))
    if as_json:
        print_json(report.as_json())
    else:
        typer.echo(f"{matrix(report.results).text()}\n\n{report.summary()}\n{report.seconds:.1f} s")
    if not report.holds:
        raise typer.Exit(FAILED)
