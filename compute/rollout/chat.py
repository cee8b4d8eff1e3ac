"""Chat messages to token ids and back, with `tokenizers` and Jinja only (no torch, no transformers).

Reads what `save_pretrained` writes: `tokenizer.json`, `tokenizer_config.json`, and the chat template in
either or in `chat_template.jinja`. Parity with `AutoTokenizer.apply_chat_template` is a test, tools included.
One thing differs on purpose: a template that asks for the date gets the day on which it was loaded, so that
no prompt changes at midnight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from megloom.compute.graph.records import clean_text
from megloom.compute.graph.seeds import canonical_json
from megloom.compute.workload import Prompt


class ChatError(ValueError):
    """A tokenizer directory or a prompt that cannot be rendered."""


# The special words that templates may name, as tokenizer_config.json spells them.
NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Chat:
    """One policy's tokenizer and template. `stop_ids` end an answer."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "tokenizer_config.json").read_text())
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        template = _read_template(directory, config)
        self._template = _environment().from_string(template)
        self._names = {name: _token_text(config.get(name)) for name in NAMED_TOKENS}
        self.stop_ids = self._find_stops(directory)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids of a prompt, up to where the model's answer begins. A text is one user message.

        Raises: ChatError if a message lacks a role or content, or the template refuses it.
        """
        return self.encode_text(self.render(chat_messages(prompt)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation. `tools` are JSON schemas, `variables` what else the template asks for.

        Raises: ChatError if the template refuses the messages.
        """
        names = {name: text for name, text in self._names.items() if text is not None}
        given = {**names, **(variables or {})}
        try:
            return self._template.render(
                messages=messages,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except ChatError:
            raise
        # What a template's own expressions raise where a message lacks what they read.
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ChatError(f"chat template: {type(error).__name__}: {error}") from None

    def encode_answer(self, answer: str) -> tuple[int, ...]:
        """The ids of an answer to imitate, its stop token included."""
        return (*self.encode_text(answer), self.stop_ids[0])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids, special tokens left out. A view: ids stay the truth."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def special_tokens(self) -> dict[int, str]:
        """The tokens that `decode` leaves out."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    def encode_text(self, text: str) -> tuple[int, ...]:
        """The ids of a text as it stands; special tokens in it are read as such."""
        # Datasets may hold lone surrogates; tokenizers take valid Unicode only.
        return tuple(self._tokenizer.encode(clean_text(text), add_special_tokens=False).ids)

    def _find_stops(self, directory: Path) -> tuple[int, ...]:
        stops: list[int] = []
        if (eos := self._names["eos_token"]) is not None:
            token_id = self._tokenizer.token_to_id(eos)
            if token_id is not None:
                stops.append(token_id)
        generation = directory / "generation_config.json"
        if generation.exists():
            extra = json.loads(generation.read_text()).get("eos_token_id")
            stops.extend(extra if isinstance(extra, list) else [] if extra is None else [extra])
        if not stops:
            raise ChatError(f"{directory}: no eos_token in tokenizer_config.json, so no answer could end")
        return tuple(dict.fromkeys(stops))


def chat_messages(prompt: Prompt) -> list[Mapping[str, Any]]:
    """A prompt as chat messages: a text is one user message.

    Raises: ChatError naming the message that lacks a role or content.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages: list[Mapping[str, Any]] = list(prompt)
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise ChatError(f"message {position}: expected a mapping with role and content, got {message!r}")
    return messages


def recorded_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Each message as canonical JSON, every field included.

    Raises: ChatError naming the message that is no JSON.
    """
    recorded = []
    for position, message in enumerate(messages):
        try:
            recorded.append(canonical_json(dict(message)))
        except (TypeError, ValueError) as error:
            raise ChatError(f"message {position}: cannot be recorded as JSON ({error})") from None
    return tuple(recorded)


class _Generation(Extension):
    """Templates mark what a model wrote with `{% generation %}`; rendering passes through it."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = datetime.now().strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it in training: Jinja's own filter escapes `<` and sorts the keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _read_template(directory: Path, config: Mapping[str, Any]) -> str:
    beside = directory / "chat_template.jinja"
    if beside.exists():
        return beside.read_text()
    template = config.get("chat_template")
    if not isinstance(template, str):
        raise ChatError(f"{directory}: no chat template (chat_template.jinja or tokenizer_config.json)")
    return template


def _token_text(value: Any) -> str | None:
    return value["content"] if isinstance(value, dict) else value


def _raise(message: str) -> None:
    raise ChatError(f"chat template: {message}")
