"""Fixed stories of preemption (level L3): there are more requests than blocks."""

from dataclasses import replace

from spec.conformance.fixed import BEGIN, END, STEP, FixedStory, abort, ahead, ask, fork, steps
from spec.engine import Capability
from spec.vocabulary import AdmissionRule, Config, Policy, Recovery

CROWDED = Config(num_blocks=6, block_size=1, max_num_seqs=4, max_model_len=12, admission_rule=AdmissionRule.OPTIMISTIC)
SWAPPING = replace(CROWDED, num_host_blocks=8, recovery=Recovery.SWAP)
CACHED = replace(CROWDED, prefix_cache=True)
CHUNKED = replace(CROWDED, num_blocks=8, max_num_batched_tokens=3)
WIDE = replace(CROWDED, num_blocks=6, block_size=2)


def preempted(name: str, config: Config, *calls: object) -> FixedStory:
    """A story in which somebody gives way."""
    more = frozenset({Capability.PREEMPTION})
    return FixedStory(name, config, calls, more, insists=True)  # type: ignore[arg-type]


PREEMPTION_STORIES = (
    preempted(
        "three grow until one gives way",
        CROWDED,
        *(ask(i, (i + 5,), 6) for i in range(3)),
        *steps(18),
    ),
    preempted(
        "three grow in blocks of two",
        WIDE,
        *(ask(i, (i + 5, 6, 7), 6) for i in range(3)),
        *steps(4),
        ask(3, (3,), 5),
        *steps(14),
    ),
    preempted(
        "a chunk asks for what it computes",
        CHUNKED,
        ask(0, (5, 6), 5),
        ask(1, (6, 7, 8), 5),
        ask(2, (7, 8, 9, 1, 2), 3),
        *steps(22),
    ),
    preempted(
        "two samples give way as one",
        CROWDED,
        ask(0, (5,), 6),
        ask(1, (6,), 3, 1, 2),
        *steps(14),
    ),
    preempted(
        "two samples give way for one another",
        replace(CROWDED, num_blocks=7),
        ask(0, (5, 8), 6),
        ask(1, (6, 9), 2, 1, 2),
        *steps(14),
    ),
    preempted(
        "three samples in blocks of two",
        replace(WIDE, num_blocks=8),
        ask(0, (5, 8, 9), 8),
        ask(1, (6, 9, 4), 4, 1, 2, 3),
        *steps(18),
    ),
    preempted(
        "forks in a crowd",
        replace(CROWDED, num_blocks=8),
        ask(0, (5,), 3),
        ask(1, (6,), 4),
        STEP,
        fork(1, 2),
        fork(0, 3),
        fork(0, 4),
        *steps(12),
    ),
    preempted(
        "an abort of who gave way",
        CROWDED,
        *(ask(i, (i + 5, 4), 5) for i in range(3)),
        *steps(3),
        abort(2),
        STEP,
        ask(2, (9,), 3),
        abort(1),
        *steps(8),
    ),
    preempted(
        "who gave way finds its prefix",
        CACHED,
        *(ask(i, (i + 5, 4), 5) for i in range(3)),
        *steps(18),
    ),
    preempted(
        "samples that gave way find their prefix",
        replace(CACHED, num_blocks=7),
        ask(0, (5, 8), 6),
        ask(1, (6, 9), 2, 1, 2),
        *steps(14),
    ),
    preempted(
        "what a victim was to write is found by nobody",
        replace(CACHED, num_blocks=5, admission_rule=AdmissionRule.PROMPT),
        ask(0, (0, 0), 2),
        ask(1, (0,), 2, 1, 2),
        *steps(6),
    ),
    preempted(
        "a prefix of two blocks in a crowd",
        replace(CACHED, num_blocks=7, block_size=2),
        ask(0, (5, 6, 7, 8, 9), 6),
        ask(1, (5, 6, 7, 8, 1), 6),
        ask(2, (5, 6, 7, 8, 9), 4),
        *steps(5),
        ask(3, (5, 6, 7, 8, 9, 9), 3),
        *steps(18),
    ),
    preempted(
        "who gives way moves to host memory",
        SWAPPING,
        *(ask(i, (i + 5, 4), 5) for i in range(3)),
        *steps(18),
    ),
    preempted(
        "samples move to host memory",
        SWAPPING,
        ask(0, (5,), 6),
        ask(1, (6,), 3, 1, 2),
        *steps(14),
    ),
    preempted(
        "samples move to host memory in blocks of two",
        replace(WIDE, num_blocks=7, num_host_blocks=6, recovery=Recovery.SWAP),
        ask(0, (5, 8, 9), 8),
        ask(1, (6, 9, 4), 4, 1, 2),
        *steps(18),
    ),
    preempted(
        "host memory is full",
        replace(SWAPPING, num_host_blocks=2),
        *(ask(i, (i + 5, 4), 5) for i in range(4)),
        *steps(5),
        abort(2),
        *steps(16),
    ),
    preempted(
        "the least urgent gives way",
        replace(CROWDED, policy=Policy.PRIORITY),
        ask(0, (5, 4), 5, priority=2),
        STEP,
        ask(1, (6, 4), 5, priority=0),
        STEP,
        ask(2, (7, 4), 5, priority=1),
        *steps(16),
    ),
    preempted(
        "a crowd with a window",
        replace(CROWDED, num_blocks=7, window=3),
        *(ask(i, (i + 5, 4, 3), 7) for i in range(3)),
        *steps(26),
    ),
    preempted(
        "a crowd while steps are in flight",
        CROWDED,
        *(ask(i, (i + 5,), 6) for i in range(3)),
        *ahead(20),
        END,
    ),
    preempted(
        "who gives way for himself comes back when his token is drawn",
        replace(CROWDED, num_blocks=5),
        ask(0, (5, 6), 1),
        ask(1, (7, 8, 9), 3),
        *(BEGIN, BEGIN, BEGIN, END),
        *ahead(4),
        END,
    ),
    preempted(
        "chunks in a crowd while steps are in flight",
        replace(CHUNKED, block_size=2, num_blocks=5),
        *(ask(i, (i + 5, 4, 3, 2, 1), 5) for i in range(3)),
        *ahead(24),
        END,
    ),
    preempted(
        "a cache in a crowd while steps are in flight",
        replace(CACHED, max_num_batched_tokens=4),
        *(ask(i, (i + 5, 4), 5) for i in range(3)),
        *ahead(24),
        END,
    ),
    preempted(
        "host memory while steps are in flight",
        SWAPPING,
        *(ask(i, (i + 5, 4), 5) for i in range(3)),
        *ahead(20),
        END,
        BEGIN,
        END,
    ),
)
"""In the order in which they are told."""
