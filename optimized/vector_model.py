"""The forward pass on a CPU by the vector kernels: packed weights, bf16 keys and values, float32 sums and residual.

All tokens of a step go through all layers in one parallel region, and a second one gives the logits of the rows that
sample. Every sum of a row runs in an order that the row alone decides, so a sequence has the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import AttentionPlan
from kernels.cpu.layout import CONTENDERS, LEFT, PackedWeight, rounded_up
from kernels.cpu.memory import Arena, pool_of_zeros
from kernels.cpu.packing import pack_four_bits, pack_int8_weight, pack_weight
from kernels.cpu.task import PHASES
from kernels.cpu.team import Team
from kernels.cpu.workspace import Workspace, chunks_of, layer_records
from optimized.checkpoint import ModelConfig
from optimized.llama import KVCache
from optimized.weights import WeightReader, matrices_of

if TYPE_CHECKING:
    from optimized.gguf_groups import GgufGroups

MATRICES = ("qkv", "o", "gate_up", "down")
"""A layer's matrices, under the names of its record."""

GROWTH = 64
"""Rows by which the buffers grow."""


class VectorModel:
    """A model like ``LlamaModel``, whose blocks hold their cells in the order of ``kernels.cpu.layout``.

    Its results are views of buffers: they hold until the next call. With ``in_int8`` the matrices of its layers are in
    int8, from the numbers that they have in bf16; with ``groups`` those that these have are as their file has them.
    All others are as ``kernels.cpu.packing.pack_weight`` has bf16 here.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        num_threads: int,
        in_int8: bool = False,
        groups: GgufGroups | None = None,
    ) -> None:
        self.config = config
        self.dtype = torch.bfloat16
        self.device = torch.device("cpu")
        self.likeliest: npt.NDArray[np.int64] | None = None
        weights = WeightReader(config, tensors, self.dtype, self.device)
        embedding = weights.tensor("model.embed_tokens.weight").contiguous()
        self._arena = arena = Arena()
        pack = pack_int8_weight if in_int8 else pack_weight
        self._layers = [_packed(weights, index, arena, pack, groups) for index in range(config.num_layers)]
        self._norm = weights.tensor("model.norm.weight").float()
        head = embedding if config.tie_word_embeddings else weights.tensor("lm_head.weight")
        self._head = pack_weight(head, arena=arena)
        self._records = layer_records([_addressed(layer) for layer in self._layers])
        for name in MATRICES:
            self._records[f"{name}_code"] = [_packed_of(layer, name).code for layer in self._layers]
        team = Team(num_threads)
        self._forward, self._logits = Workspace(team, config.num_layers), Workspace(team)
        for work in (self._forward, self._logits):
            work.set(hidden_size=config.hidden_size, eps=config.rms_norm_eps)
        self._describe(embedding)

    def _describe(self, embedding: Tensor) -> None:
        """What is the same in every step."""
        config, layer, work = self.config, self._layers[0], self._forward
        work.set(
            num_layers=config.num_layers,
            num_query_heads=config.num_query_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            window=config.sliding_window or 0,
            scale=config.scale,
            hidden_columns=_packed_of(layer, "o").padded_columns,
            hidden_depth=_packed_of(layer, "qkv").padded_depth,
            qkv_columns=_packed_of(layer, "qkv").padded_columns,
            gate_columns=_packed_of(layer, "gate_up").padded_columns,
            gate_depth=_packed_of(layer, "down").padded_depth,
            layers=self._records.ctypes.data,
        )
        work.hold("embedding", embedding)
        work.gate_room()
        self._logits.set(
            hidden_columns=config.hidden_size,
            hidden_depth=self._head.padded_depth,
            vocab_size=config.vocab_size,
            vocab_columns=self._head.padded_columns,
            head_code=self._head.code,
        )
        self._logits.hold("norm", self._norm)
        self._logits.hold("head", self._head.tiles)
        self._max_keys, self._block_size, self._num_rotations = 0, 0, 0

    @property
    def num_weight_bytes(self) -> int:
        """The size of the weights in memory."""
        parts = [
            part.tiles if isinstance(part, PackedWeight) else part for layer in self._layers for part in layer.values()
        ]
        return sum(
            part.nbytes
            for part in (*parts, self._norm, self._head.tiles, self._forward.held("embedding"))
            if part is not None
        )

    @property
    def cycles(self) -> dict[str, int]:
        """What each phase has taken of the first thread since the model was made."""
        counts = (self._forward.profile + self._logits.profile).tolist()
        return dict(zip(PHASES, counts, strict=False))

    @property
    def clock(self) -> int:
        """The processor's clock, in cycles, when the last logits were there."""
        return int(self._logits.profile[-1])

    def new_kv_caches(self, num_blocks: int, block_size: int) -> list[KVCache]:
        """An empty cache: for each layer keys and values of ``num_blocks`` blocks. ``block_size`` is a multiple of 16.

        Its pages are found while others go on, and huge ones for the weights, so that neither the start nor a request waits.
        """
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_size)
        caches, _ = pool_of_zeros(2 * len(self._layers), shape, self.dtype, then=self._arena.to_huge_pages)
        return list(zip(caches[::2], caches[1::2], strict=True))

    def forward(
        self,
        token_ids: Tensor,  # [num_tokens] int64
        positions: Tensor,  # [num_tokens] int64
        kv_caches: Sequence[KVCache],
        slot_mapping: Tensor,  # [num_tokens] int64
        block_tables: Tensor,  # [num_seqs, max_blocks_per_seq] int32
        seq_lens: Tensor,  # [num_seqs] int32, keys including this step's
        query_start: Tensor,  # [num_seqs + 1] int32
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """What ``logits`` reads, ``[num_tokens, hidden_size]`` float32; the caches get the keys and values of all tokens."""
        rows, work, config = len(token_ids), self._forward, self.config
        num_blocks, block_size = kv_caches[0][0].shape[:2]
        _demand_within("token id", token_ids, config.vocab_size)
        _demand_within("slot", slot_mapping, num_blocks * block_size)
        lengths = seq_lens.numpy()
        self._make_room(rows, int(lengths.max()), block_size)
        self._hold_caches(kv_caches)
        group = config.num_query_heads // config.num_kv_heads
        chunks = torch.from_numpy(chunks_of(query_start.numpy(), lengths, group))
        if block_tables.stride(1) != 1:
            block_tables = block_tables.contiguous()
        given = {
            "token_ids": token_ids,
            "positions": positions,
            "slot_mapping": slot_mapping,
            "block_tables": block_tables,
            "chunks": chunks,
        }
        for name, tensor in given.items():
            work.hold(name, tensor)
        work.set(rows=rows, num_chunks=len(chunks), table_stride=block_tables.stride(0))
        work.run("forward")
        return work.held("x")[:rows, : config.hidden_size]

    def logits(self, x: Tensor) -> Tensor:
        """Logits ``[num_rows, vocab_size]`` in float32, of rows ``[num_rows, hidden_size]`` that ``forward`` gave."""
        rows, work, vocab_size = len(x), self._logits, self.config.vocab_size
        if rows > work.capacity:
            capacity = rounded_up(rows, GROWTH)
            work.set(capacity=capacity)
            work.room("normed", (capacity, self._head.padded_depth), LEFT)
            work.rounded_room(capacity, [self._head])
            work.room("logits", (capacity, self._head.padded_columns), torch.float32)
            work.room("likeliest", (capacity,), torch.int64)
        if rows == 0:
            self.likeliest = np.zeros(0, np.int64)
            return torch.zeros(0, vocab_size)
        work.hold("x", x.float().contiguous())
        work.set(rows=rows)
        work.run("logits")
        self.likeliest = work.held("likeliest")[:rows].numpy()
        return work.held("logits")[:rows, :vocab_size]

    def contenders(self, draws: Sequence[tuple[int, int, float]]) -> list[npt.NDArray[np.int64] | None]:
        """For each draw, ``(row of the last logits, key, temperature)``, the tokens that can win it; None: all."""
        work, count = self._logits, len(draws)
        rows, keys, temperatures = zip(*draws, strict=True)
        work.hold("drawn_rows", torch.tensor(rows))
        work.hold("keys", torch.from_numpy(np.array(keys, np.uint64)))
        work.hold("temperatures", torch.tensor(temperatures, dtype=torch.float64))
        found = work.room("contenders", (rounded_up(count, GROWTH), CONTENDERS), torch.int64).numpy()
        counts = work.room("counts", (rounded_up(count, GROWTH),), torch.int64)
        work.set(rows=count)
        work.run("contend")
        return [found[i, :n] if n > 0 else None for i, n in enumerate(counts[:count].tolist())]

    def _make_room(self, rows: int, longest: int, block_size: int) -> None:
        """Buffers for so many rows, and for sequences of so many keys; they only grow."""
        work, config = self._forward, self.config
        if rows > work.capacity:
            capacity, group = rounded_up(rows, GROWTH), config.num_query_heads // config.num_kv_heads
            work.set(capacity=capacity)
            columns = {name: _packed_of(self._layers[0], name).padded_columns for name in ("o", "qkv", "gate_up")}
            work.room("x", (capacity, columns["o"]), torch.float32)
            work.room("normed", (capacity, _packed_of(self._layers[0], "qkv").padded_depth), LEFT)
            work.room("qkv", (capacity, columns["qkv"]), torch.float32)
            work.room("query", (config.num_kv_heads, capacity, group, config.head_size), LEFT)
            work.room("mixed", (capacity, config.num_query_heads, config.head_size), LEFT)
            work.room("gated", (capacity, columns["gate_up"]), LEFT)
            work.rounded_room(capacity, [_packed_of(layer, name) for layer in self._layers for name in MATRICES])
        if longest > self._max_keys or block_size != self._block_size:
            self._block_size = block_size
            self._max_keys = rounded_up(max(256, 1 << (longest - 1).bit_length()), block_size)
            work.attention_room(
                config.num_query_heads // config.num_kv_heads, self._max_keys, block_size, config.head_size
            )
        if longest > self._num_rotations:
            self._rotate_until(max(256, 1 << (longest - 1).bit_length()))

    def _rotate_until(self, num_positions: int) -> None:
        """The cosine and sine of every angle of so many positions, made in float64 so that each turns by the right one."""
        frequencies = torch.tensor(self.config.inverse_frequencies(), dtype=torch.float64)
        angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * frequencies
        for name, wave in (("cos", angles.cos()), ("sin", angles.sin())):
            self._forward.hold(name, (self.config.rope_scale * wave).float().contiguous())
        self._num_rotations = num_positions

    def _hold_caches(self, kv_caches: Sequence[KVCache]) -> None:
        """Where the caches lie now. Nobody holds them between two calls."""
        keys, values = zip(*kv_caches, strict=True)
        self._records["key_cache"] = [cache.data_ptr() for cache in keys]
        self._records["value_cache"] = [cache.data_ptr() for cache in values]


def _packed(
    weights: WeightReader, index: int, arena: Arena, pack: Callable[..., PackedWeight], groups: GgufGroups | None
) -> dict[str, PackedWeight | Tensor | None]:
    """A layer's weights under the names of its record."""
    layer = weights.vectors(index)
    query_norm, key_norm = layer.qk_norms or (None, None)
    singles = {
        "input_norm": layer.input_norm,
        "mlp_norm": layer.mlp_norm,
        "qkv_bias": layer.qkv_bias,
        "o_bias": layer.o_bias,
        "query_norm": query_norm,
        "key_norm": key_norm,
    }
    packed = {}
    for name, names in matrices_of(index).items():
        parts = [(each,) for each in names] if name == "gate_up" else [names]
        as_they_are = [] if groups is None else [groups.joined(*part) for part in parts]
        found = [each for each in as_they_are if each is not None]
        if len(found) == len(parts):
            packed[name] = pack_four_bits(*found, arena=arena)
        else:
            packed[name] = pack(*(weights.tensor(*part) for part in parts), arena=arena)
    return {**{name: None if vector is None else vector.float() for name, vector in singles.items()}, **packed}


def _packed_of(layer: Mapping[str, PackedWeight | Tensor | None], name: str) -> PackedWeight:
    weight = layer[name]
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"{name} is not packed")
    return weight


def _addressed(layer: Mapping[str, PackedWeight | Tensor | None]) -> dict[str, Tensor | None]:
    return {name: part.tiles if isinstance(part, PackedWeight) else part for name, part in layer.items()}


def _demand_within(name: str, values: Tensor, limit: int) -> None:
    """The compiled code looks nothing up twice: what it is given must lie in its tables."""
    numbers = values.numpy()
    least, most = int(numbers.min()), int(numbers.max())
    if least < 0 or most >= limit:
        raise IndexError(f"{name} {most if most >= limit else least} is outside of 0 to {limit - 1}")
