"""Sabotaged pools: faults in what the reference does without a scheduler, each looked for in the scope of a lens."""

from dataclasses import replace

from spec.scope import LENSES, Scope
from tests.mutants.sabotage import Mutant

_POOL, _SEQUENCES = "pool.py", "sequence_pool.py"
_CACHE, _WINDOW, _ROLLBACK, _FLIGHT, _FORK = (
    LENSES[name].small for name in ("cache", "window", "rollback", "flight", "fork")
)
_SMALL_BLOCKS = replace(_ROLLBACK, config=replace(_ROLLBACK.config, block_size=1))

_NARROW = replace(_WINDOW, config=replace(_WINDOW.config, block_size=1, window=1))
"""A window that leaves a table empty after every token."""


def _fault(name: str, file: str, old: str, new: str, rule: str, row: str, scope: Scope) -> Mutant:
    return Mutant(name, "reference", file, old, new, rule, row, scope)


POOL_ZOO = [
    _fault(
        "a block that nobody holds any more is free twice",
        _POOL,
        "            if self.ref_count[block] == 0:\n                self.free.append(block)\n",
        "            if self.ref_count[block] == 0:\n                self.free += [block, block]\n",
        "ALLOC-1",
        "B-002",
        _FORK,
    ),
    _fault(
        "a block that is needed twice is handed out twice",
        _POOL,
        "        blocks = tuple(self.take() for _ in range(growth))\n        self.tables",
        "        blocks = (self.take(),) * growth if growth else ()\n        self.tables",
        "ALLOC-4",
        "B-093",
        _FORK,
    ),
    _fault(
        "a block is free although a step in flight reads it",
        _POOL,
        "if self.ref_count[block] == 1 and readers:",
        "if self.ref_count[block] > 1 and readers:",
        "ALLOC-5",
        "B-016",
        _FLIGHT,
    ),
    _fault(
        "a swapped table is entered in the reverse order of its contents",
        _POOL,
        "        self.tables[seq_id] = blocks\n        self.host_free.extend(host_blocks)",
        "        self.tables[seq_id] = blocks[::-1]\n        self.host_free.extend(host_blocks)",
        "TABLE-5",
        "B-129",
        _CACHE,
    ),
    _fault(
        "a block leaves the window one token too early",
        _SEQUENCES,
        "first_visible = max(0, seq.num_computed_tokens - window + 1)",
        "first_visible = max(0, seq.num_computed_tokens - window + 2)",
        "TABLE-10",
        "B-205",
        _WINDOW,
    ),
    _fault(
        "a copy takes the first block of the table for the shared one",
        _POOL,
        "return Copy(seq_id, index, source, target)",
        "return Copy(seq_id, index, self.tables[seq_id][0] if index else source, target)",
        "COW-5",
        "B-057",
        _FORK,
    ),
    _fault(
        "a fork takes an id that somebody has",
        _SEQUENCES,
        "        self._demand_new(child)\n",
        "",
        "COW-6",
        "B-176",
        _FORK,
    ),
    _fault(
        "a rollback may take back nothing",
        _SEQUENCES,
        "if not 0 < num_tokens < old.num_tokens or",
        "if not 0 < num_tokens <= old.num_tokens or",
        "COW-7",
        "B-135",
        _ROLLBACK,
    ),
    _fault(
        "a rollback goes back behind what the window has kept",
        _SEQUENCES,
        " or first_visible < old.num_dropped_blocks * size:",
        ":",
        "COW-8",
        "B-111",
        _WINDOW,
    ),
    _fault(
        "a key is made of the block's own tokens only",
        _POOL,
        "key = CacheKey(seq.tokens[: (index + 1) * self.config.block_size], salt)",
        "key = CacheKey(seq.tokens[index * self.config.block_size : (index + 1) * self.config.block_size], salt)",
        "CACHE-1",
        "B-077",
        _CACHE,
    ),
    _fault(
        "two keys that differ in the last token are the same",
        _POOL,
        "            if cached == key:\n",
        "            if cached.tokens[:-1] == key.tokens[:-1]:\n",
        "CACHE-3",
        "B-075",
        _CACHE,
    ),
    _fault(
        "a hit leaves nothing to compute",
        _POOL,
        "for index in range((len(tokens) - 1) // size):",
        "for index in range(len(tokens) // size):",
        "CACHE-4",
        "B-088",
        _CACHE,
    ),
    _fault(
        "a hit is one block shorter than it could be",
        _POOL,
        "            blocks.append(block)\n        return tuple(blocks)",
        "            blocks.append(block)\n        return tuple(blocks[: max(1, len(blocks) - 1)])",
        "CACHE-5",
        "B-091",
        _SMALL_BLOCKS,
    ),
    _fault(
        "a key that the cache has is published again",
        _POOL,
        "        if self.find(key) is not None:\n            return False\n",
        "",
        "CACHE-8",
        "B-096",
        _CACHE,
    ),
    _fault(
        "host blocks are not given back after the swap in",
        _POOL,
        "        self.tables[seq_id] = blocks\n        self.host_free.extend(host_blocks)\n",
        "        self.tables[seq_id] = blocks\n",
        "SWAP-1",
        "B-127",
        _CACHE,
    ),
    _fault(
        "one host block takes the whole table",
        _POOL,
        "        host_blocks = tuple(self.host_free.pop(0) for _ in table)\n",
        "        host_blocks = (self.host_free[0],) * len(table)\n        del self.host_free[: len(table)]\n",
        "SWAP-2",
        "B-045",
        _CACHE,
    ),
    _fault(
        "the host table is entered in the reverse order of its contents",
        _POOL,
        "        self.host_tables[seq_id] = host_blocks\n",
        "        self.host_tables[seq_id] = host_blocks[::-1]\n",
        "SWAP-3",
        "B-085",
        _CACHE,
    ),
    _fault(
        "a table that is shared stays on the device when it is swapped out",
        _POOL,
        "        self.host_tables[seq_id] = host_blocks\n        self.give_back(table)\n",
        "        self.host_tables[seq_id] = host_blocks\n"
        "        if all(self.num_entries(block) for block in table):\n"
        "            self.tables[seq_id] = table\n"
        "        else:\n"
        "            self.give_back(table)\n",
        "SWAP-4",
        "B-066",
        _CACHE,
    ),
    _fault(
        "a swap out leaves out the first block",
        _POOL,
        "host_blocks = tuple(self.host_free.pop(0) for _ in table)",
        "host_blocks = tuple(self.host_free.pop(0) for _ in table[1:])",
        "API-2",
        "B-132",
        _CACHE,
    ),
    _fault(
        "a table that the window has emptied is swapped out",
        _SEQUENCES,
        "        if num_blocks == 0:\n            return ()\n",
        "",
        "SWAP-5",
        "B-132",
        _NARROW,
    ),
    _fault(
        "a swap out keeps a host block more than it moves",
        _POOL,
        "        self.host_tables[seq_id] = host_blocks\n",
        "        self.host_tables[seq_id] = host_blocks + tuple(self.host_free[:1])\n"
        "        self.host_free = self.host_free[1:]\n",
        "SWAP-6",
        "B-012",
        _CACHE,
    ),
    _fault(
        "a step that is over stays in flight",
        _POOL,
        "flight = self.flights.pop(step_id)",
        "flight = self.flights[step_id]",
        "API-5",
        "B-017",
        _FLIGHT,
    ),
    _fault(
        "a block whose contents are cached is given back for the cached one without a word",
        _POOL,
        "        if self.find(key) is not None:\n            return False\n",
        "        found, table = self.find(key), self.tables[seq_id]\n"
        "        if found is not None:\n"
        "            self.hold(found)\n"
        "            self.give_back([table[index]])\n"
        "            self.tables[seq_id] = (*table[:index], found, *table[index + 1 :])\n"
        "            return False\n",
        "TABLE-8",
        "B-096",
        _CACHE,
    ),
    _fault(
        "a block taken for something else can still be found",
        _POOL,
        "        self.cached.pop(block, None)\n",
        "",
        "CACHE-1",
        "B-092",
        _CACHE,
    ),
    _fault(
        "the cache is emptied while its blocks are in use",
        _POOL,
        "        if any(self.ref_count[block] > 0 for block in self.cached):\n            return False\n",
        "",
        "CACHE-10",
        "B-102",
        _CACHE,
    ),
]
