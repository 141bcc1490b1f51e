"""Sabotaged optimized engines: faults in the pool, the scheduler, the plan and the prefix cache."""

from dataclasses import replace

from spec.vocabulary import AdmissionRule, Config, Policy, Recovery
from tests.mutants.sabotage import Mutant

_POOL, _SCHEDULER, _ADMISSION, _PLACEMENT, _PLAN, _CACHE, _SEQUENCES, _ENGINE, _ROSTER = (
    f"{name}.py"
    for name in ("pool", "scheduler", "admission", "placement", "plan", "prefix_cache", "sequences", "engine", "roster")
)


_SWAPPING = Config(
    num_blocks=6,
    block_size=1,
    max_num_seqs=4,
    num_host_blocks=8,
    admission_rule=AdmissionRule.OPTIMISTIC,
    recovery=Recovery.SWAP,
)
_CACHED = Config(num_blocks=32, block_size=1, max_num_seqs=4, max_model_len=6, prefix_cache=True)
_PAIR = Config(num_blocks=32, block_size=4, max_num_seqs=2, max_model_len=12)
_GUARDED = Config(num_blocks=8, block_size=1, max_num_seqs=4, max_model_len=4, watermark_blocks=5)
_WINDOWED = Config(num_blocks=16, block_size=2, max_num_seqs=4, max_model_len=24, window=3)
_CHUNKED = Config(num_blocks=16, block_size=2, max_num_seqs=4, max_num_batched_tokens=3, max_model_len=24)
_SHARED = Config(
    num_blocks=16, block_size=2, max_num_seqs=4, max_num_batched_tokens=6, max_model_len=16, max_num_partial_prefills=2
)
_STATIC = Config(num_blocks=32, block_size=2, max_num_seqs=4, max_model_len=8, policy=Policy.STATIC)
_TIGHT = Config(
    num_blocks=6,
    block_size=1,
    max_num_seqs=4,
    max_num_batched_tokens=3,
    max_model_len=12,
    admission_rule=AdmissionRule.OPTIMISTIC,
)
_ONE_SPARE = Config(num_blocks=2, block_size=2, watermark_blocks=1)


def _fault(name: str, file: str, old: str, new: str, rule: str, row: str, config: Config | None = None) -> Mutant:
    return Mutant(name, "optimized", file, old, new, rule, row, config=config)


