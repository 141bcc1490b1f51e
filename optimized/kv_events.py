"""The KV events of a prefix cache, in the shape in which vLLM publishes its own: blocks stored, blocks removed, all cleared.

They speak of contents, never of block ids: a hash is the digest of a prefix, its salt and its model, and a block is stored once
however many sequences share it. No block is stored before its parent, unless the parent has left a sliding window.
Hashes of two processes have nothing in common. Nothing of this is made while nobody listens; an event costs O(its blocks).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TextIO

from optimized.prefix_cache import Record

KvEvent = dict[str, object]
"""The fields of ``spec.kv_events.FIELDS``, and the ``type``."""


class KvEvents:
    """Tells what happens to a prefix cache. ``window`` is the sliding window of its model, if it has one."""

    def __init__(self, tell: Callable[[KvEvent], None], block_size: int, window: int | None = None) -> None:
        self._tell = tell
        self._block_size = block_size
        self._window = window

    def stored(self, records: Sequence[Record]) -> None:
        """These blocks, each the parent of the next, can be found from now on."""
        parent = records[0].parent
        is_first = parent is None or parent.parent is None
        salt = "" if parent is None or not is_first else parent.packed.decode()
        self._tell(
            {
                "type": "BlockStored",
                "block_hashes": [record.digest.hex() for record in records],
                "parent_block_hash": None if parent is None or is_first else parent.digest.hex(),
                "token_ids": [token for record in records for token in record.tokens(self._block_size)],
                "block_size": self._block_size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [[salt], *[None] * (len(records) - 1)] if salt else None,
                "kv_cache_spec_sliding_window": self._window,
            }
        )

    def removed(self, records: Sequence[Record]) -> None:
        """These blocks can no longer be found."""
        self._tell({"type": "BlockRemoved", "block_hashes": [each.digest.hex() for each in records], "medium": "GPU"})

    def cleared(self) -> None:
        """Nothing can be found any more."""
        self._tell({"type": "AllBlocksCleared"})


def write_kv_events(file: TextIO) -> Callable[[KvEvent], None]:
    """Writes each event as a line of JSON, for ``kvproof trace check``."""
    return lambda event: print(json.dumps(event, separators=(",", ":")), file=file)
