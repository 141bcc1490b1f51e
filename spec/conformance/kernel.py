"""Judges an attention kernel of any framework: what it reads, exactly, and what it gives, within the kernel bound.

A kernel is a black box that is called with arrays. What it reads is found out: one key after the other is made so large
that a query which sees it gives its value and nothing else, and every value names its slot. So a read is right or wrong,
as it is for an engine, and the rules of ``spec.attention`` judge it. What is computed is compared with float64.
"""

import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from spec.attention import first_visible
from spec.conformance.kernel_case import (
    Case,
    call_of,
    names_of_slots,
    picked,
    pool,
    renamed,
    tables,
    with_numbers_for_poison,
)
from spec.conformance.kernel_oracle import (
    Array,
    Call,
    dense,
    e4m3_bytes,
    errors,
    kernel_bound,
    lse_bound,
    numbers_of,
    stored,
)
from spec.picture import memory_map, text
from spec.rules import RULES, RuleViolation
from spec.vocabulary import Config, Read, Seq, Slot, State


class Offer(Enum):
    """What a kernel may lack. What it does not declare is not judged, and its tests say so."""

    LSE = "lse"  # returns (out, lse) and not out alone
    WINDOW = "window"  # takes ``window``: a query sees that many keys, itself included
    LOGIT_CAP = "logit_cap"  # takes ``logit_cap``: a score s becomes cap * tanh(s / cap)
    BATCH_INVARIANT = "batch_invariant"  # a sequence's bits depend on neither its neighbours nor its block ids
    NO_COPY = "no_copy"  # ``convert`` copies nothing: views are views, and a huge pool costs no memory
    FP8 = (
        "fp8"  # takes ``kv_scales``: the caches hold bytes of e4m3, each token and head with a scale of K and one of V
    )
    COPY = "copy"  # has ``copy_blocks``


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel as its author offers it: how it is called, and with what.

    ``attend(query, key_cache, value_cache, block_tables, seq_lens, query_start, scale)``, and ``window=`` and
    ``logit_cap=`` where declared, gives the output, or the output and its log-sum-exp. Each array went through
    ``convert(array, dtype)`` before; without it they are numpy's. The dtype is int32, or one of ``dtypes``; bfloat16 comes
    as its bits, in uint16, since numpy has no such type. What comes back is anything that numpy or DLPack can read.

    ``kv_scales=`` comes with caches of float8_e4m3fn, which are bytes before ``convert``. ``copy_blocks(key_cache,
    value_cache, block_copies)``, [num_copies, 2] int64, copies whole blocks, source to target, with their ``kv_scales=``.
    """

    name: str
    attend: Callable[..., Any]  # Any: the arrays are the framework's
    offers: frozenset[Offer] = frozenset()
    dtypes: tuple[str, ...] = ("float32",)
    head_sizes: tuple[int, ...] = (64, 128)
    block_sizes: tuple[int, ...] = (1, 4, 8, 16, 32)
    groups: tuple[int, ...] = (1, 2, 4)
    convert: Callable[[Array, str], Any] | None = None
    copy_blocks: Callable[..., Any] | None = None

    def can(self, *offers: Offer) -> bool:
        return self.offers.issuperset(offers)

    def __call__(
        self,
        query: object,
        key_cache: object,
        value_cache: object,
        block_tables: object,
        seq_lens: object,
        query_start: object,
        scale: float,
        **more: object,
    ) -> object:
        return self.attend(query, key_cache, value_cache, block_tables, seq_lens, query_start, scale, **more)


def as_kernel(given: Callable[..., object]) -> AttentionKernel:
    """The kernel itself, or a plain function: a kernel that declares nothing."""
    if isinstance(given, AttentionKernel):
        return given
    return AttentionKernel(getattr(given, "__name__", type(given).__name__), given)


class KernelFault(Exception):
    """A kernel raised, or gave what is no answer. That is no broken rule."""


class KernelViolation(RuleViolation):
    """A kernel broke a rule. The report ends with the tables as a memory map and with a test that shows it again."""

    def __init__(self, rule_id: str, state: State, event: Read, *, kernel: str, found: str, again: str) -> None:
        super().__init__(RULES[rule_id], state, event, state, engine=kernel)
        self.found = found
        self.again = again
        self.args = ("\n".join([self.args[0], f"  found     {found}", text(memory_map(state)), "", again]),)


@dataclass(frozen=True)
class Verdict:
    """Who judges what, so that a violation can say how to see it again."""

    kernel: AttentionKernel
    case: Case
    judge: str

    def violation(self, rule_id: str, call: Call, seq: int, position: int, slots: Sequence[Slot], found: str) -> None:
        again = _again(rule_id, self.judge, repr(self.case))
        event = Read(seq, tuple(slots), first_visible(position, call.window))
        state = state_of(call, seq, position)
        raise KernelViolation(rule_id, state, event, kernel=self.kernel.name, found=found, again=again)


def _again(rule_id: str, judge: str, arguments: str) -> str:
    """A test that shows a violation again, ready to paste."""
    return (
        f"from spec.conformance.kernel import Case, as_kernel, {judge}\n\n\n"
        f"def test_{rule_id.lower().replace('-', '_')}_again(attention_kernel):\n"
        f"    {judge}(as_kernel(attention_kernel), {arguments})"
    )


def run(kernel: AttentionKernel, call: Call, copies: Array | None = None) -> tuple[Array, Array | None]:
    """What the kernel gives for the call, in float64: the output, and the log-sum-exp where it is declared. Before, it
    makes the ``copies`` [num_copies, 2] of blocks."""
    convert = kernel.convert or (lambda array, dtype: array)
    kept = call.dtype if call.kv_scales is None else "float8_e4m3fn"
    query, key_cache = convert(call.query, call.dtype), convert(call.key_cache, kept)
    is_one = (
        call.value_cache is call.key_cache
    )  # Triton's interpreter copies one of two names for one memory over itself
    caches = (key_cache, key_cache if is_one else convert(call.value_cache, kept))
    scales = {} if call.kv_scales is None else {"kv_scales": convert(call.kv_scales, "bfloat16")}
    indices = (convert(each, "int32") for each in (call.block_tables, call.seq_lens, call.query_start))
    more = {"window": call.window, "logit_cap": call.logit_cap}
    given_more = {name: value for name, value in more.items() if value is not None}
    try:
        if copies is not None and kernel.copy_blocks is not None:
            kernel.copy_blocks(*caches, convert(copies, "int64"), **scales)
        given = kernel.attend(query, *caches, *indices, call.scale, **given_more, **scales)
    except Exception as error:
        raise KernelFault(f"{kernel.name} raised {type(error).__name__}: {error}") from error
    parts = tuple(given) if isinstance(given, tuple | list) else (given,)
    if len(parts) != 1 + kernel.can(Offer.LSE):
        raise KernelFault(f"{kernel.name} gave {len(parts)} arrays, it declares {1 + kernel.can(Offer.LSE)}")
    out = _numbers(kernel, "the output", parts[0], call.query.shape)
    return out, _numbers(kernel, "the log-sum-exp", parts[1], call.query.shape[:2]) if len(parts) > 1 else None


def _numbers(kernel: AttentionKernel, name: str, given: object, shape: tuple[int, ...]) -> Array:
    try:
        found = np.asarray(given, np.float64)
    except (TypeError, ValueError, RuntimeError):
        try:
            found = np.from_dlpack(given).astype(np.float64)  # type: ignore[arg-type]  # whatever the framework gave
        except Exception as error:
            raise KernelFault(f"{kernel.name}: {name} is a {type(given).__name__} that numpy can not read") from error
    if found.shape != shape:
        raise KernelFault(f"{kernel.name}: {name} has the shape {found.shape}, needs {shape}")
    return found


def state_of(call: Call, seq: int, position: int) -> State:
    """The tables as the specification sees them when ``seq`` computes ``position``. A token is named by its slot, so that
    sequences that share a block share its tokens."""
    size, num_blocks = call.block_size, len(call.key_cache)
    held: dict[int, tuple[int, ...]] = {}
    seqs, cells = {}, {}
    for each, length in enumerate(call.seq_lens.tolist()):
        count = position + 1 if each == seq else length
        slots = tuple(call.slots(each, 0, length))
        held[each] = tuple(dict.fromkeys(at // size for at in slots))
        cells.update({at: slots[: i + 1] for i, at in enumerate(slots)})
        seqs[each] = Seq(each, slots[:count] or (0,), 1, num_computed_tokens=count)
    entries = [block for blocks in held.values() for block in blocks]
    counts = tuple(entries.count(block) for block in range(num_blocks))
    return State(
        Config(num_blocks, size, window=call.window),
        free=tuple(block for block, count in enumerate(counts) if count == 0),
        ref_count=counts,
        block_tables=held,
        seqs=seqs,
        cells=cells,
    )


# What a kernel reads


def reading_call(case: Case) -> tuple[Call, Array]:
    """The call whose values name their slots, with all keys 0, and the names [num_slots, num_kv_heads, head_size].

    The query of a head points at the dimension of its KV head, so that the key of another one does nothing to it.
    """
    num_blocks = tables(case)[1]
    key_cache, value_cache = pool(case, num_blocks, 0.0)
    value_cache[...], names, kv_scales = names_of_slots(case, num_blocks)
    query = np.zeros((sum(case.query_lens), case.num_kv_heads * case.group, case.head_size), np.float32)
    for head in range(query.shape[1]):
        query[:, head, head // case.group] = 1.0
    call = replace(call_of(case), query=stored(query, case.dtype), key_cache=key_cache, value_cache=value_cache)
    return replace(call, scale=1.0, logit_cap=None, kv_scales=kv_scales), names.reshape(-1, *names.shape[2:])


Heard: TypeAlias = dict[Slot, Slot | None]
LOUD = 64.0  # a score so far above all others that their weights, e^-64, vanish in float32


def reads(kernel: AttentionKernel, call: Call, names: Array, quiet: Array) -> dict[tuple[int, int], Heard]:
    """For each query and head the slots whose key it listens to, and the slot whose value it then gives: None if it
    gives no value that there is, but something else than ``quiet``, the output without a loud key."""
    found: dict[tuple[int, int], Heard] = {where: {} for where in np.ndindex(*quiet.shape[:2])}
    size, group = call.block_size, call.group
    for slot in range(len(names)):
        cell = call.key_cache[slot // size, slot % size]
        for head in range(call.key_cache.shape[2]):
            cell[head, head] = _loud(call, slot, head)
        out, _ = run(kernel, call)
        cell[...] = 0
        for (row, head), heard in found.items():
            named = np.flatnonzero((np.abs(out[row, head] - names[:, head // group]) < 0.5).all(-1))
            if len(named):
                heard[slot] = int(named[0])
            elif not (np.abs(out[row, head] - quiet[row, head]) < 0.5).all():
                heard[slot] = None
    return {where: _settled(heard) for where, heard in found.items()}


def _loud(call: Call, slot: Slot, head: int) -> Any:  # Any: a number as the cache keeps it
    if call.kv_scales is None:
        return stored(np.array([LOUD]), call.dtype)[0]
    scale = call.kv_scales[slot // call.block_size, slot % call.block_size, head, :1]
    return e4m3_bytes(LOUD / numbers_of(scale, "bfloat16"))[0]


def _settled(heard: Heard) -> Heard:
    """A query that sees one key only gives its value whatever is loud: then that is all it reads."""
    [*values] = set(heard.values())
    return {values[0]: values[0]} if len(values) == 1 and values[0] is not None else heard


def _place(heard: Heard, slot: Slot) -> Slot:
    """The slot whose value comes with this slot's key."""
    place = heard[slot]
    return slot if place is None else place


