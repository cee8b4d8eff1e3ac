"""Builds a word-level tokenizer from its spec, as the files that `AutoTokenizer` and `tokenizers` load.

Promises: text → ids → text gives the text back, character by character; a text with an unknown word is
refused, unless the spec names a word for it. Ids: the special words first, then the words, in their order.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megloom.compute.workload import Tokenizer


def build_tokenizer(spec: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer of a spec. Every piece that `pattern` cuts, and all between the cuts, must be a word.

    Raises: ValueError for a word given twice, an empty one, or one that the pattern would cut in two.
    """
    vocabulary: dict[str, int] = {}
    for word in (*spec.special, *spec.words):
        if not word or word in vocabulary:
            raise ValueError(f"tokenizer word {word!r} is {'given twice' if word else 'empty'}")
        vocabulary[word] = len(vocabulary)
    split = pre_tokenizers.Split(tokenizers.Regex(spec.pattern), behavior="isolated")
    for word in spec.words:
        pieces = [piece for piece, _ in split.pre_tokenize_str(word)]
        if pieces != [word]:
            raise ValueError(f"tokenizer word {word!r} would be cut into {pieces} by {spec.pattern!r}")
    # Without a word for unknown pieces, one that the vocabulary lacks makes encoding such a piece raise.
    unknown = spec.unknown if spec.unknown is not None else "\0unknown"
    built = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    built.pre_tokenizer = split
    built.decoder = decoders.Fuse()
    built.add_special_tokens([tokenizers.AddedToken(word, normalized=False) for word in spec.special])
    return built


def write_tokenizer(spec: Tokenizer, directory: Path) -> tokenizers.Tokenizer:
    """Writes tokenizer.json and tokenizer_config.json (chat template and stop word included).

    Raises: ValueError, see `build_tokenizer`.
    """
    built = build_tokenizer(spec)
    built.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": spec.stop,
        "chat_template": spec.chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False))
    return built
