"""The door through which everybody's engine comes to the judge: behind its guard, followed call by call."""

from spec.conformance.guard import CALL_LIMIT_S, GuardedEngine, GuardedPool
from spec.conformance.judge import JudgedEngine
from spec.conformance.machine import next_token
from spec.conformance.pools import JudgedPool
from spec.engine import EngineFactory, PoolFactory
from spec.vocabulary import Config


def judged_engine(make: EngineFactory, config: Config, limit_s: float = CALL_LIMIT_S) -> JudgedEngine:
    """An engine of this factory. Its calls raise ``RuleViolation`` where a rule is broken, and ``AdapterFault`` where
    the adapter does not keep to the protocol; a call that takes longer than ``limit_s`` does not."""
    return JudgedEngine(GuardedEngine(make, config, limit_s), config)


def judged_pool(make: PoolFactory, config: Config, limit_s: float = CALL_LIMIT_S) -> JudgedPool:
    """The same of a pool; also ``Differs``, where no rule is broken and the specification does something else."""
    return JudgedPool(GuardedPool(make, config, limit_s), config)


def all_end(judged: JudgedEngine) -> bool:
    """Whether every request ends when steps are made and nothing else: in as many steps as one token a step takes, and
    as many more for each preemption that there can be."""
    requests = judged.state.requests.values()
    left = sum(len(r.seq_ids) * (len(r.prompt) + 2 * r.max_tokens) for r in requests)
    for _ in range((left + 1) * (len(requests) + 1)):
        if not judged.state.requests:
            break
        judged.step(next_token)
    return not judged.state.requests