def judge_reads(kernel: AttentionKernel, case: Case) -> None:
    """Every query reads the slots of its own positions, each once, and no other cell of the pool. Raises
    ``RuleViolation``."""
    case = replace(case, aliases=(), logit_cap=None)
    call, names = reading_call(case)
    verdict = Verdict(kernel, case, "judge_reads")
    quiet, _ = _checked_run(verdict, call)
    found = reads(kernel, call, names, quiet)
    for row, seq, position in call.rows():
        due = call.slots(seq, first_visible(position, call.window), position + 1)
        for head in range(call.query.shape[1]):
            heard = found[row, head]
            who = f"sequence {seq} at position {position}, query head {head}"
            slots = [_place(heard, at) for at in due if at in heard] + [at for at in heard if at not in due]
            _check_read(verdict, call, seq, position, slots, f"{who}, reads slots {slots}, not {due}")
            garbled = [at for at in heard if heard[at] is None]
            if garbled:
                what = f"{who}, reads the key in slot {garbled[0]} and gives no value that its KV head has anywhere"
                verdict.violation("ATTN-1", call, seq, max(position, 0), slots, what)


READ_RULES = ("ATTN-2", "ATTN-3", "ATTN-1")  # the narrower first: who reads a stranger's block finds no prefix there


def _check_read(verdict: Verdict, call: Call, seq: int, position: int, slots: list[Slot], found: str) -> None:
    if position < 0:
        if slots:
            verdict.violation("ATTN-3", call, seq, 0, slots, found)
        return
    state, event = state_of(call, seq, position), Read(seq, tuple(slots), first_visible(position, call.window))
    for rule_id in READ_RULES:
        if not RULES[rule_id].holds(state, event, state):
            verdict.violation(rule_id, call, seq, position, slots, found)


