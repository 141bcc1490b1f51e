"""Makes a story shorter that ends badly: fewer calls, smaller requests, smaller limits, as long as it ends in the same way."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeAlias

from spec.conformance.story import Call, Failed
from spec.scope import Move
from spec.vocabulary import Config, InvalidConfig, Request

Calls: TypeAlias = tuple[Call, ...]
Replay: TypeAlias = Callable[[Config, Calls], Failed | None]
"""Tells a story again: how it failed, or None."""

MAX_REPLAYS, MAX_REPLAYS_OF_A_HANG = 2_000, 10


def shrink(failed: Failed, replay: Replay, most: int = MAX_REPLAYS) -> Failed:
    """The shortest story that is found from this one. Every change that keeps the failure is kept, until none does."""
    left = MAX_REPLAYS_OF_A_HANG if "did not return" in str(failed.why) else most

    def better(config: Config, calls: Calls) -> Failed | None:
        nonlocal left
        left -= 1
        found = replay(config, calls) if left >= 0 else None
        return found if found is not None and found.kind == failed.kind else None

    improved = True
    while improved and left > 0:
        improved = False
        for change in (_fewer_calls, _smaller_requests, _smaller_limits, _first_names):
            found = _improve(failed, change, better)
            improved = improved or found is not failed
            failed = found
    return failed


Change: TypeAlias = Callable[[Config, Calls], Iterator[tuple[Config, Calls]]]


def _improve(failed: Failed, change: Change, better: Replay) -> Failed:
    """Take changes as long as one of them is better."""
    while failed.config is not None:
        calls = tuple(told.call for told in failed.story)
        found = (better(*candidate) for candidate in change(failed.config, calls))
        best = next((each for each in found if each is not None), None)
        if best is None:
            break
        failed = best
    return failed


def _fewer_calls(config: Config, calls: Calls) -> Iterator[tuple[Config, Calls]]:
    """Without half of them, a quarter, ... without one. The last call is the one that fails."""
    size = len(calls) // 2
    while size:
        for start in range(len(calls) - 1 - size, -1, -size):
            yield config, calls[:start] + calls[start + size :]
        size //= 2


def _smaller_requests(config: Config, calls: Calls) -> Iterator[tuple[Config, Calls]]:
    for i, call in enumerate(calls):
        for j, argument in enumerate(call.arguments):
            if isinstance(argument, Request | Move):
                for smaller in _smaller(argument) if isinstance(argument, Request) else _shorter(argument):
                    arguments = (*call.arguments[:j], smaller, *call.arguments[j + 1 :])
                    yield config, (*calls[:i], replace(call, arguments=arguments), *calls[i + 1 :])


def _smaller(request: Request) -> Iterator[Request]:
    changes: dict[str, Any] = {  # Any: the values of any fields
        "prompt": [request.prompt[: len(request.prompt) // 2], request.prompt[:-1], (0,) * len(request.prompt)],
        "max_tokens": [1, request.max_tokens // 2, request.max_tokens - 1],
        "seq_ids": [request.seq_ids[:1], request.seq_ids[:-1]],
        "stop_token_ids": [()],
        "priority": [0],
        "cache_salt": [""],
    }
    for name, values in changes.items():
        old = getattr(request, name)
        yield from (replace(request, **{name: value}) for value in values if value != old and value not in ((), 0, -1))
        if old and name in ("stop_token_ids", "priority"):
            yield replace(request, **{name: values[0]})


def _shorter(move: Move) -> Iterator[Move]:
    for tokens in (move.tokens[: len(move.tokens) // 2], move.tokens[:-1], (0,) * len(move.tokens)):
        if tokens and tokens != move.tokens:
            yield replace(move, tokens=tokens)


def _smaller_limits(config: Config, calls: Calls) -> Iterator[tuple[Config, Calls]]:
    """Limits that matter less: those that have a default have it, the others are smaller."""
    plain = Config(num_blocks=config.num_blocks)
    for field in fields(Config):
        old, default = getattr(config, field.name), getattr(plain, field.name)
        values = [default]
        if field.name in ("num_blocks", "block_size", "max_num_seqs", "num_host_blocks"):
            values = [1, old // 2, old - 1] if old > 1 else []
        for value in values:
            if value != old:
                try:
                    yield replace(config, **{field.name: value}), calls
                except InvalidConfig:
                    continue


def _first_names(config: Config, calls: Calls) -> Iterator[tuple[Config, Calls]]:
    """Requests and sequences counted from 0, in the order in which they come."""
    requests: dict[int, int] = {}
    seqs: dict[int, int] = {}

    def renamed(call: Call) -> Call:
        arguments: list[object] = []
        for argument in call.arguments:
            if isinstance(argument, Request):
                named = requests.setdefault(argument.request_id, len(requests))
                ids = tuple([seqs.setdefault(i, len(seqs)) for i in argument.seq_ids])
                arguments.append(replace(argument, request_id=named, seq_ids=ids))
            elif type(argument) is int:
                names = seqs if call.method == "fork" else requests
                arguments.append(names.setdefault(argument, len(names)))
            else:
                arguments.append(argument)
        return replace(call, arguments=tuple(arguments))

    new = tuple([renamed(call) for call in calls])
    if new != calls:
        yield config, new
