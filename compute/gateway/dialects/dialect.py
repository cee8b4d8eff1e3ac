"""What a dialect gives the HTTP front: a request that is read, and how its answer is written.

A dialect is a module with `parse(body) -> Asked`. It knows nothing of episodes, engines or tokens' meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megloom.compute.gateway.dialects.errors import CallError, anthropic_error, openai_error
from megloom.compute.gateway.protocol import ChatCall, Delta, Reply


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What is known of an answer before its first token. `answer_id` is its first call's invocation id."""

    answer_id: str
    created_s: int
    num_prompt_tokens: int
    token_text: Callable[[int], str]


class EventStream(Protocol):
    """Writes the events of one streamed answer; each method returns bytes to send at once."""

    def open(self) -> bytes:
        """What comes before the first delta."""
        ...

    def add(self, choice: int, delta: Delta) -> bytes:
        """A delta of a choice."""
        ...

    def end(self, choice: int, reply: Reply) -> bytes:
        """A choice is complete."""
        ...

    def close(self, replies: Sequence[Reply]) -> bytes:
        """All choices are complete."""
        ...

    def fail(self, error: CallError) -> bytes:
        """The answer breaks off; nothing follows."""
        ...


class Asked(Protocol):
    """A request of a dialect. `truncates` are fields that would bend the distribution, `ignored` the rest."""

    @property
    def call(self) -> ChatCall: ...
    @property
    def ignored(self) -> tuple[str, ...]: ...
    @property
    def truncates(self) -> tuple[str, ...]: ...

    def render(self, head: Head, replies: Sequence[Reply]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def stream(self, head: Head) -> EventStream:
        """The writer of a streamed answer."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """How a path's requests are read and its errors written."""

    parse: Callable[[Mapping[str, Any]], Asked]
    error: Callable[[CallError], dict[str, Any]]


def error_form(path: str) -> Callable[[CallError], dict[str, Any]]:
    """How errors are written below a path, known or not."""
    return anthropic_error if path.startswith("/v1/messages") else openai_error
