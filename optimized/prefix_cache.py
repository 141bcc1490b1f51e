"""The prefix cache: full blocks that are found by the tokens they stand for, by everything before them, and by a salt.

A block's digest is SHA-256 over its parent's digest and its own tokens, length first. The first parent is a root that
depends on random bytes of this process, on the model and on the salt, so that nobody can foresee a digest and equal
prefixes under different salts have nothing in common. A digest only finds a record: what is found counts as a hit
after its tokens and its parents are compared, so that a collision costs a hit and never shows foreign tokens.

To look a prompt up costs one comparison of tokens a block while it goes where the prompt before it went, and one hash
more a block where it does not; to publish a block costs one hash. Later look-ups of the same sequence read a list.
A cached block costs some 300 bytes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import groupby, islice
from struct import error, pack, unpack
from typing import Protocol
from weakref import WeakValueDictionary

from spec.vocabulary import BlockId, CacheKey, Prefix, Token


class Hash(Protocol):
    """A hash of bytes, as ``hashlib`` makes them."""

    def digest(self) -> bytes: ...


class Record:
    """What one full block stands for. ``block`` is the one that holds it, None while no cached block does.

    A root has no parent, and its salt where a block has its tokens.
    """

    __slots__ = ("__weakref__", "block", "child", "digest", "packed", "parent")

    def __init__(self, parent: Record | None, digest: bytes, packed: bytes) -> None:
        self.parent = parent
        self.digest = digest
        self.packed = packed
        self.block: BlockId | None = None
        self.child: Record | None = None
        """The cached record of the same line that was last seen after it, the first guess of a look-up."""

    def __eq__(self, other: object) -> bool:
        """Whether both stand for the same prefix under the same salt, token by token."""
        mine: Record | None = self
        theirs = other if isinstance(other, Record) else None
        while mine is not None and theirs is not None:
            if mine is theirs:
                return True
            if mine.packed != theirs.packed:
                return False
            mine, theirs = mine.parent, theirs.parent
        return mine is theirs

    def tokens(self, block_size: int) -> Prefix:
        """The tokens of the block alone."""
        return unpack(
            f"<{len(self.packed) // 4}I" if len(self.packed) <= 4 * block_size else f"<{block_size}q", self.packed
        )

    __hash__ = None  # type: ignore[assignment]  # records are found by digest


class CacheListener(Protocol):
    """Hears what can be found in a prefix cache, and what no longer can."""

    def stored(self, records: Sequence[Record]) -> None: ...

    def removed(self, records: Sequence[Record]) -> None: ...

    def cleared(self) -> None: ...


class PrefixCache:
    """Records by digest and by block. Which block is free is the pool's business."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        model: str = "",
        root: bytes | None = None,
        hash_of: Callable[[bytes], Hash] = hashlib.sha256,
    ) -> None:
        self.block_size = block_size
        self.of_block: list[Record | None] = [None] * num_blocks
        self.num_cached = 0
        self.listener: CacheListener | None = None
        self._by_digest: dict[bytes, Record] = {}
        self._hash_of = hash_of
        self._num_bytes = 4 * block_size
        self._length = _length(self._num_bytes)
        self._root = _with_length(secrets.token_bytes(32) if root is None else root) + _with_length(model.encode())
        # A root lives as long as a record or a sequence that starts from it: salts of the past leave nothing behind.
        self._roots: WeakValueDictionary[str, Record] = WeakValueDictionary()

    def __deepcopy__(self, memo: dict[int, object]) -> PrefixCache:
        """A cache of its own, with roots of its own: a weak dictionary copies its keys only."""
        made = object.__new__(PrefixCache)
        memo[id(self)] = made
        roots = {salt: deepcopy(root, memo) for salt, root in self._roots.items()}
        fields = {name: deepcopy(value, memo) for name, value in vars(self).items() if name != "_roots"}
        vars(made).update(fields, _roots=WeakValueDictionary(roots))
        return made

    def root(self, salt: str) -> Record:
        """Where the records of all prefixes under this salt begin."""
        root = self._roots.get(salt)
        if root is None:
            packed = salt.encode()
            root = Record(None, self._hash_of(self._root + _with_length(packed)).digest(), packed)
            self._roots[salt] = root
        return root

    def find(self, chain: list[Record], tokens: Sequence[Token], limit: int) -> list[BlockId]:
        """The cached blocks of the longest prefix, at most ``limit`` of them.

        ``chain`` begins with a root and then has the records of the tokens' full blocks, as far as they are known; it
        grows by what is learnt here, which is what makes the next look-up cheap.
        """
        blocks: list[BlockId] = []
        for record in islice(chain, 1, limit + 1):
            if record.block is None:
                break
            blocks.append(record.block)
        first = len(blocks)
        for index, packed in enumerate(self._packed_as_asked(tokens, first, limit), first):
            block = self._known(chain, index, packed).block
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, chain: list[Record], tokens: Sequence[Token], first: int, blocks: Sequence[BlockId]) -> list[int]:
        """These blocks, which hold the full blocks of the tokens from ``first`` on, can be found from now on.

        The answer has the places of those that could not be found before: the others' keys are those of other blocks.
        """
        packs = self._packed(tokens, first, first + len(blocks))
        known = len(chain) - 1
        if known < first:  # blocks have left a window before anybody named them
            for index, packed in enumerate(self._packed(tokens, known, first), known):
                self._known(chain, index, packed)
        published = []
        by_digest, of_block = self._by_digest, self.of_block
        for index, (block, packed) in enumerate(zip(blocks, packs, strict=True), first):
            record = self._known(chain, index, packed)
            if record.block is None and by_digest.setdefault(record.digest, record) is record:
                record.block = block
                of_block[block] = record
                chain[index].child = record
                published.append(index)
        self.num_cached += len(published)
        if self.listener is not None:
            for _, run in groupby(enumerate(published), lambda pair: pair[1] - pair[0]):
                self.listener.stored([chain[index + 1] for _, index in run])
        return published

    def is_lost(self, chain: list[Record], index: int) -> bool:
        """Whether full block ``index``, which could be found once, no longer can."""
        record = chain[index + 1] if index + 1 < len(chain) else None
        return record is not None and record.block is None and record.digest not in self._by_digest

    def evict(self, blocks: Sequence[BlockId]) -> None:
        """The blocks can no longer be found, those that could. O(blocks)."""
        if self.listener is not None:
            gone = [record for record in map(self.of_block.__getitem__, blocks) if record is not None]
            if gone:
                self.listener.removed(gone)
        self._forget(blocks)

    def clear(self) -> None:
        """Nothing can be found any more. O(cached blocks)."""
        self._forget(self.cached_blocks())
        if self.listener is not None:
            self.listener.cleared()

    def _forget(self, blocks: Sequence[BlockId]) -> None:
        of_block = self.of_block
        for block in blocks:
            record = of_block[block]
            if record is not None:
                of_block[block] = record.block = None
                del self._by_digest[record.digest]
                _forget_child(record)
                self.num_cached -= 1

    def cached_blocks(self) -> list[BlockId]:
        """Every block that can be found, in the order in which they were published. O(cached blocks)."""
        return [record.block for record in self._by_digest.values() if record.block is not None]

    def key_of(self, block: BlockId) -> CacheKey:
        """What a cached block stands for, read from its record and those before it."""
        record = self.of_block[block]
        if record is None:
            raise KeyError(block)
        parts = list[Prefix]()
        while record.parent is not None:
            parts.append(record.tokens(self.block_size))
            record = record.parent
        return CacheKey(tuple(token for part in reversed(parts) for token in part), record.packed.decode())

    def _known(self, chain: list[Record], index: int, packed: bytes) -> Record:
        """The record of full block ``index``: the one that the cache has, or else one without a block."""
        parent = chain[index]
        if index + 1 == len(chain):
            record = parent.child
            # What stands after the same parent and has the same tokens is the same prefix: no need for its digest.
            if record is None or record.packed != packed or record.block is None:
                length = self._length if len(packed) == self._num_bytes else _length(len(packed))
                record = Record(parent, self._hash_of(parent.digest + length + packed).digest(), packed)
            chain.append(record)
        else:
            record = chain[index + 1]
        if record.block is None:
            found = self._by_digest.get(record.digest)
            if found is not None and found == record:
                chain[index + 1] = record = found
            if record.parent is not parent:
                # From here on both lines have the same parents, so that the next comparison ends at once.
                _forget_child(record)
                record.parent = parent
            if found is record:
                parent.child = record
        return record

    def _packed(self, tokens: Sequence[Token], first: int, stop: int) -> list[bytes]:
        """The tokens of the full blocks from ``first`` to ``stop``: 4 bytes a token, or 8 in a block that needs it."""
        size, width = self.block_size, self._num_bytes
        chunk = tokens[first * size : stop * size]
        try:
            packed = pack(f"<{len(chunk)}I", *chunk)  # a third of the time that an array takes
        except error:
            return [_pack(chunk[i : i + size]) for i in range(0, len(chunk), size)]
        return [packed] if len(packed) == width else [packed[i : i + width] for i in range(0, len(packed), width)]

    def _packed_as_asked(self, tokens: Sequence[Token], first: int, stop: int) -> Iterator[bytes]:
        """The same, without more work than in proportion to how many of them are asked for."""
        count = 1
        while first < stop:
            yield from self._packed(tokens, first, min(stop, first + count))
            first, count = first + count, 2 * count


def _forget_child(record: Record) -> None:
    parent = record.parent
    if parent is not None and parent.child is record:
        parent.child = None


def _with_length(data: bytes) -> bytes:
    return _length(len(data)) + data


def _length(length: int) -> bytes:
    return length.to_bytes(8, "little")


def _pack(tokens: Sequence[Token]) -> bytes:
    try:
        return pack(f"<{len(tokens)}I", *tokens)
    except error:
        return pack(f"<{len(tokens)}q", *tokens)
