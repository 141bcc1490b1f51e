"""Text to tokens and back, and text that grows token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from optimized.checkpoint import Checkpoint
from optimized.tokenizer import (
    PRE_TYPES,
    ByteLevelDetokenizer,
    Tokenizer,
    UnsupportedTokenizer,
    WindowDetokenizer,
    byte_characters,
    byte_level_bpe,
)
from tests.models.tiny_files import vocabulary


def grown(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool) -> str:
    """The text as a reader of the stream gets it."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens)
    deltas = [detokenizer.add(token_id) for token_id in token_ids]
    return "".join([*deltas, detokenizer.finish()])


def tiny(pre_type: str = "smollm", **options: object) -> Tokenizer:
    tokens, types, merges = vocabulary()
    return byte_level_bpe(tokens, types, merges, pre_type=pre_type, bos_token_id=260, eos_token_ids=(261,), **options)


# --- byte-level BPE ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("pre_type", [name for name in PRE_TYPES if name != "qwen2"])  # which composes characters
@given(text=st.text())
def test_text_survives_a_round_trip(pre_type: str, text: str) -> None:
    tokenizer = tiny(pre_type)
    expected = text.encode("utf-8", "replace").decode()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == expected


def test_merges_are_applied() -> None:
    assert tiny().encode("hello hell") == [259, 32, 258]


@pytest.mark.parametrize(
    ("pre_type", "pieces"),
    [
        ("smollm", ["ab", "1", "2", "3", "4", "!!", " ", " cd", "'s", "\n"]),
        ("gpt-2", ["ab", "1234", "!!", " ", " cd", "'s", "\n"]),
        ("default", ["ab", "123", "4", "!!", " ", " cd", "'", "s", "\n"]),
        ("llama-bpe", ["ab", "123", "4", "!!", " ", " cd", "'s", "\n"]),
        ("qwen2", ["ab", "1", "2", "3", "4", "!!", " ", " cd", "'s", "\n"]),
    ],
)
def test_pre_types_cut_text_as_their_models_learned(pre_type: str, pieces: list[str]) -> None:
    cut = tiny(pre_type).backend.pre_tokenizer.pre_tokenize_str("ab1234!!  cd's\n")
    bytes_of_piece = byte_characters()
    found = ["".join(chr(bytes_of_piece[c]) for c in piece) for piece, _ in cut]
    assert found == pieces


def test_qwen2_composes_characters() -> None:
    tokenizer = tiny("qwen2")
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_control_tokens_are_found_in_text_and_left_out_of_it() -> None:
    tokenizer = tiny()
    assert tokenizer.encode("<begin>he<end>") == [260, 256, 261]
    assert tokenizer.decode([260, 256, 261]) == "he"
    assert tokenizer.decode([260, 256, 261], skip_special_tokens=False) == "<begin>he<end>"
    assert tokenizer.special_ids == {260, 261}
    assert tokenizer.vocab_size == 262
    assert tokenizer.token_id("<end>") == 261
    assert tokenizer.token(261) == "<end>"


def test_a_begin_token_is_added_on_request_only() -> None:
    assert tiny(add_bos=True).encode("he") == [260, 256]
    assert tiny(add_bos=True).encode("he", add_special_tokens=False) == [256]
    assert tiny(add_bos=False).encode("he") == [256]


def test_lone_surrogates_become_question_marks() -> None:
    tokenizer = tiny()
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a?b"


def test_unknown_pre_types_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedTokenizer, match="tokenizer pre-type 'tekken' is not supported, only default"):
        tiny("tekken")


def test_a_merge_of_unknown_tokens_is_refused() -> None:
    tokens, types, _ = vocabulary()
    with pytest.raises(UnsupportedTokenizer, match="merge 'q q' does not join two tokens into a third"):
        byte_level_bpe(tokens, types, ["q q"], pre_type="smollm")


