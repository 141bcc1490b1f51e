"""Text to token ids and back, through the ``tokenizers`` library, and text that grows token by token."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimized.fault_points import FaultPoint, reach
from optimized.model_store import BadModelFile

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""What a GGUF file says a token is (``tokenizer.ggml.token_type``)."""

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

PRE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
}
"""How each GGUF pre-type cuts text before the merges: these expressions one after the other, each keeping what it
matches as a piece of its own; the bytes of every piece are then written as characters."""

WHOLE_WORDS_FIRST = frozenset({"llama-bpe"})
"""Pre-types under which a piece that is a token is that token, whatever the merges say."""

BEGINS_BY_DEFAULT = frozenset({"llama-bpe"})
"""Pre-types under which a text begins with the begin token unless the file says otherwise."""


class UnsupportedTokenizer(ValueError):
    """A tokenizer that is described in a way we do not know."""


class Tokenizer:
    """Text to token ids and back; safe to use from several threads."""

    def __init__(
        self, backend: tokenizers.Tokenizer, bos_token_id: int | None = None, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self._special: frozenset[int] | None = None

    @staticmethod
    def from_json(content: bytes, path: Path) -> Tokenizer:
        """The tokenizer that a tokenizer.json describes; ``path`` is for the message when it is refused."""
        import tokenizers

        try:
            return Tokenizer(tokenizers.Tokenizer.from_buffer(content))
        except Exception as error:  # the library raises bare Exceptions
            raise BadModelFile(path, f"it is not a tokenizer ({str(error)[:200]})") from error

    def with_special_ids(self, bos_token_id: int | None, eos_token_ids: Iterable[int]) -> Tokenizer:
        """The same tokenizer, told which tokens begin and end a text."""
        return Tokenizer(self.backend, bos_token_id, eos_token_ids)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, which the added tokens may raise; a file may leave ids out. O(its tokens)."""
        return 1 + max(map(int, self.backend.get_vocab(with_added_tokens=True).values()), default=-1)

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that stand for no text of their own and that ``skip_special_tokens`` leaves out."""
        if self._special is None:
            added = self.backend.get_added_tokens_decoder()
            self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        return self._special

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact text."""
        found = self.backend.token_to_id(token)
        return None if found is None else int(found)

    def token(self, token_id: int | None) -> str | None:
        """The exact text of a token by its id, as the vocabulary writes it."""
        return None if token_id is None or token_id < 0 else self.backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; lone surrogates, which UTF-8 cannot say, become question marks."""
        reach(FaultPoint.TOKENIZER_ENCODE)
        clean = text.encode("utf-8", "replace").decode("utf-8")
        return list(self.backend.encode(clean, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids outside the vocabulary have none."""
        reach(FaultPoint.TOKENIZER_DECODE)
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A new text that grows token by token."""
        from tokenizers import decoders

        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if isinstance(self.backend.decoder, decoders.ByteLevel):
            return ByteLevelDetokenizer(self, skipped)
        return WindowDetokenizer(self, skipped)


class Detokenizer:
    """Text that grows token by token and never ends in half a character.

    The deltas, joined, are what ``decode`` says of all tokens at once: ``"".join([add(t) for t in ids] + [finish()])``.
    """

    def add(self, token_id: int) -> str:
        """The text that this token completes, possibly none."""
        raise NotImplementedError

    def finish(self) -> str:
        """What was held back because a later token could have completed it."""
        raise NotImplementedError


class ByteLevelDetokenizer(Detokenizer):
    """Every token is a string of bytes, so text is what the bytes spell."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_id: int) -> str:
        token = None if token_id in self._skipped else self._tokenizer.token(token_id)
        return "" if token is None else self._utf8.decode(bytes_of(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """For other tokenizers: the difference that a token makes to the text of a window of recent tokens.

    The window begins with tokens whose text is already out, so that a decoder that trims the start of a text trims
    nothing here. Single-byte tokens are held back until their run ends, since only the whole run has a meaning.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window: list[int] = []
        self._num_out = 0

    def add(self, token_id: int) -> str:
        token = None if token_id in self._skipped else self._tokenizer.token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        return "" if BYTE_TOKEN.fullmatch(token) else self._emit(final=False)

    def finish(self) -> str:
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        before = self._decode(self._window[: self._num_out])
        text = self._decode(self._window)
        if not final and (len(text) <= len(before) or text.endswith(REPLACEMENT)):
            return ""
        if before:
            self._window = self._window[self._num_out :]
        self._num_out = len(self._window)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones stand for themselves.

    >>> byte_characters()["A"], byte_characters()["Ġ"]
    (65, 32)
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = byte_characters()


def bytes_of(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for; added tokens are written as they are."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def byte_level_bpe(
    tokens: Sequence[str],
    token_types: Sequence[int],
    merges: Sequence[str],
    *,
    pre_type: str,
    bos_token_id: int | None = None,
    eos_token_ids: Iterable[int] = (),
    add_bos: bool = False,
) -> Tokenizer:
    """A byte-level BPE from the arrays of a GGUF file."""
    if pre_type not in PRE_TYPES:
        raise UnsupportedTokenizer(f"tokenizer pre-type {pre_type!r} is not supported, only {', '.join(PRE_TYPES)}")
    if len(token_types) != len(tokens):
        raise UnsupportedTokenizer(f"there are {len(tokens)} tokens but {len(token_types)} token types")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise UnsupportedTokenizer(f"{len(tokens) - len(vocab)} of its tokens appear twice")
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    model = models.BPE(vocab=vocab, merges=_pairs(merges, vocab), ignore_merges=pre_type in WHOLE_WORDS_FIRST)
    backend = Backend(model)
    if pre_type == "qwen2":
        backend.normalizer = normalizers.NFC()
    cuts: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE_TYPES[pre_type]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    # In order of their ids, since a tokenizer numbers the tokens it does not know in the order they are added.
    for token, kind in zip(tokens, token_types, strict=True):
        if kind in (CONTROL, USER_DEFINED) and token:
            backend.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    if add_bos and bos_token_id is not None:
        bos = tokens[bos_token_id]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_token_id)]
        )
    return Tokenizer(backend, bos_token_id, eos_token_ids)


def _pairs(merges: Sequence[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merges as pairs, each of which makes a known token out of two known ones."""
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise UnsupportedTokenizer(f"merge {merge[:80]!r} does not join two tokens into a third")
        pairs.append((left, right))
    return pairs