# What a kernel gives


def judge_numbers(kernel: AttentionKernel, case: Case) -> None:
    """Output and log-sum-exp lie within the kernel bound, poison changes nothing, and the caches stay as they are. Raises
    ``RuleViolation``: for what is read, if that is wrong, and else for what is given."""
    call = call_of(case)
    verdict = Verdict(kernel, case, "judge_numbers")
    given = _checked_run(verdict, call)
    worst = beyond_the_bound(call, *given)
    if worst is None:
        return
    row, head, found = worst
    _, seq, position = list(call.rows())[row]
    for rule_id, is_guard in (("ATTN-2", True), ("ATTN-3", False)):
        clean = with_numbers_for_poison(call, case, is_guard=is_guard)
        if beyond_the_bound(clean, *run(kernel, clean)) is None:
            place = "a block that no table names" if is_guard else "a cell of a used block that no query sees"
            slots = call.slots(seq, first_visible(max(position, 0), call.window), position + 1)
            what = f"sequence {seq} at position {position}, query head {head}: poison from {place} gets into the output"
            verdict.violation(rule_id, call, seq, max(position, 0), slots, what)
    judge_reads(kernel, case)
    slots = call.slots(seq, first_visible(max(position, 0), call.window), position + 1)
    rule_id = "ATTN-1" if position >= 0 else "ATTN-3"
    what = f"sequence {seq} at position {position}, query head {head}: {found}"
    verdict.violation(rule_id, call, seq, max(position, 0), slots, what)


