"""Sabotaged engines that choose what vLLM chooses with its asynchronous scheduler. The engine that is sabotaged is the
executable model of ``tests/spec``, which can choose that as well."""

from spec.vocabulary import AdmissionRule, Config, Policy
from tests.mutants.sabotage import Mutant

_CROWDED = Config(
    num_blocks=6,
    block_size=1,
    max_num_seqs=4,
    max_num_batched_tokens=4,
    prefix_cache=True,
    admission_rule=AdmissionRule.OPTIMISTIC,
)
_CACHED = Config(num_blocks=9, block_size=1, max_num_seqs=4, prefix_cache=True)
_URGENT = Config(num_blocks=9, block_size=2, max_num_seqs=4, policy=Policy.PRIORITY)


def _fault(name: str, old: str, new: str, rule: str, row: str, config: Config | None = None) -> Mutant:
    return Mutant(name, "tests/spec", "model_engine.py", old, new, rule, row, config=config)


AHEAD_ZOO = [
    _fault(
        "a step computes the token after the one that is being drawn",
        "        missing = num_tokens_ahead(self.state, seq_id) - room",
        "        missing = num_tokens_ahead(self.state, seq_id) + 1 - room",
        "SCHED-5",
        "B-154",
        _CACHED,
    ),
    _fault(
        "who was preempted comes back while his token is still being drawn",
        "            if admission(self.state, head, self._budget()) is not Admission.NOW:\n",
        "            idle = replace(self.state, flights={max(self.state.flights): self._open})\n"
        "            if admission(idle, head, self._budget()) is not Admission.NOW:\n",
        "SCHED-11",
        "B-134",
        _CROWDED,
    ),
    _fault(
        "who was preempted in the middle of his prompt is given a token",
        "in waiting and stops[i] == self.state.seqs[i].num_tokens",
        "in waiting",
        "SCHED-6",
        "B-134",
        _CROWDED,
    ),
    _fault(
        "a block is published whose last token is still being drawn",
        "        num_tokens = min(room(seq), seq.num_tokens) if self",
        "        num_tokens = room(seq) if self",
        "CACHE-6",
        "B-100",
        _CACHED,
    ),
    _fault(
        "of equal blocks the last one takes the place of the first",
        "                self._do(Publish(seq_id, index))",
        "                if not is_new:\n"
        "                    self._do(Evict(find(self.state, key_of(self.state, seq_id, index))))\n"
        "                self._do(Publish(seq_id, index))",
        "CACHE-9",
        "B-101",
        _CACHED,
    ),
    _fault(
        "the cache is not emptied while somebody waits",
        "        if not may_reset(self.state):\n",
        "        if not may_reset(self.state) or self.state.requests:\n",
        "CACHE-13",
        "B-105",
        _CACHED,
    ),
    _fault(
        "who runs is shown by priority, and runs in the order of admission",
        "        return replace(self.state, cells={}, host_cells={})",
        "        running = sorted(self.state.running, key=lambda i: service_order(self.state, i))\n"
        "        return replace(self.state, running=tuple(running), cells={}, host_cells={})",
        "SCHED-14",
        "B-159",
        _URGENT,
    ),
]
