"""A decode step of a Llama, made of all our kernels and torch's products: eagerly, and as one captured CUDA graph.

A layer is five launches of ours and four products: rotation with the write into the cache, attention (and the merge of its
splits), the norm of the sum with the residual, gate, norm again. Before them comes a norm, after them the logits and the draw.
An engine's step launches the same; ours does, and a test keeps the two alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan, plan_attention
from kernels.layer import add_rms_norm, rms_norm, rotate_write, silu_mul
from kernels.roofline import Heads, Work, attention_work, draw_tokens_work
from kernels.sampling import draw_tokens

EPS = 1e-5


@dataclass(frozen=True)
class StepShape:
    """A model, and a batch of sequences of one length."""

    num_layers: int = 4
    hidden_size: int = 4096
    intermediate_size: int = 14336
    vocab_size: int = 128256
    heads: Heads = Heads(32, 8, 128)  # noqa: RUF009  it is frozen
    batch: int = 64
    seq_len: int = 4096
    block_size: int = 16

    @property
    def name(self) -> str:
        return f"decode step, {self.num_layers} layers of {self.hidden_size}, {self.batch} x {self.seq_len}"

    @property
    def qkv_size(self) -> int:
        return (self.heads.num_query_heads + 2 * self.heads.num_kv_heads) * self.heads.head_size

    @property
    def num_weights(self) -> int:
        """The weights that a step reads: all but those of the embedding, of which it reads a row a sequence."""
        attended = self.heads.num_query_heads * self.heads.head_size
        layer = self.hidden_size * (self.qkv_size + attended + 3 * self.intermediate_size)
        return self.num_layers * layer + self.hidden_size * self.vocab_size

    @property
    def work(self) -> Work:
        """Weights once, the live cache once, logits once; activations stay in the second-level cache."""
        products = Work(self.num_weights * self.heads.element_bytes, 2 * self.batch * self.num_weights)
        lens = ([1] * self.batch, [self.seq_len] * self.batch)
        attention = attention_work(*lens, self.heads, block_size=self.block_size)
        total = products + draw_tokens_work(self.batch, self.vocab_size)
        for _ in range(self.num_layers):
            total = total + attention
        return total


@dataclass(frozen=True)
class LayerWeights:
    """What one layer multiplies by; both norms have one weight."""

    norm: Tensor  # [hidden_size]
    qkv: Tensor  # [hidden_size, qkv_size]
    o: Tensor  # [num_query_heads * head_size, hidden_size]
    gate_up: Tensor  # [hidden_size, 2 * intermediate_size]
    down: Tensor  # [intermediate_size, hidden_size]
    key_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache: Tensor


class DecodeStep:
    """Random weights and a full cache; a call computes one step, and the next one computes the same again."""

    def __init__(self, shape: StepShape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape = shape
        random = torch.Generator(device).manual_seed(0)
        heads, batch = shape.heads, shape.batch

        def matrix(*sizes: int, factor: float = 1.0) -> Tensor:
            return torch.randn(sizes, generator=random, device=device, dtype=dtype) * factor

        blocks_per_seq = -(-shape.seq_len // shape.block_size)
        pool = (batch * blocks_per_seq, shape.block_size, heads.num_kv_heads, heads.head_size)
        attended, inner = heads.num_query_heads * heads.head_size, shape.intermediate_size
        self.layers = [
            LayerWeights(
                norm=torch.ones(shape.hidden_size, device=device, dtype=dtype),
                qkv=matrix(shape.hidden_size, shape.qkv_size, factor=shape.hidden_size**-0.5),
                o=matrix(attended, shape.hidden_size, factor=attended**-0.5),
                gate_up=matrix(shape.hidden_size, 2 * inner, factor=shape.hidden_size**-0.5),
                down=matrix(inner, shape.hidden_size, factor=inner**-0.5),
                key_cache=matrix(*pool),
                value_cache=matrix(*pool),
            )
            for _ in range(shape.num_layers)
        ]
        self.embedded = matrix(batch, shape.hidden_size)  # of the tokens
        self.head = matrix(shape.hidden_size, shape.vocab_size, factor=shape.hidden_size**-0.5)
        order = torch.randperm(pool[0], generator=random, device=device)
        self.block_tables = order.view(batch, blocks_per_seq).int()
        last = shape.seq_len - 1
        last_blocks = self.block_tables[:, last // shape.block_size].long()
        self.slot_mapping = last_blocks * shape.block_size + last % shape.block_size
        self.positions = torch.full((batch,), last, device=device)
        self.rotation = torch.randn((shape.seq_len, 2, heads.head_size // 2), generator=random, device=device)
        self.seq_lens = torch.full((batch,), shape.seq_len, dtype=torch.int32, device=device)
        self.query_start = torch.arange(batch + 1, dtype=torch.int32, device=device)
        whole = torch.zeros(batch, dtype=torch.int64, device=device)
        numbers = whole.double()
        self.draw = (numbers + 0.8, numbers - 1e9, whole, numbers + 0.95, whole + 7)
        self.plan: AttentionPlan = plan_attention(
            [1] * batch,
            [shape.seq_len] * batch,
            num_query_heads=heads.num_query_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            dtype=dtype,
            device=device,
        )

    def __call__(self) -> Tensor:
        """The tokens that are drawn, ``[batch]``."""
        heads = self.shape.heads
        count, size = heads.num_query_heads, heads.head_size
        out, residual = self.embedded, self.embedded
        for index, layer in enumerate(self.layers):
            if index == 0:
                x = rms_norm(out, layer.norm, eps=EPS)
            else:
                x, residual = add_rms_norm(out, residual, layer.norm, eps=EPS)
            qkv = (x @ layer.qkv).view(len(x), -1, size)
            query, key, value = qkv.split_with_sizes([count, heads.num_kv_heads, heads.num_kv_heads], 1)
            caches = (layer.key_cache, layer.value_cache)
            rotate_write(query, key, value, *caches, self.positions, self.slot_mapping, self.rotation)
            attended = paged_attention(
                query,
                *caches,
                self.block_tables,
                self.seq_lens,
                self.query_start,
                scale=size**-0.5,
                plan=self.plan,
            )
            x, residual = add_rms_norm(attended.flatten(1) @ layer.o, residual, layer.norm, eps=EPS)
            gate, up = (x @ layer.gate_up).chunk(2, -1)
            out = silu_mul(gate, up) @ layer.down
        x, _ = add_rms_norm(out, residual, self.layers[-1].norm, eps=EPS)
        return draw_tokens((x @ self.head).float(), *self.draw)


def captured(step: DecodeStep) -> Callable[[], Tensor]:
    """The step as one CUDA graph: a call replays it, and gives the tokens' tensor, which each replay fills anew."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = step()

    def replay() -> Tensor:
        graph.replay()
        return tokens

    return replay
