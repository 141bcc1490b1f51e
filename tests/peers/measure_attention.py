"""Attention of the vector kernels alone, in the shapes of SmolLM2-135M: billions of operations a second of processor time, one thread.

Run it as ``OMP_NUM_THREADS=1 python -m tests.peers.measure_attention``. Each layer has a cache of its own, and blocks lie where
chance has put them, so keys and values come from memory as they do in a step.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from kernels.cpu.layout import LEFT
from kernels.cpu.memory import pool_of_zeros
from kernels.cpu.team import Team
from kernels.cpu.workspace import Workspace, chunks_of, layer_records

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 30, 9, 3, 64, 16
TURNS = 15
BATCHES = {  # tokens of this step and of the context before them, for each sequence
    "32 sequences, a token after 300": [(1, 300)] * 32,
    "8 sequences, a token after 300": [(1, 300)] * 8,
    "a prompt of 256": [(256, 0)],
    "16 tokens for each of 8, a prompt of 128": [(1, 200)] * 8 + [(128, 0)],
}


def main() -> None:
    team = Team(1)
    for name, batch in BATCHES.items():
        lengths = [tokens + before for tokens, before in batch]
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        shape = (sum(blocks), BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        caches, toucher = pool_of_zeros(2 * LAYERS, shape, torch.bfloat16)
        toucher.join()
        for cache in caches:
            cache.normal_()
        places = torch.randperm(sum(blocks), dtype=torch.int32)
        tables = torch.zeros(len(batch), max(blocks), dtype=torch.int32)
        for row, part in zip(tables, torch.split(places, blocks), strict=True):
            row[: len(part)] = part
        starts = [0]
        for tokens, _ in batch:
            starts.append(starts[-1] + tokens)
        rows, work = starts[-1], Workspace(team)
        chunks = torch.from_numpy(chunks_of(np.array(starts), np.array(lengths), QUERY_HEADS // KV_HEADS))
        work.attention_room(QUERY_HEADS // KV_HEADS, 512, BLOCK_SIZE, HEAD_SIZE)
        work.set(rows=rows, capacity=rows, num_chunks=len(chunks), table_stride=tables.shape[1], scale=0.125)
        work.set(num_query_heads=QUERY_HEADS, num_kv_heads=KV_HEADS, window=0)
        work.hold("query", torch.randn(rows * QUERY_HEADS * HEAD_SIZE).to(LEFT))
        work.hold("block_tables", tables)
        work.hold("chunks", chunks)
        work.room("mixed", (rows, QUERY_HEADS, HEAD_SIZE), LEFT)
        pairs = zip(caches[::2], caches[1::2], strict=True)
        layers = [layer_records([{"key_cache": keys, "value_cache": values}]) for keys, values in pairs]
        operations = (
            sum(before + i + 1 for tokens, before in batch for i in range(tokens)) * QUERY_HEADS * HEAD_SIZE * 4
        )
        seconds = []
        for _ in range(TURNS):
            began = time.process_time()
            for layer in layers:
                work.set(layers=layer.ctypes.data)
                work.run("attention")
            seconds.append((time.process_time() - began) / LAYERS)
        best, median = min(seconds), sorted(seconds)[TURNS // 2]
        print(
            f"{name}: {operations / median / 1e9:.1f} at the median of {TURNS}, {operations / best / 1e9:.1f} at best"
        )


if __name__ == "__main__":
    main()
