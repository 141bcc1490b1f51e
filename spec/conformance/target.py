"""What ``--engine`` names: a factory of engines, a factory of pools, or an attention kernel."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path

from spec.conformance.guard import AdapterFault, Guard
from spec.engine import Capability, InvalidRequest, Profile
from spec.vocabulary import Config


class Kind(Enum):
    """What is judged."""

    ENGINE = "an engine"
    POOL = "a pool"
    KERNEL = "an attention kernel"


METHODS: Mapping[Kind, Mapping[Capability | None, tuple[str, ...]]] = {
    Kind.ENGINE: {
        None: ("add", "step", "snapshot"),
        Capability.FORK: ("fork",),
        Capability.ABORT: ("abort",),
        Capability.PREFIX_CACHE: ("reset_cache",),
        Capability.OVERLAP: ("begin_step", "end_step"),
    },
    Kind.POOL: {
        None: ("allocate", "append", "release", "snapshot"),
        Capability.FORK: ("fork",),
        Capability.SWAP: ("swap_out", "swap_in"),
        Capability.PREFIX_CACHE: ("publish", "reset"),
        Capability.ROLLBACK: ("rollback",),
        Capability.OVERLAP: ("submit", "complete"),
    },
}
"""What an adapter must have, and what it must have if it declares a capability."""


FIRST_MAKE_LIMIT_S = 900.0
"""How long a factory may take that is called for the first time: it may import its engine, and a framework with it. The
import is over when the suite begins to measure."""


class BadTarget(ValueError):
    """What ``--engine`` names cannot be judged, and why."""


@dataclass(frozen=True)
class Target:
    """What is judged, under the name it was given. Engines and pools have a profile."""

    name: str
    kind: Kind
    call: Callable[..., object]
    profile: Profile | None = None


def load(name: str, folder: Path) -> Target:
    """The target of this name, ``MODULE:NAME``; modules in ``folder`` are found last. Raises ``BadTarget``."""
    call = _imported(name, folder)
    if _is_kernel(call):
        return Target(name, Kind.KERNEL, call)
    made: object = _made(name, call)
    kind = Kind.ENGINE if hasattr(made, "step") else Kind.POOL
    profile = getattr(made, "profile", None)
    if not isinstance(profile, Profile):
        raise BadTarget(f"{name} makes a {type(made).__name__} whose profile is {profile!r}, it must be a Profile")
    for capability, methods in METHODS[kind].items():
        if capability is None or profile.can(capability):
            missing = [method for method in methods if not callable(getattr(made, method, None))]
            why = f", which its profile declares as {capability.name}" if capability else ""
            if missing:
                raise BadTarget(f"{name} makes {kind.value} without a method {missing[0]}{why}")
    return Target(name, kind, call, profile)


def _made(name: str, call: Callable[..., object]) -> object:
    made, config = list[object](), Config(num_blocks=8)
    try:
        Guard(config, FIRST_MAKE_LIMIT_S).call(name, type(None), lambda: made.append(call(config)))
    except (AdapterFault, InvalidRequest) as fault:
        raise BadTarget(f"AdapterFault in {fault}") from fault
    return made[0]


def _imported(name: str, folder: Path) -> Callable[..., object]:
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise BadTarget(f"--engine is {name!r}, it must be MODULE:NAME, for example reference:make_engine")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last: a package ``spec`` of the caller's must not hide this one
    try:
        found: object = attrgetter(path)(importlib.import_module(module_name))
    except AttributeError:
        raise BadTarget(f"--engine is {name!r}: the module {module_name} has no {path}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BadTarget(f"--engine is {name!r}: its import raises {type(error).__name__}: {error}") from error
    if not callable(found):
        raise BadTarget(f"--engine is {name!r}, which is a {type(found).__name__} and cannot be called")
    return found


def _is_kernel(call: Callable[..., object]) -> bool:
    """Whether it takes a query and a cache: a factory takes the limits of an engine."""
    try:
        return {"query", "key_cache"} <= inspect.signature(call).parameters.keys()
    except (TypeError, ValueError):
        return False
