"""What a profile declares, tried once with room for everything: a capability that is declared and refused is a fault."""

from collections.abc import Callable
from dataclasses import replace

from spec.conformance.guard import AdapterFault, GuardedEngine, GuardedPool
from spec.conformance.machine import next_token
from spec.engine import Admission, Capability, EngineFactory, InvalidRequest, PoolFactory, Profile
from spec.vocabulary import Config, Request

PROMPT = (0, 1, 0, 1, 0, 1, 0, 1)
REQUEST = Request(request_id=0, prompt=PROMPT, max_tokens=8, seq_ids=(0,))


def _refused(method: str, capability: Capability, answer: object) -> AdapterFault:
    return AdapterFault(
        method, f"the profile declares {capability.name}, and with room for everything it says {answer}"
    )


def _roomy(profile: Profile, **limits: int | bool) -> Config:
    return Config(
        num_blocks=64 + profile.num_reserved_blocks,
        block_size=2,
        max_num_seqs=8,
        max_model_len=64,
        admission_rule=profile.admission_rules[0],
        **limits,  # type: ignore[arg-type]  # a name and a value that Config knows
    )


def try_engine(make: EngineFactory, *capabilities: Capability) -> None:
    """Raises ``AdapterFault`` for what an engine declares and does not do at all: of these capabilities, or of all."""
    profile = _profile(GuardedEngine(make, Config(num_blocks=8)).profile, capabilities)
    if not profile.admission_rules:
        raise AdapterFault("profile", "it names no admission rule: an engine has at least one")
    if profile.can(Capability.CHUNKED_PREFILL):
        _add(GuardedEngine(make, _roomy(profile, max_num_batched_tokens=4)), Capability.CHUNKED_PREFILL)
    if profile.can(Capability.FORK):
        _try_fork(GuardedEngine(make, _roomy(profile)))
    if profile.can(Capability.ABORT):
        _try_abort(GuardedEngine(make, _roomy(profile)))
    if profile.can(Capability.PREFIX_CACHE):
        _try_cache(GuardedEngine(make, _roomy(profile, prefix_cache=True)))


def _profile(profile: Profile, capabilities: tuple[Capability, ...]) -> Profile:
    return replace(profile, capabilities=profile.capabilities.intersection(capabilities or Capability))


def _add(engine: GuardedEngine, capability: Capability) -> None:
    try:
        engine.add(REQUEST)
    except InvalidRequest as error:
        raise _refused("add", capability, repr(error)) from None


def _try_fork(engine: GuardedEngine) -> None:
    _add(engine, Capability.FORK)
    for _ in PROMPT:
        engine.step(next_token)
        seq = engine.snapshot().seqs.get(0)
        if seq is not None and seq.num_output_tokens > 0:
            try:
                answer: object = engine.fork(0, 1)
            except InvalidRequest as error:
                answer = repr(error)
            if answer is not Admission.NOW:
                raise _refused("fork", Capability.FORK, answer)
            return


def _try_abort(engine: GuardedEngine) -> None:
    _add(engine, Capability.ABORT)
    before = engine.snapshot()
    engine.abort(0)
    if engine.snapshot() == before:
        raise AdapterFault("abort", "the profile declares ABORT, and it changes nothing")


def _try_cache(engine: GuardedEngine) -> None:
    _add(engine, Capability.PREFIX_CACHE)
    for _ in range(len(PROMPT) + REQUEST.max_tokens):
        engine.step(next_token)
        if engine.snapshot().cached:
            return
    raise AdapterFault("snapshot", "the profile declares PREFIX_CACHE, and no block can ever be found")


def try_pool(make: PoolFactory, *capabilities: Capability) -> None:
    """The same of a pool."""
    profile = _profile(GuardedPool(make, Config(num_blocks=8)).profile, capabilities)
    if profile.can(Capability.FORK):
        pool = _pool(make, profile)
        _try(Capability.FORK, "fork", lambda: pool.fork(0, 1))
    if profile.can(Capability.SWAP):
        swapped = _pool(make, profile, num_host_blocks=8)
        _try(Capability.SWAP, "swap_out", lambda: swapped.swap_out(0))
        _try(Capability.SWAP, "swap_in", lambda: swapped.swap_in(0))
    if profile.can(Capability.PREFIX_CACHE):
        cached = _pool(make, profile, prefix_cache=True)
        _try(Capability.PREFIX_CACHE, "publish", lambda: cached.publish(0))
        if not cached.snapshot().cached:
            raise AdapterFault("publish", "the profile declares PREFIX_CACHE, and no block can be found afterwards")
    if profile.can(Capability.ROLLBACK):
        shorter = _pool(make, profile)
        _try(Capability.ROLLBACK, "rollback", lambda: shorter.rollback(0, 3))


def _pool(make: PoolFactory, profile: Profile, **limits: int | bool) -> GuardedPool:
    """A pool with one sequence."""
    pool = GuardedPool(make, _roomy(profile, **limits))
    try:
        answer: object = pool.allocate(0, PROMPT)
    except InvalidRequest as error:
        answer = repr(error)
    if not isinstance(answer, tuple):
        raise AdapterFault("allocate", f"with room for everything it says {answer}")
    return pool


def _try(capability: Capability, method: str, call: Callable[[], object]) -> None:
    try:
        answer = call()
    except InvalidRequest as error:
        answer = repr(error)
    if not isinstance(answer, tuple):
        raise _refused(method, capability, answer)
