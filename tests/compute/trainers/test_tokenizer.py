"""Text → ids → text gives the text back, in `tokenizers` and in `AutoTokenizer` alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megloom.compute.trainers.tokenizer import build_tokenizer, write_tokenizer

from .builders import TOKENIZER, VOCAB_SIZE

BUILT = build_tokenizer(TOKENIZER)
# Two letter words side by side are one word for the pattern, so they are kept apart.
texts = st.lists(st.sampled_from([*TOKENIZER.words, *TOKENIZER.special])).map(
    lambda words: re.sub(r"(?<=[a-z])(?=plan|answer)", " ", "".join(words))
)


@given(texts)
def test_every_text_of_known_words_survives_the_round_trip(text: str) -> None:
    ids = BUILT.encode(text, add_special_tokens=False).ids
    assert BUILT.decode(ids, skip_special_tokens=False) == text


def test_special_words_come_first_and_every_word_is_one_id() -> None:
    words = [*TOKENIZER.special, *TOKENIZER.words]
    assert [BUILT.token_to_id(word) for word in words] == list(range(VOCAB_SIZE))
    assert [BUILT.encode(word, add_special_tokens=False).ids for word in words] == [
        [i] for i in range(VOCAB_SIZE)
    ]


@pytest.mark.parametrize("text", ["12 + x", "plans", "ä"])
def test_an_unknown_word_is_refused_never_replaced(text: str) -> None:
    with pytest.raises(Exception, match="UNK"):
        BUILT.encode(text)


def test_skipping_special_words_leaves_the_rest_as_it_was() -> None:
    ids = BUILT.encode("<user>1 + 2\n=<end>", add_special_tokens=False).ids
    assert BUILT.decode(ids, skip_special_tokens=True) == "1 + 2\n="


def test_transformers_reads_the_files_the_same_way(tmp_path: Path) -> None:
    write_tokenizer(TOKENIZER, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<user>plan 12 + 3=\né<end>"
    ids = BUILT.encode(text, add_special_tokens=False).ids
    assert loaded.encode(text, add_special_tokens=False) == ids
    assert loaded.encode(text) == ids  # no special token is added on its own
    assert loaded.decode(ids) == text
    assert (loaded.eos_token, loaded.eos_token_id) == ("<end>", BUILT.token_to_id("<end>"))
    messages = [{"role": "user", "content": "1+2"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "<user>1+2<assistant>"


@pytest.mark.parametrize(
    ("words", "message"),
    [(("a", "a"), "given twice"), (("",), "empty"), (("a b",), "would be cut"), (("<end>",), "given twice")],
)
def test_a_word_that_can_never_be_one_token_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tokenizer(TOKENIZER.model_copy(update={"words": words}))
