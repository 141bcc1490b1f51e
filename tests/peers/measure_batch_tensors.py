"""What a decode step of 256 sequences spends on the tensors of its batch, that of the block tables among them.

python -m tests.peers.measure_batch_tensors
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from optimized.scheduler import Scheduler
from optimized.torch_device import _TableRows
from spec.vocabulary import Config, Request

NUM_SEQS, CONTEXT, ROUNDS = 256, 1024, 200
CONFIG = Config(num_blocks=NUM_SEQS * 70, max_num_seqs=NUM_SEQS, max_num_batched_tokens=NUM_SEQS * CONTEXT)


def microseconds(work: Callable[[], object]) -> float:
    """The fastest of many rounds."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1e6 * min(times)


def main() -> None:
    scheduler = Scheduler(CONFIG)
    for number in range(NUM_SEQS):
        scheduler.add(Request(number, (1,) * CONTEXT, 32, (number,)))
    for _ in range(3):  # the prompts, and two tokens
        plan = scheduler.schedule()
        scheduler.commit(plan, [0] * len(plan.sample_rows))
    plan = scheduler.schedule()
    columns = (plan.token_ids, plan.positions, plan.slot_mapping, plan.seq_lens, plan.query_start, plan.sample_rows)
    tables = _TableRows(NUM_SEQS, 70, torch.device("cpu"))
    made = microseconds(lambda: [torch.from_numpy(np.array(column, dtype=np.int64)) for column in columns])
    filled = microseconds(lambda: tables.filled(plan.block_tables))
    print(
        f"{len(columns)} tensors of {NUM_SEQS} numbers: {made:.0f} us; block tables that did not change: {filled:.0f} us"
    )


if __name__ == "__main__":
    main()
