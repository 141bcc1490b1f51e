"""What a model is made of: its files with their hashes, its shapes, its words, what a block of its cache takes, and whether it
can be served. Only what is on this machine is looked at; no weight is read but to hash it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimized.capacity import FP8_SCALE_BYTES, bytes_per_block
from optimized.checkpoint import Checkpoint, load_checkpoint
from optimized.generation_defaults import defaults_of
from optimized.hub_cache import SIDE_FILES, HubModel, cache_folder, commit_of, in_cache, name_of
from optimized.model_store import BadModelFile, ModelUnavailable, default_path, resolve, sha256_of, spelled_out

DEFAULT = "default"
"""What the model is called that is served where none is named."""

DEFAULT_BLOCK_SIZE = 16
CELLS = {"bfloat16": (2, 0), "float32": (4, 0), "fp8": (1, FP8_SCALE_BYTES)}
"""Bytes of a number in the cache, by the type that it may have, and of what lies beside those of a token and head."""


@dataclass(frozen=True)
class ModelFile:
    """A file that is read when the model is loaded."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Inspection:
    """All that was found. Of a model that is refused it is the files, and why."""

    model: str
    path: str
    commit: str | None
    files: tuple[ModelFile, ...]
    refused: str | None
    architecture: str | None = None
    shape: Mapping[str, int | None] | None = None
    num_parameters: int | None = None
    tensor_types: Mapping[str, int] | None = None
    num_tokens: int | None = None
    begin_token: str | None = None
    end_tokens: tuple[str, ...] = ()
    has_chat_template: bool = False
    default_sampling_params: Mapping[str, float] | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    bytes_per_block: Mapping[str, int] | None = None

    def as_json(self) -> dict[str, object]:
        """The findings as plain data."""
        return {**asdict(self), "can_be_served": self.refused is None}

    def text(self) -> str:
        """The findings as a person reads them."""
        total = sum(file.num_bytes for file in self.files)
        shown = _lines({"model": self.model, "path": self.path, "commit": self.commit or ""})
        shown += _lines({"files": f"{len(self.files)}, {total:,} bytes, with their SHA-256"})
        names = [spelled_out(file.name) for file in self.files]
        width = max(map(len, names), default=0)
        shown += [
            f"  {name:<{width}} {file.num_bytes:>15,}  {file.sha256}"
            for name, file in zip(names, self.files, strict=True)
        ]
        if self.refused is not None:
            return "\n".join([*shown, *_lines({"served": f"no: {self.refused}"})])
        shape, types, blocks = self.shape or {}, self.tensor_types or {}, self.bytes_per_block or {}
        window = f", each sees {shape['sliding_window']:,}" if shape.get("sliding_window") else ""
        said = ", ".join(f"{name} {value}" for name, value in (self.default_sampling_params or {}).items())
        ends = ", ".join(map(repr, self.end_tokens)) or "none"
        shown += _lines(
            {
                "architecture": f"{self.architecture}, {shape['num_layers']} layers, {shape['hidden_size']:,} wide",
                "heads": f"{shape['num_query_heads']} for queries, {shape['num_kv_heads']} for K and V, of {shape['head_size']}",
                "context": f"{shape['max_model_len']:,} tokens{window}",
                "parameters": f"{self.num_parameters:,}, in tensors of {', '.join(f'{k} ({n})' for k, n in types.items())}",
                "tokenizer": "none: it takes and gives token ids only"
                if self.num_tokens is None
                else f"{self.num_tokens:,} tokens, begin {self.begin_token!r}, end {ends}",
                "template": "found" if self.has_chat_template else "none: it cannot chat",
                "sampling": said or "no generation_config.json says anything",
                "block": f"of {self.block_size} tokens: {', '.join(f'{n:,} bytes in {k}' for k, n in blocks.items())}",
                "served": "yes",
            }
        )
        return "\n".join(shown)


