"""Every cache is registered and bounded, and nothing else in a server grows with what callers ask."""

import ast
import gc
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from weakref import WeakValueDictionary

from optimized.caches import CACHES, ONCE
from optimized.checkpoint import Checkpoint
from optimized.grammar import GrammarLimits
from optimized.model_core import TorchCore
from optimized.server.limits import Limits
from optimized.structured_outputs import StructuredOutputsParams
from tests.server.conftest import RunningServer, running, waited_for

ROOT = Path(__file__).parents[2]
PACKAGES = ("spec", "reference", "optimized", "kernels")
NOT_SERVED = ("spec.proofs", "spec.conformance")
KEEPING = {"cache", "lru_cache", "cached_property"}
CONTAINERS = (dict, list, set, deque, WeakValueDictionary)
LEAVES = (type, ModuleType, FunctionType, BuiltinFunctionType, str, bytes, int, float)
WALKED = {*PACKAGES, "collections", "builtins", "weakref", "prometheus_client"}
"""Whose objects are looked into."""
ENOUGH = 24
"""Requests after which every cache of a small server is full."""


def kept_in(path: Path) -> Iterator[str]:
    """What a module works out once and keeps, by its full name."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text if any(how in text for how in KEEPING) else "")
    for outer in (tree, *(each for each in ast.walk(tree) if isinstance(each, ast.ClassDef))):
        inside = f"{module}.{outer.name}" if isinstance(outer, ast.ClassDef) else module
        for each in outer.body:
            if isinstance(each, ast.FunctionDef) and any(
                ast.unparse(how).partition("(")[0].rpartition(".")[2] in KEEPING for how in each.decorator_list
            ):
                yield f"{inside}.{each.name}"


def test_what_is_kept_is_registered() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {name for path in paths for name in kept_in(path) if not name.startswith(NOT_SERVED)}
    assert found == set(ONCE)


def reachable(*roots: object) -> dict[int, int]:
    """The lengths of the containers that belong to these, and to our modules."""
    ours = [vars(module) for name, module in list(sys.modules.items()) if name.partition(".")[0] in PACKAGES]
    seen, left, found = set[int](), [*roots, *ours], dict[int, int]()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)  # to ask an object itself may load whatever a library loads late
        if issubclass(kind, CONTAINERS):
            found[id(each)] = len(each)
        elif issubclass(kind, LEAVES) or str(kind.__module__).partition(".")[0] not in WALKED:
            continue
        left += gc.get_referents(each)
    return found


def ask_what_nobody_has_asked(server: RunningServer, number: int) -> None:
    """In every field that a caller may fill with what it likes."""
    new = f"number {number}"
    body = {
        "prompt": f"{new} of many",
        "max_tokens": 1,
        "cache_salt": new,
        "seed": number,
        "stop": [new],
        "bad_words": [new],
        "logit_bias": {str(5 + number): 1},
        "stop_token_ids": [number],
        "user": new,
        "metadata": {new: new},
    }
    assert server.ask("POST", "/v1/completions", body, {"x-request-id": new, f"x-{number}": new}).status == 200
    assert server.ask("GET", f"/v1/models/{number}").status == 404
    assert server.ask("GET", f"/nothing/{number}", None, {"authorization": f"Bearer {new}"}).status == 404
    assert server.complete(model=new).status == 404
    assert server.complete(**{f"field {number}": 1}).status == 400


def test_nothing_grows_with_what_callers_ask(tiny: Checkpoint) -> None:
    server = running(tiny, Limits(grammar_cache_bytes=60_000), num_gpu_blocks_override=40)
    llm = server.engine.llm
    try:
        sizes = []
        for first in (0, ENOUGH, 2 * ENOUGH):
            for number in range(first, first + ENOUGH):
                ask_what_nobody_has_asked(server, number)
            assert waited_for(lambda: server.engine.health.num_unfinished == 0 and not server.app.readers.connected)
            gc.collect()
            sizes.append(sum(reachable(server.app, server.service, server.engine).values()))
        assert min(sizes) > 1000
        assert sizes[2] - sizes[1] < ENOUGH // 2, sizes  # one entry a request would be twice as many
        for cache in CACHES:
            assert 0 <= cache.size(llm) <= cache.most(llm), cache.name
        assert llm.stats().num_cached_blocks > llm.config.num_blocks // 2
        core = llm._core
        assert isinstance(core, TorchCore)
        deepest = (server.engine._engine._names, core.core.scheduler.requests, core.device.sampling)
        assert set(map(id, deepest)) <= reachable(server.app, server.service, server.engine).keys()
        vars(server.service)["forgotten"] = {"by": set(range(ENOUGH))}  # whatever somebody adds one day is found
        assert sum(reachable(server.app, server.service, server.engine).values()) >= sizes[2] + ENOUGH
    finally:
        server.stop()


def test_grammars_stay_within_their_bytes(tiny: Checkpoint) -> None:
    server = running(tiny)
    llm = server.engine.llm
    [cache] = [each for each in CACHES if each.name == "grammars"]
    try:
        llm.grammars.limits = GrammarLimits(cache_bytes=60_000)
        for number in range(4):
            llm.grammars.grammar(StructuredOutputsParams(choice=[f"{number}"]))
            assert cache.size(llm) <= cache.most(llm)
        assert cache.size(llm) > 0
    finally:
        server.stop()
