"""Which fields of a request count, and how they are read. Whatever is not read is ignored, and said once.

| field | what happens |
|---|---|
| `model` | names the agent |
| `max_tokens` and its other names | the smaller of it and the agent's |
| `temperature` | the agent's is used: what is trained is the agent's distribution |
| `seed` | ignored: seeds derive from the run's, so that a run can be replayed |
| `top_p` < 1, `top_k`, `min_p`, penalties, `logit_bias` | refused: log-probabilities of a truncated or bent distribution are not the policy's. An admission with `ignores_truncation` has them ignored: the full distribution is sampled |
| `response_format`, `text.format`, `output_config.format` that ask for a schema | refused: no grammar constrains the sampling |
| `tool_choice` none | the tools are not shown to the model |
| `tool_choice` that forces a call | ignored: the model is free not to call |
| `n` | honoured up to `MAX_CHOICES`; each choice is a call of its own |
| `best_of`, `echo`, `suffix`, several prompts | refused |
| `previous_response_id`, `conversation`, `background` | refused: nothing is kept but the history that the client sends |
| images, audio, files | refused |
| every other field | accepted, ignored, noted once per episode |
"""  # noqa: E501  a table row cannot be broken

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megloom.compute.gateway.dialects.errors import invalid, unsupported

MAX_CHOICES = 128  # OpenAI's own bound on `n`
MAX_STOPS = 64  # each is looked for in every piece of text
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # values that leave the distribution as it is
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}


class Fields:
    """Reads a body field by field with checked types, and remembers what was read."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._read: set[str] = set()

    def any(self, name: str) -> Any:
        """The value as it came; None where it is missing."""
        self._read.add(name)
        return self._body.get(name)

    def text(self, name: str) -> str | None:
        """A text or None. Raises: CallError."""
        value = self.any(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{name}: expected a string, got {kind_of(value)}", name)
        return value

    def agent(self) -> str:
        """The agent that `model` names. Raises: CallError."""
        model = self.text("model")
        if not model:
            raise invalid("model: expected the name of an agent, got none", "model")
        return model

    def flag(self, name: str) -> bool:
        """A boolean, False where it is missing. Raises: CallError."""
        value = self.any(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(f"{name}: expected a boolean, got {kind_of(value)}", name)
        return bool(value)

    def count(self, *names: str) -> int | None:
        """The first given of the names, a whole number of at least 1. Raises: CallError."""
        found = None
        for name in names:
            value = self.any(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise invalid(f"{name}: expected a whole number of at least 1, got {shown(value)}", name)
            found = value if found is None else found
        return found

    def number(self, name: str) -> float | None:
        """A finite number of at least 0. Raises: CallError."""
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{name}: expected a number, got {kind_of(value)}", name)
        if not 0 <= value <= sys.float_info.max:  # whole numbers may be larger than any float
            raise invalid(f"{name}: expected a number of at least 0, got {shown(value)}", name)
        return float(value)

    def objects(self, name: str) -> list[dict[str, Any]]:
        """A list of objects, empty where it is missing. Raises: CallError."""
        value = self.any(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise invalid(f"{name}: expected a list, got {kind_of(value)}", name)
        for position, entry in enumerate(value):
            if not isinstance(entry, dict):
                raise invalid(f"{name}[{position}]: expected an object, got {kind_of(entry)}", name)
        return value

    def stops(self, name: str) -> tuple[str, ...]:
        """The texts that end an answer: one, a list of them, or none. Raises: CallError."""
        value = self.any(name)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise invalid(f"{name}: expected a string or a list of strings, got {shown(value)}", name)
        if len(texts) > MAX_STOPS:
            raise invalid(f"{name}: expected at most {MAX_STOPS} texts, got {len(texts)}", name)
        return tuple(dict.fromkeys(text for text in texts if text))

    def choices(self) -> int:
        """`n`. Raises: CallError."""
        wanted = self.count("n") or 1
        if wanted > MAX_CHOICES:
            raise invalid(f"n: expected at most {MAX_CHOICES}, got {wanted}", "n")
        return wanted

    def refuse(self, names: Sequence[str], why: str) -> None:
        """Refuses fields that are given with anything but null, false or emptiness. Raises: CallError."""
        for name in names:
            if self.any(name):
                raise unsupported(f"{name}: {why}", name)

    def truncating(self) -> tuple[str, ...]:
        """The fields that bend or truncate the distribution, with a value that does. Raises: CallError."""
        found = []
        for name, neutral in _NEUTRAL.items():
            value = self.any(name)
            if value is None or value in neutral:
                continue
            if name != "logit_bias" and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise invalid(f"{name}: expected a number, got {kind_of(value)}", name)
            found.append(name)
        return tuple(found)

    def ignored(self) -> tuple[str, ...]:
        """The fields that nobody has read, without those that say nothing."""
        return tuple(name for name, value in self._body.items() if name not in self._read and value)


def kind_of(value: Any) -> str:
    """The JSON type of a value, for messages."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "a boolean"
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")


def shown(value: Any) -> str:
    """A value, cut to a length that fits a message."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return text if len(text) <= 80 else f"{text[:80]}…"
