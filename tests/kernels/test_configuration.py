"""``call_of`` says for each configuration exactly what the launcher does."""

import pytest
import torch

import kernels
from kernels import QKNorm, attention_launch, cache_launch, layer_launch, sampling_launch
from kernels.arguments import new_packed
from kernels.configuration import ATTENTION, LAYER, MOVES, VOCAB_SIZE, Configuration, FakeTensor, call_of
from kernels.fp8 import FP8, new_scales
from tests.kernels.batches import Recipe, build
from tests.kernels.test_fp8 import fp8_batch

OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")

NOT_OF_A_CONFIGURATION = (1 << 20, 1024, 4096)  # the number of slots, the width of the tables, the window


class Recorder:
    """Stands where a kernel stands, and keeps the last call."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.calls.append((arguments, constants))


def recorded(monkeypatch, module, name: str) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(module, name, recorder)
    return recorder


def launch(monkeypatch, c: Configuration) -> Recorder:
    """The launcher's call for small tensors of this configuration."""
    monkeypatch.setattr("kernels.attention_plan.architecture_of", lambda device: c.target)
    monkeypatch.setattr("kernels.attention_launch.architecture_of", lambda device: c.target)
    dtype = getattr(torch, c.dtype)
    lens = ((3,), (40,)) if c.kernel == "prefill" else ((1,), (3000,) if c.kernel == "merge" else (40,))
    recipe = Recipe(*lens, dtype, c.block_size, c.group, c.num_kv_heads, c.head_size, 4096 if c.window else None)
    if c.kernel in ATTENTION or c.kernel == "merge":
        attention = recorded(monkeypatch, attention_launch, "paged_attention_kernel")
        merge = recorded(monkeypatch, attention_launch, "merge_splits_kernel")
        cap = 30.0 if c.logit_cap else None
        batch, scales = build(recipe), None
        if c.fp8:
            batch, _, scales = fp8_batch(recipe)
        options = {"window": recipe.window, "logit_cap": cap, "return_lse": c.lse, "kv_scales": scales}
        kernels.triton_paged_attention(*batch, scale=0.1, **options)
        return merge if c.kernel == "merge" else attention
    caches = torch.zeros((2, 4, c.block_size, c.num_kv_heads, c.head_size), dtype=dtype)
    query = torch.zeros((2, c.num_kv_heads * c.group, c.head_size), dtype=dtype)
    tokens, ids = caches[0, :2, 0].contiguous(), torch.tensor([0, 1])
    caches = caches.to(FP8) if c.fp8 else caches
    scales = new_scales(caches[0]) if c.fp8 else None
    if c.kernel in MOVES:
        name = {"write_kv": "write_kv", "copy_blocks": "copy_blocks"}.get(c.kernel, "pack_blocks")
        recorder = recorded(monkeypatch, cache_launch, f"{name}_kernel")
        packed = new_packed(caches[0], ids)
        {
            "write_kv": lambda: kernels.triton_write_kv(tokens, tokens, *caches, ids, scales),
            "copy_blocks": lambda: kernels.triton_copy_blocks(*caches, ids[None], scales),
            "pack_blocks": lambda: kernels.triton_pack_blocks(*caches, ids, scales),
            "unpack_blocks": lambda: kernels.triton_unpack_blocks(packed, *caches, ids, scales),
        }[c.kernel]()
        return recorder
    if c.kernel == "draw_tokens":
        recorder = recorded(monkeypatch, sampling_launch, "draw_tokens_kernel")
        numbers = torch.zeros(1, dtype=torch.float64)
        kernels.triton_draw_tokens(torch.zeros(1, VOCAB_SIZE), numbers, numbers, ids[:1] * 0, numbers + 1, ids[:1])
        return recorder
    name = {"silu_mul": "silu_mul", "rms_norm": "rms_norm", "add_rms_norm": "rms_norm"}.get(c.kernel, "rotate_write")
    recorder = recorded(monkeypatch, layer_launch, f"{name}_kernel")
    rows, weight = query.flatten(1), query[0].flatten()
    norm = QKNorm(weight[: c.head_size], weight[: c.head_size], 1e-6) if c.kernel == "rotate_write_norm" else None
    rotation = torch.zeros((2, 2, c.head_size // 2))
    {
        "silu_mul": lambda: kernels.triton_silu_mul(rows, rows),
        "rms_norm": lambda: kernels.triton_rms_norm(rows, weight, eps=1e-5),
        "add_rms_norm": lambda: kernels.triton_add_rms_norm(rows, rows, weight, eps=1e-5),
    }.get(
        c.kernel,
        lambda: kernels.triton_rotate_write(
            query, tokens, tokens, *caches, ids, ids, rotation, norm=norm, kv_scales=scales
        ),
    )()
    return recorder


CONFIGURATIONS = [
    *(Configuration("sm_90", kernel) for kernel in (*ATTENTION, "merge", *MOVES, *LAYER)),
    *(Configuration("sm_80", kernel, 80, 5, 3, 3, "float32", True, True, True) for kernel in (*ATTENTION, "merge")),
    *(Configuration("gfx942", kernel, 80, 5, 3, 3, "float16") for kernel in MOVES + LAYER),
    *(Configuration("sm_90", kernel, fp8=True) for kernel in (*ATTENTION, *MOVES, "rotate_write")),
    Configuration("gfx942", "decode", fp8=True),
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: f"{c.target}-{c.kernel}{'-fp8' * c.fp8}")
def test_the_call_is_the_launchers_own(configuration, monkeypatch):
    arguments, keywords = launch(monkeypatch, configuration).calls[-1]
    call = call_of(configuration)
    assert call.constants == {name: value for name, value in keywords.items() if name not in OPTIONS}
    assert call.options == {name: value for name, value in keywords.items() if name in OPTIONS}
    assert len(call.arguments) == len(arguments)
    for expected, found in zip(call.arguments, arguments, strict=True):
        if isinstance(expected, FakeTensor):
            assert found.dtype == expected.dtype
        else:
            assert type(found) is type(expected)
            assert found == expected or isinstance(expected, float) or expected in NOT_OF_A_CONFIGURATION
