"""Whatever is wrong with one tensor, every launcher says it in its own words: no error of torch or Triton, and no launch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels
from kernels import BadArgument
from kernels.arguments import new_packed
from kernels.fp8 import FP8, new_scales

CACHES = {"key_cache": torch.zeros(6, 16, 2, 32), "value_cache": torch.zeros(6, 16, 2, 32)}
FP8_CACHES = {name: cache.to(FP8) for name, cache in CACHES.items()}
SCALES = {"kv_scales": new_scales(FP8_CACHES["key_cache"])}
TOKENS = {"key": torch.zeros(3, 2, 32), "value": torch.zeros(3, 2, 32), "slot_mapping": torch.tensor([1, 2, 3])}
STEP = {
    "query": torch.zeros(4, 4, 32),
    "block_tables": torch.arange(6, dtype=torch.int32).view(2, 3),
    "seq_lens": torch.tensor([40, 9], dtype=torch.int32),
    "query_start": torch.tensor([0, 1, 4], dtype=torch.int32),
}
TURNED = {"query": torch.zeros(3, 4, 32), "positions": torch.arange(3), "rotation": torch.zeros(8, 2, 16)}
IDS, COPIES = {"block_ids": torch.tensor([0, 1])}, {"block_copies": torch.tensor([[0, 1], [2, 3]])}
ROWS, WEIGHT = torch.zeros(3, 64), {"weight": torch.zeros(64)}
DRAWS = {
    "logits": torch.zeros(3, 50),
    **{name: torch.ones(3, dtype=torch.float64) for name in ("temperatures", "top_ps")},
    "log_min_ps": -torch.ones(3, dtype=torch.float64),
    **{name: torch.ones(3, dtype=torch.int64) for name in ("top_ks", "keys")},
}
CALLS: list[tuple[str, dict[str, Tensor], dict[str, float]]] = [
    ("paged_attention", STEP | CACHES, {"scale": 0.1}),
    ("paged_attention", STEP | FP8_CACHES | SCALES, {"scale": 0.1}),
    ("write_kv", TOKENS | CACHES, {}),
    ("write_kv", TOKENS | FP8_CACHES | SCALES, {}),
    ("rotate_write", TURNED | TOKENS | CACHES, {}),
    ("rotate_write", TURNED | TOKENS | FP8_CACHES | SCALES, {}),
    ("copy_blocks", COPIES | FP8_CACHES | SCALES, {}),
    ("pack_blocks", IDS | CACHES, {}),
    ("unpack_blocks", IDS | CACHES | {"packed": new_packed(CACHES["key_cache"], IDS["block_ids"])}, {}),
    ("rms_norm", {"hidden": ROWS} | WEIGHT, {"eps": 1e-5}),
    ("add_rms_norm", {"hidden": ROWS, "residual": ROWS} | WEIGHT, {"eps": 1e-5}),
    ("silu_mul", {"gate": ROWS, "up": ROWS}, {}),
    ("draw_tokens", DRAWS, {}),
]
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "an axis more": lambda x: x[None],
    "an axis less": lambda x: x[0],
    "no axis": lambda x: x.view(torch.uint8).flatten()[0].view(torch.uint8) if x.dtype == FP8 else x.flatten()[0],
    "another type": lambda x: x.view(torch.uint8).to(torch.complex64) if x.dtype == FP8 else x.to(torch.complex64),
    "another device": lambda x: x.to("meta"),
    "strides": lambda x: torch.empty((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)[..., ::2],
}
WRITTEN = {
    "write_kv": ("key_cache", "value_cache"),
    "copy_blocks": ("key_cache", "value_cache"),
    "unpack_blocks": ("key_cache", "value_cache"),
    "rotate_write": ("query", "key_cache", "value_cache"),
}


@pytest.mark.parametrize("kind", ["cpu", "triton"])
@pytest.mark.parametrize(("name", "tensors", "numbers"), CALLS)
def test_a_fault_of_any_tensor_is_refused_by_name(name, tensors, numbers, kind):
    call = getattr(kernels, f"{kind}_{name}")
    for argument, tensor in tensors.items():
        for fault, changed in FAULTS.items():
            with pytest.raises(BadArgument) as raised:
                call(**tensors | {argument: changed(tensor)}, **numbers)
            assert raised.value.argument in tensors, (argument, fault)


@pytest.mark.parametrize("kind", ["cpu", "triton"])
@pytest.mark.parametrize(("name", "tensors", "numbers"), [call for call in CALLS if call[0] in WRITTEN])
def test_what_is_written_has_a_place_for_each_element(name, tensors, numbers, kind):
    for argument in WRITTEN[name]:
        once = tensors[argument][:1].expand_as(tensors[argument])
        with pytest.raises(BadArgument, match=f"{argument} has strides .*, needs none of 0"):
            getattr(kernels, f"{kind}_{name}")(**tensors | {argument: once}, **numbers)


@pytest.mark.parametrize("kind", ["cpu", "triton"])
def test_an_output_has_a_place_for_each_element(kind):
    out = torch.zeros(1, 4, 32).expand(4, 4, 32)
    with pytest.raises(BadArgument, match=r"out has strides \(0, 32, 1\), needs none of 0"):
        getattr(kernels, f"{kind}_paged_attention")(**STEP, **CACHES, scale=0.1, out=out)
