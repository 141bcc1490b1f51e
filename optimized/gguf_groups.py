"""The layers' weights of a GGUF file in the groups in which they lie there, for kernels that multiply with them as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.packing import FourBits
from optimized.checkpoint import Checkpoint, ModelConfig, tensor_shapes
from optimized.gguf_checkpoint import canonical_name, in_halves
from optimized.gguf_guard import QUANT_GROUPS, Extent, precheck
from optimized.model_store import BadModelFile
from spec.vocabulary import InvalidConfig

GROUP = 32
"""Numbers of a group."""


class GgufGroups:
    """Tensors of a GGUF file by their canonical names, those whose type has groups of 4 bits; the file stays open as a mapping."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        header = precheck(path)
        self._path, self._config, self._shapes = path, config, tensor_shapes(config)
        self._in_pairs = header.architecture == "llama"
        self._start = header.data_start
        try:
            self._data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise BadModelFile(path, f"it cannot be read ({error})") from error
        self._extents: Mapping[str, Extent] = {
            canonical_name(path, each.name): each
            for each in header.extents
            if each.name.startswith("blk.") and QUANT_GROUPS[each.kind][0] in UNPACK
        }

    def __len__(self) -> int:
        return len(self._extents)

    def joined(self, *names: str) -> FourBits | None:
        """These tensors as one matrix of all their rows, or None if one of them is not in groups of 4 bits."""
        parts = [self._groups(name) for name in names]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            return None
        numbers, scales, minima = zip(*((part.numbers, part.scales, part.minima) for part in whole), strict=True)
        return FourBits(torch.cat(numbers), torch.cat(scales), torch.cat(minima))

    def _groups(self, name: str) -> FourBits | None:
        if name not in self._extents:
            return None
        extent = self._extents[name]
        kind, _, size = QUANT_GROUPS[extent.kind]
        start = self._start + extent.offset
        shape = extent.shape[::-1]
        if shape != self._shapes[name]:
            raise BadModelFile(
                self._path, f"tensor {extent.name} has shape {list(shape)}, expected {list(self._shapes[name])}"
            )
        rows, depth = shape
        raw = np.array(self._data[start : start + extent.num_bytes]).reshape(rows, depth // GROUP, size)
        scales, minima, pairs = UNPACK[kind](raw)
        if (np.isfinite(scales) & ~np.isfinite(minima)).any():
            return None
        numbers = np.concatenate((pairs & 15, pairs >> 4), axis=-1).reshape(rows, depth)
        heads = self._config.num_query_heads if ".q_proj." in name else self._config.num_kv_heads
        turned = self._in_pairs and (".q_proj." in name or ".k_proj." in name)
        found = (torch.from_numpy(each) for each in (numbers, scales, minima))
        return FourBits(*(in_halves(each, heads) if turned else each for each in found))


def groups_of(checkpoint: Checkpoint) -> GgufGroups:
    """Those of the model's file; raises ``InvalidConfig`` if it has none."""
    wanted = f"left out here, no weight of a layer in {checkpoint.name} is {' or '.join(UNPACK)}"
    if not checkpoint.path.is_file():
        raise InvalidConfig("quantization", "gguf", wanted)
    groups = GgufGroups(checkpoint.path, checkpoint.config)
    if len(groups) == 0:
        raise InvalidConfig("quantization", "gguf", wanted)
    return groups


Raw = npt.NDArray[np.uint8]  # [rows, groups, bytes of a group]
Halves = npt.NDArray[np.float16]  # [rows, groups]


def _q4_0(raw: Raw) -> tuple[Halves, Halves, Raw]:
    """A scale, and 16 bytes with the first half of the numbers in their lower bits; 8 stands for 0."""
    scales = _halves(raw, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        return scales, scales * np.float16(-8), raw[..., 2:]


def _q4_1(raw: Raw) -> tuple[Halves, Halves, Raw]:
    """A scale, a minimum, and the same bytes."""
    return _halves(raw, 0), _halves(raw, 2), raw[..., 4:]


def _halves(raw: Raw, start: int) -> Halves:
    return np.ascontiguousarray(raw[..., start : start + 2]).view(np.float16)[..., 0]


UNPACK: dict[str, Callable[[Raw], tuple[Halves, Halves, Raw]]] = {"Q4_0": _q4_0, "Q4_1": _q4_1}
"""The types in groups of 4 bits: their scales, their minima, and their bytes."""
