"""The prefix cache: full blocks that are found by the tokens they stand for, by everything before them, and by a salt.

A block's digest is SHA-256 over its parent's digest and its own tokens, length first. The first parent is a root that
depends on random bytes of this process, on the model and on the salt, so that nobody can foresee a digest and equal
prefixes under different salts have nothing in common. A digest only finds a record: what is found counts as a hit
after its tokens and its parents are compared, so that a collision costs a hit and never shows foreign tokens.

To look a prompt up costs one hash and one comparison a block, the first time; later look-ups of the same sequence
cost one dictionary access or less a block. A cached block costs some 300 bytes.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

from spec.vocabulary import BlockId, CacheKey, Prefix, Token

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    """The digest that the cache takes unless it is told another one."""
    return hashlib.sha256(data).digest()


class Record:
    """What one full block stands for. ``block`` is the one that holds it, None while no cached block does."""

    __slots__ = ("__weakref__", "block", "digest", "packed", "parent", "salt")

    def __init__(self, parent: Record | None, salt: str, digest: bytes, packed: bytes) -> None:
        self.parent = parent
        self.salt = salt
        self.digest = digest
        self.packed = packed
        self.block: BlockId | None = None

    def __eq__(self, other: object) -> bool:
        """Whether both stand for the same prefix under the same salt, token by token."""
        mine: Record | None = self
        theirs = other if isinstance(other, Record) else None
        while mine is not None and theirs is not None:
            if mine is theirs:
                return True
            if mine.packed != theirs.packed or mine.salt != theirs.salt:
                return False
            mine, theirs = mine.parent, theirs.parent
        return mine is theirs

    __hash__ = None  # type: ignore[assignment]  # records are found by digest


class PrefixCache:
    """Records by digest and by block. Which block is free is the pool's business."""

    def __init__(
        self, num_blocks: int, block_size: int, *, model: str = "", root: bytes | None = None, digest: Digest = sha256
    ) -> None:
        self.block_size = block_size
        self.of_block: list[Record | None] = [None] * num_blocks
        self.num_cached = 0
        self._by_digest: dict[bytes, Record] = {}
        self._digest = digest
        self._root = _with_length(secrets.token_bytes(32) if root is None else root) + _with_length(model.encode())
        # A root lives as long as a record or a sequence that starts from it: salts of the past leave nothing behind.
        self._roots: WeakValueDictionary[str, Record] = WeakValueDictionary()

    def root(self, salt: str) -> Record:
        """Where the records of all prefixes under this salt begin."""
        root = self._roots.get(salt)
        if root is None:
            root = Record(None, salt, self._digest(self._root + _with_length(salt.encode())), b"")
            self._roots[salt] = root
        return root

    def find(self, chain: list[Record], tokens: Sequence[Token], limit: int) -> list[BlockId]:
        """The cached blocks of the longest prefix, at most ``limit`` of them.

        ``chain`` begins with a root and then has the records of the tokens' full blocks, as far as they are known; it
        grows by what is learnt here, which is what makes the next look-up cheap.
        """
        blocks: list[BlockId] = []
        for index in range(limit):
            block = self._known(chain, tokens, index).block
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, chain: list[Record], tokens: Sequence[Token], index: int, block: BlockId) -> bool:
        """The block, which holds full block ``index`` of the tokens, can be found; False if another one can already."""
        for earlier in range(len(chain) - 1, index):  # blocks that left a window before anybody named them
            self._known(chain, tokens, earlier)
        record = self._known(chain, tokens, index)
        if record.block is not None or record.digest in self._by_digest:
            return False
        record.block = block
        self._by_digest[record.digest] = record
        self.of_block[block] = record
        self.num_cached += 1
        return True

    def evict(self, block: BlockId) -> None:
        """The block can no longer be found, if it could."""
        record = self.of_block[block]
        if record is not None:
            self.of_block[block] = None
            record.block = None
            del self._by_digest[record.digest]
            self.num_cached -= 1

    def cached_blocks(self) -> list[BlockId]:
        """Every block that can be found, in the order in which they were published. O(cached blocks)."""
        return [record.block for record in self._by_digest.values() if record.block is not None]

    def key_of(self, block: BlockId) -> CacheKey:
        """What a cached block stands for, read from its record and those before it."""
        record = self.of_block[block]
        if record is None:
            raise KeyError(block)
        salt, parts = record.salt, list[Prefix]()
        while record is not None:
            parts.append(_unpack(record.packed, self.block_size))
            record = record.parent
        return CacheKey(tuple(token for part in reversed(parts) for token in part), salt)

    def _known(self, chain: list[Record], tokens: Sequence[Token], index: int) -> Record:
        """The record of full block ``index``: the one that the cache has, or else one without a block."""
        if index + 1 < len(chain):
            record = chain[index + 1]
            if record.block is not None:
                return record
        else:
            packed = _pack(tokens[index * self.block_size : (index + 1) * self.block_size])
            parent = chain[-1]
            record = Record(parent, parent.salt, self._digest(parent.digest + _with_length(packed)), packed)
            chain.append(record)
        found = self._by_digest.get(record.digest)
        if found is not None and found == record:
            # From here on both lines have the same parents, so that the next comparison ends at once.
            found.parent = record.parent
            chain[index + 1] = record = found
        return record


def _with_length(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _pack(tokens: Sequence[Token]) -> bytes:
    """The tokens of a block as bytes: 4 a token, or 8 if one of them needs it."""
    try:
        return array("i", tokens).tobytes()
    except OverflowError:
        return array("q", tokens).tobytes()


def _unpack(packed: bytes, block_size: int) -> Prefix:
    return tuple(array("i" if len(packed) <= 4 * block_size else "q", packed))
