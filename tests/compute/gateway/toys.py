"""Toy tokenizers and chat templates: small, and with the traps of real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megloom.compute.gateway.template import ChatTemplate
from megloom.compute.rollout.chat import Chat

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
PLAIN_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # one token each, but not special

_HEAD = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_CALLS = """
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
"""
_TAIL = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

# A newline after the end of turn: it belongs to neither the sampled ids nor the next message.
CHATML = (
    _HEAD
    + """
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
"""
    + _CALLS
    + """
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
    + _TAIL
)

# Drops the thinking of answers that stand before the last user message.
FORGETFUL = (
    _HEAD
    + """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
"""
    + _TAIL
)

# The prompt opens the thinking, and every answer is shown with it.
THINKING = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and '</think>' not in message.content %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
""" + _TAIL.replace("assistant\\n", "assistant\\n<think>\\n")

# Spaces around contents, the last one before the end of turn; and the turn's number stands before it.
SPACED = """
{%- for message in messages %}
    {{- '<|im_start|> ' + message.role + '\\n' + (message.content | trim) + ' <|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|> assistant\\n' }}{% endif %}
"""

# Counts the messages at the top: the past never looks the same twice.
COUNTING = "{{ '<|im_start|>count\\n' + (messages | length | string) + '<|im_end|>\\n' }}" + CHATML


def bpe(
    merges: tuple[tuple[str, str], ...], *, end_swallows_space: bool = False, special_markers: bool = False
) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with `merges`, best first; every byte has a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *dict.fromkeys("".join(merge) for merge in merges)]
    vocabulary = {word: position for position, word in enumerate(words)}
    built = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges)))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(
        [
            tokenizers.AddedToken(
                word, normalized=False, rstrip=end_swallows_space and word == "<|im_end|>", special=True
            )
            for word in SPECIAL
        ]
    )
    built.add_tokens(
        [tokenizers.AddedToken(word, normalized=False, special=special_markers) for word in PLAIN_MARKERS]
    )
    return built


# "he" and "llo" are tokens, and so is "hello": a model may write the two, an encoder never does.
HELLO = (("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"))


def write(
    directory: Path,
    template: str = CHATML,
    *,
    tokenizer: tokenizers.Tokenizer | None = None,
    stops: tuple[str, ...] = ("<|im_end|>",),
) -> Path:
    """Writes a toy as `save_pretrained` would."""
    built = tokenizer or bpe(HELLO)
    built.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": stops[0],
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ids = [built.token_to_id(stop) for stop in stops]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return directory


def toy(directory: Path, template: str = CHATML, **options: Any) -> ChatTemplate:
    """A toy, ready to use."""
    return ChatTemplate(Chat(write(directory, template, **options)))


def tool(name: str) -> dict[str, Any]:
    """A tool that takes a path."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Reads <a> file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }


def user(content: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}


def assistant(content: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls)} if calls else message


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}