OPTIMIZED_ZOO = [
    _fault(
        "what was let go while a step was in flight is free the other way round",
        _SCHEDULER,
        "self.pool.drop_holds(let_go)",
        "self.pool.drop_holds(let_go[::-1])",
        "CACHE-17",
        "B-105",
        replace(_CACHED, num_blocks=8),
    ),
    _fault(
        "the fast path writes a block that somebody shares",
        _SCHEDULER,
        "if count == 1 and room % block_size and budget and ref_count[seq.table[-1]] == 1:",
        "if count == 1 and room % block_size and budget:",
        "COW-2",
        "B-055",
    ),
    _fault(
        "a block that is hit in the free list stays there",
        _POOL,
        "        if count == 0:\n            self._unlink(block)\n            self.num_free -= 1",
        "        if count == 0:\n            self.num_free -= 1",
        "ALLOC-3",
        "B-093",
        _CACHED,
    ),
    _fault(
        "the source of a copy loses its holder before the copy",
        _POOL,
        "        self.holds[block] = self.holds.get(block, 0) + 1",
        "        self.holds[block] = self.holds.get(block, 0) + 1\n        self.drop_holder(block)",
        "ALLOC-2",
        "B-019",
        _PAIR,
    ),
    _fault(
        "the watermark is ignored",
        _ADMISSION,
        "- (config.watermark_blocks if running else 0)\n    wanted",
        "\n    wanted",
        "SCHED-11",
        "B-123",
        _GUARDED,
    ),
    _fault(
        "the watermark also holds for an empty engine",
        _ADMISSION,
        "- (config.watermark_blocks if running else 0)\n    wanted",
        "- (config.watermark_blocks if running or not pool.submitted else 0)\n    wanted",
        "SCHED-9",
        "B-150",
        _ONE_SPARE,
    ),
    _fault(
        "a share is divided once more",
        _ADMISSION,
        "-(-config.max_num_batched_tokens // config.max_num_partial_prefills)",
        "-(-config.max_num_batched_tokens // (config.max_num_partial_prefills + 1))",
        "SCHED-13",
        "B-157",
        _SHARED,
    ),
    _fault(
        "a share is the whole budget",
        _ADMISSION,
        "-(-config.max_num_batched_tokens // config.max_num_partial_prefills)",
        "config.max_num_batched_tokens",
        "SCHED-27",
        "B-152",
        _SHARED,
    ),
    _fault(
        "whoever is admitted takes what a half computed prompt still lacks",
        _ADMISSION,
        "return sum([blocks_lacking(config, seq) for request in running for seq in request.seqs])",
        "return 0",
        "SCHED-11",
        "B-123",
        replace(_SHARED, num_blocks=8),
    ),
    _fault(
        "a static batch is closed when the first request is in it",
        _ADMISSION,
        "len(seq.tokens) > len(request.request.prompt) for",
        "len(seq.tokens) > 0 for",
        "SCHED-12",
        "B-155",
        _STATIC,
    ),
    _fault(
        "the last slot of a chunk is the next block's first",
        _PLAN,
        "        # The token goes into the last block: a table has no more than the step needs (TABLE-1).\n"
        "        slot_mapping=tuple([block * block_size + p % block_size",
        "        slot_mapping=tuple([block * block_size + (p + 1) % block_size",
        "TABLE-2",
        "B-030",
    ),
    _fault(
        "the lengths leave out the tokens of this step",
        _PLAN,
        "seq_lens=tuple(seq_lens)",
        "seq_lens=tuple([max(1, stop - count) for stop, count in zip(seq_lens, counts)])",
        "ATTN-3",
        "B-139",
    ),
    _fault(
        "nothing is ever hit",
        _PLACEMENT,
        "    if pool.cache is None or seq.host_table:\n        return []\n",
        "    if True:\n        return []\n",
        "CACHE-12",
        "B-103",
    ),
    _fault(
        "a half-filled block is published",
        _SCHEDULER,
        "            seq.num_computed // self.config.block_size,\n        )\n        # Without its parent",
        "            len(seq.table) + seq.num_dropped_blocks,\n        )\n        # Without its parent",
        "CACHE-6",
        "B-098",
    ),
    _fault(
        "salts are ignored",
        _CACHE,
        "root = self._roots.get(salt)",
        "salt = ''\n        root = self._roots.get(salt)",
        "CACHE-7",
        "B-084",
        _CACHED,
    ),
    _fault(
        "an abort of a waiting request leaves it in the queue",
        _ROSTER,
        "            else:\n                self.waiting.remove(request)",
        "            else:\n                pass",
        "SCHED-3",
        "B-170",
    ),
    _fault(
        "a swapped table comes back in the wrong order",
        _SCHEDULER,
        "seq.table = self.pool.take_many(len(seq.host_table))",
        "seq.table = self.pool.take_many(len(seq.host_table))[::-1]\n        seq.host_table = seq.host_table[::-1]",
        "SAMPLE-1",
        "B-129",
        _SWAPPING,
    ),
    _fault(
        "a block leaves its table while the next token sees it",
        _PLACEMENT,
        "max(0, num_computed - window + 1)",
        "max(0, num_computed - window + 2)",
        "TABLE-10",
        "B-205",
        _WINDOWED,
    ),
    _fault(
        "one block that the window has passed stays in the table",
        _SCHEDULER,
        "            if count > 0:\n                self._give_back(seq, seq.table[:count])",
        "            if count > 1:\n                self._give_back(seq, seq.table[:count])",
        "TABLE-11",
        "B-034",
        _WINDOWED,
    ),
    _fault(
        "what leaves the window is not given back",
        _SCHEDULER,
        "                self._give_back(seq, seq.table[:count])\n",
        "",
        "ALLOC-2",
        "B-155",
        _WINDOWED,
    ),
    _fault(
        "a fork does not know which blocks have left its table",
        _SEQUENCES,
        "child.num_dropped_blocks = self.num_dropped_blocks",
        "child.num_dropped_blocks = 0",
        "TABLE-1",
        "B-057",
        _WINDOWED,
    ),
    _fault(
        "what a step in flight may touch is free at once",
        _ROSTER,
        "self.pool.submitted[step.step_id].blocks.update(blocks)",
        "pass",
        "ALLOC-5",
        "B-016",
        _CHUNKED,
    ),
    _fault(
        "the step that was begun last ends first",
        _ENGINE,
        "step = next(iter(self.scheduler.flights.values()), None)",
        "step = next(reversed(self.scheduler.flights.values()), None)",
        "API-3",
        "B-134",
        replace(_CHUNKED, max_num_seqs=1),
    ),
    _fault(
        "a step in flight sees which blocks have left the tables since",
        _ENGINE,
        "if step.is_torn else step.plan",
        "if step.is_torn else replace("
        "step.plan, num_dropped_blocks=tuple([seq.num_dropped_blocks for seq in step.scheduled]))",
        "ATTN-1",
        "B-034",
        replace(_CHUNKED, window=2),
    ),
    _fault(
        "the end of a step forgets what the next one has scheduled",
        _SCHEDULER,
        "            seq.num_scheduled -= count\n",
        "            seq.num_scheduled = 0\n",
        "TABLE-1",
        "B-134",
        replace(_CHUNKED, block_size=1),
    ),
    _fault(
        "somebody is preempted while another step is in flight",
        _SCHEDULER,
        "            if self.flights:\n                return False\n",
        "",
        "PREEMPT-7",
        "B-125",
        _TIGHT,
    ),
    _fault(
        "the name of what is aborted in flight is given to somebody else",
        _ROSTER,
        "in_flight = any(seq_id in step.gone for step in self.flights.values())",
        "in_flight = False",
        "SCHED-8",
        "B-176",
        _CHUNKED,
    ),
    _fault(
        "the reads begin at the first block of the table",
        _PLAN,
        "start = 0 if window is None else max(0, plan.positions[plan.query_start[index]] - window + 1)",
        "start = first_kept",
        "ATTN-3",
        "B-206",
        _WINDOWED,
    ),
]