def inspect_model(model: str, revision: str | None = None) -> Inspection:
    """Look at a model. Raises ``ModelUnavailable`` for one that is not here, and ``BadModelFile`` for what is none."""
    path = _place(model, revision)
    files = tuple(ModelFile(name, (each := _path(path, name)).stat().st_size, sha256_of(each)) for name in _names(path))
    name, commit = name_of(path), commit_of(path)
    try:
        found = load_checkpoint(path)
        defaults = defaults_of(found)
        architecture, types, num_parameters = _makings(path, found)
    except BadModelFile as error:
        return Inspection(name, str(path), commit, files, str(error))
    config, tokenizer = found.config, found.tokenizer
    ends = () if tokenizer is None else tuple(tokenizer.token(each) or str(each) for each in tokenizer.eos_token_ids)
    shape = (config.num_layers, config.num_kv_heads, config.head_size)
    return Inspection(
        name,
        str(path),
        commit,
        files,
        None,
        architecture,
        {name: getattr(config, name) for name in SHAPE},
        num_parameters,
        types,
        None if tokenizer is None else tokenizer.vocab_size,
        None if tokenizer is None else tokenizer.token(tokenizer.bos_token_id),
        ends,
        found.chat_template is not None,
        dict(defaults),
        bytes_per_block={name: bytes_per_block(DEFAULT_BLOCK_SIZE, *shape, *cell) for name, cell in CELLS.items()},
    )


SHAPE = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_query_heads",
    "num_kv_heads",
    "head_size",
    "vocab_size",
    "max_model_len",
    "sliding_window",
)
"""The numbers of a configuration that are told."""


def _place(model: str, revision: str | None) -> Path:
    """Where a model is on this machine; nothing is fetched."""
    if revision is None and model == DEFAULT and not Path(model).exists():
        if not default_path().is_file():
            sentence = f"{default_path().name} is not in {default_path().parent}: kvproof generate fetches it"
            raise ModelUnavailable(sentence, path=default_path())
        return default_path()
    asked = HubModel.read(model)
    if asked is not None and revision is not None:
        asked = HubModel(asked.name, revision, asked.file)
    if asked is None or (revision is None and Path(model).expanduser().exists()):
        return resolve(model) if revision is None else HubModel(model, revision).folder  # which raises
    found = in_cache(asked)
    if found is None:
        raise ModelUnavailable(f"{asked} is not in {cache_folder()}: kvproof serve fetches it", path=asked.folder)
    return found


def _names(path: Path) -> list[str]:
    """The files of a model, by their names in its folder."""
    if path.is_file():
        return [path.name]
    index = "model.safetensors.index.json"
    weights = sorted(each.name for each in path.glob("*.safetensors") if each.is_file())
    return [name for name in (*SIDE_FILES, index) if (path / name).is_file()] + weights


def _path(path: Path, name: str) -> Path:
    return path if path.is_file() else path / name


def _makings(path: Path, found: Checkpoint) -> tuple[str, dict[str, int], int]:
    """What it calls itself, its tensors by their type, and its numbers in all."""
    kinds: list[tuple[str, int]]
    if path.is_file():
        from optimized.gguf_guard import QUANT_GROUPS, precheck

        header = precheck(path)
        kinds = [(QUANT_GROUPS[each.kind][0], math.prod(each.shape)) for each in header.extents]
        return f"{header.architecture} (GGUF)", *_counted(kinds)
    from optimized.hf_checkpoint import MAX_CONFIG_BYTES, MODELS, SafetensorsTensors, read_json

    kind: Any = read_json(path / "config.json", MAX_CONFIG_BYTES).get("model_type", "llama")
    places = found.tensors.places if isinstance(found.tensors, SafetensorsTensors) else {}
    return MODELS[kind], *_counted([(place.dtype, math.prod(place.shape)) for place in places.values()])


def _lines(facts: Mapping[str, str]) -> list[str]:
    return [f"{name:14}{spelled_out(fact)}" for name, fact in facts.items() if fact]


def _counted(kinds: list[tuple[str, int]]) -> tuple[dict[str, int], int]:
    counts = Counter(kind for kind, _ in kinds)
    return dict(counts.most_common()), sum(count for _, count in kinds)