def test_a_token_that_appears_twice_is_refused() -> None:
    tokens, types, merges = vocabulary()
    with pytest.raises(UnsupportedTokenizer, match="1 of its tokens appear twice"):
        byte_level_bpe([*tokens[:-1], tokens[0]], types, merges, pre_type="smollm")


# --- growing text -----------------------------------------------------------------------------------------------------
@given(token_ids=st.lists(st.integers(0, 261)), skip=st.booleans())
def test_growing_text_is_the_text_of_all_bytes(token_ids: list[int], skip: bool) -> None:
    tokenizer = tiny()
    assert isinstance(tokenizer.detokenizer(), ByteLevelDetokenizer)
    assert grown(tokenizer, token_ids, skip) == tokenizer.decode(token_ids, skip)


@given(text=st.text(st.characters(min_codepoint=0x80), min_size=1))
def test_growing_text_never_ends_in_half_a_character(text: str) -> None:
    tokenizer = tiny()
    detokenizer = tokenizer.detokenizer()
    out = ""
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        out += detokenizer.add(token_id)
        assert text.encode("utf-8", "replace").decode().startswith(out)
    assert detokenizer.finish() == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    detokenizer = tiny().detokenizer()
    assert [detokenizer.add(byte) for byte in "é".encode()] == ["", "é"]
    assert detokenizer.add(0xE2) == ""
    assert detokenizer.finish() == "\ufffd"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    tokenizer = tiny()
    assert tokenizer.decode([256, 100_000, 257]) == grown(tokenizer, [256, 100_000, 257], True) == "hell"


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's: words with a mark for the space before them, and single bytes for the rest."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁hello",
        "▁",
        "world",
        "é",
        "▁▁",
        "\ufffd",
    ]
    backend = Backend(
        models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


@given(token_ids=st.lists(st.integers(256, 264) | st.sampled_from([1, 2, 0xE2 + 3, 0x82 + 3, 0xAC + 3, 0x41 + 3])))
def test_growing_text_is_right_for_other_tokenizers_too(byte_fallback: Tokenizer, token_ids: list[int]) -> None:
    assert isinstance(byte_fallback.detokenizer(), WindowDetokenizer)
    for skip in (True, False):
        assert grown(byte_fallback, token_ids, skip) == byte_fallback.decode(token_ids, skip), skip


def test_the_window_stays_small(byte_fallback: Tokenizer) -> None:
    detokenizer = byte_fallback.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    hello = byte_fallback.token_id("▁hello")
    assert hello is not None
    assert [detokenizer.add(hello) for _ in range(50)] == ["hello", *[" hello"] * 49]
    assert len(detokenizer._window) == 1


# --- the real tokenizer -----------------------------------------------------------------------------------------------


def test_smollm2_survives_a_round_trip(smollm2: Checkpoint) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    text = "It's 1,234.5°; naïve Ωmega 東京 🙂👩‍👩‍👧 \t\r\n\n  def f(x):\n    return x**2"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert grown(tokenizer, token_ids, True) == text


def test_smollm2_cuts_numbers_digit_by_digit(smollm2: Checkpoint) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    assert [tokenizer.token(token_id) for token_id in tokenizer.encode(" 1234")] == ["Ġ", "1", "2", "3", "4"]


def test_smollm2_grows_as_it_decodes(smollm2: Checkpoint) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None

    @given(st.lists(st.integers(0, 49_151)), st.binary(), st.booleans())
    def check(token_ids: list[int], raw: bytes, skip: bool) -> None:
        single_bytes = [tokenizer.token_id(character) for character in characters_of(raw)]
        all_ids = [token_id for token_id in (*token_ids, *single_bytes) if token_id is not None]
        assert grown(tokenizer, all_ids, skip) == tokenizer.decode(all_ids, skip)

    check()


def characters_of(raw: bytes) -> list[str]:
    by_byte = {byte: character for character, byte in byte_characters().items()}
    return [by_byte[byte] for byte in raw]
