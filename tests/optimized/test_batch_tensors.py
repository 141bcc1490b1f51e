"""The tensors of a batch that persist from step to step: they are those that each plan would give alone, and a decode step reads
no list."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from optimized.batch_tensors import BatchTensors, StepTensors
from optimized.checkpoint import random_checkpoint
from optimized.engine import EngineCore, SymbolicEngine, make_engine
from optimized.llama import LlamaModel
from optimized.plan import Plan
from optimized.torch_device import TorchDevice
from spec.vocabulary import Config, Request, Token
from tests.optimized.driver import Caller, config_for
from tests.optimized.test_torch_device import MODEL

CPU = torch.device("cpu")


def made_anew(plan: Plan) -> dict[str, list[object]]:
    """What the tensors of a plan say, from the plan alone; of tables without what is never read."""
    return {
        "token_ids": [*plan.token_ids],
        "positions": [*plan.positions],
        "slot_mapping": [*plan.slot_mapping],
        "block_tables": [*plan.block_tables],
        "seq_lens": [*plan.seq_lens],
        "query_start": [*plan.query_start],
        "sample_rows": [*plan.sample_rows],
    }


def said(tensors: StepTensors, plan: Plan) -> dict[str, list[object]]:
    """What the tensors say."""
    found = {name: tensor.tolist() for name, tensor in tensors._asdict().items() if tensor is not None}
    dropped = plan.num_dropped_blocks or (0,) * len(plan.seq_ids)
    parts = zip(found["block_tables"], dropped, plan.block_tables, strict=True)
    found["block_tables"] = [tuple(row[first : first + len(table)]) for row, first, table in parts]
    return {"sample_rows": [*range(plan.num_tokens)]} | found


class Watched:
    """Stands between an engine and its device, and compares what is kept with what each plan says."""

    def __init__(self, engine: SymbolicEngine) -> None:
        limits = engine.core.config
        columns = -(-limits.max_model_len // limits.block_size)
        self.kept = [BatchTensors(limits.max_num_seqs, columns, limits.block_size, CPU) for _ in range(2)]
        self.num_plans = 0
        self._run = engine.device.run
        engine.device.run = self.run  # type: ignore[method-assign]

    def run(self, plan: Plan) -> Sequence[Token]:
        if plan.seq_ids:
            if not self.kept[0].is_next(plan):
                self.kept.reverse()
            tensors = self.kept[0].filled(plan)
            assert said(tensors, plan) == made_anew(plan)
            self.num_plans += 1
        tokens = self._run(plan)
        if plan.seq_ids:
            assert said(tensors, plan) == made_anew(plan)
            self.kept[0].drew(tokens, np.array(tokens, np.int64))
        return tokens


def test_what_is_kept_is_what_each_plan_says() -> None:
    """Random runs of everything: preemption, swap, hits, forks, aborts, windows, chunks, and two steps in flight."""
    counts = dict.fromkeys(("num_preemptions", "num_blocks_swapped_out", "num_cache_hits", "num_blocks_copied"), 0)
    num_plans = num_forks = num_windows = most_in_flight = 0
    for seed in range(60):
        config = config_for(seed, SymbolicEngine.profile.capabilities)
        engine = make_engine(config)
        watched = Watched(engine)
        caller = Caller(config, [engine], seed)
        caller.run(60)
        for name in counts:
            counts[name] += getattr(engine.core.scheduler.counters, name)
        num_plans += watched.num_plans
        num_forks += caller.answers["Admission.NOW"]
        num_windows += config.window is not None
        most_in_flight = max(most_in_flight, caller.most_in_flight)
    assert min(*counts.values(), num_forks, num_windows) > 5, (counts, num_forks, num_windows)
    assert num_plans > 500
    assert most_in_flight == 2


class Number:
    """A number that knows when it is read, and is as good as another one to compare and to look up."""

    num_read = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Number) else other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __index__(self) -> int:
        Number.num_read += 1
        return self.value

    __int__ = __index__

    def __sub__(self, other: int) -> int:
        return self.value - other


class Numbered:
    """Makes plans of numbers that know when they are read; a table stays the same tuple."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], tuple[Number, ...]] = {}

    def __call__(self, plan: Plan) -> Plan:
        names = ("token_ids", "positions", "slot_mapping", "seq_lens", "query_start", "sample_rows")
        values: dict[str, Any] = {name: tuple(map(Number, getattr(plan, name))) for name in names}
        values["block_tables"] = tuple(
            [self._tables.setdefault(table, tuple(map(Number, table))) for table in plan.block_tables]
        )
        Number.num_read = 0
        return replace(plan, **values)


