"""Each launcher refuses what it can not do right, by the argument's name and with both numbers, before it writes anything."""

from dataclasses import replace

import pytest
import torch

import kernels
from kernels import BadArgument, cpu_paged_attention, triton_paged_attention
from tests.kernels.batches import Recipe, build, plan_of

RECIPE = Recipe((1, 3), (40, 9), block_size=16)
BOTH = pytest.mark.parametrize("attend", [cpu_paged_attention, triton_paged_attention], ids=["twin", "triton"])


def refused(attend, batch, argument, found, needed, **options):
    """The message names the argument and both numbers, and the output is as it was."""
    out = options.pop("out", None)
    mine = torch.full_like(batch.query, 7.0, memory_format=torch.contiguous_format) if out is None else out
    with pytest.raises(ValueError, match=argument) as raised:
        attend(*batch, **{"scale": 0.1, "out": mine, **options})
    assert isinstance(raised.value, BadArgument)
    assert raised.value.argument == argument
    assert str(found) in str(raised.value)
    assert str(needed) in str(raised.value)
    if out is None:
        assert torch.equal(mine, torch.full_like(mine, 7.0))


def changed(**tensors):
    batch = build(RECIPE)
    return replace(batch, **{name: change(getattr(batch, name)) for name, change in tensors.items()})


