"""The bounded check of a GGUF file, before a parser sees it."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from optimized.model_store import BadModelFile

MAX_ENTRIES = 65_536
MAX_ARRAY = 1 << 20
MAX_DIMS = 4
MAX_DIM = 1 << 32
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 1 << 20
MAX_ALIGNMENT = 4096

UINT32, STRING, ARRAY = 4, 8, 9
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

# GGML type -> (name, elements per quantization group, bytes per group)
QUANT_GROUPS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


def precheck(path: Path) -> Header:
    """What lies where in a file; one that would make a parser allocate, loop or read beyond what the file has is refused.

    The library bounds neither counts nor dimensions nor alignment; after this walk every one of them is bounded, every
    string and tensor lies inside the file, and names are unique.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise BadModelFile(path, "it is too short for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _walk(Cursor(path, data))
    except (OSError, ValueError) as error:
        raise BadModelFile(path, f"it cannot be read ({error})") from error


@dataclass(frozen=True)
class Extent:
    """What a GGUF file says about one tensor, after the check."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def num_bytes(self) -> int:
        """The size of the tensor's data in the file."""
        _, group, group_bytes = QUANT_GROUPS[self.kind]
        elements = 1
        for length in self.shape:
            elements *= length
        return elements // group * group_bytes


@dataclass(frozen=True)
class Header:
    """What a GGUF file says about itself, after the check."""

    architecture: str
    extents: tuple[Extent, ...]
    data_start: int  # the byte from which the tensors' offsets count


class Cursor:
    """A place in a file that refuses to leave it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def skip(self, num_bytes: int) -> int:
        """Step over bytes that the file must have; the place where they start."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise BadModelFile(
                self.path,
                f"it is cut off: byte {start:,} announces {num_bytes:,} more, the file ends at {len(self.data):,}",
            )
        self.position = start + num_bytes
        return start

    def number(self, layout: str) -> int:
        """A little-endian whole number, ``I`` of four or ``Q`` of eight bytes."""
        start = self.skip(struct.calcsize("<" + layout))
        value: int = struct.unpack_from("<" + layout, self.data, start)[0]
        return value

    def text(self, most: int) -> bytes:
        """A string with its length before it."""
        length = self.number("Q")
        if length > most:
            raise BadModelFile(
                self.path, f"a string of {length:,} bytes before byte {self.position:,}, at most {most:,} allowed"
            )
        start = self.skip(length)
        return self.data[start : start + length]


def _walk(cursor: Cursor) -> Header:
    if cursor.data[cursor.skip(4) : cursor.position] != b"GGUF":
        raise BadModelFile(cursor.path, "it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise BadModelFile(cursor.path, f"GGUF version {version} is not supported, only little-endian 2 and 3")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    for count, what in ((num_tensors, "tensors"), (num_fields, "metadata fields")):
        if count > MAX_ENTRIES:
            raise BadModelFile(cursor.path, f"it announces {count:,} {what}, at most {MAX_ENTRIES:,} are allowed")
    alignment, architecture = _walk_fields(cursor, num_fields)
    extents = _walk_tensors(cursor, num_tensors)
    return Header(architecture, tuple(extents), _check_extents(cursor, extents, alignment))


def _walk_fields(cursor: Cursor, num_fields: int) -> tuple[int, str]:
    """Step over all metadata; the alignment of the tensors' data, and the architecture."""
    alignment, architecture = 32, ""
    seen = {b"GGUF.version", b"GGUF.tensor_count", b"GGUF.kv_count"}
    for _ in range(num_fields):
        key = cursor.text(MAX_NAME_BYTES)
        if key in seen:
            raise BadModelFile(cursor.path, f"metadata field {_shown(key)} appears twice")
        seen.add(key)
        kind = cursor.number("I")
        if key == b"general.alignment":
            if kind != UINT32:
                raise BadModelFile(cursor.path, f"general.alignment has type {kind}, expected {UINT32}")
            alignment = cursor.number("I")
            if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
                raise BadModelFile(
                    cursor.path, f"its alignment is {alignment:,}, a power of two up to {MAX_ALIGNMENT:,} is allowed"
                )
        elif key == b"general.architecture" and kind == STRING:
            architecture = _shown(cursor.text(MAX_STRING_BYTES))
        elif kind == ARRAY:
            _walk_array(cursor, key)
        else:
            _walk_value(cursor, key, kind)
    return alignment, architecture


def _walk_array(cursor: Cursor, key: bytes) -> None:
    kind, length = cursor.number("I"), cursor.number("Q")
    if length > MAX_ARRAY:
        raise BadModelFile(cursor.path, f"{_shown(key)} has {length:,} entries, at most {MAX_ARRAY:,} are allowed")
    if kind in SCALAR_BYTES:
        cursor.skip(SCALAR_BYTES[kind] * length)
        return
    for _ in range(length):
        _walk_value(cursor, key, kind)


def _walk_value(cursor: Cursor, key: bytes, kind: int) -> None:
    if kind == STRING:
        cursor.text(MAX_STRING_BYTES)
    elif kind in SCALAR_BYTES:
        cursor.skip(SCALAR_BYTES[kind])
    else:
        raise BadModelFile(cursor.path, f"{_shown(key)} has values of unknown type {kind}")


def _walk_tensors(cursor: Cursor, num_tensors: int) -> list[Extent]:
    extents: dict[str, Extent] = {}
    for _ in range(num_tensors):
        raw = cursor.text(MAX_NAME_BYTES)
        name = _shown(raw)
        num_dims = cursor.number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise BadModelFile(cursor.path, f"tensor {name} has {num_dims} dimensions, 1 to {MAX_DIMS} are allowed")
        shape = tuple(cursor.number("Q") for _ in range(num_dims))
        if not all(1 <= length <= MAX_DIM for length in shape):
            raise BadModelFile(cursor.path, f"tensor {name} has the impossible shape {list(shape)}")
        kind = cursor.number("I")
        if kind not in QUANT_GROUPS:
            known = ", ".join(group[0] for group in QUANT_GROUPS.values())
            raise BadModelFile(cursor.path, f"tensor {name} has GGML type {kind}, only {known} are supported")
        if shape[0] % QUANT_GROUPS[kind][1]:
            raise BadModelFile(
                cursor.path, f"tensor {name} has rows of {shape[0]}, not a multiple of {QUANT_GROUPS[kind][1]}"
            )
        if name in extents:
            raise BadModelFile(cursor.path, f"tensor {name} appears twice")
        extents[name] = Extent(name, shape, kind, cursor.number("Q"))
    return list(extents.values())


def _check_extents(cursor: Cursor, extents: list[Extent], alignment: int) -> int:
    """Tensors lie behind each other, aligned, and inside the file; the byte from which their offsets count."""
    start = -(-cursor.position // alignment) * alignment
    room, position = len(cursor.data) - start, 0
    for extent in extents:
        if extent.offset % alignment or extent.offset < position:
            raise BadModelFile(
                cursor.path,
                f"tensor {extent.name} starts at {extent.offset:,}, expected a multiple of {alignment} from {position:,} on",
            )
        position = extent.offset + extent.num_bytes
        if position > room:
            raise BadModelFile(
                cursor.path, f"it is cut off: tensor {extent.name} ends at {position:,}, the data at {max(room, 0):,}"
            )
    return start


def _shown(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