NUM_SEQS, BLOCK_SIZE = 11, 4


@pytest.fixture
def engine() -> EngineCore:
    """Sequences of lengths that differ by one, all past their prompts; sequence 3 ends five tokens later."""
    checkpoint = random_checkpoint(MODEL, seed=0)
    config = Config(num_blocks=200, block_size=BLOCK_SIZE, max_num_seqs=16, max_num_batched_tokens=256)
    core = EngineCore(config, TorchDevice(LlamaModel(checkpoint.config, checkpoint.tensors), config))
    for number in range(NUM_SEQS):
        core.add(Request(number, (number,) * (5 + number), 6 if number == 3 else 40, (number,)))
    core.step()
    return core


def step(core: EngineCore, numbered: Numbered) -> tuple[Plan, int]:
    """A step, and how many numbers of its plan were read."""
    plan = core.schedule()
    tokens = core.device.run(numbered(plan))
    num_read = Number.num_read
    core.commit(plan, tokens)
    return plan, num_read


def test_a_steady_step_reads_no_list(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the block that somebody gets, and the slot in it."""
    numbered = Numbered()
    step(engine, numbered)
    lists = lists_made_arrays(monkeypatch)
    for _ in range(3):
        plan, num_read = step(engine, numbered)
        assert len(plan.seq_ids) == NUM_SEQS
        grown = [table for table, length in zip(plan.block_tables, plan.seq_lens, strict=True) if length % 4 == 1]
        assert 1 < len(grown) < 4
        assert num_read == 2 * len(grown)
    assert lists == []
    assert [seq_id for seq_id, _ in engine.step().finished] == [3]


def lists_made_arrays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """From now on, the lists of the batch's length or longer of which somebody makes an array."""
    lists: list[object] = []

    def noticing(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(values: object, *args: Any, **others: Any) -> object:
            if isinstance(values, list | tuple) and len(values) >= NUM_SEQS:
                lists.append(values)
            return call(values, *args, **others)

        return made

    for module, name in ((np, "array"), (np, "asarray"), (torch, "tensor"), (torch, "as_tensor")):
        monkeypatch.setattr(module, name, noticing(getattr(module, name)))
    return lists


def test_whoever_leaves_moves_the_others(engine: EngineCore) -> None:
    """Their tables, positions and slots are not read again, and their tokens once."""
    numbered = Numbered()
    for _ in range(5):
        step(engine, numbered)
    assert 3 not in engine.scheduler.seqs
    plan, num_read = step(engine, numbered)
    grown = [table for table, length in zip(plan.block_tables, plan.seq_lens, strict=True) if length % 4 == 1]
    assert num_read == NUM_SEQS - 1 + 2 * len(grown)


def test_a_step_that_was_interrupted_is_not_gone_on_from() -> None:
    """The same plans again, after one that could not be told: nothing of what was kept meanwhile counts."""
    kept = BatchTensors(4, 8, BLOCK_SIZE, torch.device("cpu"))
    first = Plan(0, (0,), (0, 1), (7,), (4,), (5,), ((0, 1),), (5,), (0,), (0,))
    second = replace(first, positions=(5,), slot_mapping=(6,), seq_lens=(6,))
    kept.filled(first)
    with pytest.raises(TypeError):
        kept.filled(replace(second, block_tables=((0, None),)))  # type: ignore[arg-type]
    assert said(kept.filled(second), second) == made_anew(second)
