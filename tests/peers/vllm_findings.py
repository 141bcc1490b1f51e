"""What the suite has found in vLLM 0.32.0: for each finding the shortest story that shows it, told to the engine itself.

A story is told by ``tell``; it ends with the violation. ``but`` are the rules that are left out, since the story breaks
them earlier, with what the finding's text says about them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spec.conformance.adapters import vllm
from spec.conformance.judge import JudgedEngine
from spec.rules import RULES, RuleViolation
from spec.vocabulary import Config, Policy, Prefix, Request, SeqId, Token

Call = Callable[[JudgedEngine], object]


@dataclass(frozen=True)
class Finding:
    """A violation that is there: the rule, what happens in words, and the calls that lead to it."""

    rule: str
    title: str
    config: Config
    calls: tuple[Call, ...]
    long_prefill_token_threshold: int = 0
    but: tuple[str, ...] = ()


def one(seq: SeqId, tokens: Prefix) -> Token:
    return 1


def step(judged: JudgedEngine) -> object:
    return judged.step(one)


def add(request_id: int, prompt: Prefix, max_tokens: int, priority: int) -> Call:
    request = Request(request_id, prompt, max_tokens, (request_id,), priority=priority)
    return lambda judged: judged.add(request)


@contextmanager
def without(rule_ids: tuple[str, ...]) -> Iterator[None]:
    """For a while these rules judge nothing."""
    rules = dict(RULES)
    for rule_id in rule_ids:
        del RULES[rule_id]
    try:
        yield
    finally:
        RULES.clear()
        RULES.update(rules)


def tell(finding: Finding) -> RuleViolation | None:
    """What the story breaks; None if it comes to its end."""
    engine = vllm.VllmEngine(finding.config, vllm.PRIORITY_PROFILE, finding.long_prefill_token_threshold)
    judged = JudgedEngine(engine, finding.config)
    with without(finding.but):
        try:
            for call in finding.calls:
                call(judged)
        except RuleViolation as violation:
            return violation
    return None


URGENT, PATIENT = 0, 1
PRIORITY = Config(num_blocks=4, block_size=1, max_model_len=8, policy=Policy.PRIORITY)
LONG = Config(10, block_size=2, max_num_batched_tokens=64, max_model_len=32, prefix_cache=True, policy=Policy.PRIORITY)
LONG_PROMPT = (0, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1)
UNTIL_THE_PREEMPTION = (
    add(9, (1, 1), 3, URGENT),
    add(0, LONG_PROMPT, 2, PATIENT),
    step,
    add(1, (0, 0), 4, URGENT),
    step,
    step,
)

FINDINGS = (
    Finding(
        "SCHED-9",
        "A step computes nothing although there is work",
        PRIORITY,
        (add(0, (0,), 3, PATIENT), step, add(1, (1,), 3, URGENT), step, step),
    ),
    Finding(
        "SCHED-13",
        "A running request is passed over, with budget and blocks left",
        Config(num_blocks=7, block_size=1, max_model_len=8, policy=Policy.PRIORITY),
        (add(2, (1,), 4, URGENT), add(0, (0,), 3, PATIENT), step, add(1, (1,), 3, URGENT), step, step),
    ),
    Finding(
        "CACHE-1",
        "A block that was never written can be found in the prefix cache",
        LONG,
        UNTIL_THE_PREEMPTION,
        long_prefill_token_threshold=4,
        but=("SCHED-12", "SCHED-13"),
    ),
    Finding(
        "ATTN-1",
        "A request reads the block that was never written",
        LONG,
        (*UNTIL_THE_PREEMPTION, step),
        long_prefill_token_threshold=4,
        but=("SCHED-12", "SCHED-13", "CACHE-1", "CACHE-7", "CACHE-17", "TABLE-5"),
    ),
)
