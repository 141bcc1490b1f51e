"""A case to measure: lengths and heads, the tensors made from them, and what is right for it."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan, plan_attention
from kernels.fp8 import FP8, bytes_of, dequantized, quantized
from kernels.roofline import Heads, Work, attention_work


def llama_heads() -> Heads:
    """Those of an 8-billion Llama 3."""
    return Heads(32, 8, 128)


@dataclass(frozen=True)
class Case:
    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: Heads = field(default_factory=llama_heads)
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.heads.head_size)

    @property
    def work(self) -> Work:
        return attention_work(
            self.query_lens, self.seq_lens, self.heads, block_size=self.block_size, window=self.window
        )

    def plan(self, device: torch.device, *, split: bool | None = None) -> AttentionPlan:
        return plan_attention(
            self.query_lens,
            self.seq_lens,
            num_query_heads=self.heads.num_query_heads,
            num_kv_heads=self.heads.num_kv_heads,
            head_size=self.heads.head_size,
            dtype=self.dtype,
            device=device,
            window=self.window,
            is_fp8=self.heads.is_fp8,
            split=split,
        )


@dataclass(frozen=True)
class Inputs:
    """The arguments of ``paged_attention``, with tables of shuffled blocks."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor
    kv_scales: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens, self.query_start

    def gathered(self, seq: int) -> tuple[Tensor, Tensor]:
        """K and V of one sequence, ``[num_kv_heads, seq_len, head_size]``."""
        positions = torch.arange(int(self.seq_lens[seq]), device=self.query.device)
        block_size = self.key_cache.shape[1]
        where = self.block_tables[seq].long()[positions // block_size], positions % block_size
        key, value = (bytes_of(cache)[where].transpose(0, 1) for cache in (self.key_cache, self.value_cache))
        if self.kv_scales is None:
            return key, value
        scales = self.kv_scales[where].transpose(0, 1)
        numbers = (dequantized(cells.view(FP8), scales[..., i]) for i, cells in enumerate((key, value)))
        exact_key, exact_value = (each.to(self.query.dtype) for each in numbers)
        return exact_key, exact_value


def make_inputs(case: Case, device: torch.device) -> Inputs:
    random = torch.Generator(device).manual_seed(0)
    needs = [-(-length // case.block_size) for length in case.seq_lens]
    ids = torch.randperm(sum(needs), generator=random, device=device, dtype=torch.int32).split_with_sizes(needs)
    cell = (case.heads.num_kv_heads, case.heads.head_size)
    pool = (sum(needs), case.block_size, *cell)
    key_cache, value_cache = (
        torch.randn(pool, generator=random, device=device, dtype=case.dtype) for _ in ("key", "value")
    )
    kv_scales = None
    if case.heads.is_fp8:
        (key_cache, key_scales), (value_cache, value_scales) = quantized(key_cache), quantized(value_cache)
        kv_scales = torch.stack([key_scales, value_scales], -1)
    return Inputs(
        query=torch.randn(
            (sum(case.query_lens), case.heads.num_query_heads, case.heads.head_size),
            generator=random,
            device=device,
            dtype=case.dtype,
        ),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        query_start=torch.tensor((0, *case.query_lens), device=device).cumsum(0).int(),
        kv_scales=kv_scales,
    )


def correctness_cases() -> list[Case]:
    """Decodes long and short beside a prefill chunk; few, as each has its own binaries to compile."""
    kinds: list[tuple[torch.dtype, int, int | None]] = [
        (torch.bfloat16, 64, None),
        (torch.bfloat16, 128, None),
        (torch.bfloat16, 128, 100),
        (torch.bfloat16, 256, None),
        (torch.float16, 80, 100),
        (torch.float16, 32, None),
        (torch.float32, 64, None),
        (torch.float32, 128, 100),
    ]
    plain = [_check(Heads(8, 2, size, dtype.itemsize), dtype, window) for dtype, size, window in kinds]
    return plain + [
        _check(Heads(8, 2, size, is_fp8=True), torch.bfloat16, window) for size, window in ((64, 100), (128, None))
    ]


def _check(heads: Heads, dtype: torch.dtype, window: int | None) -> Case:
    name = f"{dtype} x {heads.head_size}, window {window}{', fp8 cache' * heads.is_fp8}"
    return Case(name, (1, 70, 1, 1), (3000, 200, 17, 1024), heads, block_size=24, window=window, dtype=dtype)


def problems(case: Case, device: torch.device) -> list[str]:
    """The kernel bound against float64, and splits of their own against splits in a row, bit for bit."""
    inputs = make_inputs(case, device)
    exact, accumulated = _dense(case, inputs, torch.float64)
    own = float((_dense(case, inputs, case.dtype)[0].double() - exact).abs().max())
    last_place = torch.finfo(case.dtype).eps * 2.0 ** float(exact.abs().max().log2().floor()) / 2
    apart, in_a_row = (
        paged_attention(
            *inputs.tensors,
            scale=case.scale,
            window=case.window,
            plan=case.plan(device, split=split),
            kv_scales=inputs.kv_scales,
        )
        for split in (True, False)
    )
    error, bound = float((apart.double() - exact).abs().max()), 2 * own + accumulated + last_place
    found = [] if error <= bound else [f"{case.name}: error {error:.3g}, bound {bound:.3g}"]
    return found if torch.equal(apart, in_a_row) else [*found, f"{case.name}: splits of their own change bits"]


def _dense(case: Case, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Attention written out in one precision, and the accumulator's share of the kernel bound."""
    starts, outs, accumulated = inputs.query_start.tolist(), [], 0.0
    for seq, seq_len in enumerate(case.seq_lens):
        key, value = (each.to(dtype).repeat_interleave(case.heads.group, 0) for each in inputs.gathered(seq))
        query = inputs.query[starts[seq] : starts[seq + 1]].to(dtype).transpose(0, 1)
        at = torch.arange(seq_len - query.shape[1], seq_len, device=query.device)[:, None]
        keys = torch.arange(seq_len, device=query.device)
        hidden = (keys > at) | (keys <= at - (seq_len if case.window is None else case.window))
        weights = (query @ key.mT * case.scale).masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append((weights @ value).transpose(0, 1))
        reach = case.scale * float((query.abs() @ key.abs().mT).max())
        spread = float((weights @ value.abs()).max())
        accumulated = max(accumulated, torch.finfo(torch.float32).eps * spread * (1 + reach))
    return torch.cat(outs), accumulated
