"""The whole forward pass as one compiled function, which every thread of a team walks through.

A phase is a number of units. Threads claim units from a counter, and wait until so many are *done*, not until every
thread has arrived: a thread that the system has put aside between two units keeps nobody waiting. Both counters of a phase
stand in a cache line of their own, ``counters``, and a phase returns where those of the next one are.
"""

from collections.abc import Callable
from typing import Any

import numba
from numba import carray, njit, types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys

from kernels.cpu.attention import attention
from kernels.cpu.draw import contend_rows
from kernels.cpu.layout import GATE_ROWS, TILE_COLUMNS
from kernels.cpu.memory import LINE
from kernels.cpu.product import gate_up, product
from kernels.cpu.rows import embed, likeliest_rows, norm_rows, place_rows
from kernels.cpu.task import LAYER, OPERATIONS, PHASES, TASK
from kernels.cpu.vectors import LEFT_BYTES, claim, cycles, int64_at, pointer_to
from kernels.cpu.whole import pack_tiles

TASK_TYPE, LAYER_TYPE = numba.from_dtype(TASK), numba.from_dtype(LAYER)
layers_at = pointer_to(LAYER_TYPE)
FORWARD, LOGITS, PRODUCT, PRODUCT_ADD, GATE_UP, ATTENTION, CONTEND, PACK = range(len(OPERATIONS))
NUM_PHASES = len(PHASES)
EMBED, NORM, QKV, PLACE, ATTEND, O, GATE, DOWN, HEAD, LIKELIEST = range(NUM_PHASES)


@njit(error_model="numpy")
def lap(g, thread, phase, since):
    """The first thread's cycles since then belong to this phase; returns now."""
    now = cycles()
    if thread == 0:
        profile = carray(int64_at(g.profile), NUM_PHASES + 1)
        profile[phase] += now - since
        profile[NUM_PHASES] = now
    return now


@njit(error_model="numpy")
def forward(counters, g, thread):
    """``g.x`` becomes the hidden states of the tokens; the caches get their keys and values."""
    layers, rows = carray(layers_at(g.layers), g.num_layers), g.rows
    scratch = g.gate_scratch + thread * GATE_ROWS * 2 * TILE_COLUMNS * 4
    wide = g.widened + thread * g.widened_bytes
    size, width, depth = g.hidden_size, g.hidden_columns, g.hidden_depth
    mixed_depth = g.num_query_heads * g.head_size
    clock = cycles()
    counters = embed(counters, rows, g.token_ids, g.embedding, size, g.x, width)
    clock = lap(g, thread, EMBED, clock)
    for index in range(g.num_layers):
        layer = layers[index]
        counters = norm_rows(counters, rows, g.x, width, 0, layer.input_norm, size, g.eps, g.normed, depth)
        clock = lap(g, thread, NORM, clock)
        counters = product(
            counters,
            g.normed,
            depth * LEFT_BYTES,
            rows,
            layer.qkv,
            layer.qkv_code,
            wide,
            g.rounded,
            depth,
            g.qkv_columns,
            g.qkv,
            g.qkv_columns * 4,
            False,
        )
        clock = lap(g, thread, QKV, clock)
        counters = place_rows(counters, g, layer)
        clock = lap(g, thread, PLACE, clock)
        counters = attention(counters, g, layer, thread)
        clock = lap(g, thread, ATTEND, clock)
        counters = product(
            counters,
            g.mixed,
            mixed_depth * LEFT_BYTES,
            rows,
            layer.o,
            layer.o_code,
            wide,
            g.rounded,
            mixed_depth,
            width,
            g.x,
            width * 4,
            True,
        )
        clock = lap(g, thread, O, clock)
        counters = norm_rows(counters, rows, g.x, width, layer.o_bias, layer.mlp_norm, size, g.eps, g.normed, depth)
        clock = lap(g, thread, NORM, clock)
        counters = gate_up(
            counters,
            g.normed,
            depth * LEFT_BYTES,
            rows,
            layer.gate_up,
            layer.gate_up_code,
            wide,
            g.rounded,
            depth,
            g.gate_columns,
            scratch,
            g.gated,
            g.gate_columns * LEFT_BYTES,
        )
        clock = lap(g, thread, GATE, clock)
        counters = product(
            counters,
            g.gated,
            g.gate_columns * LEFT_BYTES,
            rows,
            layer.down,
            layer.down_code,
            wide,
            g.rounded,
            g.gate_depth,
            width,
            g.x,
            width * 4,
            True,
        )
        clock = lap(g, thread, DOWN, clock)


