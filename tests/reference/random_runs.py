"""Random callers: short runs on tiny engines, in which requests are added, stepped, forked and aborted in any order."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from reference.engine import ReferenceEngine
from spec.conformance.judge import Follower, JudgedEngine
from spec.engine import InvalidRequest
from spec.vocabulary import Config, Request
from tests.reference.follow import next_token


def random_config(rng: random.Random, **fields: Any) -> Config:
    """An engine of 2 to 8 blocks of 1 to 4 tokens; ``fields`` overrides."""
    drawn: dict[str, Any] = {
        "num_blocks": rng.randint(2, 8),
        "block_size": rng.randint(1, 4),
        "max_num_seqs": rng.randint(1, 4),
        "max_num_batched_tokens": rng.randint(1, 8),
        "max_model_len": rng.randint(8, 32),
        "watermark_blocks": rng.randint(0, 1),
    }
    return Config(**(drawn | fields))


@dataclass
class Run:
    """One engine, the model that follows it, and a caller who does anything at any time.

    The model follows the events that the engine emits, or works them out from what each step reports.
    """

    config: Config
    rng: random.Random
    by_report: bool = False
    num_requests: int = 0
    num_seqs: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.by_report:
            judged = JudgedEngine(ReferenceEngine(self.config), self.config)
            self.engine: ReferenceEngine | JudgedEngine = judged
            self.follower = judged.follower
        else:
            self.follower = Follower(self.config, "reference")
            self.engine = ReferenceEngine(self.config, self.follower)

    def go(self, num_calls: int = 40) -> "Run":
        """So many random calls; then everything that is left runs to its end."""
        calls = [
            self.add,
            self.add,
            self.step,
            self.step,
            self.begin_step,
            self.end_step,
            self.fork,
            self.abort,
            self.reset_cache,
        ]
        for _ in range(num_calls):
            self.rng.choice(calls)()
        while self.follower.state.flights:
            self.end_step()
        for _ in range(3000):
            if not self.follower.state.requests:
                return self
            self.step()
        raise AssertionError(f"these requests never end: {list(self.follower.state.requests)}")

    def add(self) -> None:
        rng = self.rng
        count = rng.choice((1, 1, 1, 2, 3))
        request = Request(
            request_id=self.num_requests,
            prompt=tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 6))),
            max_tokens=rng.randint(1, 8),
            seq_ids=tuple(range(self.num_seqs, self.num_seqs + count)),
            stop_token_ids=rng.choice(((), (2,))),
            priority=rng.randint(0, 2),
            cache_salt=rng.choice(("", "", "salt")),
        )
        self.num_requests += 1
        self.num_seqs += count
        try:
            refused = self.engine.add(request) is False
        except InvalidRequest:
            refused = True
        self.counts["refused" if refused else "added"] += 1

    def step(self) -> None:
        while self.follower.state.flights:
            self.end_step()
        self.engine.step(next_token)

    def begin_step(self) -> None:
        if len(self.follower.state.flights) < 2:
            self.engine.begin_step()

    def end_step(self) -> None:
        self.engine.end_step(next_token)

    def fork(self) -> None:
        state = self.follower.state
        running = [(i, seq) for i, seq in state.seqs.items() if seq.request_id in state.running]
        parents = [i for i, seq in running if seq.num_output_tokens and not seq.num_scheduled_tokens]
        if parents:
            answer = self.engine.fork(self.rng.choice(parents), self.num_seqs)
            self.num_seqs += 1
            assert answer is not None, "a sequence that can be forked was called invalid"
            self.counts[f"fork {answer.value}"] += 1

    def abort(self) -> None:
        if self.num_requests and self.rng.random() < 0.3:
            self.engine.abort(self.rng.randrange(self.num_requests))

    def reset_cache(self) -> None:
        if self.config.prefix_cache:
            self.counts[f"reset {self.engine.reset_cache()}"] += 1
