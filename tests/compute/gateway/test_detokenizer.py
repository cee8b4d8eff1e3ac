"""Ids become whole characters; bytes that are no text become the replacement character and harm nothing."""

from __future__ import annotations

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from megloom.compute.gateway.detokenizer import MAX_WAITING, Detokenizer

from .toys import HELLO, bpe

BPE = bpe(HELLO)


def decode(ids: object) -> str:
    return BPE.decode(list(ids), skip_special_tokens=False)  # type: ignore[call-overload]


def encode(text: str) -> list[int]:
    return list(BPE.encode(text, add_special_tokens=False).ids)


def sentencepiece() -> tokenizers.Tokenizer:
    """Words with a space before them, and bytes: the decoder drops the first space."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁b", "c"]
    vocabulary = {word: position for position, word in enumerate(words)}
    built = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return built


def test_a_character_waits_for_its_last_byte() -> None:
    ((first, second),) = [encode("é")]
    feed = Detokenizer(decode).feed
    assert [feed([*encode("hello"), first]), feed([second]), feed(encode("!"))] == ["hello", "é", "!"]


def test_spaces_between_words_are_kept_where_the_decoder_drops_the_first() -> None:
    model = sentencepiece()
    ids = [
        model.token_to_id(word)
        for word in ("▁a", "▁b", "c", "<0xC3>", "<0xA9>", "<0xE6>", "<0x97>", "<0xA5>")
    ]
    detokenizer = Detokenizer(lambda some: model.decode(list(some), skip_special_tokens=False))
    assert [detokenizer.feed([token]) for token in ids] == ["a", " b", "c", "", "é", "", "", "日"]


def test_what_never_becomes_a_character_is_let_out_at_last() -> None:
    ((first, _),) = [encode("é")]
    detokenizer = Detokenizer(decode)
    texts = [detokenizer.feed([first]) for _ in range(MAX_WAITING + 1)]
    assert texts == [""] * MAX_WAITING + ["\ufffd" * (MAX_WAITING + 1)]
    assert detokenizer.feed(encode("he")) == "he"


def test_what_still_waits_at_the_end_is_given_once() -> None:
    detokenizer = Detokenizer(decode)
    assert detokenizer.feed([encode("日")[0]]) == ""
    assert [detokenizer.finish(), detokenizer.finish()] == ["\ufffd", ""]


def test_ids_without_text_give_none() -> None:
    detokenizer = Detokenizer(lambda ids: "a" * sum(token == 1 for token in ids))
    assert [detokenizer.feed(ids) for ids in ([], [0], [0, 0], [1], [0])] == ["", "", "", "a", ""]
    assert detokenizer.finish() == ""


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(1, 9), max_size=40))
def test_pieces_join_to_the_text_however_the_ids_come(text: str, cuts: list[int]) -> None:
    ids = encode(text)
    detokenizer = Detokenizer(decode)
    pieces = []
    for size in [*cuts, len(ids) + 1]:
        pieces.append(detokenizer.feed(ids[:size]))
        ids = ids[size:]
    assert "".join(pieces) + detokenizer.finish() == text


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=30))
def test_any_bytes_are_read_without_a_crash_and_as_unicode(data: bytes) -> None:
    alphabet = {decode([token]): token for token in range(256)}
    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.feed([alphabet.get(chr(byte), byte)]) for byte in data) + detokenizer.finish()
    text.encode()
