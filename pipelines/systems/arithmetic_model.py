"""The arithmetic team's default model: a two-layer Qwen3 of 106,000 parameters with a word-level tokenizer.

Words carry the space before them, so that text and tokens map one to one; only words that can open a text
exist without it.
"""

from __future__ import annotations

from megloom.compute.workload import RandomModel, Tokenizer

WORDS = ("plan", "then", "a", "b", "c", "+", "-", "=", "none")
NUMBERS = tuple(str(number) for number in range(-40, 46))
DIGITS = tuple("0123456789")

TOKENIZER = Tokenizer(
    special=("<pad>", "<user>", "<assistant>", "<end>", "<unk>"),
    words=("task", "a", "b", "c", *DIGITS, *(f" {word}" for word in (*WORDS, *NUMBERS))),
    pattern=" ?[^ <>]+",
    chat_template="{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<assistant>",
    stop="<end>",
    unknown="<unk>",
)
MODEL = RandomModel(
    architecture="qwen3",
    config={
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 192,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
    tokenizer=TOKENIZER,
)
