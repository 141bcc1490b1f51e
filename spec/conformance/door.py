"""The door through which everybody's engine comes to the judge: behind its guard, followed call by call."""

from spec.conformance.guard import CALL_LIMIT_S, GuardedEngine, GuardedPool
from spec.conformance.judge import JudgedEngine
from spec.conformance.machine import next_token
from spec.conformance.pools import JudgedPool
from spec.conformance.watched import WatchedEngine
from spec.engine import Capability, EngineFactory, PoolFactory
from spec.vocabulary import Config


def judged_engine(make: EngineFactory, config: Config, limit_s: float = CALL_LIMIT_S) -> JudgedEngine:
    """An engine of this factory. Its calls raise ``RuleViolation`` where a rule is broken, and ``AdapterFault`` where
    the adapter does not keep to the protocol; a call that takes longer than ``limit_s`` does not."""
    return JudgedEngine(GuardedEngine(make, config, limit_s), config)


def watched_engine(make: EngineFactory, config: Config, limit_s: float = CALL_LIMIT_S) -> WatchedEngine:
    """The same of an engine that tells its events to an observer: the factory has a parameter of that name."""
    return WatchedEngine(make, config, limit_s)


def judged_pool(make: PoolFactory, config: Config, limit_s: float = CALL_LIMIT_S) -> JudgedPool:
    """The same of a pool; also ``Differs``, where no rule is broken and the specification does something else."""
    return JudgedPool(GuardedPool(make, config, limit_s), config)


def all_end(judged: JudgedEngine) -> bool:
    """Whether every request ends when steps are made and nothing else, and the engine then holds nothing: in as many
    steps as one token a step takes, and as many more for each preemption that there can be."""
    requests, profile = judged.state.requests.values(), judged.engine.profile
    left = sum(len(r.seq_ids) * (len(r.prompt) + 2 * r.max_tokens) for r in requests)
    for _ in range((left + 1) * (len(requests) + 1) + 2):
        if not judged.state.requests and not judged.state.flights:
            break
        if not profile.can(Capability.OVERLAP):
            judged.step(next_token)
            continue
        while len(judged.state.flights) < 2:
            flights = len(judged.state.flights)
            judged.begin_step()
            if len(judged.state.flights) == flights:
                break
        judged.end_step(next_token)
    state, num_usable = judged.state, judged.config.num_blocks - profile.num_reserved_blocks
    is_idle = not state.requests and not state.flights
    return is_idle and len(state.free) >= num_usable and len(state.host_free) >= judged.config.num_host_blocks
