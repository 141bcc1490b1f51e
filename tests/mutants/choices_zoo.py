"""Sabotaged engines that choose otherwise: they publish at the schedule, and keep a block for padding. The engine that is
sabotaged is the executable model of ``tests/spec``, which can choose either way."""

from dataclasses import replace

from spec.vocabulary import AdmissionRule, Config
from tests.mutants.sabotage import Mutant

_CACHED = Config(num_blocks=9, block_size=1, max_num_seqs=4, prefix_cache=True)
_CROWDED = Config(
    num_blocks=6,
    block_size=1,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    prefix_cache=True,
    admission_rule=AdmissionRule.OPTIMISTIC,
)
_ALONE = Config(num_blocks=5, block_size=2, max_num_seqs=1)


def _fault(name: str, old: str, new: str, rule: str, row: str, config: Config | None = None) -> Mutant:
    return Mutant(name, "tests/spec", "model_engine.py", old, new, rule, row, config=config)


CHOICES_ZOO = [
    _fault(
        "an empty row names the null block",
        "        return replace(self.state, cells={}, host_cells={})",
        "        rows = {i: table or (0,) for i, table in self.state.block_tables.items()}\n"
        "        rows = {**dict.fromkeys(self.state.seqs.keys() - self.state.host_tables.keys(), (0,)), **rows}\n"
        "        return replace(self.state, block_tables=rows, cells={}, host_cells={})",
        "ALLOC-6",
        "B-003",
        _ALONE,
    ),
    _fault(
        "the door counts the block that is kept for padding",
        "        if not may_come_in(self.state, request):\n",
        "        if not may_come_in(replace(self.state, choices=PROFILE.choices), request):\n",
        "SCHED-8",
        "B-022",
        _ALONE,
    ),
    _fault(
        "the null block is handed out like any other",
        "        return self.state.free[:count]",
        "        return (0, *self.state.free)[:count]",
        "ALLOC-4",
        "B-003",
        _CROWDED,
    ),
    _fault(
        "of a long prompt only the first block is published ahead",
        "        for index in range(seq.num_dropped_blocks, full):\n",
        "        for index in range(seq.num_dropped_blocks, full)[:1]:\n",
        "CACHE-15",
        "B-100",
        _CACHED,
    ),
    _fault(
        "what a victim was to write stays in the cache",
        "        self._unpublish(tables.values())\n",
        "",
        "CACHE-1",
        "B-094",
        _CROWDED,
    ),
    _fault(
        "whoever hits a block reads it before it is written",
        "            for seq_id in tuple(self._served(step_id)):\n                self._compute",
        "            for seq_id in reversed(self._served(step_id)):\n                self._compute",
        "ATTN-1",
        "B-099",
        replace(_CACHED, num_blocks=32),
    ),
    _fault(
        "the block that became free last is taken first",
        "        return self.state.free[:count]",
        "        return self.state.free[::-1][:count]",
        "CACHE-16",
        "B-105",
        _CACHED,
    ),
]
