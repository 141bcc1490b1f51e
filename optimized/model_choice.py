"""What a model is put together from where its own files are not all of it: another tokenizer, another chat template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from optimized.chat_template import MAX_TEMPLATE_CHARACTERS
from optimized.checkpoint import Checkpoint, load_checkpoint
from optimized.hub_cache import HubModel, located
from optimized.model_store import BadModelFile
from spec.vocabulary import InvalidConfig

MAX_TOKENIZER_BYTES = 128 << 20


def chosen_checkpoint(
    model: str | None, revision: str | None = None, tokenizer: Path | None = None, chat_template: Path | None = None
) -> Checkpoint:
    """The model, with the files that are named instead of its own. ``revision`` is that of all files of a hub's model."""
    is_own = tokenizer is None
    if revision is not None:
        found = load_checkpoint(located(_at(model or "", revision), with_tokenizer=is_own))
    else:
        found = load_checkpoint(model, with_tokenizer=is_own)
    if tokenizer is not None:
        found = _with_tokenizer(found, tokenizer)
    if chat_template is not None:
        found = replace(found, chat_template=_text(chat_template, MAX_TEMPLATE_CHARACTERS).decode())
    return found


def _at(model: str, revision: str) -> HubModel:
    """A model of the hub at a revision that its name does not have already."""
    asked = HubModel.read(model) or HubModel(model, revision)
    if "@" in model:
        raise InvalidConfig("revision", revision, f"left out, as {model} names one")
    return replace(asked, revision=revision)


def _with_tokenizer(found: Checkpoint, path: Path) -> Checkpoint:
    """A tokenizer whose tokens the model all knows, with the model's own ends of a text."""
    from optimized.tokenizer import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    made = Tokenizer.from_json(_text(file, MAX_TOKENIZER_BYTES), file)
    if made.vocab_size > found.config.vocab_size:
        limit = f"one whose tokens are below {found.config.vocab_size}, which the model knows"
        raise InvalidConfig("tokenizer", f"{file} (with token {made.vocab_size - 1})", limit)
    ends = made.with_special_ids(found.config.bos_token_id, found.config.eos_token_ids)
    return replace(found, tokenizer=ends)


def _text(path: Path, most: int) -> bytes:
    """A text file of bounded size."""
    if not path.is_file():
        raise BadModelFile(path, "there is no such file")
    if path.stat().st_size > most:
        raise BadModelFile(path, f"it has {path.stat().st_size:,} bytes, at most {most:,} are read")
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError:
        raise BadModelFile(path, "it is not UTF-8 text") from None
    return content
