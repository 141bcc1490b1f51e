"""Sabotaged reference engines that only their own events give away, or a look at them while a step is in flight."""

from spec.vocabulary import AdmissionRule, Config, Recovery
from tests.mutants.sabotage import Mutant

_POOL, _SCHEDULER, _DEVICE, _ENGINE = (f"{name}.py" for name in ("pool", "scheduler", "device", "engine"))


_CACHED = Config(num_blocks=8, block_size=1, max_num_seqs=4, prefix_cache=True)
_ROOMY = Config(num_blocks=64, block_size=2, max_num_seqs=4, max_model_len=12)
_SWAPPING = Config(
    num_blocks=9,
    block_size=1,
    max_num_seqs=6,
    max_model_len=5,
    num_host_blocks=16,
    admission_rule=AdmissionRule.OPTIMISTIC,
    recovery=Recovery.SWAP,
)


def _fault(name: str, file: str, old: str, new: str, rule: str, row: str, config: Config | None = None) -> Mutant:
    return Mutant(name, "reference", file, old, new, rule, row, config=config)


STREAM_ZOO = [
    _fault(
        "slots count on from the first block, as if blocks were contiguous",
        _POOL,
        "slots.append(table[index] * block_size + offset)",
        "slots.append(table[0] * block_size + index * block_size + offset)",
        "TABLE-2",
        "B-036",
    ),
    _fault(
        "the device writes every sequence twice",
        _DEVICE,
        "    yield from (write_of(scheduled) for scheduled in plan.scheduled)",
        "    yield from (write_of(scheduled) for scheduled in plan.scheduled for _ in range(2))",
        "TABLE-3",
        "B-089",
    ),
    _fault(
        "a step begins with the token before its first",
        _SCHEDULER,
        "        start = stop - num_tokens\n",
        "        start = max(first_kept, stop - num_tokens - 1)\n        stop = start + num_tokens\n",
        "TABLE-9",
        "B-106",
    ),
    _fault(
        "a table is a ring: what it grows by is one block, several times",
        _POOL,
        "        self.tables[seq_id] = self.tables.get(seq_id, ()) + blocks\n",
        "        for _ in blocks[1:]:\n"
        "            self.hold(blocks[0])\n"
        "        self.give_back(blocks[1:])\n"
        "        self.tables[seq_id] = self.tables.get(seq_id, ()) + blocks[:1] * growth\n",
        "TABLE-6",
        "B-001",
        _ROOMY,
    ),
    _fault(
        "the last entry of a table is padding until its block is filled",
        _POOL,
        "        self.tables[seq_id] = self.tables.get(seq_id, ()) + blocks\n",
        "        self.give_back(blocks[-1:])\n"
        "        self.tables[seq_id] = self.tables.get(seq_id, ()) + blocks[:-1] + (-1,) * len(blocks[-1:])\n",
        "TABLE-7",
        "B-038",
        _ROOMY,
    ),
    _fault(
        "a fork copies the tail at once, which this step has just written",
        _SCHEDULER,
        "                self.fork(sample.source, sample.seq)\n",
        "                self.fork(sample.source, sample.seq)\n"
        "                index = self.pool.tail_to_copy(sample.seq, self.roster.seqs[sample.seq])\n"
        "                if index is not None and self.pool.num_free:\n"
        "                    self.emit(self.pool.copy_entry(sample.seq, index))\n",
        "COW-4",
        "B-069",
    ),
    _fault(
        "a fork is made for a sequence that is there already",
        _SCHEDULER,
        "            if sample.seq != sample.source:\n",
        "            if True:\n",
        "COW-6",
        "B-055",
    ),
    _fault(
        "a sequence of which this step computes something is swapped out",
        _SCHEDULER,
        "            and not any(seq_id in draft.counts for seq_id in seq_ids)\n",
        "",
        "SWAP-7",
        "B-156",
        _SWAPPING,
    ),
    _fault(
        "the next request is among the running ones before it has a seat",
        _SCHEDULER,
        "        self.emit(Complete(plan.step_id))\n",
        "        self.emit(Complete(plan.step_id))\n"
        "        seated = sum(len(self.roster.seqs_of(running)) for running in self.roster.running)\n"
        "        if self.roster.waiting and seated >= self.config.max_num_seqs:\n"
        "            self.roster.admit(self.roster.waiting[0])\n",
        "SCHED-2",
        "B-154",
    ),
    _fault(
        "the first sample has its token before the others are forked",
        _SCHEDULER,
        "        for sample in plan.samples:\n"
        "            if sample.seq != sample.source:\n"
        "                self.fork(sample.source, sample.seq)\n"
        "        emitted = tuple(self._append(sample.seq, tokens[sample.seq]) for sample in plan.samples)\n",
        "        appended = []\n"
        "        for sample in plan.samples:\n"
        "            if sample.seq != sample.source:\n"
        "                self.fork(sample.source, sample.seq)\n"
        "            appended.append(self._append(sample.seq, tokens[sample.seq]))\n"
        "        emitted = tuple(appended)\n",
        "SCHED-18",
        "B-058",
    ),
    _fault(
        "attention reads a table of another order than the one written through",
        _SCHEDULER,
        "return ScheduledSeq(seq_id, start, seq.tokens[start:stop], slot_mapping, table, first_kept)",
        "return ScheduledSeq(seq_id, start, seq.tokens[start:stop], slot_mapping, table[::-1], first_kept)",
        "ATTN-1",
        "B-035",
    ),
    _fault(
        "a token that was given out is taken back when it is the one before it",
        _SCHEDULER,
        "        event = Append(seq_id, (token,))\n        self.emit(event)\n",
        "        event = Append(seq_id, (token,))\n"
        "        self.emit(event)\n"
        "        seq = self.roster.seqs[seq_id]\n"
        "        if seq.tokens[-2] == token:\n"
        "            from spec.vocabulary import Rollback\n\n"
        "            self.roster.seqs[seq_id] = replace(seq, tokens=seq.tokens[:-1])\n"
        "            self.emit(Rollback(seq_id, seq.num_tokens - 1))\n",
        "SCHED-26",
        "B-135",
    ),
    _fault(
        "newcomers are served before those who run",
        _SCHEDULER,
        "        if self._schedule_running(draft):\n            self._schedule_waiting(draft)\n",
        "        self._schedule_waiting(draft)\n        self._schedule_running(draft)\n",
        "SCHED-25",
        "B-157",
        Config(num_blocks=32, block_size=1, max_num_seqs=4, max_num_batched_tokens=2),
    ),
    _fault(
        "an abort of what has ended is told as if it had happened",
        _ENGINE,
        "                self.scheduler.remove(seq_id)\n            self._emit(Abort(request_id))",
        "                self.scheduler.remove(seq_id)\n        self._emit(Abort(request_id))",
        "API-2",
        "B-168",
    ),
    _fault(
        "the source of a copy is given back before the step is over",
        _SCHEDULER,
        "                draft.holds.append(event.source)\n",
        "                self.pool.give_back([event.source])\n",
        "API-3",
        "B-019",
    ),
    _fault(
        "attention reads a block where the cache names its contents, and not where the table has it",
        _SCHEDULER,
        "        return ScheduledSeq(seq_id, start, seq.tokens[start:stop], slot_mapping, table, first_kept)",
        "        named = self.pool.longest_hit(seq.tokens[:stop], self.roster.request_of(seq_id).cache_salt)\n"
        "        if all(self.pool.ref_count[block] for block in named):\n"
        "            table = named + table[len(named) :]\n"
        "        return ScheduledSeq(seq_id, start, seq.tokens[start:stop], slot_mapping, table, first_kept)",
        "ATTN-2",
        "B-096",
        _CACHED,
    ),
]
