"""Sabotaged reference engines whose steps overlap: each fault shows only while a step is in flight."""

from dataclasses import replace

from spec.vocabulary import AdmissionRule, Config
from tests.mutants.sabotage import Mutant

_POOL, _SCHEDULER, _DOOR, _ENGINE = (f"{name}.py" for name in ("pool", "scheduler", "door", "engine"))

_CROWDED = Config(num_blocks=4, block_size=1, max_num_seqs=4, admission_rule=AdmissionRule.OPTIMISTIC)
_CHUNKED = Config(
    num_blocks=8,
    block_size=2,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    max_model_len=16,
    admission_rule=AdmissionRule.OPTIMISTIC,
)
_ROOMY = Config(num_blocks=64, block_size=4, max_num_seqs=4, max_model_len=12)


def _fault(name: str, file: str, old: str, new: str, rule: str, row: str, config: Config | None = None) -> Mutant:
    return Mutant(name, "reference", file, old, new, rule, row, config=config)


OVERLAP_ZOO = [
    _fault(
        "an abort frees at once what a step in flight writes to",
        _POOL,
        "if self.ref_count[block] == 1 and readers:",
        "if False:",
        "ALLOC-5",
        "B-016",
        _ROOMY,
    ),
    _fault(
        "the tokens of a step are committed to the step after it",
        _ENGINE,
        "            plan = self.scheduler.live_part(self.plans[0])\n",
        "            self.plans.reverse()\n            plan = self.scheduler.live_part(self.plans[0])\n",
        "ATTN-4",
        "B-089",
        replace(_ROOMY, max_model_len=3),
    ),
    _fault(
        "somebody is preempted while a step in flight computes for them",
        _SCHEDULER,
        "            if self.pool.flights:\n                return False\n",
        "",
        "PREEMPT-7",
        "B-125",
        _CHUNKED,
    ),
    _fault(
        "nothing is scheduled but the head of the queue while a step is in flight",
        _SCHEDULER,
        "        if self._schedule_running(draft):\n",
        "        if self.pool.flights or self._schedule_running(draft):\n",
        "SCHED-13",
        "B-157",
    ),
    _fault(
        "nobody is admitted while a step is in flight",
        _SCHEDULER,
        "        return bool(waiting) and may_admit(self.roster, self.pool, waiting[0], draft.budget)\n",
        "        return False\n",
        "SCHED-12",
        "B-155",
    ),
    _fault(
        "a step in flight says that it touches only the blocks that it writes to",
        _POOL,
        "for seq_id in (*scheduled, *readers) for block in self.tables[seq_id]}",
        "for seq_id in (*scheduled, *readers) for block in self.tables[seq_id][-1:]}",
        "API-5",
        "B-019",
        _ROOMY,
    ),
    _fault(
        "a copy is left out when another step has been scheduled meanwhile",
        _SCHEDULER,
        "copies=tuple(copy for copy in plan.copies if copy.seq in live),",
        "copies=tuple(copy for copy in plan.copies if len(self.pool.flights) < 2),",
        "TABLE-5",
        "B-069",
    ),
    _fault(
        "an aborted request's sequence can be had again while a step in flight computes it",
        _DOOR,
        "return roster.seq_ids_in_use().union(*(flight.scheduled for flight in pool.flights.values()))",
        "return roster.seq_ids_in_use()",
        "SCHED-8",
        "B-168",
    ),
]
