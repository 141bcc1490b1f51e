"""A task: what Python hands to the compiled code, as one record of numbers and addresses."""

import numpy as np

OPERATIONS = ("forward", "logits", "product", "product_add", "gate_up", "attention", "contend", "pack")
"""What a task asks for; a number in the record. Products by themselves, and the packing of a weight, take what the head has."""

PHASES = ("embed", "norm", "qkv", "rotate, write", "attention", "o", "gate, up", "down", "head", "likeliest")
"""The parts of a step whose cycles are counted."""

COUNTERS_PER_LAYER = 12
COUNTERS_BESIDE = 8
"""Cache lines of counters: one for each phase of a layer, and of what stands around the layers."""

NUMBERS = (
    "operation",
    "num_layers",
    "rows",
    "capacity",  # rows that the buffers have room for
    "num_chunks",
    "chunk_rows",  # queries of a chunk at most
    "max_keys",  # keys that a chunk may see at most, a multiple of the block size
    "table_stride",  # of a row of the block tables, in entries
    "hidden_size",
    "hidden_depth",
    "hidden_columns",
    "qkv_columns",
    "gate_columns",
    "gate_depth",
    "vocab_size",
    "vocab_columns",
    "num_query_heads",
    "num_kv_heads",
    "head_size",
    "block_size",
    "window",  # keys that a query sees, 0 for all
    "widened_bytes",  # of each thread's, 0 if no weight is widened
    "tile_stride",  # from one tile of a weight that is packed to the next, in bytes
    "head_code",  # how ``head`` lies (``kernels.cpu.layout``): 0 bf16, else whole numbers
)
# A matrix is "left" where a product reads it from that side: in bf16, or in float32 (``kernels.cpu.instructions``).
ADDRESSES = (
    "x",  # [capacity, hidden_columns] float32: the hidden states
    "normed",  # [capacity, hidden_depth] left
    "qkv",  # [capacity, qkv_columns] float32
    "query",  # [num_kv_heads, capacity, group, head_size] left
    "mixed",  # [capacity, num_query_heads, head_size] left
    "gated",  # [capacity, gate_columns] left
    "token_ids",  # [rows] int64
    "positions",  # [rows] int64
    "slot_mapping",  # [rows] int64
    "block_tables",  # [num_seqs, table_stride] int32
    "chunks",  # [num_chunks, 4] int64: sequence, tokens, first position, first row
    "cos",  # [num_positions, head_size / 2] float32
    "sin",
    "embedding",  # [vocab_size, hidden_size] bf16
    "layers",  # [num_layers] records
    "norm",  # [hidden_size] float32
    "head",  # packed
    "logits",  # [capacity, vocab_columns] float32
    "likeliest",  # [capacity] int64
    "drawn_rows",  # [rows] int64: the row of logits that each draw is from
    "keys",  # [rows] uint64: of each draw's randomness
    "temperatures",  # [rows] float64
    "contenders",  # [rows, CONTENDERS] int64
    "counts",  # [rows] int64
    "counters",  # [cache lines] zeros
    "profile",  # [phases + 1] int64: cycles that the first thread has spent, and its clock when it last looked
    "rounded",  # [capacity, bytes]: rows as a product of whole numbers takes them, 0 if there is none
    # Of each thread:
    "scores",  # [chunk_rows, max_keys] float32
    "weights",  # [chunk_rows, max_keys] left
    "parts",  # [max_keys] int64
    "sums",  # [chunk_rows, head_size] float32
    "factors",  # [chunk_rows] float32
    "masked",  # [2, block_size, head_size] bf16
    "gate_scratch",  # [GATE_ROWS, 2 * TILE_COLUMNS] float32
    "widened",  # [2, deepest, TILE_COLUMNS] int16: the numbers of two tiles, 0 if no weight is widened
)
LAYER_ADDRESSES = (
    "input_norm",
    "qkv",
    "qkv_bias",
    "query_norm",
    "key_norm",
    "o",
    "o_bias",
    "mlp_norm",
    "gate_up",
    "down",
    "key_cache",
    "value_cache",
)

TASK = np.dtype([(name, np.int64) for name in (*NUMBERS, *ADDRESSES)] + [("eps", np.float32), ("scale", np.float32)])
LAYER_CODES = ("qkv_code", "o_code", "gate_up_code", "down_code")
"""How a layer's weights lie."""
LAYER = np.dtype([(name, np.int64) for name in (*LAYER_ADDRESSES, *LAYER_CODES)])