@njit(error_model="numpy")
def logits(counters, g, thread):
    """``g.logits`` and ``g.likeliest`` of the hidden states ``g.x``."""
    rows, depth, width = g.rows, g.hidden_depth, g.vocab_columns
    clock = cycles()
    counters = norm_rows(counters, rows, g.x, g.hidden_columns, 0, g.norm, g.hidden_size, g.eps, g.normed, depth)
    clock = lap(g, thread, NORM, clock)
    counters = product(
        counters,
        g.normed,
        depth * LEFT_BYTES,
        rows,
        g.head,
        g.head_code,
        0,
        g.rounded,
        depth,
        width,
        g.logits,
        width * 4,
        False,
    )
    clock = lap(g, thread, HEAD, clock)
    likeliest_rows(counters, rows, g.logits, width, g.vocab_size, g.likeliest)
    lap(g, thread, LIKELIEST, clock)


@njit(error_model="numpy")
def run(g):
    """One thread's part of a task."""
    thread, counters = claim(g.counters), g.counters + LINE
    wide = g.widened + thread * g.widened_bytes
    if g.operation == FORWARD:
        forward(counters, g, thread)
    elif g.operation == LOGITS:
        logits(counters, g, thread)
    elif g.operation == PRODUCT or g.operation == PRODUCT_ADD:
        adds, depth, width = g.operation == PRODUCT_ADD, g.hidden_depth, g.vocab_columns
        product(
            counters,
            g.normed,
            depth * LEFT_BYTES,
            g.rows,
            g.head,
            g.head_code,
            wide,
            g.rounded,
            depth,
            width,
            g.logits,
            width * 4,
            adds,
        )
    elif g.operation == GATE_UP:
        scratch, depth, width = (
            g.gate_scratch + thread * GATE_ROWS * 2 * TILE_COLUMNS * 4,
            g.hidden_depth,
            g.gate_columns,
        )
        gate_up(
            counters,
            g.normed,
            depth * LEFT_BYTES,
            g.rows,
            g.head,
            g.head_code,
            wide,
            g.rounded,
            depth,
            width,
            scratch,
            g.gated,
            width * LEFT_BYTES,
        )
    elif g.operation == ATTENTION:
        attention(counters, g, carray(layers_at(g.layers), 1)[0], thread)
    elif g.operation == CONTEND:
        contend_rows(counters, g)
    elif g.operation == PACK:
        pack_tiles(counters, g)


def compiled(version: int, say: Callable[[], None]) -> Any:
    """The function that a team runs, from numba's cache on disk, or compiled now, of which ``say`` tells.

    ``version`` is part of the cache's key: numba looks only at the file of the function itself, and not at those it calls.
    """

    class Told(CFunc):
        def _compile_uncached(self):
            say()
            return super()._compile_uncached()

    def work(task):
        if version != 0:
            run(carray(task, 1)[0])

    class Found(FunctionCache):
        def load_overload(self, signature, context):
            """What lies in the cache needs numba's runtime, and none of the tables of types that numba would fill first."""
            rtsys.initialize(context)
            return self._load_overload(signature, context)

    function = Told(work, ((types.CPointer(TASK_TYPE),), types.void), locals={}, options={"error_model": "numpy"})
    function._cache = Found(work)
    function.compile()
    return function
