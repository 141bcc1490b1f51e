"""What a step of at most 256 sequences spends on the tensors of its batch: made anew from the plan, as they once were, and kept from
the step before. The plans are those of ``kvproof bench scheduler``, and of 256 sequences that only go on; both ways take turns.

python -m tests.peers.measure_batch_tensors
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from optimized.batch_tensors import BatchTensors
from optimized.bench_scheduler import limits, workload
from optimized.checkpoint import ModelConfig
from optimized.llama import KVCache, LlamaModel
from optimized.plan import Plan
from optimized.scheduler import Scheduler
from optimized.torch_device import TorchDevice
from spec.vocabulary import BlockId, Config, Request, Token

NUM_SEQS, CONTEXT, COLUMNS, VOCAB_SIZE, ROUNDS = 256, 1024, 80, 64, 7
STEADY = Config(num_blocks=NUM_SEQS * 70, max_num_seqs=NUM_SEQS, max_num_batched_tokens=NUM_SEQS * CONTEXT)


class MadeAnew:
    """Six tensors from the tuples of each plan; of the block tables a row is written when it has another table than before."""

    def __init__(self, num_columns: int) -> None:
        self._array = np.zeros((NUM_SEQS, num_columns), np.int32)
        self._tensor = torch.from_numpy(self._array)
        self._held: list[tuple[BlockId, ...]] = [()] * NUM_SEQS

    def filled(self, plan: Plan) -> list[Tensor]:
        width = 0
        for row, table in enumerate(plan.block_tables):
            if self._held[row] is not table:
                self._array[row, : len(table)] = table
                self._held[row] = table
            width = max(width, len(table))
        wide = (plan.token_ids, plan.positions, plan.slot_mapping, plan.sample_rows)
        narrow = (plan.seq_lens, plan.query_start)
        return [
            self._tensor[: len(plan.seq_ids), :width],
            *(torch.from_numpy(np.array(column, np.int64)) for column in wide),
            *(torch.from_numpy(np.array(column, np.int32)) for column in narrow),
        ]


def microseconds(work: Callable[[], object]) -> float:
    """Of this thread: what others take of the processor meanwhile is not counted."""
    started = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - started) / 1e3


def costs(config: Config, requests: Sequence[Request], most: int) -> npt.NDArray[np.float64]:
    """What the first steps of these requests cost either way ``[steps, 2]``; everybody draws tokens by chance."""
    scheduler, draw, found = Scheduler(config), np.random.Generator(np.random.PCG64(0)), []
    anew, kept = MadeAnew(COLUMNS), BatchTensors(NUM_SEQS, COLUMNS, config.block_size, torch.device("cpu"))
    for request in requests:
        scheduler.add(request)
    while scheduler.requests and len(found) < most:
        plan = scheduler.schedule()
        tokens = draw.integers(0, 32_000, len(plan.sample_rows))
        drawn = tokens.tolist()

        def keep(plan: Plan = plan, drawn: list[Token] = drawn, tokens: npt.NDArray[np.int64] = tokens) -> None:
            kept.filled(plan)
            kept.drew(drawn, tokens)

        if len(found) % 2:  # who comes second finds the plan in the processor's cache
            after, before = microseconds(keep), microseconds(lambda plan=plan: anew.filled(plan))
        else:
            before, after = microseconds(lambda plan=plan: anew.filled(plan)), microseconds(keep)
        found.append((before, after))
        scheduler.commit(plan, drawn)
    return np.array(found[1:])


def compared(name: str, config: Config, requests: Sequence[Request], most: int = 1 << 30) -> None:
    """Both ways through all steps, in turns, several times: what the steps cost, and how much the rounds differ."""
    numbers = np.stack([costs(config, requests, most) for _ in range(ROUNDS)])  # [rounds, steps, 2]
    (anew_mean, kept_mean), (anew_half, kept_half) = numbers.mean((0, 1)).tolist(), np.median(numbers, (0, 1)).tolist()
    ratios = (numbers[..., 0].sum(1) / numbers[..., 1].sum(1)).tolist()
    print(
        f"{name}, {numbers.shape[1]} steps: made anew {anew_mean:.0f} us a step (half below {anew_half:.0f}), "
        f"kept {kept_mean:.0f} (half below {kept_half:.0f}), a ratio of {median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {ROUNDS} rounds)"
    )


class Narrow(LlamaModel):
    """A model without layers: what is left of a step is what surrounds the model."""

    def __init__(self) -> None:
        self.config, self.device, self.dtype = (
            ModelConfig(1, 8, 8, 1, 1, 8, VOCAB_SIZE, CONTEXT),
            torch.device("cpu"),
            torch.float32,
        )

    def new_kv_caches(self, num_blocks: int, block_size: int) -> list[KVCache]:
        return []


def compared_draws() -> None:
    """The likeliest token of every row: one row after the other, as everybody else's tokens are drawn, and all at once."""
    device = TorchDevice(Narrow(), STEADY)
    requests = [Request(number, (1,), 100, (number,)) for number in range(NUM_SEQS)]
    scheduler = Scheduler(STEADY)
    for request in requests:
        scheduler.add(request)
    plan, logits = scheduler.schedule(), torch.randn(NUM_SEQS, VOCAB_SIZE)
    each = [microseconds(lambda: device._sample(plan, logits)) for _ in range(100)]
    at_once = [microseconds(lambda: device._is_plain(plan) and device._all_likeliest(logits)) for _ in range(100)]
    print(
        f"the likeliest tokens of {NUM_SEQS} rows of {VOCAB_SIZE} logits: {median(each):.0f} us one by one "
        f"({min(each):.0f} to {max(each):.0f}), {median(at_once):.0f} at once ({min(at_once):.0f} to {max(at_once):.0f})"
    )


def main() -> None:
    compared_draws()
    requests = [Request(number, (1,) * (CONTEXT - number), 100, (number,)) for number in range(NUM_SEQS)]
    compared("256 sequences that go on", STEADY, requests, 80)
    compared("1,000 requests that come and go", limits(8192, prefix_cache=False), workload(prefix_cache=False))


if __name__ == "__main__":
    main()