def other_strides(cache):
    """The same numbers with heads before tokens."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


TENSOR_CASES = [
    ("query", "rank", {"query": lambda x: x[0]}, 2, 3),
    ("query", "head_size", {"query": lambda x: x[..., :16].contiguous()}, 16, 32),
    ("query", "dtype", {"query": lambda x: x.half()}, "float16", "float32"),
    ("query", "last stride", {"query": lambda x: x.repeat_interleave(2, 2)[..., ::2]}, 2, 1),
    ("query", "num_query_heads", {"query": lambda x: x[:, :3].contiguous()}, 3, 2),
    ("query", "heads per KV head", {"query": lambda x: x.repeat(1, 33, 1)}, 66, 64),
    ("key_cache", "rank", {"key_cache": lambda x: x[0]}, 3, 4),
    ("key_cache", "dtype", {"key_cache": lambda x: x.double()}, "float64", "float32"),
    ("key_cache", "last stride", {"key_cache": lambda x: x.repeat_interleave(2, 3)[..., ::2]}, 2, 1),
    ("key_cache", "shape", {"key_cache": lambda x: x[:, :0]}, 0, "no empty axis"),
    ("value_cache", "shape", {"value_cache": lambda x: x[:-1]}, 6, 7),
    ("value_cache", "dtype", {"value_cache": lambda x: x.half()}, "float16", "float32"),
    ("value_cache", "last stride", {"value_cache": lambda x: x.repeat_interleave(2, 3)[..., ::2]}, 2, 1),
    ("block_tables", "rank", {"block_tables": lambda x: x[0]}, 1, 2),
    ("block_tables", "dtype", {"block_tables": lambda x: x.long()}, "int64", "int32"),
    ("block_tables", "rows", {"block_tables": lambda x: x[:1]}, 1, 2),
    ("block_tables", "last stride", {"block_tables": lambda x: x.T.contiguous().T}, 2, 1),
    ("seq_lens", "rank", {"seq_lens": lambda x: x[None]}, 2, 1),
    ("seq_lens", "dtype", {"seq_lens": lambda x: x.long()}, "int64", "int32"),
    ("query_start", "dtype", {"query_start": lambda x: x.long()}, "int64", "int32"),
    ("query_start", "length", {"query_start": lambda x: x[:2]}, 2, 3),
    ("query", "device", {"query": lambda x: x.to("meta")}, "meta", "cpu"),
    ("value_cache", "device", {"value_cache": lambda x: x.to("meta")}, "meta", "cpu"),
    ("block_tables", "device", {"block_tables": lambda x: x.to("meta")}, "meta", "cpu"),
    ("seq_lens", "device", {"seq_lens": lambda x: x.to("meta")}, "meta", "cpu"),
    ("query_start", "device", {"query_start": lambda x: x.to("meta")}, "meta", "cpu"),
]

VALUE_CASES = [
    ("block_tables", "width", {"block_tables": lambda x: x[:, :2].contiguous()}, 2, 3),
    ("block_tables", "block id", {"block_tables": lambda x: x.index_fill(1, torch.tensor(0), 7)}, 7, 6),
    ("block_tables", "block id", {"block_tables": lambda x: x.index_fill(1, torch.tensor(0), -1)}, -1, 0),
    ("seq_lens", "smallest entry", {"seq_lens": lambda x: x - 20}, -11, 0),
    ("query_start", "first entry", {"query_start": lambda x: x + 1}, 1, 0),
    ("query_start", "entry 2", {"query_start": lambda x: torch.tensor([0, 3, 2], dtype=torch.int32)}, 2, 3),
    ("query_start", "end", {"query_start": lambda x: torch.tensor([0, 1, 5], dtype=torch.int32)}, 5, 4),
]


@BOTH
@pytest.mark.parametrize(("argument", "quality", "change", "found", "needed"), TENSOR_CASES + VALUE_CASES)
def test_a_bad_tensor_is_refused(attend, argument, quality, change, found, needed):
    batch = changed(**change)
    mine = torch.full((4, 4, 32), 7.0)
    refused(attend, batch, argument, found, needed, out=mine)
    assert torch.equal(mine, torch.full_like(mine, 7.0))


@pytest.mark.parametrize("head_size", [16, 40, 120, 272])
def test_k7_the_kernel_refuses_head_sizes_without_wide_loads(head_size):
    batch = build(replace(RECIPE, head_size=head_size))
    refused(triton_paged_attention, batch, "key_cache", head_size, "a multiple of 16 from 32 to 256")


def test_the_kernel_refuses_caches_with_different_strides():
    batch = changed(value_cache=other_strides)
    refused(triton_paged_attention, batch, "value_cache", (1024, 32, 512, 1), (1024, 64, 32, 1))


def test_the_kernel_refuses_strides_that_make_loads_narrow():
    def pad(cache):
        return torch.nn.functional.pad(cache, (0, 4))[..., :32]

    refused(triton_paged_attention, changed(key_cache=pad, value_cache=pad), "key_cache", 36, "multiples of 16")


def test_the_kernel_refuses_a_pool_that_starts_off_by_two_bytes():
    def shift(cache):
        return torch.cat([cache.flatten()[:1], cache.flatten()])[1:].view(cache.shape)

    batch = build(replace(RECIPE, dtype=torch.bfloat16))
    shifted = replace(batch, key_cache=shift(batch.key_cache), value_cache=shift(batch.value_cache))
    refused(triton_paged_attention, shifted, "key_cache", "2 modulo 16", "0 modulo 16")


@BOTH
def test_a_window_or_a_cap_of_nothing_is_refused(attend):
    refused(attend, build(RECIPE), "window", 0, 1, window=0)
    refused(attend, build(RECIPE), "logit_cap", 0.0, 0, logit_cap=0.0)
    refused(attend, build(RECIPE), "logit_cap", "nan", 0, logit_cap=float("nan"))


@BOTH
@pytest.mark.parametrize("scale", [0.0, -0.125, float("nan"), float("inf")])
def test_a_scale_of_nothing_or_less_is_refused(attend, scale):
    refused(attend, build(RECIPE), "scale", scale, "above 0", scale=scale)


@BOTH
@pytest.mark.parametrize(
    ("out", "found", "needed"),
    [
        (torch.empty(4, 2, 32), (4, 2, 32), (4, 4, 32)),
        (torch.empty(4, 4, 32, dtype=torch.float16), "float16", "float32"),
        (torch.empty(4, 4, 64)[..., ::2], 2, 1),
        (torch.empty(4, 4, 32, device="meta"), "meta", "cpu"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(attend, out, found, needed):
    refused(attend, build(RECIPE), "out", found, needed, out=out)


@BOTH
def test_a_plan_for_another_step_is_refused(attend):
    batch = build(RECIPE)
    other_lens = replace(batch, seq_lens=torch.tensor([39, 9], dtype=torch.int32))
    other_queries = replace(batch, query_start=torch.tensor([0, 2, 4], dtype=torch.int32))
    refused(attend, batch, "plan", 39, 40, plan=plan_of(other_lens))
    refused(attend, batch, "plan", (2, 2), (1, 3), plan=plan_of(other_queries))
    refused(attend, batch, "plan", 5, None, plan=plan_of(batch, window=5))
    refused(attend, batch, "plan", 4, 2, plan=plan_of(build(replace(RECIPE, group=4))))
    elsewhere = replace(plan_of(batch), merges=torch.empty(0, 3, dtype=torch.int32, device="meta"))
    refused(attend, batch, "plan", "meta", "cpu of query", plan=elsewhere)


@BOTH
def test_entries_that_no_query_sees_may_hold_anything(attend):
    batch = build(replace(RECIPE, window=4))  # past the end and before the window there are ids of no block
    assert int(batch.block_tables.min()) < 0
    attend(*batch, scale=0.1, window=4)


@BOTH
def test_unchecked_values_are_not_looked_at(attend, monkeypatch):
    """Ids that no query sees are all that an unchecked call may get wrong: here a guard block's id is read and used."""
    batch = build(RECIPE)
    plan = plan_of(batch)
    monkeypatch.setenv("KVPROOF_UNCHECKED_KERNELS", "1")
    monkeypatch.setattr(
        "kernels.attention_launch.check_table_values"
        if attend is triton_paged_attention
        else "kernels.attention_twin.check_table_values",
        lambda *_, **__: pytest.fail("looked at the table"),
    )
    attend(*batch, scale=0.1, plan=plan)