def beyond_the_bound(call: Call, out: Array, lse: Array | None) -> tuple[int, int, str] | None:
    """The row and head that are furthest off, if they are too far off, and by how much."""
    exact, own = dense(call), dense(call, call.dtype)
    pairs = [("output", out, exact.out, kernel_bound(exact, own, call.dtype))]
    pairs += [("log-sum-exp", lse, exact.lse, lse_bound(exact, own))] if lse is not None else []
    for name, found, right, bound in pairs:
        off = errors(found, right)
        if off.size and off.max() > bound:
            at = np.unravel_index(int(off.argmax()), off.shape)
            row, head = int(at[0]), int(at[1])
            numbers = f"{found[at]:.8g}, float64 gives {right[at]:.8g}"
            return row, head, f"the {name} is {numbers}: an error of {off[at]:.3g}, the kernel bound is {bound:.3g}"
    return None


def _checked_run(verdict: Verdict, call: Call) -> tuple[Array, Array | None]:
    """What the kernel gives. It writes nothing else: its step has written its tokens before, and the tables stay."""
    touched = {"key_cache": "TABLE-9", "value_cache": "TABLE-9", "block_tables": "TABLE-8"}
    touched |= {} if call.kv_scales is None else {"kv_scales": "TABLE-9"}
    before = {name: getattr(call, name).copy() for name in touched}
    given = run(verdict.kernel, call)
    for name, rule_id in touched.items():
        if before[name].tobytes() != np.ascontiguousarray(getattr(call, name)).tobytes():
            verdict.violation(rule_id, call, 0, max(int(call.seq_lens[0]) - 1, 0), (), f"the kernel wrote into {name}")
    return given