def test_with_a_plan_and_unchecked_the_launcher_never_waits(monkeypatch):
    """Nothing is copied to the host: no ``tolist``, ``item`` or ``bool`` of a tensor."""
    batch = build(RECIPE)
    plan = plan_of(batch)
    monkeypatch.setenv("KVPROOF_UNCHECKED_KERNELS", "1")
    for name in ("tolist", "item", "__bool__", "__int__", "cpu", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"waited in {name}"))
    monkeypatch.setattr("kernels.attention_launch.paged_attention_kernel", {(1, 2): lambda *_, **__: None})
    triton_paged_attention(*batch, scale=0.1, plan=plan)


WRITE_CASES = [
    ("key", lambda a: a | {"key": a["key"][0]}, 2, 3),
    ("key", lambda a: a | {"key": a["key"][:, :1]}, (1, 32), (2, 32)),
    ("key", lambda a: a | {"key": a["key"].half()}, "float16", "float32"),
    ("key", lambda a: a | {"key": a["key"].repeat_interleave(2, 2)[..., ::2]}, 2, 1),
    ("key", lambda a: a | {"key": a["key"].to("meta")}, "meta", "cpu"),
    ("value", lambda a: a | {"value": a["value"][:2]}, (2, 2, 32), (3, 2, 32)),
    ("value", lambda a: a | {"value": a["value"].half()}, "float16", "float32"),
    ("value_cache", lambda a: a | {"value_cache": a["value_cache"][1:]}, 3, 4),
    ("slot_mapping", lambda a: a | {"slot_mapping": a["slot_mapping"].int()}, "int32", "int64"),
    ("slot_mapping", lambda a: a | {"slot_mapping": a["slot_mapping"][:2]}, 2, 3),
    ("slot_mapping", lambda a: a | {"slot_mapping": a["slot_mapping"][None]}, 2, 1),
    ("slot_mapping", lambda a: a | {"slot_mapping": torch.tensor([0, 16, 1])}, 16, 15),
    ("slot_mapping", lambda a: a | {"slot_mapping": torch.tensor([0, -2, 1])}, -2, -1),
    ("slot_mapping", lambda a: a | {"slot_mapping": torch.tensor([5, 0, 5])}, 5, "at most once"),
]


@pytest.mark.parametrize("write", [kernels.cpu_write_kv, kernels.triton_write_kv], ids=["twin", "triton"])
@pytest.mark.parametrize(("argument", "change", "found", "needed"), WRITE_CASES)
def test_a_bad_write_is_refused(write, argument, change, found, needed):
    arguments = {
        "key": torch.zeros(3, 2, 32),
        "value": torch.zeros(3, 2, 32),
        "key_cache": torch.full((4, 4, 2, 32), 5.0),
        "value_cache": torch.full((4, 4, 2, 32), 5.0),
        "slot_mapping": torch.tensor([0, 9, 3]),
    }
    with pytest.raises(BadArgument) as raised:
        write(**change(arguments))
    assert raised.value.argument == argument
    assert str(found) in str(raised.value)
    assert str(needed) in str(raised.value)
    assert torch.equal(arguments["key_cache"], torch.full((4, 4, 2, 32), 5.0))


COPY_CASES = [
    (torch.tensor([[0, 1]], dtype=torch.int32), "int32", "int64"),
    (torch.tensor([0, 1]), 1, 2),
    (torch.tensor([[0, 1, 2]]), 3, 2),
    (torch.tensor([[0, 4]]), 4, 3),
    (torch.tensor([[-1, 2]]), -1, 0),
    (torch.tensor([[0, 1], [2, 1]]), 1, "at most once"),
    (torch.tensor([[0, 1], [1, 2]]), 1, "a block that is no source"),
    (torch.tensor([[2, 2]]), 2, "a block that is no source"),
]


@pytest.mark.parametrize("copy", [kernels.cpu_copy_blocks, kernels.triton_copy_blocks], ids=["twin", "triton"])
@pytest.mark.parametrize(("copies", "found", "needed"), COPY_CASES)
def test_a_bad_copy_is_refused(copy, copies, found, needed):
    caches = torch.full((2, 4, 4, 2, 32), 5.0)
    caches[:, 0] = 1.0
    before = caches.clone()
    with pytest.raises(BadArgument) as raised:
        copy(caches[0], caches[1], copies)
    assert raised.value.argument == "block_copies"
    assert str(found) in str(raised.value)
    assert str(needed) in str(raised.value)
    assert torch.equal(caches, before)


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="sm_70.*sm_80, sm_90, sm_100, gfx942"):
        kernels.tile_shapes("sm_70", head_size=64, group=1, dtype=torch.float16)