def judge_copies(kernel: AttentionKernel, case: Case) -> None:
    """A query that reads copies of its blocks gets what it got from their sources. A case has no more blocks than the
    pool has spare ones. Raises ``RuleViolation``."""
    judge_numbers(kernel, case)
    call = call_of(case)
    used = sorted({int(block) for seq, need in enumerate(case.needs()) for block in call.block_tables[seq, :need]})
    spare = [block for block in range(len(call.key_cache)) if block not in used]
    target = dict(zip(used, spare, strict=False))
    moved = [[target.get(block, block) for block in row] for row in call.block_tables.tolist()]
    copied = replace(call, block_tables=np.array(moved, np.int32))
    worst = beyond_the_bound(call, *run(kernel, copied, np.array(list(target.items()), np.int64)))
    if worst is not None:
        row, head, found = worst
        _, seq, position = list(call.rows())[row]
        slots = copied.slots(seq, first_visible(position, call.window), position + 1)
        what = f"sequence {seq} at position {position}, query head {head}, its blocks copied as {target}: {found}"
        Verdict(kernel, case, "judge_copies").violation("ATTN-1", copied, seq, position, slots, what)


def judge_invariance(kernel: AttentionKernel, case: Case) -> None:
    """Neither block ids nor neighbours nor their order change a bit. Raises ``RuleViolation``."""
    call = call_of(case)
    everyone = list(range(len(case.seq_lens)))
    together = run(kernel, call)
    verdict = Verdict(kernel, case, "judge_invariance")
    changes: list[tuple[str, Call, list[int]]] = [("the ids of its blocks", renamed(call, case.seed), everyone)]
    changes += [("the order of the batch", picked(call, everyone[::-1]), everyone[::-1])]
    changes += [("its neighbours", picked(call, [seq]), [seq]) for seq in everyone]
    for what, changed, seqs in changes:
        given = run(kernel, changed)
        start = 0
        for seq in seqs:
            begin, end = call.query_start[seq], call.query_start[seq + 1]
            now = slice(start, start := start + int(end - begin))
            for mine, other in zip(together, given, strict=True):
                if mine is not None and other is not None and not np.array_equal(mine[begin:end], other[now]):
                    last = int(call.seq_lens[seq]) - 1
                    slots = call.slots(seq, first_visible(last, call.window), last + 1)
                    found = f"the bits that sequence {seq} gets depend on {what}"
                    verdict.violation("ATTN-1", call, seq, last, slots, found)


class NoRoom(Exception):
    """This machine has no address space for a huge pool."""


HUGE = 5 << 30  # elements of the pool: 32 bits, signed or not, do not name its last ones


def judge_huge_ids(kernel: AttentionKernel, case: Case) -> None:
    """The highest blocks of a pool of more than 2^32 elements are found, by decodes in the shapes of the case. The pool is
    a sparse mapping: it takes address space and no memory. Raises ``RuleViolation``, and ``NoRoom`` where there is no
    address space."""
    size = case.block_size
    case = Case((1, 1), (3 * size - size // 2, 3 * size), case.dtype, size, case.group, 2, case.head_size)
    per_block = case.block_size * case.num_kv_heads * case.head_size
    num_blocks, edge = HUGE // per_block, (1 << 31) // per_block
    kept = stored(np.zeros(1), case.dtype).dtype
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    try:
        memory = mmap.mmap(-1, 4 * HUGE * kept.itemsize, flags=flags)  # a wild address finds zeros, not the end
    except (OSError, ValueError) as error:
        raise NoRoom(str(error)) from error
    whole = np.frombuffer(memory, kept)[HUGE : HUGE + num_blocks * per_block]
    huge = whole.reshape(num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    small = call_of(replace(case, poison=0.0))
    ids = {int(b): at for b, at in zip(np.unique(small.block_tables[:, :3]), _spread(num_blocks, edge), strict=True)}
    block_tables = np.vectorize(lambda block: ids.get(int(block), 3))(small.block_tables).astype(np.int32)
    for old, new in ids.items():  # one pool for keys and values: what counts is where they are looked for
        huge[new] = small.key_cache[old]
    call = replace(small, key_cache=huge, value_cache=huge, block_tables=block_tables)
    worst = beyond_the_bound(call, *run(kernel, call))
    if worst is not None:
        row, head, found = worst
        last = int(call.seq_lens[row]) - 1
        what = f"with block ids {sorted(ids.values())}, query head {head} of sequence {row}: {found}"
        verdict = Verdict(kernel, case, "judge_huge_ids")
        verdict.violation("ATTN-2", small, row, last, small.slots(row, 0, last + 1), what)


def _spread(num_blocks: int, edge: int) -> list[int]:
    return [num_blocks - 1, edge, num_blocks // 2, edge - 1, 5, edge + 1]
